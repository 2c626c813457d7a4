"""An output's way from the device to a sink.

In three parts, which may run on two threads: ``prepare`` takes the payload apart and records an
event behind its forward; ``queue_copy`` makes a side stream wait for that event and queues one copy
a leaf; ``run`` waits for the copy and publishes, and queues it first if nobody has.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidestream.errors import DeviceLostError, OutputTransferError, RequestError
from sidestream.platforms.device import DeviceEvent, SideStream
from sidestream.platforms.platform import Platform
from sidestream.request import OutputTimings
from sidestream.transport.failure import describe_error, detach_frames, without_causes
from sidestream.transport.packing import pack
from sidestream.worker.copy_times import CopyTimes
from sidestream.worker.device_sync import DeviceSync
from sidestream.worker.forwards import Forward, ForwardLog
from sidestream.worker.output_job import Copy, OutputJob
from sidestream.worker.sink import OutputLabel, OutputSink
from sidestream.worker.staging import Staging

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Gives why nobody wants an output any more, if that is so.
GivenUp = Callable[[OutputLabel], RequestError | None]


class OutputTransfer:
    """Brings outputs of one device to a sink, on a side stream or on the current one."""

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        sink: OutputSink[Any],
        *,
        on_device_lost: Callable[[DeviceLostError], None] | None = None,
        given_up: GivenUp | None = None,
        forwards: ForwardLog | None = None,
    ) -> None:
        self.platform = platform
        self.device = device
        self.sink = sink
        self._on_device_lost = on_device_lost
        self._given_up = given_up
        self._forwards = forwards
        self._sync = DeviceSync(platform, device)
        self._times = CopyTimes(forwards)
        self._staging = Staging(platform, device)
        # Of the copies: how many were left to the thread that waits for them, and how many of those
        # it is through with. A count each thread, so that neither needs a lock.
        self._left, self._caught_up = 0, 0

    def start_clock(self, stream: SideStream | None) -> None:
        """Set the device's clock by the host's, on the thread that will call ``run``."""
        if stream is not None:
            self._times.start(stream)

    # --- the thread that queues the forwards --------------------------------------------------

    def prepare(
        self,
        label: OutputLabel,
        tree: Any,
        *,
        private: bool,
        copies_now: bool = False,
        forward: Forward | None = None,
        timings: OutputTimings | None = None,
    ) -> OutputJob:
        """Take a payload apart and record the end of its forward, on the caller's stream.

        ``private``: nobody writes to its device tensors again. ``copies_now``: nor to anything in
        it before the job was run, so that its bytes are copied once, straight to their place.

        Raises:
            PackingError: A leaf can't travel; names it.
            DeviceLostError: The device no longer answers.
        """
        packed = pack(tree)
        if not copies_now:
            packed.make_private(clone_device=not private)
        job = OutputJob(
            label=label, packed=packed, forward=forward, timings=timings or OutputTimings()
        )
        if packed.has_device_leaves:
            job.event = self.record()
            if forward is not None:
                forward.ended = job.event
        return job

    def record(self) -> DeviceEvent | None:
        """Record an event on the current stream; None after synchronizing the device instead."""
        return self._sync.record()

    def queue_copy(self, job: OutputJob, stream: SideStream) -> None:
        """Queue the copy of a prepared job, if there is page-locked memory that waits for it.

        Waits for no memory and copies no host leaves: ``run`` does what is not done here, and
        answers for what fails here. Never before an earlier output's: on one stream that would wait
        for this one's forward too, and answer for its faults.
        """
        if not job.packed.has_device_leaves:
            return
        is_next = self._left == self._caught_up
        if is_next and job.packed.is_on_device and job.event is not None:
            try:
                self._queue_at_once(job, stream)
            except Exception as error:  # noqa: BLE001 - boundary: one output's way to the host
                # Until its turn comes it would keep what the caller's frames hold.
                detach_frames(error)
                job.error = error
        if job.copy is None or not job.copy.is_queued:
            job.is_left = True
            self._left += 1

    def _queue_at_once(self, job: OutputJob, stream: SideStream) -> None:
        destination = self.sink.take_free(job.packed.nbytes)
        if destination is not None:
            job.copy = Copy(destination=destination, started_at=time.monotonic())
            self._queue(job, job.copy, destination.buffer, stream)

    # --- the thread that waits for copies -----------------------------------------------------

    def run(self, job: OutputJob, stream: SideStream | None) -> None:
        """Copy, publish and resolve the job's future; never raises for the output's own failure."""
        reason = None if self._given_up is None else self._given_up(job.label)
        try:
            if reason is not None:
                self._withdraw(job)
            else:
                result = self._bring_out(job, stream)
        except BaseException as error:  # noqa: BLE001 - boundary: one output's way to the host
            # Before the check of the device, which needs some memory too.
            job.packed.drop()
            detach_frames(error)
            found = self.diagnose(error)
            if isinstance(found, DeviceLostError):
                self._lose(job, found)
            else:
                self.fail(job, found)
            return
        if reason is not None:
            self._drop(job, reason)
        else:
            job.future.set_result(result)
            job.finish()

    def catch_up(self, job: OutputJob) -> None:
        """Note that a copy that was left to this thread was queued, or won't be; idempotent."""
        if job.is_left:
            job.is_left = False
            self._caught_up += 1

    def fail(self, job: OutputJob, error: BaseException) -> None:
        """Publish that a job failed, resolve its future with the reason, give its memory back."""
        reason = transfer_error(job.label, error)
        job.future.set_exception(reason)
        self.publish_error(job.label, reason)
        job.finish()
        if isinstance(error, DeviceLostError) and self._on_device_lost is not None:
            self._on_device_lost(error)

    def publish_error(self, label: OutputLabel, reason: RequestError) -> None:
        """Say that an output will not come; in few words if there is no memory for more."""
        try:
            try:
                self.sink.publish_error(label, reason)
            except MemoryError:
                self.sink.publish_error(label, without_causes(reason))
        except OSError:
            logger.debug("The reader of output %r is gone.", label.output_id)

    def diagnose(self, error: BaseException) -> BaseException:
        """Give the fault of the device in place of ``error``, if the device is lost."""
        return self._sync.diagnose(error)

    def _bring_out(self, job: OutputJob, stream: SideStream | None) -> Any:
        packed = job.packed
        if job.copy is None:
            if job.error is not None:
                raise job.error
            if not packed.has_device_leaves and packed.nbytes <= self.sink.inline_bytes:
                timings = self._times.on_host(job, time.monotonic())
                return self.sink.publish(job.label, packed, None, timings)
            destination = self.sink.allocate(packed.nbytes)
            job.copy = Copy(destination=destination, started_at=time.monotonic())
        try:
            timings = self._copy(job, job.copy, stream)
            # Before anybody hears: who has the output finds its device memory free, and the next
            # forward need not wait for the message.
            job.finish()
            return self.sink.publish(job.label, packed, job.copy.destination, timings)
        except BaseException:
            if packed.has_device_leaves:
                # A copy may still write to it. Where this fails too, nobody gets that memory again.
                self._sync.drain()
            self.sink.discard(job.copy.destination)
            raise

    def _copy(self, job: OutputJob, copy: Copy, stream: SideStream | None) -> OutputTimings:
        if job.error is not None:
            raise job.error
        destination = copy.destination
        if not job.packed.has_device_leaves:
            job.packed.write(destination.buffer)
            return self._times.on_host(job, copy.started_at)
        place = destination.buffer
        if stream is not None and not destination.is_page_locked:
            place = self._staging.place_before(place)
        if not copy.is_queued:
            self._queue(job, copy, place, stream)
            self.catch_up(job)
        if self._forwards is not None and stream is not None:
            # Asked by this event and not by the forward's: some hosts wait for a whole stream.
            self._sync.wait(copy.began)
            job.is_computed = True
        self._sync.wait(copy.ended)
        if place is not destination.buffer:
            self._staging.empty_into(destination.buffer)
        return self._times.on_device(job, copy)

    def _queue(
        self, job: OutputJob, copy: Copy, place: torch.Tensor, stream: SideStream | None
    ) -> None:
        """Queue one copy a leaf into ``place``, behind the forward."""
        if stream is not None and job.event is not None:
            self._sync.order(stream, job.event)
        with stream if stream is not None else contextlib.nullcontext():
            copy.began = self.record()
            job.packed.write(place, non_blocking=True)
            copy.ended = self.record()
        copy.is_queued = True

    # --- ends that are none of the above ------------------------------------------------------

    def _withdraw(self, job: OutputJob) -> None:
        """Take back the memory of a copy that nobody wants, once nothing writes to it."""
        if job.copy is None:
            return
        if job.copy.is_queued:
            self._sync.wait(job.copy.ended)
        else:
            self._sync.drain()
        self.sink.discard(job.copy.destination)

    def _drop(self, job: OutputJob, reason: RequestError) -> None:
        job.finish()  # before anybody hears: who gave it up finds its device memory free
        job.future.set_exception(reason)
        if not job.label.is_chunk:  # of a part the end of its request will tell
            self.publish_error(job.label, reason)

    def _lose(self, job: OutputJob, error: DeviceLostError) -> None:
        """Have the request answered for whose forward broke the device; the others hear of its end.

        A worker's end is told by whoever watches it, who may also run them again.
        """
        own = job.forward
        if self._forwards is None or own is None:
            self.fail(job, error)
            return
        guilty = self._forwards.blame(own, is_computed=job.is_computed)
        if guilty is own and not own.is_shared:
            self.fail(job, error)
            return
        job.future.set_exception(transfer_error(job.label, error))
        job.finish()
        if guilty is not own and guilty.accuse is not None and not guilty.is_shared:
            guilty.accuse(error)
        if self._on_device_lost is not None:
            self._on_device_lost(error)


def transfer_error(label: OutputLabel, error: BaseException) -> OutputTransferError:
    """Say of which output ``error`` was the end."""
    if isinstance(error, OutputTransferError):
        return error
    reason = OutputTransferError(
        f"The output {label.output_id!r} could not be brought to the host: {describe_error(error)}",
        request_id=label.output_id,
    )
    reason.__cause__ = error
    return reason
