"""One worker group of an engine: its executor, its state and its deaths."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sidestream.executor.health import GroupHealth

if TYPE_CHECKING:
    from sidestream.executor.base import Executor
    from sidestream.executor.flight import Flight

#: Deaths further back than this no longer count.
RESTART_WINDOW_S: Final = 600.0
#: The pause before a restart doubles from the first to the last of these.
_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 10.0


class WorkerGroup:
    """One group. Changed by its :class:`Supervisor` only.

    States: running, restarting (from a death until its successor is up), failed (died too often).
    """

    def __init__(self, index: int, executor: Executor, max_restarts: int) -> None:
        self.index = index
        self.executor = executor
        self.state = "running"
        #: What it died of last.
        self.reason: BaseException | None = None
        self._max_restarts = max_restarts
        # When it died, as far as that counts against it.
        self._deaths: deque[float] = deque()

    def health(self) -> GroupHealth:
        """Say how it is."""
        own = self.executor.check_health()  # before the state, which it may change
        state, reason = self.state, str(self.reason)
        if state == "running":
            state, reason = "running" if own.ok else "failed", own.reason
        return GroupHealth(self.index, state, reason, self.executor.ranks())

    def is_guilty(self, flight: Flight) -> bool:
        """Tell whether the worker died of a flight: of one that it had begun, and nothing beside.

        A suspect that was only on its way, to a worker that was dying already, is as it was.
        """
        return flight.is_suspect and self.executor.has_started(flight)

    def charge(self, flights: Iterable[Flight]) -> bool:
        """Count a death, unless it is a suspect's own; tell whether the group may go on."""
        if self._max_restarts == 0:
            return False
        if any(self.is_guilty(flight) for flight in flights):
            return True
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW_S:
            self._deaths.popleft()
        return len(self._deaths) <= self._max_restarts

    @property
    def pause_s(self) -> float:
        """Give the time to wait before the next restart; it grows with the deaths."""
        return min(_FIRST_PAUSE_S * 2.0 ** max(0, len(self._deaths) - 1), _LAST_PAUSE_S)
