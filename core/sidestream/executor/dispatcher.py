"""Requests on their way to workers: packed, named, registered, and waited for."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from sidestream.errors import EngineClosedError, InvalidRequestError, RequestError
from sidestream.executor.callbacks import CallbackThread
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
    """Turns requests into flights with futures, and sends them to workers."""

    def __init__(
        self, table: InflightTable, callbacks: CallbackThread, *, is_stepwise: bool = False
    ) -> None:
        #: Whether the workers run denoising steps, and no whole forwards.
        self.is_stepwise = is_stepwise
        self.table = table
        self.callbacks = callbacks
        self._pid = os.getpid()

    @abstractmethod
    def dispatch(self, flights: Sequence[Flight]) -> None:
        """Send one forward over ``flights``, which are registered before; never blocks."""

    @abstractmethod
    def check_usable(self) -> None:
        """Raise what keeps this from taking work, if anything does."""

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


def fresh(error: BaseException) -> BaseException:
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
        raise EngineClosedError(FORKED)
