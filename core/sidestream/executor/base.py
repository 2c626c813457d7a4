"""One worker, seen from the main process: send it commands, hear its answers, notice its end."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from sidestream.errors import EngineClosedError
from sidestream.executor.answers import AnswerRouter
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.calls import MethodCalls, PendingCall
from sidestream.executor.dispatcher import FORKED, Dispatcher
from sidestream.executor.flight import Flight
from sidestream.executor.futures import fresh
from sidestream.executor.hang_watch import HangWatch
from sidestream.executor.health import Health, RankHealth
from sidestream.executor.holding import holds_any
from sidestream.executor.inflight import InflightTable
from sidestream.executor.stepwise import StepCalls, StepFuture, make_command
from sidestream.executor.worker_load import WorkerLoad
from sidestream.protocol import AsyncOutputKind, Call, Command, Execute, StepStage
from sidestream.transport.control_page import ControlPage
from sidestream.transport.envelope import Delivery
from sidestream.transport.packing import pack_bytes

#: How long the steps of an end by force may take; as a rule they take milliseconds.
FORCE_S: Final = 5.0


class Executor(Dispatcher):
    """Sends commands to one worker and resolves whoever waits for its answers.

    States: new, running, broken (its worker died; ``broken`` says how), closed.
    """

    def __init__(
        self,
        dispatch_depth: int,
        *,
        hang_timeout_s: float = math.inf,
        is_stepwise: bool = False,
        table: InflightTable | None = None,
        callbacks: CallbackThread | None = None,
    ) -> None:
        super().__init__(
            InflightTable() if table is None else table,
            CallbackThread() if callbacks is None else callbacks,
            is_stepwise=is_stepwise,
        )
        #: What the worker has, and what becomes of its answers.
        self.load = WorkerLoad(self.table, dispatch_depth)
        self.steps = StepCalls(self.table)
        self.calls = MethodCalls(self.table, self.callbacks, self._attend)
        self.answers = AnswerRouter(self.table, self.load, self.steps, is_stepwise=is_stepwise)
        self._owns_callbacks = callbacks is None
        self._hang_timeout_s = hang_timeout_s
        self._hang = HangWatch(hang_timeout_s)
        # Guards the state and the watch: the loop dispatches, the pump hears of the end. Reentrant,
        # since a signal handler may close the engine while its thread is in here.
        self._lock = threading.RLock()
        # Guards the steps of the end, and those of the start that an end must not come between;
        # reentrant for the same reason.
        self._ending = threading.RLock()
        self._is_ended = False
        # The page that the worker writes; None before there is a worker. Open while it is running.
        self._page: ControlPage | None = None
        #: What the worker said of itself when it was ready.
        self.worker: Mapping[str, Any] = {}
        self._broken: BaseException | None = None
        self._closed: BaseException | None = None
        #: Called once when the executor breaks, with the flights that it had; on any thread.
        self.on_death: Callable[[BaseException, list[Flight]], None] = lambda error, flights: (
            self.table.fail(flights, error)
        )

    # --- life ---------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Bring the workers up; returns when they are ready.

        Raises:
            WorkerStartError: A worker did not come up; nothing is left of it.
        """

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let running forwards finish within ``timeout_s``, then end the workers by force.

        Idempotent. A second caller waits for the first.
        """
        if self.is_in_child:
            return  # it owns none of this
        with self._lock:
            self._closed = self._closed or EngineClosedError("The engine is closed.")
        if not self._ending.acquire(timeout=timeout_s + FORCE_S):
            return
        try:
            if not self._is_ended:
                self._end(timeout_s)
        finally:
            self._ending.release()

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return holds_any(self._lock) or self.load.is_held()

    def _end(self, timeout_s: float) -> None:
        try:
            self._ask_to_end()
            self._await_end(timeout_s)
        finally:
            # Also after Ctrl-C in that wait: no worker may be left, and nobody who waits for one.
            self._force_end()
            if self._owns_callbacks:
                self.callbacks.close()
            self._is_ended = True

    @abstractmethod
    def _ask_to_end(self) -> None:
        """Tell the workers to finish what runs and to end."""

    @abstractmethod
    def _await_end(self, timeout_s: float) -> None:
        """Wait until they have; returns after ``timeout_s`` at the latest."""

    @abstractmethod
    def _force_end(self) -> None:
        """End what is left, fail what is open, let go of everything; nothing here waits long."""

    def check_health(self) -> Health:
        """Say whether work would be done; no message is sent for it."""
        if self.is_in_child:
            return Health(False, FORKED)
        error = self._broken or self._closed
        return Health(True) if error is None else Health(False, str(error))

    def check_usable(self) -> None:
        """Raise what keeps this executor from taking work, if anything does."""
        self.check_process()
        error = self._broken or self._closed
        if error is not None:
            raise fresh(error)

    @property
    def broken(self) -> BaseException | None:
        """Give what broke the executor."""
        return self._broken

    def ranks(self) -> tuple[RankHealth, ...]:
        """Say which worker processes there are."""
        return ()

    @property
    def size(self) -> int:
        """Give the number of workers that share one copy of the model."""
        return 1

    # --- commands -----------------------------------------------------------------------------

    def has_capacity(self, *, bind_late: bool = False) -> bool:
        """Tell whether a forward may be sent now, see :meth:`WorkerLoad.has_room`."""
        if self._broken is not None or self._closed is not None:
            return False
        return self.load.has_room(bind_late=bind_late)

    def dispatch(self, flights: Sequence[Flight]) -> None:
        """Send one forward over ``flights``, which are registered before; never blocks."""
        rpc_id = self.load.add(flights)
        with self._lock:
            error = self._broken or self._closed
            if error is None:
                self._watch_for_hanging()
        if error is not None:
            # It stopped since the caller looked, and may have emptied the table before.
            self.answers.fail_forward(rpc_id, error)
            return
        self._send(
            Execute(
                rpc_id=rpc_id,
                output_ids=tuple(flight.output_id for flight in flights),
                attempts=tuple(flight.attempt for flight in flights),
                requests=tuple(flight.packed for flight in flights),
            )
        )

    def execute_stepwise(self, stage: StepStage, flights: Sequence[Flight]) -> StepFuture:
        """Send one call of step mode: a stage for ``flights``; never blocks.

        One call at a time. To prepare flights gives them to this executor.

        Raises:
            WorkerDiedError, EngineClosedError: Nothing is taken any more.
        """
        future = StepFuture(self.callbacks, flights, lambda: self.answers.listener.on_capacity())
        with self._lock:
            error = self._broken or self._closed
            if error is None:
                rpc_id = self.steps.register(future)
                if stage is StepStage.PREPARE:
                    # In the lock: who breaks this executor afterwards finds them to be its own.
                    self.table.assign(flights, rpc_id, self.load)
                self._watch_for_hanging()
        if error is not None:
            raise fresh(error)
        self._send(make_command(rpc_id, stage, flights))
        self._fail_if_late([rpc_id])
        return future

    def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] = (0,),
    ) -> list[PendingCall]:
        """Send a call to each of ``ranks``; see :meth:`Dispatcher.call`."""
        self.check_usable()
        arguments = pack_bytes((tuple(args), dict(kwargs or {})), root="arguments")
        calls = [self.calls.add() for _ in ranks]
        self._send_calls(
            ranks, [Call(rpc_id=one.rpc_id, method=method, arguments=arguments) for one in calls]
        )
        self._fail_if_late(one.rpc_id for one in calls)
        return calls

    def leader(self, rank: int) -> Dispatcher:
        """Give this executor: one worker, or the first one for all, runs its forwards."""
        return self

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Queue a command for the workers; never blocks."""

    def _send_calls(self, ranks: Sequence[int], calls: Sequence[Call]) -> None:
        """Queue one call for each of ``ranks``."""
        for call in calls:
            self._send(call)

    def _fail_if_late(self, rpc_ids: Iterable[int]) -> None:
        """Fail calls that were sent after all were failed that the worker had."""
        error = self._broken or self._closed
        if error is not None:
            for rpc_id in rpc_ids:
                if (late := self.table.take_call(rpc_id)) is not None:
                    late.set_exception(fresh(error))

    # --- messages -----------------------------------------------------------------------------

    def _attend(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Read answers until ``is_done``, where no thread does; tells whether that is so."""
        return False

    def _on_delivery(self, delivery: Delivery) -> None:
        """Do what a message asks for; on the pump."""
        self._hang.message(delivery.received_at)
        if delivery.kind == AsyncOutputKind.PROGRESS and not delivery.rpc_id:
            self._on_progress(delivery)
        else:
            self.answers.route(delivery)

    @abstractmethod
    def _on_progress(self, delivery: Delivery) -> None:
        """Hear a worker's sign of life."""

    @abstractmethod
    def has_started(self, flight: Flight) -> bool:
        """Tell whether the worker has begun with a flight that it has."""

    # --- hanging ------------------------------------------------------------------------------

    def _adopt(self, page: ControlPage) -> None:
        """Take the control page of the worker."""
        self._page = page
        self.load.adopt(page)

    def _watch_for_hanging(self) -> None:
        if self._page is not None:
            self._hang.begin(self._page.heartbeat, time.monotonic())

    def watch(self, now: float) -> float | None:
        """End a worker that hangs; gives when to look again, None: there is nothing to watch."""
        with self._lock:
            look_at = self._hang.look_at
            if self._broken is not None or self._closed is not None or self._page is None:
                return None
            if look_at is None or now < look_at:
                return look_at
            # A call may take as long as it likes, and its caller may wait for as long.
            since = now if self.calls.is_any_open() else self._busy_since()
            silent_s = self._hang.look(self._page.heartbeat, since, now)
            look_at = self._hang.look_at
        if silent_s is None:
            return look_at
        self._end_hung(silent_s)
        return None

    def _busy_since(self) -> float | None:
        if self.is_stepwise:
            return self.steps.busy_since(self.load.flights())
        return self.table.busy_since(self.load)

    @abstractmethod
    def _end_hung(self, silent_s: float) -> None:
        """End a worker that was silent for too long, if that can be, and break."""

    # --- death --------------------------------------------------------------------------------

    def _break(self, error: BaseException) -> None:
        """Refuse what is new, fail the calls, and hand over the flights."""
        with self._lock:
            if self._broken is not None or self._closed is not None:
                return
            self._broken = error
        self.on_death(error, self._let_go(error))

    def _fail_all(self, error: BaseException) -> None:
        self.table.fail(self._let_go(error), error)

    def _let_go(self, error: BaseException) -> list[Flight]:
        """Fail the calls and give the flights that were with the worker."""
        self.load.clear()
        self.steps.fail(error)
        self.calls.fail(error)
        return self.load.flights()
