"""Where the figures of a bench go: the terminal, and the files that were named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from sidestream.bench.run import Findings
    from sidestream.bench.series import Sample, Session
    from sidestream.bench.table import Table
    from sidestream.bench.throughput import Cell

#: More outputs than this make a timeline that nobody reads.
_TRACED: Final = 60
_DRAWN: Final = 8


class Figures:
    """Shows findings as they come, and writes all of them so far to files."""

    def __init__(
        self,
        session: Session,
        *,
        json_file: Path | None = None,
        plot_file: Path | None = None,
        trace_file: Path | None = None,
        timeline_file: Path | None = None,
    ) -> None:
        self._session = session
        self._json_file = json_file
        self._plot_file = plot_file
        self._trace_file = trace_file
        self._timeline_file = timeline_file
        self._tables: list[Table] = []

    def add(self, findings: Findings) -> None:
        """Print the tables; write the files for which there is something new."""
        from sidestream.bench.about import about
        from sidestream.bench.table import to_json

        self._tables += findings.tables
        for table in findings.tables:
            click.echo(table.to_text() + "\n")
        if self._json_file is not None:
            document = to_json(self._tables, about(self._session))
            self._json_file.write_text(json.dumps(document, indent=1) + "\n")
        if self._plot_file is not None and findings.cells:
            self._draw(findings.cells, self._plot_file)
        if self._trace_file is not None and findings.samples:
            _write_trace(findings.samples[:_TRACED], self._trace_file)
        if self._timeline_file is not None and findings.samples:
            self._draw_timeline(findings.samples[:_DRAWN], self._timeline_file)

    def summarize(self) -> None:
        """Count the goals, and name those that are missed."""
        goals = [goal for table in self._tables for goal in table.goals]
        missed = [goal for goal in goals if not goal.is_met]
        click.echo(f"{len(goals) - len(missed)} of {len(goals)} goals met.")
        for goal in missed:
            click.echo(str(goal))

    def _draw(self, cells: list[Cell], plot_file: Path) -> None:
        from sidestream.cli.shares import draw_shares

        image = draw_shares(
            [(c.name, {"asynchronous output": c.on, "synchronous": c.off}) for c in cells],
            f"sidestream bench throughput on {self._session.device_name}",
            "requests/s as a share of the same forwards with their outputs dropped",
        )
        image.save(plot_file, optimize=True)

    def _draw_timeline(self, samples: list[Sample], timeline_file: Path) -> None:
        from sidestream.cli.timeline import draw_timeline

        megabytes = samples[0].timings.nbytes / 1e6
        title = f"sidestream bench: outputs of {megabytes:.4g} MB on {self._session.device_name}"
        image = draw_timeline([sample.timings for sample in samples], title)
        image.save(timeline_file, optimize=True)


def _write_trace(samples: list[Sample], trace_file: Path) -> None:
    from sidestream.trace import write_trace

    write_trace(samples, trace_file, taken_at=[sample.taken_at for sample in samples])
