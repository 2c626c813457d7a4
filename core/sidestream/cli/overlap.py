"""Which copies ran beside which forwards, read off the timings of a run's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.request import OutputTimings


@dataclass(frozen=True)
class Span:
    """Two points in time, in seconds of ``time.monotonic()``."""

    start: float
    end: float

    @property
    def length_s(self) -> float:
        """Give the seconds between them."""
        return self.end - self.start

    def meets(self, other: Span) -> bool:
        """Tell whether both go on at some moment."""
        return self.start < other.end and other.start < self.end


def forward_span(timings: OutputTimings) -> Span | None:
    """Give the forward's span, None where it was not timed."""
    return _span(timings.forward_started_at, timings.forward_ended_at)


def copy_span(timings: OutputTimings) -> Span | None:
    """Give the span of the copy to the host, None where there was none or it was not timed."""
    return _span(timings.copy_started_at, timings.copy_ended_at)


def _span(start: float | None, end: float | None) -> Span | None:
    return None if start is None or end is None else Span(start, end)


def overlapped(timings: Sequence[OutputTimings]) -> list[int]:
    """Give the indices of the outputs whose copy ran during another output's forward."""
    forwards = [forward_span(timing) for timing in timings]
    copies = [copy_span(timing) for timing in timings]
    return [
        index
        for index, copy in enumerate(copies)
        if copy is not None
        and any(
            forward is not None and other != index and forward.meets(copy)
            for other, forward in enumerate(forwards)
        )
    ]


def whole_run(timings: Sequence[OutputTimings]) -> Span:
    """Span everything that happened to any output.

    Raises:
        ValueError: Nothing was timed.
    """
    points = [
        point
        for timing in timings
        for point in (
            timing.submitted_at,
            timing.forward_started_at,
            timing.forward_ended_at,
            timing.copy_started_at,
            timing.copy_ended_at,
            timing.ready_at,
        )
        if point is not None
    ]
    if not points:
        raise ValueError("None of the outputs was timed, so there is no run to span.")
    return Span(min(points), max(points))


def hand_over(timings: Sequence[OutputTimings]) -> tuple[int, Span] | None:
    """Find the longest copy that overlapped a forward, with a window in which it can be seen.

    The window shows the end of the output's own forward, the copy, and the forward beside it.
    None when no copy overlapped.
    """
    candidates = [
        (copy.length_s, index, copy)
        for index in overlapped(timings)
        if (copy := copy_span(timings[index])) is not None
    ]
    if not candidates:
        return None
    _, index, copy = max(candidates)
    own = forward_span(timings[index])
    start = copy.start if own is None else min(copy.start, own.end)
    ready = timings[index].ready_at
    end = copy.end if ready is None else max(copy.end, ready)
    margin = 0.4 * (end - start)
    return index, Span(start - margin, end + margin)
