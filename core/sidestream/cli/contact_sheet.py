"""Many small images on one page, each with a line of text below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL.Image import Image

_CELL: Final = 192
_GAP: Final = 12
_TEXT: Final = 26


def draw_contact_sheet(images: Sequence[Image], captions: Sequence[str], columns: int) -> Image:
    """Lay ``images`` out row by row, scaled to cells of 192 pixels."""
    from PIL import Image, ImageDraw, ImageFont

    rows = -(-len(images) // columns)
    width = _GAP + columns * (_CELL + _GAP)
    height = _GAP + rows * (_CELL + _TEXT + _GAP)
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(16)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, columns)
        x = _GAP + column * (_CELL + _GAP)
        y = _GAP + row * (_CELL + _TEXT + _GAP)
        cell = image.convert("RGB").resize((_CELL, _CELL), Image.Resampling.LANCZOS)
        sheet.paste(cell, (x, y))
        draw.text((x + _CELL / 2, y + _CELL + 5), caption, fill="#1f2430", font=font, anchor="ma")
    return sheet
