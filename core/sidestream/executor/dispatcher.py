"""The two ways to workers: requests, which become flights, and calls of methods."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from sidestream.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    RequestError,
)
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.calls import PendingCall
from sidestream.executor.flight import Flight
from sidestream.executor.futures import OutputFuture
from sidestream.executor.inflight import InflightTable
from sidestream.protocol import RunnerOutput
from sidestream.request import DiffusionRequest
from sidestream.transport.packing import PackingError, pack_bytes

#: Methods that answer in two steps, COMPUTE_DONE and OUTPUT_READY.
FORWARDS: Final = ("execute_model", "execute_model_batch")

FORKED: Final = (
    "This engine belongs to the process that made it: its threads and its worker's answers are "
    "there. Make another one in the forked child."
)


class Dispatcher(ABC):
    """Sends requests and calls to workers, whose answers resolve futures.

    Requests go path 1, which answers in two steps; calls of methods go path 2.
    """

    def __init__(
        self, table: InflightTable, callbacks: CallbackThread, *, is_stepwise: bool = False
    ) -> None:
        #: Whether the workers run denoising steps, and no whole forwards.
        self.is_stepwise = is_stepwise
        self.table = table
        self.callbacks = callbacks
        self._pid = os.getpid()

    @property
    @abstractmethod
    def size(self) -> int:
        """Give the number of workers; ranks are counted from 0 to it."""

    @abstractmethod
    def dispatch(self, flights: Sequence[Flight]) -> None:
        """Send one forward over ``flights``, which are registered before; never blocks."""

    @abstractmethod
    def check_usable(self) -> None:
        """Raise what keeps this from taking work, if anything does."""

    # --- path 1 -------------------------------------------------------------------------------

    def execute_model(
        self, request: DiffusionRequest, timeout_s: float | None = None
    ) -> RunnerOutput:
        """Run one forward; returns when it is queued on the device.

        Bypasses the engine's queue. The output comes by :meth:`wait_output_ready`.

        Raises:
            InvalidRequestError: The engine is in step mode, or the request can't be sent.
            RequestError: Its forward failed.
            WorkerDiedError: The worker died.
        """
        return self.execute_model_batch([request], timeout_s)

    def execute_model_batch(
        self, requests: Sequence[DiffusionRequest], timeout_s: float | None = None
    ) -> RunnerOutput:
        """Run one forward over compatible requests; as :meth:`execute_model`.

        Each request's output has an id of its own, ``{batch_id}/{request_id}``.
        """
        self.check_usable()
        if self.is_stepwise:
            raise InvalidRequestError(
                "This engine is in step mode: its workers run no whole forwards. Use submit() or "
                "step_streaming(), or an engine with step_execution=False."
            )
        self.callbacks.refuse_to_block()
        flights = [self.make_flight(request) for request in requests]
        for flight in flights:
            self.table.add_flight(flight)
        self.dispatch(flights)
        for flight in flights:
            flight.compute_done.result(timeout_s)
        return RunnerOutput(
            tuple(flight.output_id for flight in flights),
            held=tuple(flight.output for flight in flights),
        )

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

    # --- path 2 -------------------------------------------------------------------------------

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
        every = range(self.size)
        wanted = every if ranks is None else ranks
        for rank in wanted:
            if rank not in every:
                raise ConfigError("ranks", list(wanted), f"0 to {every[-1]}")
        if method in FORWARDS:
            run = getattr(self.leader(wanted[0]), method)
            return [run(*args, **{"timeout_s": timeout_s, **(kwargs or {})})]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        calls = self.call(method, args, kwargs, ranks=wanted)
        return [call.result(_remaining_s(deadline)) for call in calls]

    @abstractmethod
    def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] = (0,),
    ) -> list[PendingCall]:
        """Send a call to each of ``ranks``.

        No other command comes between those of one group, so what its workers do in it they may
        do together.

        Raises:
            PackingError: An argument can't travel; names it.
            WorkerDiedError, EngineClosedError: Nothing is taken any more.
        """

    @abstractmethod
    def leader(self, rank: int) -> Dispatcher:
        """Give what sends forwards to the group of a rank."""

    # --- processes ----------------------------------------------------------------------------

    @property
    def is_in_child(self) -> bool:
        """Tell whether this is a forked child of the process that made the executor."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise in a forked child.

        Raises:
            EngineClosedError: This is not the process that made the executor.
        """
        _check_process(self._pid)


def _remaining_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _before_wait(pid: int, want: Callable[[str], None] | None, output_id: str) -> None:
    _check_process(pid)
    if want is not None:
        want(output_id)


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise EngineClosedError(FORKED)
