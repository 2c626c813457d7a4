"""The engine's executor: one worker group a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sidestream.errors import EngineClosedError
from sidestream.executor.base import FORCE_S, Executor
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.caller_pump import ReadingTurn
from sidestream.executor.calls import PendingCall
from sidestream.executor.dispatcher import Dispatcher
from sidestream.executor.flight import Flight
from sidestream.executor.futures import fresh
from sidestream.executor.health import Health
from sidestream.executor.inflight import InflightTable
from sidestream.executor.listener import Listener
from sidestream.executor.supervisor import Supervisor

#: Makes the executor of a group: (index, table, callbacks).
MakeExecutor = Callable[[int, InflightTable, CallbackThread], Executor]


class WorkerGroups(Dispatcher):
    """Shares requests and calls among worker groups, which a :class:`Supervisor` keeps alive.

    States: new, running (at least one group is, or is being restarted), broken (none will be; new
    work is refused with the last death), closed.
    """

    def __init__(
        self,
        make: MakeExecutor,
        count: int,
        *,
        max_restarts: int,
        is_stepwise: bool = False,
        turn: ReadingTurn | None = None,
    ) -> None:
        """``turn``: where those who wait read answers; closed with the groups."""
        super().__init__(InflightTable(), CallbackThread(), is_stepwise=is_stepwise)
        #: None: each group has a thread that reads, or needs none.
        self.turn = turn
        #: Hears what becomes of requests; set by whoever sends them.
        self.listener = Listener()
        self.supervisor = Supervisor(
            lambda index: make(index, self.table, self.callbacks),
            count,
            max_restarts=max_restarts,
            table=self.table,
            listener=self.listener,
        )
        self._groups = self.supervisor.groups

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring all groups up, side by side.

        Raises:
            WorkerStartError: One did not come up; nothing is left of any.
        """
        if len(self._groups) == 1:
            self._groups[0].executor.start()
            return
        with ThreadPoolExecutor(len(self._groups), "sidestream-start") as pool:
            starts = [pool.submit(executor.start) for executor in self.workers]
        for start in starts:
            if start.exception() is not None:
                self.shutdown(0.0)
                start.result()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let running forwards finish within ``timeout_s``, then end all workers. Idempotent."""
        if self.is_in_child:
            return  # it owns none of this
        executors = self.supervisor.close()
        deadline = time.monotonic() + timeout_s
        enders = [
            threading.Thread(target=executor.shutdown, args=(timeout_s,), daemon=True)
            for executor in executors[1:]
        ]
        for ender in enders:
            ender.start()
        try:
            executors[0].shutdown(timeout_s)
            for ender in enders:
                ender.join(max(0.0, deadline - time.monotonic()) + FORCE_S)
        finally:
            self.callbacks.close()
            if self.turn is not None:
                self.turn.close()

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return (
            self.supervisor.is_held()
            or self.table.is_held()
            or self.callbacks.is_held()
            or any(executor.is_held() for executor in self.workers)
        )

    # --- what the engine asks -----------------------------------------------------------------

    @property
    def workers(self) -> list[Executor]:
        """Give each group's executor, the current one after restarts."""
        return [group.executor for group in self._groups]

    @property
    def worker(self) -> Mapping[str, Any]:
        """Give what the workers said of themselves; they run the same pipeline."""
        return self._groups[0].executor.worker

    @property
    def size(self) -> int:
        """Give the number of workers of all groups."""
        return len(self._groups) * self._groups[0].executor.size

    @property
    def restarts(self) -> int:
        """Count the restarts that led to a group that runs."""
        return self.supervisor.restarts

    def check_health(self) -> Health:
        """Say whether any group takes work, and how each one is."""
        if self.is_in_child:
            return self._groups[0].executor.check_health()
        groups = tuple(group.health() for group in self._groups)
        if any(group.state == "running" for group in groups):
            return Health(True, groups=groups)
        reason = "; ".join(dict.fromkeys(group.reason for group in groups))
        return Health(False, reason, groups=groups)

    def check_usable(self) -> None:
        """Raise what keeps this from taking work, if anything does."""
        self.check_process()
        if self.supervisor.broken is not None:
            raise fresh(self.supervisor.broken)
        if self.supervisor.is_closed:
            raise EngineClosedError("The engine is closed.")

    def watch(self, now: float) -> float | None:
        """End workers that hang; gives when to look again, None: there is nothing to watch."""
        looks = [executor.watch(now) for executor in self.workers]
        return min((look_at for look_at in looks if look_at is not None), default=None)

    # --- requests -----------------------------------------------------------------------------

    def usable(self) -> list[Executor]:
        """Give the executors of the groups that run."""
        return [
            group.executor
            for group in self._groups
            if group.state == "running" and group.executor.has_capacity()
        ]

    def has_capacity(self, *, bind_late: bool = False) -> bool:
        """Tell whether some group could take a forward now."""
        return self._pick(bind_late=bind_late, alone=False) is not None

    def can_run_alone(self) -> bool:
        """Tell whether some group has nothing else, so that a suspect may run there."""
        return self._pick(bind_late=False, alone=True) is not None

    def dispatch(self, flights: Sequence[Flight], *, bind_late: bool = False) -> None:
        """Send one forward to the least loaded group."""
        alone = flights[0].is_suspect
        executor = self._pick(bind_late=bind_late, alone=alone)
        if executor is None:
            # The group that had room died since the caller looked.
            for flight in flights:
                flight.requeue()
            self.listener.on_requeue(list(flights))
            return
        executor.dispatch(flights)

    def _pick(self, *, bind_late: bool, alone: bool) -> Executor | None:
        best: Executor | None = None
        for group in self._groups:
            executor = group.executor
            if group.state != "running" or not executor.has_capacity(bind_late=bind_late):
                continue
            # Nobody beside a suspect: an innocent would be charged with its worker's death.
            load = executor.load
            if load.has_suspect or (alone and (load.executing or load.flights())):
                continue
            if best is None or load.executing < best.load.executing:
                best = executor
        return best

    def abort(self, flight: Flight) -> None:
        """Tell the worker that has a flight to give it up; its answer says how."""
        if (owner := flight.owner) is not None:
            owner.abort(flight)

    def time_out(self, flight: Flight) -> bool:
        """Forget a flight, and tell the worker that has it; False if it was out already."""
        if (owner := flight.owner) is not None:
            return owner.time_out(flight)
        return self.table.drop_flight(flight)

    @property
    def aborting(self) -> int:
        """Count the requests that workers were told to give up and have not answered for."""
        return sum(executor.load.aborting for executor in self.workers)

    # --- calls --------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] = (0,),
    ) -> list[PendingCall]:
        """Send a call to each of ``ranks``, which go through the groups; see the base class."""
        workers = self.workers
        size = workers[0].size
        # Group by group: nothing may come between the calls of one group.
        calls = {
            group: iter(
                workers[group].call(
                    method, args, kwargs, ranks=[r % size for r in ranks if r // size == group]
                )
            )
            for group in dict.fromkeys(rank // size for rank in ranks)
        }
        return [next(calls[rank // size]) for rank in ranks]

    def leader(self, rank: int) -> Executor:
        """Give the executor of the group that a rank belongs to."""
        workers = self.workers
        return workers[rank // workers[0].size]
