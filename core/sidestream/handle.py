"""What ``submit`` gives: one request's futures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from sidestream.errors import InvalidRequestError, RequestAbortedError
from sidestream.request import AbortOutcome, AbortResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sidestream.executor.flight import Flight
    from sidestream.executor.futures import EngineFuture
    from sidestream.output import DiffusionOutput, RequestEvent

T = TypeVar("T")


class RequestHandle:
    """A request on its way, and its output once that is there.

    Keeps the output as any future does, and gives the same object each time; a handle that is
    dropped gives the output's memory back. Awaiting it does not own it: several tasks may, and
    canceling one of them leaves the request alone.

    Who takes one of its futures counts as waiting: ``concurrent.futures.wait`` does not say so.
    """

    def __init__(self, flight: Flight, owner: object, abort: Callable[[Flight], None]) -> None:
        self._flight = flight
        self._abort = abort
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

    def events(self) -> Iterator[RequestEvent]:
        """Yield what happens to the request, in order, and each event once.

        Every denoising step and every part of the output in step mode (parts come with
        ``streaming_output``), that its last work is queued, and at last the output. What nobody has
        asked for yet waits here, however slow who asks is: parts are kept in shared memory until
        then and count to ``host_buffer_bytes``, which holds other requests back, not this one. A
        part's ``step`` is the latest that was told. After a worker's death what was told is not
        told again.

        Raises:
            OutputTransferError: A part can't be rebuilt in this process; ask again for the rest.
            RequestError, WorkerDiedError, EngineClosedError: What the request ended by.
        """
        goes_on = True
        while goes_on:
            event, goes_on = self._next_event()
            if event is not None:
                yield event
            elif goes_on:
                self._flight.events.change().result()

    async def aevents(self) -> AsyncIterator[RequestEvent]:
        """Yield events without blocking the event loop; as :meth:`events`."""
        goes_on = True
        while goes_on:
            event, goes_on = self._next_event()
            if event is not None:
                yield event
            elif goes_on:
                change = self._flight.events.change()
                change.refuse_to_block()
                await asyncio.wrap_future(change)

    def _next_event(self) -> tuple[RequestEvent | None, bool]:
        """Take the event that is there, if one is; False behind it: there will be no other."""
        flight = self._flight
        # First: what is there when it is over is all.
        is_over = flight.output.done()
        event = flight.events.take()
        if event is None and is_over:
            return flight.events.take_end(flight.output.result()), False
        return event, True

    def __aiter__(self) -> AsyncIterator[RequestEvent]:
        return self.aevents()

    def abort(self, wait: bool = False, timeout_s: float | None = None) -> AbortResult:
        """Give the request up, and say how far it had come.

        One that is queued is taken back at once. One that a worker has is stopped between two
        denoising steps; where it has none, or others share its forward, its output is dropped. The
        worker's answer says which, and that device memory and place are free; ``wait`` for it, else
        the outcome may be ``REQUESTED``. An output that is already copied comes as if nothing was
        asked. May be called again, and from any thread.

        Raises:
            TimeoutError: The worker did not answer within ``timeout_s``; it is asked all the same.
            EngineClosedError: In a forked child.
        """
        self._abort(self._flight)
        return abort_result(self._flight, wait, timeout_s)

    def __await__(self) -> Generator[Any, None, DiffusionOutput]:
        future = self._flight.output
        if future.done():
            return future.result()
        # In a done-callback, an event loop's wake-up would come from the thread that it blocks.
        future.refuse_to_block()
        return (yield from asyncio.wrap_future(future).__await__())

    def __repr__(self) -> str:
        return f"<RequestHandle {self.request_id!r} {self._flight.state}>"


def flight_of(handle: RequestHandle, owner: object) -> Flight:
    """Give the request behind a handle of ``owner``.

    Raises:
        InvalidRequestError: Another engine made it, and has ids of its own.
    """
    if handle._owner is not owner:
        raise InvalidRequestError(
            f"{handle!r} is of another engine; handle.abort() knows which.",
            request_id=handle.request_id,
        )
    return handle._flight


def abort_result(flight: Flight, wait: bool, timeout_s: float | None) -> AbortResult:
    """Say what became of a request that was given up; raises as :meth:`RequestHandle.abort`."""
    # The signal and not the output, which would be rebuilt for this.
    answer = flight.output_ready
    if not wait and not answer.done():
        return AbortResult(AbortOutcome.REQUESTED)
    error = answer.exception(timeout_s)
    if isinstance(error, RequestAbortedError):
        return AbortResult(error.outcome, error.step)
    return AbortResult(AbortOutcome.ALREADY_OUT)


def _wanted(future: EngineFuture[T]) -> Future[T]:
    future.want()
    return future
