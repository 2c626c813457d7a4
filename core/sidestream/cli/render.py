"""Run requests through an engine and save what comes out, with a progress bar."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sidestream.cli.stream import progress_bar, stream
from sidestream.cli.video import makes_mp4
from sidestream.cli.writer import OutputWriter
from sidestream.config import EngineConfig
from sidestream.request import DiffusionRequest, OutputTimings

if TYPE_CHECKING:
    from sidestream.engine import DiffusionEngine


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """What was saved, and how long it took."""

    files: list[Path]
    #: How many videos the files are of; 0: they are images.
    videos: int
    timings: list[OutputTimings]
    start_s: float
    run_s: float

    def summary(self) -> str:
        """Say counts, rate and typical times in one line."""
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
        form = ""
        if self.videos and not makes_mp4():
            form = f' as {len(self.files)} PNG files (for MP4: pip install "sidestream[video]")'
        noun = "video" if self.videos else "image"
        rate = (self.videos or len(self.files)) / self.run_s
        return (
            f"Saved {_counted(len(self.files), self.videos)}{form} in {self.run_s:.2f} s: "
            f"{rate:.2f} {noun}s/s (start-up {self.start_s:.1f} s){medians}."
        )


def _counted(files: int, videos: int) -> str:
    count, noun = (videos, "video") if videos else (files, "image")
    return f"{count} {noun}{'' if count == 1 else 's'}"


def render(
    config: EngineConfig,
    requests: Sequence[DiffusionRequest],
    folder: Path,
    name: Callable[[int], str],
    *,
    fps: int = 24,
    overwrite: bool = False,
) -> Rendering:
    """Draw ``requests`` into ``folder``; ``name(i)`` is the i-th one's file name without ending.

    Each request has a seed. With ``config.streaming_output`` they are drawn one after the other,
    and videos are saved in parts. When a request fails, those before it are saved, and the error
    is raised.
    """
    from sidestream.engine import DiffusionEngine

    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    timings: list[OutputTimings] = []
    draw = _draw_in_parts if config.streaming_output else _draw
    writer = OutputWriter(folder, fps=fps, overwrite=overwrite)
    try:
        with DiffusionEngine(config) as engine:
            ready = time.monotonic()
            named = [(name(i), _metadata(config, request)) for i, request in enumerate(requests)]
            with writer:
                timings.extend(draw(engine, requests, named, writer))
            ended = time.monotonic()
    except BaseException:
        if writer.count:
            saved = _counted(len(writer.files), writer.videos)
            click.echo(f"Saved before: {saved}, in {folder}.", err=True)
        raise
    return Rendering(
        files=writer.files,
        videos=writer.videos,
        timings=timings,
        start_s=ready - began,
        run_s=ended - ready,
    )


def _draw(
    engine: DiffusionEngine,
    requests: Sequence[DiffusionRequest],
    named: Sequence[tuple[str, Mapping[str, str]]],
    writer: OutputWriter,
) -> Iterator[OutputTimings]:
    with progress_bar(len(requests), "Drawing") as bar:
        for (name, text), output in zip(named, engine.imap(requests), strict=True):
            writer.submit(output, name, text)
            yield output.timings
            bar.update(1)


def _draw_in_parts(
    engine: DiffusionEngine,
    requests: Sequence[DiffusionRequest],
    named: Sequence[tuple[str, Mapping[str, str]]],
    writer: OutputWriter,
) -> Iterator[OutputTimings]:
    for index, (request, (name, text)) in enumerate(zip(requests, named, strict=True)):
        label = f"Drawing {index + 1} of {len(requests)}"
        yield stream(engine, request, writer, name, text, label).timings


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
