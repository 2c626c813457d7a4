"""A picture of what overlapped with what, with a lane for each thread or stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from sidestream.cli.overlap import Span, copy_span, forward_span, hand_over, overlapped, whole_run
from sidestream.request import OutputTimings

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

_WIDTH: Final = 1500
_LEFT: Final = 270
_RIGHT: Final = 50
_HEADING: Final = 118
_LANE: Final = 46
_BAR: Final = 28
_TITLE: Final = 44
_AXIS: Final = 74
_LEGEND: Final = 60
#: A copy of microseconds in a run of seconds still shows.
_NARROWEST: Final = 3

INK: Final = "#1f2430"
FAINT: Final = "#5f6775"
GRID: Final = "#e3e6ec"
#: One a request, then again from the first; all dark enough for white figures.
_COLORS: Final = (
    "#2f6db5", "#c7612a", "#2e8b57", "#a83a52", "#6f55a8",
    "#8a6d1f", "#b0478f", "#47707a", "#5f7f2a", "#3d4f9f",
)  # fmt: skip
_LANES: Final = ("submit", "forward (device)", "copy to host", "ready (pump thread)")


def draw_timeline(timings: Sequence[OutputTimings], title: str) -> Image:
    """Draw the whole run and, below it, the longest overlapped copy magnified.

    ``timings[i]`` is shown with the number i.

    Raises:
        ValueError: None of the outputs was timed.
    """
    from PIL import Image, ImageDraw

    run = whole_run(timings)
    panels = [("The whole run", run)]
    if (closest := hand_over(timings)) is not None:
        index, window = closest
        panels.append((f"Magnified: output {index} leaves while the next one is made", window))
    panel_height = _TITLE + _LANE * len(_LANES) + _AXIS
    height = _HEADING + panel_height * len(panels) + _LEGEND
    image = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((30, 24), title, fill=INK, font=font_of(26))
    draw.text((30, 70), _caption(timings), fill=FAINT, font=font_of(18))
    for row, (name, window) in enumerate(panels):
        panel = _Panel(draw, _HEADING + row * panel_height, window, run.start)
        panel.draw(name, timings)
    _draw_legend(draw, height - _LEGEND + 12)
    return image


def _caption(timings: Sequence[OutputTimings]) -> str:
    copies = sum(copy_span(timing) is not None for timing in timings)
    if not copies:
        return "No copy was timed."
    count = len(overlapped(timings))
    return f"{count} of {copies} copies ran while the forward of another output was running."


@dataclass(frozen=True)
class _Panel:
    """One time window with its lanes and its axis, whose zero is ``origin``."""

    image: ImageDraw
    top: int
    window: Span
    origin: float

    def draw(self, name: str, timings: Sequence[OutputTimings]) -> None:
        self.image.text((30, self.top), name, fill=INK, font=font_of(20))
        self._draw_axis()
        for lane, label in enumerate(_LANES):
            middle = self._middle(lane)
            self.image.text((30, middle), label, fill=INK, font=font_of(18), anchor="lm")
        for index, timing in enumerate(timings):
            self._draw_mark(0, index, timing.submitted_at, "down")
            self._draw_bar(1, index, forward_span(timing))
            self._draw_bar(2, index, copy_span(timing))
            self._draw_mark(3, index, timing.ready_at, "up")

    def _x(self, moment: float) -> float:
        share = (moment - self.window.start) / self.window.length_s
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _middle(self, lane: int) -> int:
        return self.top + _TITLE + lane * _LANE + _LANE // 2

    def _draw_axis(self) -> None:
        top = self.top + _TITLE
        bottom = top + _LANE * len(_LANES)
        for lane in range(len(_LANES) + 1):
            y = top + lane * _LANE
            self.image.line((_LEFT, y, _WIDTH - _RIGHT, y), fill=GRID)
        for tick_ms, text in _ticks(self.window, self.origin):
            x = self._x(self.origin + tick_ms / 1e3)
            self.image.line((x, top, x, bottom), fill=GRID)
            self.image.line((x, bottom, x, bottom + 6), fill=FAINT)
            self.image.text((x, bottom + 10), text, fill=FAINT, font=font_of(16), anchor="ma")
        self.image.line((_LEFT, bottom, _WIDTH - _RIGHT, bottom), fill=FAINT)
        self.image.text(
            (_LEFT - 16, bottom + 10),
            "ms since the start",
            fill=FAINT,
            font=font_of(16),
            anchor="ra",
        )

    def _draw_bar(self, lane: int, index: int, span: Span | None) -> None:
        if span is None or not span.meets(self.window):
            return
        left = self._x(max(span.start, self.window.start))
        right = max(self._x(min(span.end, self.window.end)), left + _NARROWEST)
        y = self._middle(lane)
        self.image.rectangle(
            (left, y - _BAR // 2, right - 1, y + _BAR // 2), fill=_color(index), outline="white"
        )
        label = str(index)
        if right - left > self.image.textlength(label, font=font_of(16)) + 4:
            middle = ((left + right) / 2, y)
            self.image.text(middle, label, fill="white", font=font_of(16), anchor="mm")

    def _draw_mark(
        self, lane: int, index: int, moment: float | None, points: Literal["up", "down"]
    ) -> None:
        if moment is None or not self.window.start <= moment <= self.window.end:
            return
        _draw_triangle(self.image, self._x(moment), self._middle(lane), points, _color(index))


def _ticks(window: Span, origin: float) -> Iterator[tuple[float, str]]:
    """Give about ten round points in time as milliseconds after ``origin``, and their text."""
    rough = 1e3 * window.length_s / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(1e3 * (window.start - origin) / step)
    last = math.floor(1e3 * (window.end - origin) / step)
    for number in range(first, last + 1):
        yield number * step, f"{number * step:.{decimals}f}"


def _draw_legend(image: ImageDraw, top: int) -> None:
    font = font_of(16)
    middle = top + 14
    image.rectangle((30, middle - 12, 62, middle + 12), fill=_COLORS[0])
    image.text((46, middle), "0", fill="white", font=font, anchor="mm")
    _draw_triangle(image, 520, middle, "down", _COLORS[0])
    _draw_triangle(image, 680, middle, "up", _COLORS[0])
    for x, text in (
        (74, "a forward or a copy, with the number of its output"),
        (538, "submitted"),
        (698, "readable by the caller"),
    ):
        image.text((x, middle), text, fill=INK, font=font, anchor="lm")


def _draw_triangle(
    image: ImageDraw, x: float, y: float, points: Literal["up", "down"], color: str
) -> None:
    tip = -9 if points == "up" else 9
    image.polygon([(x, y + tip), (x - 7, y - tip), (x + 7, y - tip)], fill=color, outline="white")


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def font_of(size: int) -> FreeTypeFont | ImageFont:
    """Give the font that comes with Pillow."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
