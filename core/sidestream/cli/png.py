"""PNG files of images."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def write_png(path: Path, image: Image, text: Mapping[str, str], *, overwrite: bool) -> None:
    """Write ``image`` with ``text`` as its metadata, in Latin-1 or, where that fails, UTF-8.

    Raises:
        FileExistsError: The file is there and ``overwrite`` is False.
    """
    from PIL.PngImagePlugin import PngInfo

    metadata = PngInfo()
    for key, value in text.items():
        metadata.add_text(key, value)
    encoded = io.BytesIO()
    image.save(encoded, format="png", pnginfo=metadata)
    with path.open("wb" if overwrite else "xb") as file:  # complete or not there at all
        file.write(encoded.getbuffer())
