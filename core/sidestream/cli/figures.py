"""Where the figures of a bench go: the terminal, and the files that were named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from sidestream.bench.findings import Cell, Findings
    from sidestream.bench.series import Sample, Session
    from sidestream.bench.table import Table

#: More outputs than this make a timeline that nobody reads.
_TRACED: Final = 60
_DRAWN: Final = 8


class Figures:
    """Shows findings as they come, and writes all of them so far to files.

    A file is replaced as a whole: a run that is cut short leaves what it had. The outputs that are
    drawn and traced are those of the first tables that have any.
    """

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
        self._drawn: Table | None = None

    def announce(self, what: str, planned_s: float) -> None:
        """Say what begins and how long it should take."""
        click.echo(f"-- {what}: about {planned_s:.0f} s")

    def take(self, parts: Iterable[Findings]) -> None:
        """Take all parts of one measurement."""
        for findings in parts:
            self.add(findings)

    def add(self, findings: Findings) -> None:
        """Print the tables once they are complete; write the files for which there is something."""
        from sidestream.bench.about import about
        from sidestream.bench.table import to_json

        self._tables += [table for table in findings.tables if table not in self._tables]
        main = findings.tables[0]
        if main.took_s is not None:
            for table in findings.tables:
                click.echo(table.to_text() + "\n")
        if self._json_file is not None:
            text = json.dumps(to_json(self._tables, about(self._session)), indent=1) + "\n"
            _replace(self._json_file, lambda path: path.write_text(text))
        if self._plot_file is not None and findings.cells:
            self._draw(findings.cells, self._plot_file)
        if findings.samples and self._drawn in (None, main):
            self._drawn = main
            self._show(findings.samples)

    def _show(self, samples: list[Sample]) -> None:
        from sidestream.trace import write_trace

        if self._trace_file is not None:
            traced = samples[:_TRACED]
            taken_at = [sample.taken_at for sample in traced]
            _replace(self._trace_file, lambda path: write_trace(traced, path, taken_at=taken_at))
        if self._timeline_file is not None:
            self._draw_timeline(samples[:_DRAWN], self._timeline_file)

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
        _replace(plot_file, lambda path: image.save(path, "PNG", optimize=True))

    def _draw_timeline(self, samples: list[Sample], timeline_file: Path) -> None:
        from sidestream.cli.timeline import draw_timeline

        megabytes = samples[0].timings.nbytes / 1e6
        title = f"sidestream bench: outputs of {megabytes:.4g} MB on {self._session.device_name}"
        image = draw_timeline([sample.timings for sample in samples], title)
        _replace(timeline_file, lambda path: image.save(path, "PNG", optimize=True))


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Put a file in its place once it is whole."""
    new = file.with_name(f".{file.name}.new")
    try:
        write(new)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
