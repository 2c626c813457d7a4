"""One request in flight, and the futures of whoever waits for it.

A future is resolved once: by the pump, by a worker's death, or by close.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sidestream.errors import ExecutionError, OutputTransferError, RequestError, SidestreamError
from sidestream.executor.events import EventLog
from sidestream.executor.futures import Answer, OutputFuture, StageFuture
from sidestream.output import DiffusionOutput
from sidestream.protocol import number_of
from sidestream.transport.failure import describe_error, detach_frames

if TYPE_CHECKING:
    from sidestream.executor.callbacks import CallbackThread
    from sidestream.executor.worker_load import WorkerLoad
    from sidestream.transport.envelope import Delivery


class Flight:
    """One request between submit and output, and its futures.

    States: queued, dispatched, computed (its forward is queued on a device), done.
    """

    def __init__(
        self,
        *,
        output_id: str,
        request_id: str,
        packed: bytes,
        callbacks: CallbackThread,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        #: What the engine calls it, from submit on.
        self.key = output_id
        #: What the tables of aborted requests call it.
        self.number = number_of(output_id)
        #: What it is called on the wire: ``{batch_id}/{key}`` once it ran in a batch.
        self.output_id = output_id
        #: Requests with equal keys may share a forward; None: runs alone.
        self.batch_key: Hashable | None = None
        self.request_id = request_id
        #: The request, packed in its caller's thread; kept until its output is out.
        self.packed = packed
        #: Which run of the request is current.
        self.attempt = 0
        #: Of whose load it is a part, from dispatch until its output is out.
        self.owner: WorkerLoad | None = None
        #: The forward that it is in.
        self.rpc_id = 0
        #: Whether that forward is queued on a device.
        self.is_computed = False
        #: Whether somebody gave it up while a worker had it: it must not run again.
        self.is_aborted = False
        #: How long it may take from submit to output, and until when that is; None: any time.
        self.timeout_s: float | None = None
        self.due_at: float | None = None
        #: Whether a worker died of it, perhaps: it runs once more, and with nobody beside it.
        self.is_suspect = False
        self.submitted_at = time.monotonic()
        self.dispatched_at: float | None = None
        self.compute_done = StageFuture(callbacks, on_wait)
        self.output_ready = StageFuture(callbacks, on_wait)
        self.output = OutputFuture(callbacks, on_wait)
        self.events = EventLog(partial(StageFuture, callbacks, on_wait))

    @property
    def state(self) -> str:
        """Name where the request is."""
        if self.output.done():
            return "done"
        if self.compute_done.done():
            return "computed"
        if self.dispatched_at is None:
            return "queued"
        return self.events.progress or "dispatched"

    def requeue(self) -> None:
        """Make it as new: an earlier run's messages are stale from here on."""
        self.attempt += 1
        self.owner = None
        self.is_computed = False
        self.dispatched_at = None
        self.events.restart()

    def computed(self) -> None:
        """Hear that all of its work is queued on the device; pump thread."""
        self.is_computed = True
        self.events.computed()
        self.compute_done.reach()

    def add_chunk(self, delivery: Delivery) -> None:
        """Keep the envelope of a part of the output for whoever asks; pump thread."""
        if not self.events.add_chunk(self._answer(delivery)):
            delivery.discard()

    def deliver(self, delivery: Delivery) -> None:
        """Resolve everything with the envelope of the output, or of what failed; pump thread."""
        self.packed = b""
        answer = self._answer(delivery)
        if not delivery.failed:
            self.events.computed()
        self.output.deliver(answer)
        for stage in (self.compute_done, self.output_ready):
            if delivery.failed:
                stage.miss(answer)
            else:
                stage.reach()
        self.events.end()

    def fail(self, error: BaseException) -> None:
        """Resolve what is open with ``error``."""
        self.packed = b""
        for future in (self.compute_done, self.output, self.output_ready):
            future.fail(error)
        self.events.end()

    def _answer(self, delivery: Delivery) -> Answer:
        return Answer(
            delivery,
            partial(
                decode_output,
                request_id=self.request_id,
                submitted_at=self.submitted_at,
                dispatched_at=self.dispatched_at,
            ),
        )


def decode_output(
    delivery: Delivery,
    *,
    request_id: str,
    submitted_at: float | None = None,
    dispatched_at: float | None = None,
) -> DiffusionOutput:
    """Open the envelope of an output, in the thread that wants it.

    Raises:
        RequestError: What the worker reported, or that the output can't be rebuilt here.
    """
    try:
        message, post_process = delivery.open()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A user's class may be missing here, or its __setstate__ may raise anything.
        detach_frames(error)  # theirs keep the slot that is being read
        raise OutputTransferError(
            f"The output of request {request_id!r} can't be rebuilt in this process: "
            f"{describe_error(error)}",
            request_id=request_id,
        ) from error
    if message.error is not None:
        raise _own_error(message.error, request_id)
    return DiffusionOutput(
        request_id=request_id,
        output=message.output,
        async_output_id=message.async_output_id,
        timings=replace(
            message.timings,
            submitted_at=submitted_at,
            dispatched_at=dispatched_at,
            ready_at=delivery.received_at,
        ),
        post_process=post_process,
    )


def _own_error(error: BaseException, request_id: str) -> BaseException:
    if isinstance(error, RequestError):
        error.request_id = request_id
    elif isinstance(error, MemoryError) or not isinstance(error, SidestreamError):
        # Such as the stand-in of one that could not travel.
        failed = ExecutionError(
            f"Request {request_id!r} failed: {describe_error(error)}", request_id=request_id
        )
        failed.__cause__ = error
        return failed
    return error
