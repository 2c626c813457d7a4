"""The order in which whole requests run."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from sidestream.errors import QueueFullError

T = TypeVar("T")


class RequestScheduler(Generic[T]):
    """First come, first served, in a bounded queue; pure policy for one lock's holder."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        # Keyed by id, so that giving one up in the middle costs no search.
        self._waiting: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def items(self) -> list[T]:
        """List what waits, next first."""
        return list(self._waiting.values())

    @property
    def has_room(self) -> bool:
        """Tell whether one more may wait."""
        return len(self._waiting) < self._max_queued

    def add(self, key: str, item: T, *, request_id: str | None = None) -> None:
        """Queue an item.

        Raises:
            QueueFullError: ``max_queued`` items wait already.
        """
        if not self.has_room:
            raise QueueFullError(limit=self._max_queued, request_id=request_id)
        self._waiting[key] = item

    def peek(self) -> T | None:
        """Give what runs next, without taking it."""
        return next(iter(self._waiting.values()), None)

    def take(self) -> T:
        """Take what runs next."""
        return self._waiting.popitem(last=False)[1]

    def remove(self, key: str) -> bool:
        """Give an item up; False if it was taken already."""
        return self._waiting.pop(key, None) is not None

    def take_all(self) -> list[T]:
        """Take everything."""
        items = list(self._waiting.values())
        self._waiting.clear()
        return items
