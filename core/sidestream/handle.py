"""What ``submit`` gives: one request's futures."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sidestream.executor.futures import EngineFuture
    from sidestream.executor.inflight import Flight
    from sidestream.output import DiffusionOutput

T = TypeVar("T")


class RequestHandle:
    """A request on its way, and its output once that is there.

    Keeps the output as any future does, and gives the same object each time; a handle that is
    dropped gives the output's memory back. Awaiting it does not own it: several tasks may, and
    canceling one of them leaves the request alone.

    Who takes one of its futures counts as waiting: ``concurrent.futures.wait`` does not say so.
    """

    def __init__(self, flight: Flight, owner: object) -> None:
        self._flight = flight
        # An engine that nobody holds ends its worker; a request under way is a reason to hold it.
        self._owner = owner

    @property
    def request_id(self) -> str:
        """Give the caller's id, or the engine's if the caller gave none."""
        return self._flight.request_id

    @property
    def async_output_id(self) -> str:
        """Give the engine's id of the output, unique in its engine."""
        return self._flight.output_id

    @property
    def compute_done(self) -> Future[None]:
        """Give the signal that the forward is queued on the device.

        Where the pipeline never waits for its device, the device may still be computing then.
        """
        return _wanted(self._flight.compute_done)

    @property
    def output_ready(self) -> Future[None]:
        """Give the signal that the output is readable; it keeps no output."""
        return _wanted(self._flight.output_ready)

    def result(self, timeout: float | None = None) -> DiffusionOutput:
        """Wait for the output.

        Raises:
            TimeoutError: It was not there within ``timeout`` seconds; the request goes on.
            RequestError: This request failed.
            WorkerDiedError: Its worker died.
            EngineClosedError: The engine closed first.
        """
        try:
            return self._flight.output.result(timeout)
        finally:
            del self  # a frame that leads to the error which refers to it is a cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the request is done, and give its error or None."""
        return self._flight.output.exception(timeout)

    def done(self) -> bool:
        """Tell whether the output is readable or the request failed."""
        return self._flight.output.done()

    def future(self) -> Future[DiffusionOutput]:
        """Give the output's future, for ``concurrent.futures.wait`` and the like."""
        return _wanted(self._flight.output)

    def __await__(self) -> Generator[Any, None, DiffusionOutput]:
        future = self._flight.output
        if future.done():
            return future.result()
        # In a done-callback, an event loop's wake-up would come from the thread that it blocks.
        future.refuse_to_block()
        return (yield from asyncio.wrap_future(future).__await__())

    def __repr__(self) -> str:
        return f"<RequestHandle {self.request_id!r} {self._flight.state}>"


def _wanted(future: EngineFuture[T]) -> Future[T]:
    future.want()
    return future
