"""Run requests through an engine and save what comes out, with a progress bar."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from sidestream.cli.png import PngWriter
from sidestream.config import EngineConfig
from sidestream.request import DiffusionRequest, OutputTimings


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """What was saved, and how long it took."""

    files: list[Path]
    timings: list[OutputTimings]
    start_s: float
    run_s: float

    def summary(self) -> str:
        """Say counts, rate and typical times in one line."""
        count = len(self.files)
        spans = {
            "forward": [timing.forward_s for timing in self.timings],
            "copy": [timing.copy_s for timing in self.timings],
        }
        typical = [
            f"{name} {1e3 * statistics.median(known):.2f} ms"
            for name, values in spans.items()
            if (known := [value for value in values if value is not None])
        ]
        medians = f"; median {', '.join(typical)}" if typical else ""
        return (
            f"Saved {count} image{'' if count == 1 else 's'} in {self.run_s:.2f} s: "
            f"{count / self.run_s:.2f} images/s (start-up {self.start_s:.1f} s){medians}."
        )


def render(
    config: EngineConfig,
    requests: Sequence[DiffusionRequest],
    folder: Path,
    name: Callable[[int], str],
    *,
    overwrite: bool = False,
) -> Rendering:
    """Draw ``requests`` into ``folder``; ``name(i)`` is the i-th one's file name without ending.

    Each request has a seed. When one fails, those before it are saved, and the error is raised.
    """
    from sidestream.engine import DiffusionEngine

    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    timings: list[OutputTimings] = []
    writer = PngWriter(folder, overwrite=overwrite)
    try:
        with DiffusionEngine(config) as engine:
            ready = time.monotonic()
            with (
                writer,
                click.progressbar(
                    length=len(requests),
                    label="Drawing",
                    file=sys.stderr,
                    hidden=not sys.stderr.isatty(),
                ) as bar,
            ):
                for index, output in enumerate(engine.imap(requests)):
                    writer.submit(output, name(index), _metadata(config, requests[index]))
                    timings.append(output.timings)
                    bar.update(1)
            ended = time.monotonic()
    except BaseException:
        if writer.files:
            click.echo(f"{len(writer.files)} images were saved to {folder} before.", err=True)
        raise
    return Rendering(
        files=writer.files, timings=timings, start_s=ready - began, run_s=ended - ready
    )


def _metadata(config: EngineConfig, request: DiffusionRequest) -> dict[str, str]:
    import sidestream

    params = request.sampling_params
    text = {
        "prompt": request.prompt,
        "seed": str(params.seed),
        "model": str(config.model),
        "Software": f"sidestream {sidestream.__version__}",
    }
    if params.negative_prompt is not None:
        text["negative_prompt"] = params.negative_prompt
    return text
