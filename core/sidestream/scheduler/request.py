"""The order in which whole requests run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from sidestream.errors import QueueFullError


class Schedulable(Protocol):
    """What the scheduler needs to know of a request."""

    #: Unique in its engine, from submission on.
    key: str
    #: The caller's name for it.
    request_id: str
    #: Requests with equal keys may share a forward; None: never.
    batch_key: Hashable | None
    #: ``time.monotonic()`` of its submission.
    submitted_at: float


T = TypeVar("T", bound=Schedulable)


class RequestScheduler(Generic[T]):
    """First come, first served, in batches of compatible requests, from a bounded queue.

    Pure policy for one lock's holder: no clock, no I/O. The oldest request always leads the next
    batch; younger ones with its key join it.
    """

    def __init__(
        self, max_queued: int, *, max_batch_size: int = 1, max_batch_wait_s: float = 0.0
    ) -> None:
        self._max_queued = max_queued
        self._max_batch_size = max_batch_size
        self._max_batch_wait_s = max_batch_wait_s
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

    def add(self, item: T) -> None:
        """Queue an item behind the others.

        Raises:
            QueueFullError: ``max_queued`` items wait already.
        """
        if not self.has_room:
            raise QueueFullError(limit=self._max_queued, request_id=item.request_id)
        self._waiting[item.key] = item

    def put_back(self, items: list[T]) -> None:
        """Queue items that were taken before in front of the others, in their order; never full."""
        for item in reversed(items):
            self._waiting[item.key] = item
            self._waiting.move_to_end(item.key, last=False)

    def ready_at(self) -> float | None:
        """Say from when on the next batch may be taken; None: nothing waits.

        That is at once when it is full, else when its leader has waited ``max_batch_wait_s``.
        """
        leader = next(iter(self._waiting.values()), None)
        if leader is None:
            return None
        if self._max_batch_wait_s <= 0 or len(self.peek()) >= self._limit(leader):
            return leader.submitted_at
        return leader.submitted_at + self._max_batch_wait_s

    def peek(self) -> list[T]:
        """Give the next batch without taking it; empty: nothing waits."""
        batch: list[T] = []
        for item in self._waiting.values():
            if not batch or item.batch_key == batch[0].batch_key:
                batch.append(item)
            if len(batch) == self._limit(batch[0]):
                break
        return batch

    def take(self) -> list[T]:
        """Take the next batch."""
        batch = self.peek()
        for item in batch:
            del self._waiting[item.key]
        return batch

    def remove(self, key: str) -> bool:
        """Give an item up; False if it was taken already."""
        return self._waiting.pop(key, None) is not None

    def take_all(self) -> list[T]:
        """Take everything."""
        items = list(self._waiting.values())
        self._waiting.clear()
        return items

    def _limit(self, leader: T) -> int:
        return 1 if leader.batch_key is None else self._max_batch_size
