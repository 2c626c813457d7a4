"""The engine's executor: one worker group a device, and what happens when one dies.

A group is restarted with growing pauses, up to ``max_restarts`` times in a window. What was with a
dead worker runs again: requests that had not started are queued as if they had never been sent; one
that had started, and so may be what the worker died of, runs once more with nobody beside it. If
the worker dies again, that request fails and the death counts for nobody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sidestream.errors import ConfigError, EngineClosedError
from sidestream.executor.base import FORCE_S, Executor, remaining_s
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.caller_pump import ReadingTurn
from sidestream.executor.dispatcher import FORWARDS, Dispatcher, fresh
from sidestream.executor.flight import Flight
from sidestream.executor.health import GroupHealth, Health
from sidestream.executor.holding import holds_any
from sidestream.executor.inflight import InflightTable
from sidestream.transport.envelope import Delivery

logger = logging.getLogger(__name__)

#: Deaths further back than this no longer count.
RESTART_WINDOW_S: Final = 600.0
#: The pause before a restart doubles from the first to the last of these.
_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 10.0

#: Makes the executor of a group: (index, table, callbacks).
MakeExecutor = Callable[[int, InflightTable, CallbackThread], Executor]


class WorkerGroup:
    """One group and its deaths.

    States: running, restarting (from a death until its successor is up), failed (died too often).
    """

    def __init__(self, index: int, executor: Executor) -> None:
        self.index = index
        self.executor = executor
        self.state = "running"
        #: What it died of last.
        self.reason: BaseException | None = None
        #: When it died, as far as that counts against it.
        self.deaths: deque[float] = deque()

    def health(self) -> GroupHealth:
        """Say how it is."""
        own = self.executor.check_health()  # before the state, which it may change
        state, reason = self.state, str(self.reason)
        if state == "running":
            state, reason = "running" if own.ok else "failed", own.reason
        return GroupHealth(self.index, state, reason, self.executor.ranks())


class WorkerGroups(Dispatcher):
    """Shares forwards among worker groups and keeps the groups alive.

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
        self._make = make
        self._max_restarts = max_restarts
        # Guards the groups' states; callbacks run outside it. Reentrant, since a signal handler may
        # close the engine while its thread is in here.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._broken: BaseException | None = None
        #: As those of an executor, for all groups together.
        self.on_capacity: Callable[[], None] = lambda: None
        self.on_ready: Callable[[Flight, Delivery], None] = lambda _flight, _delivery: None
        self.on_chunk: Callable[[Delivery], None] = lambda _delivery: None
        self.on_batch_failed: Callable[[Sequence[Flight], Delivery], None] | None = None
        #: Called with flights that are to be queued again, in the order of their submission.
        self.on_requeue: Callable[[list[Flight]], None] = lambda _flights: None
        #: Called once, when no group is left.
        self.on_broken: Callable[[BaseException], None] = lambda _error: None
        self.groups = [WorkerGroup(index, self._new(index)) for index in range(count)]
        self.restarts = 0

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring all groups up, side by side.

        Raises:
            WorkerStartError: One did not come up; nothing is left of any.
        """
        for executor in self.workers:
            self._connect(executor)
        if len(self.groups) == 1:
            self.groups[0].executor.start()
            return
        with ThreadPoolExecutor(len(self.groups), "sidestream-start") as pool:
            starts = [pool.submit(group.executor.start) for group in self.groups]
        for start in starts:
            if start.exception() is not None:
                self.shutdown(0.0)
                start.result()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let running forwards finish within ``timeout_s``, then end all workers. Idempotent."""
        if self.is_in_child:
            return  # it owns none of this
        with self._lock:
            self._closing.set()
            executors = [group.executor for group in self.groups]
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
            holds_any(self._lock)
            or self.table.is_held()
            or self.callbacks.is_held()
            or any(executor.is_held() for executor in self.workers)
        )

    # --- what the engine asks ------------------------------------------------------------------

    @property
    def workers(self) -> list[Executor]:
        """Give each group's executor, the current one after restarts."""
        return [group.executor for group in self.groups]

    @property
    def worker(self) -> Mapping[str, Any]:
        """Give what the workers said of themselves; they run the same pipeline."""
        return self.groups[0].executor.worker

    def check_health(self) -> Health:
        """Say whether any group takes work, and how each one is."""
        if self.is_in_child:
            return self.groups[0].executor.check_health()
        groups = tuple(group.health() for group in self.groups)
        if any(group.state == "running" for group in groups):
            return Health(True, groups=groups)
        reason = "; ".join(dict.fromkeys(group.reason for group in groups))
        return Health(False, reason, groups=groups)

    def check_usable(self) -> None:
        """Raise what keeps this from taking work, if anything does."""
        self.check_process()
        if self._broken is not None:
            raise fresh(self._broken)
        if self._closing.is_set():
            raise EngineClosedError("The engine is closed.")

    def usable(self) -> list[Executor]:
        """Give the executors of the groups that run."""
        return [
            group.executor
            for group in self.groups
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
            self.on_requeue(list(flights))
            return
        executor.dispatch(flights)

    def abort(self, flight: Flight) -> None:
        """Tell the worker that has a flight to give it up; its answer says how."""
        owner = flight.owner
        if isinstance(owner, Executor):
            owner.abort(flight)

    def time_out(self, flight: Flight) -> bool:
        """Forget a flight, and tell the worker that has it; False if it was out already."""
        owner = flight.owner
        if isinstance(owner, Executor):
            return owner.time_out(flight)
        return self.table.drop_flight(flight)

    @property
    def aborting(self) -> int:
        """Count the requests that workers were told to give up and have not answered for."""
        return sum(executor.aborting for executor in self.workers)

    def watch(self, now: float) -> float | None:
        """End workers that hang; gives when to look again, None: there is nothing to watch."""
        looks = [executor.watch(now) for executor in self.workers]
        return min((look_at for look_at in looks if look_at is not None), default=None)

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of the workers, else of their pipelines; one result each, in rank order.

        ``ranks`` None: all. Runs on the workers' main threads, in the order of commands, beside
        whatever requests are under way. ``execute_model`` goes the way of forwards, on one group,
        and answers with a ``RunnerOutput``.

        Raises:
            ConfigError: There is no such rank.
            TimeoutError: No answer within ``timeout_s``; the call may still run.
            WorkerDiedError: A worker died, or is being restarted.
            Whatever the method raised, with its remote traceback as cause.
        """
        self.check_usable()
        self.callbacks.refuse_to_block()
        workers = self.workers
        size = workers[0].size
        every = range(len(workers) * size)
        wanted = every if ranks is None else ranks
        for rank in wanted:
            if rank not in every:
                raise ConfigError("ranks", list(wanted), f"0 to {every[-1]}")
        if method in FORWARDS:
            leader = workers[wanted[0] // size]
            return leader.collective_rpc(method, args, kwargs, timeout_s=timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Group by group: nothing may come between the calls of one group.
        calls = {
            group: iter(
                workers[group].call(
                    method, args, kwargs, ranks=[r % size for r in wanted if r // size == group]
                )
            )
            for group in dict.fromkeys(rank // size for rank in wanted)
        }
        pending = [(workers[rank // size], next(calls[rank // size])) for rank in wanted]
        return [worker.answer(call, remaining_s(deadline)) for worker, call in pending]

    # --- groups --------------------------------------------------------------------------------

    def _new(self, index: int) -> Executor:
        return self._make(index, self.table, self.callbacks)

    def _connect(self, executor: Executor) -> None:
        executor.on_capacity = lambda: self.on_capacity()
        executor.on_chunk = lambda delivery: self.on_chunk(delivery)
        executor.on_ready = lambda flight, delivery: self.on_ready(flight, delivery)
        if self.on_batch_failed is not None:
            executor.on_batch_failed = self.on_batch_failed
        executor.on_broken = lambda error, flights: self._on_death(executor, error, flights)

    def _pick(self, *, bind_late: bool, alone: bool) -> Executor | None:
        best: Executor | None = None
        for group in self.groups:
            executor = group.executor
            if group.state != "running" or not executor.has_capacity(bind_late=bind_late):
                continue
            # Nobody beside a suspect: an innocent would be charged with its worker's death.
            if executor.has_suspect or (
                alone and (executor.load or self.table.flights_of(executor))
            ):
                continue
            if best is None or executor.load < best.load:
                best = executor
        return best

    # --- death, on the pump of the worker that died ---------------------------------------------

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
            self._fail(error, flights)
            return
        may_restart = self._charge(group, flights)
        if may_restart:
            self._requeue(executor, error, flights)
            threading.Thread(
                target=self._restart, args=(group,), name="sidestream-restart", daemon=True
            ).start()
        else:
            self._give_up(group, error, flights)
        self.on_capacity()

    def _charge(self, group: WorkerGroup, flights: list[Flight]) -> bool:
        """Count a death, unless it is a suspect's own; tell whether the group may go on."""
        if self._max_restarts == 0:
            return False
        if any(_is_guilty(group.executor, flight) for flight in flights):
            return True
        now = time.monotonic()
        group.deaths.append(now)
        while group.deaths and now - group.deaths[0] > RESTART_WINDOW_S:
            group.deaths.popleft()
        return len(group.deaths) <= self._max_restarts

    def _requeue(self, executor: Executor, error: BaseException, flights: list[Flight]) -> None:
        again = []
        for flight in flights:
            if _is_guilty(executor, flight):
                self._fail(error, [flight])
                continue
            if executor.has_started(flight):
                flight.is_suspect = True
                flight.batch_key = None
            flight.requeue()
            again.append(flight)
        self.on_requeue(again)

    def _give_up(self, group: WorkerGroup, error: BaseException, flights: list[Flight]) -> None:
        with self._lock:
            group.state, group.reason = "failed", error
            is_last = all(g.state == "failed" for g in self.groups)
            if is_last and self._broken is None:
                self._broken = error
        if is_last:
            # First: whoever hears of the death may submit at once, and is to be refused.
            self.on_broken(error)
            self._fail(error, flights)
        else:
            self._requeue(group.executor, error, flights)

    def _fail(self, error: BaseException, flights: list[Flight]) -> None:
        for flight in flights:
            if self.table.drop_flight(flight):
                flight.fail(fresh(error))

    # --- restart, on a thread of its own --------------------------------------------------------

    def _restart(self, group: WorkerGroup) -> None:
        while True:
            pause_s = min(_FIRST_PAUSE_S * 2 ** max(0, len(group.deaths) - 1), _LAST_PAUSE_S)
            if self._closing.wait(pause_s):
                return
            try:
                successor = self._replace(group)
                if successor is None:
                    return
                successor.start()
            except Exception as error:  # noqa: BLE001 - boundary: else the queue waits for ever
                if self._closing.is_set():
                    return
                logger.warning("Worker group %d could not be restarted: %s", group.index, error)
                if not self._charge(group, []):
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
            self.on_capacity()
            return

    def _replace(self, group: WorkerGroup) -> Executor | None:
        """Put a new executor in the place of a dead one; None: everything is being closed."""
        # What the dead one left: its descriptors and its pump.
        group.executor.shutdown(0.0)
        successor = self._new(group.index)
        self._connect(successor)
        with self._lock:
            if not self._closing.is_set():
                group.executor = successor
                return successor
        successor.shutdown(0.0)
        return None


def _is_guilty(executor: Executor, flight: Flight) -> bool:
    """Tell whether a worker died of a flight: of one that it had begun, and nothing beside it.

    A suspect that was only on its way, to a worker that was dying already, is as it was.
    """
    return flight.is_suspect and executor.has_started(flight)
