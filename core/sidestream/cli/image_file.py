"""An option that names a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from PIL.Image import Image


def read_image(context: click.Context, option: click.Parameter, path: str | None) -> Image | None:
    """Read a file that Pillow knows, as RGB, turned as its camera says; an option's callback.

    Raises:
        click.BadParameter: It is not there, or no picture.
    """
    if path is None:
        return None
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        why = f"there is no file {path!r}"
    except Exception as error:  # noqa: BLE001 - boundary: a broken file in Pillow's decoders
        why = f"{path!r} can't be read as a picture ({type(error).__name__}: {error})"
    raise click.BadParameter(why, ctx=context, param=option)
