"""Keeps worker groups alive: what happens when one dies.

A group is restarted with growing pauses, up to ``max_restarts`` times in a window. What was with a
dead worker runs again: requests that had not started are queued as if they had never been sent; one
that had started, and so may be what the worker died of, runs once more with nobody beside it. If
the worker dies again, that request fails and the death counts for nobody else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidestream.executor.group import WorkerGroup
from sidestream.executor.holding import holds_any

if TYPE_CHECKING:
    from sidestream.executor.base import Executor
    from sidestream.executor.flight import Flight
    from sidestream.executor.inflight import InflightTable
    from sidestream.executor.listener import Listener

logger = logging.getLogger(__name__)


class Supervisor:
    """Makes the executors of an engine's groups, and replaces those that died.

    States: open, closed (a death is final: what was there fails).
    """

    def __init__(
        self,
        make: Callable[[int], Executor],
        count: int,
        *,
        max_restarts: int,
        table: InflightTable,
        listener: Listener,
    ) -> None:
        """``make``: gives the executor of the group of an index, not started."""
        self._make = make
        self._table = table
        self._listener = listener
        # Guards the groups' states; nobody is called inside it. Reentrant, since a signal handler
        # may close the engine while its thread is in here.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        #: The death of the last group that was left.
        self.broken: BaseException | None = None
        self.groups = [WorkerGroup(i, self._new(i), max_restarts) for i in range(count)]
        self.restarts = 0

    def close(self) -> list[Executor]:
        """Restart no group any more; gives the executors, which the caller is to end."""
        with self._lock:
            self._closing.set()
            return [group.executor for group in self.groups]

    @property
    def is_closed(self) -> bool:
        """Tell whether it was closed."""
        return self._closing.is_set()

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return holds_any(self._lock)

    def _new(self, index: int) -> Executor:
        executor = self._make(index)
        executor.answers.listener = self._listener
        executor.on_death = lambda error, flights: self._on_death(executor, error, flights)
        return executor

    # --- death, on the pump of the worker that died -------------------------------------------

    def _on_death(self, executor: Executor, error: BaseException, flights: list[Flight]) -> None:
        with self._lock:
            group = next((g for g in self.groups if g.executor is executor), None)
            if group is None or self._closing.is_set():
                group = None
            elif group.state != "running":
                return  # it never was up: the thread that starts it hears of it
            else:
                group.state, group.reason = "restarting", error
        if group is None:
            self._table.fail(flights, error)
            return
        if group.charge(flights):
            self._requeue(group, error, flights)
            threading.Thread(
                target=self._restart, args=(group,), name="sidestream-restart", daemon=True
            ).start()
        else:
            self._give_up(group, error, flights)
        self._listener.on_capacity()

    def _requeue(self, group: WorkerGroup, error: BaseException, flights: list[Flight]) -> None:
        again = []
        for flight in flights:
            if group.is_guilty(flight):
                self._table.fail([flight], error)
                continue
            if group.executor.has_started(flight):
                flight.is_suspect = True
                flight.batch_key = None
            flight.requeue()
            again.append(flight)
        self._listener.on_requeue(again)

    def _give_up(self, group: WorkerGroup, error: BaseException, flights: list[Flight]) -> None:
        with self._lock:
            group.state, group.reason = "failed", error
            is_last = all(g.state == "failed" for g in self.groups)
            if is_last and self.broken is None:
                self.broken = error
        if is_last:
            # First: whoever hears of the death may submit at once, and is to be refused.
            self._listener.on_broken(error)
            self._table.fail(flights, error)
        else:
            self._requeue(group, error, flights)

    # --- restart, on a thread of its own ------------------------------------------------------

    def _restart(self, group: WorkerGroup) -> None:
        while not self._closing.wait(group.pause_s):
            try:
                successor = self._replace(group)
                if successor is None:
                    return
                successor.start()
            except Exception as error:  # noqa: BLE001 - boundary: else the queue waits for ever
                if self._closing.is_set():
                    return
                logger.warning("Worker group %d could not be restarted: %s", group.index, error)
                if not group.charge(()):
                    self._give_up(group, error, [])
                    return
                group.reason = error
                continue
            with self._lock:
                self.restarts += 1
                group.state = "running"
                died = successor.broken
            if died is not None:
                self._on_death(successor, died, [])  # before it counted as running
                return
            logger.warning("Worker group %d was restarted after: %s", group.index, group.reason)
            self._listener.on_capacity()
            return

    def _replace(self, group: WorkerGroup) -> Executor | None:
        """Put a new executor in the place of a dead one; None: everything is being closed."""
        # What the dead one left: its descriptors and its pump.
        group.executor.shutdown(0.0)
        successor = self._new(group.index)
        with self._lock:
            if not self._closing.is_set():
                group.executor = successor
                return successor
        successor.shutdown(0.0)
        return None
