"""What every executor does: dispatch forwards, call methods, answer for outputs and health."""

from __future__ import annotations

import copy
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sidestream.errors import (
    EngineClosedError,
    InternalError,
    InvalidRequestError,
    RequestError,
)
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.futures import EngineFuture, OutputFuture
from sidestream.executor.inflight import Flight, InflightTable
from sidestream.protocol import AsyncOutputKind, Call, Command, Execute, RunnerOutput
from sidestream.request import DiffusionRequest
from sidestream.transport.envelope import Delivery
from sidestream.transport.packing import PackingError, pack_bytes

#: Methods that answer in two steps, COMPUTE_DONE and OUTPUT_READY.
FORWARDS: Final = ("execute_model", "execute_model_batch")

#: How long the steps of an end by force may take; as a rule they take milliseconds.
FORCE_S: Final = 5.0

_FORKED: Final = (
    "This engine belongs to the process that made it: its threads and its worker's answers are "
    "there. Make another one in the forked child."
)


@dataclass(frozen=True)
class Health:
    """Whether an engine can take work, and if not, why."""

    ok: bool
    reason: str = ""


class Executor(ABC):
    """Sends commands to workers and resolves whoever waits for their answers.

    States: new, running, broken (its worker died; ``reason`` says how), closed.
    """

    def __init__(self, dispatch_depth: int) -> None:
        self.callbacks = CallbackThread()
        self.table = InflightTable()
        self._dispatch_depth = dispatch_depth
        self._pid = os.getpid()
        # Guards _executing and the state: the loop dispatches, the pump hears the answers.
        # Reentrant, since a signal handler may close the engine while its thread is in here.
        self._lock = threading.RLock()
        # Guards the steps of the end; reentrant for the same reason.
        self._ending = threading.RLock()
        self._is_ended = False
        self._executing: set[int] = set()
        # Of those, the ones that are at their last step.
        self._ending_soon: set[int] = set()
        #: What the worker said of itself when it was ready.
        self.worker: Mapping[str, Any] = {}
        self._broken: BaseException | None = None
        self._closed: BaseException | None = None
        #: Called, on any thread, when there may be room for another forward.
        self.on_capacity: Callable[[], None] = lambda: None
        #: Called on the pump when an output is ready, before its future resolves.
        self.on_ready: Callable[[Flight, Delivery], None] = lambda _flight, _delivery: None
        #: Called on the pump with a batch whose forward failed: each may run again alone.
        self.on_batch_failed: Callable[[Sequence[Flight], Delivery], None] = _fail_batch
        #: Called once when the executor breaks, after its flights failed.
        self.on_broken: Callable[[BaseException], None] = lambda _error: None

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
            is_first = self._closed is None
            self._closed = self._closed or EngineClosedError("The engine is closed.")
        if is_first:
            self._ask_to_end()
        if not self._ending.acquire(timeout=timeout_s + FORCE_S):
            return
        try:
            if not self._is_ended:
                self._end(timeout_s)
        finally:
            self._ending.release()

    def _end(self, timeout_s: float) -> None:
        try:
            self._await_end(timeout_s)
        finally:
            # Also after Ctrl-C in that wait: no worker may be left, and nobody who waits for one.
            self._force_end()
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
        """Queue a command for the worker; never blocks."""

    def check_health(self) -> Health:
        """Say whether work would be done; no message is sent for it."""
        if self.is_in_child:
            return Health(False, _FORKED)
        if self._broken is not None:
            return Health(False, str(self._broken))
        if self._closed is not None:
            return Health(False, str(self._closed))
        return Health(True)

    @property
    def is_in_child(self) -> bool:
        """Tell whether this is a forked child of the process that made the executor."""
        return self._pid != os.getpid()

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
            if len(self._executing) >= self._dispatch_depth:
                return False
            return not bind_late or self._executing <= self._ending_soon

    def dispatch(self, flights: Sequence[Flight]) -> int:
        """Send one forward over ``flights``, which are registered before; gives its ``rpc_id``."""
        if len(flights) > 1:
            self.table.name_batch(flights)
        rpc_id = self.table.add_forward(flights)
        now = time.monotonic()
        for flight in flights:
            flight.dispatched_at = now
        with self._lock:
            error = self._broken or self._closed
            self._executing.add(rpc_id)
        if error is not None:
            # It stopped since the caller looked, and may have emptied the table before.
            self._end_forward(rpc_id, error)
            return rpc_id
        self._send(
            Execute(
                rpc_id=rpc_id,
                output_ids=tuple(flight.output_id for flight in flights),
                attempts=tuple(flight.attempt for flight in flights),
                requests=tuple(flight.packed for flight in flights),
            )
        )
        return rpc_id

    def execute_model(
        self, request: DiffusionRequest, timeout_s: float | None = None
    ) -> RunnerOutput:
        """Run one forward; returns when it is queued on the device.

        Bypasses the engine's queue. The output comes by :meth:`wait_output_ready`.

        Raises:
            RequestError: The request can't be sent, or its forward failed.
            WorkerDiedError: The worker died.
        """
        self.check_usable()
        flight = self.make_flight(request)
        self.table.add_flight(flight)
        self.dispatch([flight])
        flight.compute_done.result(timeout_s)
        return RunnerOutput((flight.output_id,), held=(flight.output,))

    def make_flight(
        self, request: DiffusionRequest, want: Callable[[str], None] | None = None
    ) -> Flight:
        """Pack a request, in its caller's thread; ``want`` hears its id when somebody waits.

        To wait in a forked child raises ``EngineClosedError``: nobody resolves a future there.

        Raises:
            InvalidRequestError: It holds something that can't travel; names it.
        """
        output_id = self.table.new_output_id()
        request_id = request.request_id if request.request_id is not None else output_id
        try:
            packed = pack_bytes(request, root="request")
        except PackingError as error:
            raise InvalidRequestError(
                f"Request {request_id!r} can't be sent to a worker: {error}",
                request_id=request_id,
            ) from error
        return Flight(
            output_id=output_id,
            request_id=request_id,
            packed=packed,
            callbacks=self.callbacks,
            on_wait=partial(_before_wait, self._pid, want, output_id),
        )

    def wait_output_ready(self, async_output_id: str) -> OutputFuture:
        """Give the future of an output: the same one while anybody holds it.

        An id that was never issued, or whose output was delivered and forgotten, gives a future
        that has failed already.
        """
        self.check_process()
        future = self.table.output_future(async_output_id)
        if future is not None:
            return future
        flight = Flight(
            output_id=async_output_id,
            request_id=async_output_id,
            packed=b"",
            callbacks=self.callbacks,
        )
        flight.fail(
            RequestError(
                f"No output {async_output_id!r} is expected: the id was never issued, or its "
                "output was delivered or dropped and nobody holds it.",
                request_id=async_output_id,
            )
        )
        return flight.output

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
            return [self.execute_model(*args, **{"timeout_s": timeout_s, **(kwargs or {})})]
        self.check_usable()
        arguments = pack_bytes((tuple(args), dict(kwargs or {})), root="arguments")
        future: EngineFuture[Delivery] = EngineFuture(self.callbacks)
        rpc_id = self.table.add_call(future)
        self._send(Call(rpc_id=rpc_id, method=method, arguments=arguments))
        error = self._broken or self._closed
        if error is not None and (late := self.table.take_call(rpc_id)) is not None:
            late.set_exception(_fresh(error))
        message, _ = future.result(timeout_s).open()
        if message.error is not None:
            raise message.error
        return [message.result]

    def check_usable(self) -> None:
        """Raise what keeps this executor from taking work, if anything does."""
        self.check_process()
        error = self._broken or self._closed
        if error is not None:
            raise _fresh(error)

    def check_process(self) -> None:
        """Raise in a forked child.

        Raises:
            EngineClosedError: This is not the process that made the executor.
        """
        _check_process(self._pid)

    # --- answers, on the pump -----------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        match delivery.kind:
            case AsyncOutputKind.COMPUTE_DONE:
                for flight in self._take_forward(delivery.rpc_id):
                    flight.compute_done.reach()
            case AsyncOutputKind.OUTPUT_READY:
                self._on_output(delivery)
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
        if flight is None:
            delivery.discard()
            return
        self.on_ready(flight, delivery)
        flight.deliver(delivery)

    def _on_result(self, delivery: Delivery) -> None:
        call = self.table.take_call(delivery.rpc_id)
        if call is not None:
            call.set_result(delivery)
            return
        flights = self._take_forward(delivery.rpc_id)
        if len(flights) > 1:
            self.on_batch_failed(flights, delivery)
            return
        for flight in flights:
            if self.table.take_flight(flight.key, flight.attempt) is not None:
                self.on_ready(flight, delivery)
                flight.deliver(delivery)

    @abstractmethod
    def _on_progress(self, delivery: Delivery) -> None:
        """Hear a worker's sign of life."""

    def _take_forward(self, rpc_id: int) -> tuple[Flight, ...]:
        flights = self.table.take_forward(rpc_id)
        with self._lock:
            self._executing.discard(rpc_id)
            self._ending_soon.discard(rpc_id)
        self.on_capacity()
        return flights or ()

    def _end_forward(self, rpc_id: int, error: BaseException) -> None:
        for flight in self._take_forward(rpc_id):
            if self.table.drop_flight(flight):
                flight.fail(_fresh(error))

    def _break(self, error: BaseException) -> None:
        """Refuse what is new, then fail everything that is open, then say so."""
        with self._lock:
            if self._broken is not None or self._closed is not None:
                return
            self._broken = error
        self._fail_all(error)
        self.on_broken(error)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._executing.clear()
        flights, calls = self.table.take_all()
        for flight in flights:
            flight.fail(_fresh(error))
        for call in calls:
            if not call.done():
                call.set_exception(_fresh(error))


def _fresh(error: BaseException) -> BaseException:
    """Copy an error that many will raise: each raise adds its frames to the one it raises."""
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin


def _before_wait(pid: int, want: Callable[[str], None] | None, output_id: str) -> None:
    _check_process(pid)
    if want is not None:
        want(output_id)


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise EngineClosedError(_FORKED)


def _fail_batch(flights: Sequence[Flight], delivery: Delivery) -> None:
    """Fail all of a batch with what its forward raised."""
    message, _ = delivery.open()
    for flight in flights:
        flight.fail(_fresh(message.error or InternalError("A forward failed without an error.")))
