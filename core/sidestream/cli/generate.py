"""``sidestream generate``: prompts in, files of images or videos out."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from sidestream.cli.image_file import read_image
from sidestream.cli.render import render
from sidestream.cli.verbosity import verbose_option
from sidestream.config import EngineConfig
from sidestream.request import DiffusionRequest, SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, help="What to draw; may be given many times.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.File(encoding="utf-8"),
    help="A file with one prompt a line; - is standard input.",
)
@click.option(
    "--out",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder that the files go to; made if it is not there.",
)
@click.option("--height", type=_POSITIVE, help="Pixels.")
@click.option("--width", type=_POSITIVE, help="Pixels.")
@click.option("--num-frames", type=_POSITIVE, help="Of a video.")
@click.option("--fps", type=_POSITIVE, default=24, show_default=True, help="Of a video's file.")
@click.option("--steps", "num_inference_steps", type=_POSITIVE, help="Denoising steps.")
@click.option("--seed", type=int, help="Of the first image; those after it count on.")
@click.option("--guidance-scale", type=float, help="For models distilled with guidance.")
@click.option("--true-cfg-scale", type=float, help="Classifier-free guidance.")
@click.option("--negative-prompt", help="What to keep away from.")
@click.option(
    "--image", metavar="FILE", callback=read_image, help="For models that begin with a picture."
)
@click.option("--platform", help="A name from 'sidestream plugins'; default: the one available.")
@click.option("--device", type=click.IntRange(min=0), default=0, help="The device's index.")
@click.option(
    "--tensor-parallel-size",
    "ranks",
    type=_POSITIVE,
    default=1,
    help="Devices that share the model: as many from --device on.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    help="auto: bfloat16 on devices, float32 on the CPU.",
)
@click.option(
    "--executor",
    type=click.Choice(["multiproc", "uniproc"]),
    default="multiproc",
    help="Run the model in a worker process, or in a thread of this one.",
)
@click.option(
    "--stream",
    is_flag=True,
    help="One prompt after the other: show each step, save a video's parts as they are decoded.",
)
@verbose_option
def generate(
    model: str,
    prompts: tuple[str, ...],
    prompts_file: TextIO | None,
    folder: Path,
    seed: int | None,
    image: Image | None,
    platform: str | None,
    device: int,
    ranks: int,
    dtype: str,
    executor: Literal["multiproc", "uniproc"],
    fps: int,
    stream: bool,
    **sampling: Any,
) -> None:
    """Draw each prompt with MODEL: a checkpoint folder, a hub id, or the built-in 'digits'.

    Images become PNG files. A video becomes an MP4 file where PyAV is installed (the extra
    'video'), else a folder with its frames. What is not given is the checkpoint's own. Files
    already in the folder stay as they are.
    """
    texts = [*prompts, *_lines(prompts_file or ())]
    if not texts:
        raise click.UsageError("There is nothing to draw: give --prompt or --prompts.")
    # A drawn seed is named in the file, so that the image can be made again.
    first = secrets.randbelow(1 << 31) if seed is None else seed
    inputs = None if image is None else {"image": image}
    requests = [
        DiffusionRequest(text, SamplingParams(seed=first + index, **sampling), inputs=inputs)
        for index, text in enumerate(texts)
    ]
    config = EngineConfig(
        model=model,
        platform=platform,
        devices=tuple(range(device, device + ranks)),
        tensor_parallel_size=ranks,
        dtype=dtype,
        executor=executor,
        streaming_output=stream,
    )
    number = first_free_number(folder)
    rendering = render(
        config,
        requests,
        folder,
        lambda index: f"{number + index:05d}_{slug(texts[index])}_seed{first + index}",
        fps=fps,
    )
    click.echo(f"{rendering.summary()} They are in {folder}.")


def _lines(file: Iterable[str]) -> Iterable[str]:
    return (line.strip() for line in file if line.strip())


def slug(prompt: str) -> str:
    """Make the part of a file name that reminds of a prompt: ``"A red Fox!"`` gives a-red-fox."""
    words = re.findall(r"[a-z0-9]+", prompt.lower())
    lengths = itertools.accumulate(len(word) + 1 for word in words)
    kept = [word for word, length in zip(words, lengths, strict=True) if length <= 40]
    return "-".join(kept) or "image"


def first_free_number(folder: Path) -> int:
    """Give the number after the highest that a file of an earlier run starts with."""
    there = folder.iterdir() if folder.is_dir() else ()
    taken = (re.match(r"(\d{5,})_", path.name) for path in there)
    return max((int(match[1]) + 1 for match in taken if match), default=0)
