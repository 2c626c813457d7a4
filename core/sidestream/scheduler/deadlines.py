"""When requests are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

#: Entries of requests that are done may be as many as the others, and so many more.
_SLACK: Final = 64


class Deadlines:
    """The nearest of many deadlines.

    Pure policy for one lock's holder: no clock, no I/O. Keeps keys and not requests, which would
    hold their outputs until they are due.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: str, due_at: float) -> None:
        """Have ``key`` due at a point in time."""
        heapq.heappush(self._heap, (due_at, key))

    def next_at(self) -> float | None:
        """Say when the next one is due; it may be done by then. None: there is none."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[str]:
        """Take what is due, the longest overdue first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def prune(self, open_count: int, is_open: Callable[[str], bool]) -> None:
        """Let go of what is done, once that is more than ``open_count``."""
        if len(self._heap) > 2 * open_count + _SLACK:
            self._heap = [entry for entry in self._heap if is_open(entry[1])]
            heapq.heapify(self._heap)
