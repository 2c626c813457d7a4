"""``sidestream demo``: digits through the asynchronous path, and a picture of what overlapped."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from sidestream.cli.contact_sheet import draw_contact_sheet
from sidestream.cli.generate import slug
from sidestream.cli.overlap import copy_span, overlapped
from sidestream.cli.render import render
from sidestream.cli.timeline import draw_timeline
from sidestream.cli.verbosity import verbose_option
from sidestream.config import EngineConfig
from sidestream.request import DiffusionRequest, SamplingParams

#: Every digit once, named in each of the ways that the model learned.
_PROMPTS: Final = (
    "0",
    "one",
    "a handwritten 2",
    "3",
    "four",
    "a handwritten 5",
    "6",
    "seven",
    "a handwritten 8",
    "9",
)


@click.command()
@click.option(
    "--out",
    "folder",
    default=Path("demo"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the pictures; those of an earlier demo are replaced.",
)
@click.option(
    "--platform",
    help="A name from 'sidestream plugins'; default: the one available, else the simulated 'sim'.",
)
@verbose_option
def demo(folder: Path, platform: str | None) -> None:
    """Draw the ten digits with the built-in model, and what overlapped with what.

    Without an accelerator the simulated one is used: slower than the plain CPU, but with streams
    and events, so that the asynchronous path really runs.
    """
    from PIL import Image

    chosen = platform or _default_platform()
    where = f"on {chosen!r}"
    if chosen == "sim":
        where += ", the simulated accelerator (its order is real, its speed is not)"
    click.echo(f"Drawing {len(_PROMPTS)} digits {where}.")
    requests = [
        DiffusionRequest(prompt, SamplingParams(seed=index))
        for index, prompt in enumerate(_PROMPTS)
    ]
    config = EngineConfig(model="digits", platform=chosen)
    rendering = render(
        config,
        requests,
        folder,
        lambda index: f"{index:02d}_{slug(_PROMPTS[index])}",
        overwrite=True,
    )
    images = [Image.open(path) for path in rendering.files]
    draw_contact_sheet(images, _PROMPTS, columns=5).save(folder / "contact-sheet.png")
    title = f"sidestream demo: {len(_PROMPTS)} digits {where}"
    draw_timeline(rendering.timings, title).save(folder / "timeline.png")

    copies = sum(copy_span(timing) is not None for timing in rendering.timings)
    click.echo(rendering.summary())
    click.echo(
        f"{len(overlapped(rendering.timings))} of {copies} copies to the host ran while the "
        "forward of another output was running."
    )
    click.echo(f"Look at {folder / 'contact-sheet.png'} and {folder / 'timeline.png'}.")


def _default_platform() -> str:
    """Name what the engine would choose, but 'sim' where that has no side stream."""
    from sidestream.platforms.registry import NOOP_NAME, PlatformRegistry

    name = PlatformRegistry.discover().select().name
    return "sim" if name == NOOP_NAME else name
