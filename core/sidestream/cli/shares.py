"""A picture of shares of a limit: a row for each workload, a dot for each way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from sidestream.cli.timeline import FAINT, GRID, INK, font_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

#: A name, and the values of some rounds for each series.
Row = tuple[str, Mapping[str, Sequence[float]]]

_WIDTH: Final = 1200
_LEFT: Final = 270
_RIGHT: Final = 60
_TOP: Final = 140
_ROW: Final = 34
_BOTTOM: Final = 90
_COLORS: Final = ("#2f6db5", "#c7612a", "#2e8b57")


def draw_shares(rows: Sequence[Row], title: str, axis: str) -> Image:
    """Draw each row's medians as dots and their ranges as lines; the limit, 1, is a line.

    The axis begins below the smallest value and not at zero.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_WIDTH, _TOP + _ROW * len(rows) + _BOTTOM), "white")
    draw = ImageDraw.Draw(image)
    draw.text((30, 24), title, fill=INK, font=font_of(26))
    _draw_legend(draw, list(rows[0][1]))
    values = [value for _, series in rows for rounds in series.values() for value in rounds]
    scale = _Scale(min(values), max(values))
    _draw_axis(draw, scale, len(rows), axis)
    for index, (name, series) in enumerate(rows):
        y = _TOP + _ROW * index + _ROW // 2
        draw.text((30, y), name, fill=INK, font=font_of(17), anchor="lm")
        for color, rounds in zip(_COLORS, series.values(), strict=False):
            middle = sorted(rounds)[len(rounds) // 2]
            left, right, x = scale.x(min(rounds)), scale.x(max(rounds)), scale.x(middle)
            draw.line((left, y, right, y), fill=color, width=3)
            draw.ellipse((x - 7, y - 7, x + 7, y + 7), fill=color, outline="white")
    return image


class _Scale:
    """Places shares on the axis."""

    def __init__(self, least: float, most: float) -> None:
        span = max(most, 1.0) - least
        self.step = next(s for s in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if span < 10 * s)
        self.start = max(0.0, math.floor(least / self.step - 0.2) * self.step)
        self.end = max(1.0, most) + 0.3 * self.step

    def x(self, share: float) -> float:
        """Give the column of a share."""
        return _LEFT + (share - self.start) / (self.end - self.start) * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> list[float]:
        """List the round values on it."""
        count = int((self.end - self.start) / self.step + 1e-9)
        return [self.start + i * self.step for i in range(count + 1)]


def _draw_axis(draw: ImageDraw, scale: _Scale, rows: int, axis: str) -> None:
    bottom = _TOP + _ROW * rows
    for tick in scale.ticks():
        x = scale.x(tick)
        draw.line((x, _TOP, x, bottom), fill=GRID)
        draw.text((x, bottom + 10), f"{tick:.3g}", fill=FAINT, font=font_of(16), anchor="ma")
    limit = scale.x(1.0)
    draw.line((limit, _TOP - 8, limit, bottom + 6), fill=INK, width=2)
    draw.text((limit, _TOP - 12), "limit", fill=INK, font=font_of(16), anchor="ms")
    draw.text(
        ((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 44),
        axis,
        fill=FAINT,
        font=font_of(17),
        anchor="ma",
    )


def _draw_legend(draw: ImageDraw, names: Sequence[str]) -> None:
    x = 38.0
    for color, name in zip(_COLORS, names, strict=False):
        draw.ellipse((x - 7, 81, x + 7, 95), fill=color)
        draw.text((x + 16, 88), name, fill=INK, font=font_of(18), anchor="lm")
        x += 50 + draw.textlength(name, font=font_of(18))
