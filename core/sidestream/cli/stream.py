"""One request drawn in view: its steps in a progress bar, its video saved in parts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sidestream.cli.video import VideoFile
    from sidestream.cli.writer import OutputWriter
    from sidestream.engine import DiffusionEngine
    from sidestream.output import DiffusionOutput
    from sidestream.request import DiffusionRequest


def progress_bar(length: int, label: str) -> AbstractContextManager[Any]:
    """Draw a progress bar on standard error, if that is a terminal."""
    return click.progressbar(
        length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()
    )


def stream(
    engine: DiffusionEngine,
    request: DiffusionRequest,
    writer: OutputWriter,
    name: str,
    text: Mapping[str, str],
    label: str,
) -> DiffusionOutput:
    """Draw one request and save it; a video that comes in parts is saved part by part.

    The engine has ``streaming_output``. What was saved of a video stays, whatever comes after.
    """
    from sidestream.output import EventKind

    video: VideoFile | None = None
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(1, label))
        frames = 0
        for event in engine.step_streaming(request):
            if event.step is not None and event.num_steps is not None:
                bar.length = event.num_steps
                bar.update(event.step - bar.pos)
            if event.output is None:
                continue
            if event.kind is EventKind.OUTPUT:
                output = event.output
            elif event.output.is_video:
                if video is None:
                    video = stack.enter_context(writer.open_video(name, text))
                video.append(event.output.frames)
                frames += len(event.output.output)
                if bar.hidden:
                    click.echo(f"{label}: {frames} frames are saved.", err=True)
    if video is None:
        writer.submit(output, name, text)
    else:
        writer.record(video)
    return output
