"""One worker, seen from the main process: send it commands, hear its answers, notice its end."""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sidestream.errors import EngineClosedError, InternalError
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.dispatcher import FORKED, FORWARDS, Dispatcher, fresh
from sidestream.executor.flight import Flight
from sidestream.executor.futures import EngineFuture
from sidestream.executor.hang_watch import HangWatch
from sidestream.executor.health import Health, RankHealth
from sidestream.executor.holding import holds_any
from sidestream.executor.inflight import InflightTable, key_of
from sidestream.executor.stepwise import StepCalls, StepFuture, make_command
from sidestream.protocol import AsyncOutputKind, Call, Command, Execute, StepStage, number_of
from sidestream.transport.abort_table import AbortTable
from sidestream.transport.control_page import ControlPage
from sidestream.transport.envelope import Delivery
from sidestream.transport.packing import pack_bytes

#: How long the steps of an end by force may take; as a rule they take milliseconds.
FORCE_S: Final = 5.0


@dataclass(frozen=True)
class PendingCall:
    """A call that was sent."""

    rpc_id: int
    future: EngineFuture[Delivery]


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
        #: The calls of step mode.
        self.steps = StepCalls(self.table)
        self._owns_callbacks = callbacks is None
        self._dispatch_depth = dispatch_depth
        self._hang_timeout_s = hang_timeout_s
        self._hang = HangWatch(hang_timeout_s)
        # Guards _executing, the aborts and the state: the loop dispatches, the pump hears answers.
        # Reentrant, since a signal handler may close the engine while its thread is in here.
        self._lock = threading.RLock()
        # Guards the steps of the end, and those of the start that an end must not come between;
        # reentrant for the same reason.
        self._ending = threading.RLock()
        self._is_ended = False
        self._executing: set[int] = set()
        # Of those, the ones that are at their last step.
        self._ending_soon: set[int] = set()
        # Not held: it would keep its output, and so its slot, until the next one.
        self._suspect: Callable[[], Flight | None] = lambda: None
        # The page that the worker reads, and who is marked there; None before there is a worker.
        self._page: ControlPage | None = None
        self._aborts: AbortTable | None = None
        #: What the worker said of itself when it was ready.
        self.worker: Mapping[str, Any] = {}
        self._broken: BaseException | None = None
        self._closed: BaseException | None = None
        #: Called, on any thread, when there may be room for another forward.
        self.on_capacity: Callable[[], None] = lambda: None
        #: Called on the pump when an output is ready, before its future resolves.
        self.on_ready: Callable[[Flight, Delivery], None] = lambda _flight, _delivery: None
        #: Called on the pump with a part of an output, before it is given to its request.
        self.on_chunk: Callable[[Delivery], None] = lambda _delivery: None
        #: Called on the pump with a batch whose forward failed: each may run again alone.
        self.on_batch_failed: Callable[[Sequence[Flight], Delivery], None] = _fail_batch
        #: Called once when the executor breaks, with the flights that it had.
        self.on_broken: Callable[[BaseException, list[Flight]], None] = self._fail_flights

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
        return holds_any(self._lock)

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

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Queue a command for the workers; never blocks."""

    def check_health(self) -> Health:
        """Say whether work would be done; no message is sent for it."""
        if self.is_in_child:
            return Health(False, FORKED)
        if self._broken is not None:
            return Health(False, str(self._broken))
        if self._closed is not None:
            return Health(False, str(self._closed))
        return Health(True)

    def ranks(self) -> tuple[RankHealth, ...]:
        """Say which worker processes there are."""
        return ()

    @property
    def broken(self) -> BaseException | None:
        """Give what broke the executor."""
        return self._broken

    # --- path 1: forwards ---------------------------------------------------------------------

    def has_capacity(self, *, bind_late: bool = False) -> bool:
        """Tell whether a forward sent now would be within ``dispatch_depth``.

        ``bind_late``: only once what runs is at its last step, so that a batch does not close a
        whole forward before it can start.
        """
        with self._lock:
            if self._broken is not None or self._closed is not None:
                return False
            if len(self._executing) >= self._dispatch_depth:
                return False
            return not bind_late or self._executing <= self._ending_soon

    @property
    def has_suspect(self) -> bool:
        """Tell whether the worker has a request that must have it for itself."""
        suspect = self._suspect()
        # One that was given up is done for its caller before it is for the worker.
        return suspect is not None and (
            not suspect.output.done() or suspect.rpc_id in self._executing
        )

    @abstractmethod
    def has_started(self, flight: Flight) -> bool:
        """Tell whether the worker has begun with a flight that it has."""

    @property
    def load(self) -> int:
        """Count the forwards that are with the worker and not queued on its device yet."""
        return len(self._executing)

    def dispatch(self, flights: Sequence[Flight]) -> None:
        """Send one forward over ``flights``, which are registered before; never blocks."""
        if len(flights) > 1:
            self.table.name_batch(flights)
        if flights[0].is_suspect:
            self._suspect = weakref.ref(flights[0])
        rpc_id = self.table.add_forward(flights, self)
        with self._lock:
            error = self._broken or self._closed
            self._executing.add(rpc_id)
            if error is None and self._page is not None:
                self._hang.begin(self._page.heartbeat, time.monotonic())
        if error is not None:
            # It stopped since the caller looked, and may have emptied the table before.
            self._end_forward(rpc_id, error)
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
        future = StepFuture(self.callbacks, flights, lambda: self.on_capacity())
        with self._lock:
            error = self._broken or self._closed
            if error is None:
                rpc_id = self.steps.register(future)
                if stage is StepStage.PREPARE:
                    # In the lock: who breaks this executor afterwards finds them to be its own.
                    self.table.assign(flights, rpc_id, self)
                if self._page is not None:
                    self._hang.begin(self._page.heartbeat, time.monotonic())
        if error is not None:
            raise fresh(error)
        self._send(make_command(rpc_id, stage, flights))
        error = self._broken or self._closed
        if error is not None and (late := self.table.take_call(rpc_id)) is not None:
            late.set_exception(fresh(error))
        return future

    # --- giving up ----------------------------------------------------------------------------

    def abort(self, flight: Flight) -> None:
        """Tell the worker to give a flight up, unless it has answered; its answer says how."""
        with self._lock:
            if flight.owner is self and self.table.is_open(flight.key) and self._aborts is not None:
                # Where there is no place for the mark, the request just goes on.
                self._aborts.add(flight.number)

    def time_out(self, flight: Flight) -> bool:
        """Forget a flight, and tell the worker; False if it was out already."""
        with self._lock:
            if not self.table.drop_flight(flight):
                return False
            if flight.owner is self and self._aborts is not None:
                self._aborts.add(flight.number)
            return True

    @property
    def aborting(self) -> int:
        """Count the requests that the worker was told to give up and has not answered for."""
        return 0 if self._aborts is None else len(self._aborts)

    def _adopt(self, page: ControlPage) -> None:
        """Take the control page of the worker."""
        self._page, self._aborts = page, AbortTable(page)

    def _forget_abort(self, number: int) -> None:
        with self._lock:
            if self._aborts is not None:
                self._aborts.discard(number)

    # --- hanging ------------------------------------------------------------------------------

    def watch(self, now: float) -> float | None:
        """End a worker that hangs; gives when to look again, None: there is nothing to watch."""
        with self._lock:
            look_at = self._hang.look_at
            if self._broken is not None or self._closed is not None or self._page is None:
                return None
            if look_at is None or now < look_at:
                return look_at
            # A call may take as long as it likes, and its caller may wait for as long.
            since = now if self.table.has_calls(self) else self._busy_since()
            silent_s = self._hang.look(self._page.heartbeat, since, now)
            look_at = self._hang.look_at
        if silent_s is None:
            return look_at
        self._end_hung(silent_s)
        return None

    def _busy_since(self) -> float | None:
        if self.is_stepwise:
            return self.steps.busy_since(self.table.flights_of(self))
        return self.table.busy_since(self)

    @abstractmethod
    def _end_hung(self, silent_s: float) -> None:
        """End a worker that was silent for too long, if that can be, and break."""

    # --- path 2: calls ------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of the worker, else of its pipeline, on every rank; one result each.

        Runs on the worker's main thread, in the order of commands. ``execute_model`` goes the way
        of forwards and answers with a :class:`RunnerOutput`.

        Raises:
            TimeoutError: No answer within ``timeout_s``; the call may still run.
            WorkerDiedError: The worker died.
            Whatever the method raised, with its remote traceback as cause.
        """
        if method in FORWARDS:
            run = getattr(self, method)
            return [run(*args, **{"timeout_s": timeout_s, **(kwargs or {})})]
        calls = self.call(method, args, kwargs, ranks=range(self.size))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return [self.answer(call, remaining_s(deadline)) for call in calls]

    @property
    def size(self) -> int:
        """Give the number of workers that share one copy of the model."""
        return 1

    def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] = (0,),
    ) -> list[PendingCall]:
        """Send a call to ``ranks``, which are counted from 0 here; :meth:`answer` waits for one.

        No other command comes between, so what they do in it they may do together.

        Raises:
            PackingError: An argument can't travel; names it.
            WorkerDiedError, EngineClosedError: Nothing is taken any more.
        """
        self.check_usable()
        arguments = pack_bytes((tuple(args), dict(kwargs or {})), root="arguments")
        calls = []
        for _ in ranks:
            future: EngineFuture[Delivery] = EngineFuture(self.callbacks)
            calls.append(PendingCall(self.table.add_call(future, self), future))
        commands = [Call(rpc_id=one.rpc_id, method=method, arguments=arguments) for one in calls]
        self._send_calls(ranks, commands)
        error = self._broken or self._closed
        if error is not None:
            for one in calls:
                if (late := self.table.take_call(one.rpc_id)) is not None:
                    late.set_exception(fresh(error))
        return calls

    def _send_calls(self, ranks: Sequence[int], calls: Sequence[Call]) -> None:
        """Queue one call for each of ``ranks``."""
        for call in calls:
            self._send(call)

    def answer(self, call: PendingCall, timeout_s: float | None = None) -> Any:
        """Wait for a call's result; raises as :meth:`collective_rpc`."""
        if not call.future.done():
            call.future.refuse_to_block()
        if self._attend(call.future.done, timeout_s):
            timeout_s = 0.0
        try:
            delivery = call.future.result(timeout_s)
        except TimeoutError:
            self.table.forget_call(call.rpc_id)
            raise
        message, _ = delivery.open()
        if message.error is not None:
            raise message.error
        return message.result

    def _attend(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Read answers until ``is_done``, where no thread does; tells whether that is so."""
        return False

    def check_usable(self) -> None:
        """Raise what keeps this executor from taking work, if anything does."""
        self.check_process()
        error = self._broken or self._closed
        if error is not None:
            raise fresh(error)

    # --- answers, on the pump -----------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        self._hang.message(delivery.received_at)
        match delivery.kind:
            case AsyncOutputKind.COMPUTE_DONE:
                for flight in self._take_forward(delivery.rpc_id):
                    flight.computed()
            case AsyncOutputKind.OUTPUT_READY:
                self._on_output(delivery)
            case AsyncOutputKind.CHUNK_READY:
                self._on_chunk(delivery)
            case AsyncOutputKind.RPC_RESULT:
                self._on_result(delivery)
            case AsyncOutputKind.PROGRESS if delivery.rpc_id:
                with self._lock:
                    self._ending_soon.add(delivery.rpc_id)
                self.on_capacity()
            case AsyncOutputKind.PROGRESS:
                self._on_progress(delivery)

    def _on_output(self, delivery: Delivery) -> None:
        flight = self.table.take_flight(delivery.async_output_id, delivery.attempt)
        # A late one too: its request was given up.
        self._forget_abort(number_of(delivery.async_output_id))
        if flight is None:
            delivery.discard()
        else:
            if not delivery.failed:
                self.steps.before_output(flight, delivery.rpc_id)
            self._deliver(flight, delivery)
        if self.is_stepwise:
            self.steps.output_left(key_of(delivery.async_output_id))
            self.on_capacity()

    def _on_chunk(self, delivery: Delivery) -> None:
        flight = self.table.running_flight(delivery.async_output_id, delivery.attempt)
        if flight is None:
            delivery.discard()
            return
        self.steps.before_output(flight, delivery.rpc_id)
        self.on_chunk(delivery)
        flight.add_chunk(delivery)

    def _on_result(self, delivery: Delivery) -> None:
        call = self.table.take_call(delivery.rpc_id)
        if call is not None:
            call.set_result(delivery)
            return
        flights = self._take_failed(delivery.rpc_id)
        if len(flights) > 1:
            # Of a batch, some may have been answered for before it ran.
            self.on_batch_failed([f for f in flights if self.table.is_open(f.key)], delivery)
        elif flights and self.table.take_flight(flights[0].key, flights[0].attempt) is not None:
            self._deliver(flights[0], delivery)
        else:
            self.table.count_stale()
            delivery.discard()

    def _deliver(self, flight: Flight, delivery: Delivery) -> None:
        self.on_ready(flight, delivery)
        flight.deliver(delivery)
        if flight.is_suspect:
            self.on_capacity()  # others had to wait for it

    @abstractmethod
    def _on_progress(self, delivery: Delivery) -> None:
        """Hear a worker's sign of life."""

    def _take_forward(self, rpc_id: int) -> tuple[Flight, ...]:
        flights = self.table.take_forward(rpc_id)
        with self._lock:
            self._executing.discard(rpc_id)
            self._ending_soon.discard(rpc_id)
        self.on_capacity()
        return flights

    def _take_failed(self, rpc_id: int) -> tuple[Flight, ...]:
        """Take a forward out of which nothing else will come."""
        flights = self._take_forward(rpc_id)
        with self._lock:
            for flight in flights:
                flight.owner = None  # whoever aborts it from here on leaves no mark
                if self._aborts is not None:
                    self._aborts.discard(flight.number)
        return flights

    def _end_forward(self, rpc_id: int, error: BaseException) -> None:
        for flight in self._take_failed(rpc_id):
            if self.table.drop_flight(flight):
                flight.fail(fresh(error))

    def _break(self, error: BaseException) -> None:
        """Refuse what is new, fail the calls, and hand over the flights."""
        with self._lock:
            if self._broken is not None or self._closed is not None:
                return
            self._broken = error
        self.on_broken(error, self._let_go(error))

    def _fail_all(self, error: BaseException) -> None:
        self._fail_flights(error, self._let_go(error))

    def _let_go(self, error: BaseException) -> list[Flight]:
        """Fail the calls and give the flights that were with the worker."""
        with self._lock:
            self._executing.clear()
            self._ending_soon.clear()
            if self._aborts is not None:
                self._aborts.clear()
        self.table.forget_forwards(self)
        self.steps.fail(lambda: fresh(error))
        for call in self.table.take_calls(self):
            if not call.done():
                call.set_exception(fresh(error))
        return self.table.flights_of(self)

    def _fail_flights(self, error: BaseException, flights: list[Flight]) -> None:
        for flight in flights:
            if self.table.drop_flight(flight):
                flight.fail(fresh(error))


def remaining_s(deadline: float | None) -> float | None:
    """Say how long it is until ``deadline``, of the monotonic clock; None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _fail_batch(flights: Sequence[Flight], delivery: Delivery) -> None:
    """Fail all of a batch with what its forward raised."""
    message, _ = delivery.open()
    for flight in flights:
        flight.fail(fresh(message.error or InternalError("A forward failed without an error.")))
