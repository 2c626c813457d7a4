"""The thread that brings finished outputs to the host while the next forward runs.

``submit`` runs on the caller's thread and stream: it takes the payload apart, makes it private (so
that the next forward may overwrite its buffers), and records an event. The thread waits for that
event on a side stream, copies each leaf once into the sink's memory, waits for the copy's own
event, and publishes. Nothing ever skips a wait: where recording or waiting fails, the device is
synchronized instead, and one warning says so.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sidestream.errors import (
    DeviceLostError,
    DeviceMemoryError,
    EngineClosedError,
    OutputTransferError,
    PlatformError,
    RequestError,
)
from sidestream.platforms.device import DeviceEvent, SideStream
from sidestream.platforms.platform import Platform
from sidestream.request import OutputTimings
from sidestream.transport.failure import describe_error, detach_frames, without_causes
from sidestream.transport.packing import Packed, pack
from sidestream.worker.device_clock import DeviceClock
from sidestream.worker.forwards import Forward, ForwardLog, shared_s
from sidestream.worker.sink import Destination, OutputLabel, OutputSink
from sidestream.worker.staging import Staging

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Gives why nobody wants an output any more, if that is so.
GivenUp = Callable[[OutputLabel], RequestError | None]


@dataclass(kw_only=True, eq=False)
class OutputJob:
    """One output between the forward and the host."""

    label: OutputLabel
    packed: Packed
    #: The forward's end on its stream; None: the device was synchronized instead.
    event: DeviceEvent | None = None
    #: Which forward made it, where that is known.
    forward: Forward | None = None
    #: Whether the device was seen to be done with that forward.
    is_computed: bool = False
    timings: OutputTimings = field(default_factory=OutputTimings)
    #: Called when the device memory is free again, whatever happened.
    on_done: Callable[[], None] | None = None
    future: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        # From here on cancel() answers False: the copy may run already.
        self.future.set_running_or_notify_cancel()

    def finish(self) -> None:
        """Let go of the device memory and say so."""
        self.packed.drop()
        if self.on_done is not None:
            self.on_done()


class OutputTransfer:
    """Copies one output at a time to a sink, on a side stream or on the current one."""

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
        # Guards _has_warned: the forward's thread and the one that copies may fail at once.
        self._warning = threading.Lock()
        self._has_warned = False
        self._clock = DeviceClock()
        self._staging = Staging(platform, device)

    def start_clock(self, stream: SideStream | None) -> None:
        """Set the device's clock by the host's, on the thread that will copy."""
        if stream is None:
            return
        try:
            self._clock.start(stream.record_event(timing=True))
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's stream; only times need it
            logger.debug("The clock of %s could not be set: %s", self.device, error)

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
        try:
            return self.platform.record_device_event(self.device, timing=True)
        except Exception as error:  # noqa: BLE001 - boundary: a plugin
            self._fall_back("recording an event", error)
            return None

    def run(self, job: OutputJob, stream: SideStream | None) -> None:
        """Copy, publish and resolve the job's future; never raises for the output's own failure."""
        reason = None if self._given_up is None else self._given_up(job.label)
        if reason is not None:
            self._drop(job, reason)
            return
        try:
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
        else:
            job.future.set_result(result)
            job.finish()

    def _drop(self, job: OutputJob, reason: RequestError) -> None:
        job.finish()  # before anybody hears: who gave it up finds its device memory free
        job.future.set_exception(reason)
        if not job.label.is_chunk:  # of a part the end of its request will tell
            self.publish_error(job.label, reason)

    def fail(self, job: OutputJob, error: BaseException) -> None:
        """Publish that a job failed, resolve its future with the reason, give its memory back."""
        reason = transfer_error(job.label, error)
        job.future.set_exception(reason)
        self.publish_error(job.label, reason)
        job.finish()
        if isinstance(error, DeviceLostError) and self._on_device_lost is not None:
            self._on_device_lost(error)

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

    def publish_error(self, label: OutputLabel, reason: RequestError) -> None:
        """Say that an output will not come; in few words if there is no memory for more."""
        try:
            try:
                self.sink.publish_error(label, reason)
            except MemoryError:
                self.sink.publish_error(label, without_causes(reason))
        except OSError:
            logger.debug("The reader of output %r is gone.", label.output_id)

    def _bring_out(self, job: OutputJob, stream: SideStream | None) -> Any:
        packed = job.packed
        if not packed.has_device_leaves and packed.nbytes <= self.sink.inline_bytes:
            timings = self._host_times(job, time.monotonic())
            return self.sink.publish(job.label, packed, None, timings)
        destination = self.sink.allocate(packed.nbytes)
        try:
            timings = self._copy(job, destination, stream)
            packed.drop()  # before anybody hears: who has the output finds its device memory free
            return self.sink.publish(job.label, packed, destination, timings)
        except BaseException:
            if packed.has_device_leaves:
                # A copy may still write to it. Where this fails too, nobody gets that memory again.
                self.platform.synchronize_device(self.device)
            self.sink.discard(destination)
            raise

    def _copy(
        self, job: OutputJob, destination: Destination, stream: SideStream | None
    ) -> OutputTimings:
        started_at = time.monotonic()
        if not job.packed.has_device_leaves:
            job.packed.write(destination.buffer)
            return self._host_times(job, started_at)
        if stream is not None and job.event is not None:
            try:
                stream.wait_event(job.event)
            except Exception as error:  # noqa: BLE001 - boundary: a vendor's stream
                self._fall_back("waiting for an event", error)
        place = destination.buffer
        if stream is not None and not destination.is_page_locked:
            place = self._staging.place_before(place)
        with stream if stream is not None else contextlib.nullcontext():
            begun = self.record()
            job.packed.write(place, non_blocking=True)
            ended = self.record()
        if self._forwards is not None and stream is not None:
            # Asked by this event and not by the forward's: some hosts wait for a whole stream.
            self._await(begun)
            job.is_computed = True
        self._await(ended)
        if place is not destination.buffer:
            self._staging.empty_into(destination.buffer)
        return self._device_times(job, begun, ended, started_at)

    def _host_times(self, job: OutputJob, started_at: float) -> OutputTimings:
        ended_at = time.monotonic()
        hidden_s = None
        if self._forwards is not None and job.forward is not None:
            later = self._forwards.after(job.forward)
            spans = ((forward.started_at, forward.ended_at) for forward in later)
            hidden_s = shared_s(started_at, ended_at, spans)
        return replace(
            job.timings,
            copy_started_at=started_at,
            copy_ended_at=ended_at,
            copy_hidden_s=hidden_s,
            nbytes=job.packed.leaf_nbytes,
        )

    def _device_times(
        self,
        job: OutputJob,
        begun: DeviceEvent | None,
        ended: DeviceEvent | None,
        started_at: float,
    ) -> OutputTimings:
        # The host can't tell when the copy began, so it can't tell what ran beside it.
        timings = replace(self._host_times(job, started_at), copy_hidden_s=None)
        if ended is None:
            return timings
        own = job.forward
        later = [] if self._forwards is None or own is None else self._forwards.after(own)
        edges = [_reached(event) for each in later for event in (each.started, each.ended)]
        known = (begun, job.event, None if own is None else own.started)
        copy_ended_at, *placed = self._clock.place(ended, *edges, *known)
        *edges_at, copy_started_at, forward_ended_at, forward_started_at = placed
        times: dict[str, Any] = {
            "copy_ended_at": copy_ended_at,
            "copy_started_at": copy_started_at,
            "forward_ended_at": forward_ended_at,
            "forward_started_at": forward_started_at,
        }
        timings = replace(timings, **{name: at for name, at in times.items() if at is not None})
        if (
            self._forwards is None
            or own is None
            or copy_started_at is None
            or copy_ended_at is None
        ):
            return timings
        spans = map(Forward.place, later, edges_at[::2], edges_at[1::2])
        return replace(timings, copy_hidden_s=shared_s(copy_started_at, copy_ended_at, spans))

    def _await(self, event: DeviceEvent | None) -> None:
        # None: record() has synchronized the device, so the copy is done.
        if event is None:
            return
        try:
            if event.wait():
                return
            raise PlatformError(
                "wait() without a time-out came back before the event", platform=self.platform.name
            )
        except Exception as error:  # boundary: a vendor's event
            self._fall_back("waiting for a copy", error)
            if _is_incomplete(event):
                # Work can be lost without an error: then the device is idle, and never got here.
                raise self._lost(
                    "an event is incomplete although the device says that it is idle"
                ) from error

    def _fall_back(self, doing: str, error: Exception) -> None:
        """Synchronize the device in place of a wait that failed; warn once.

        Raises:
            DeviceLostError: That failed too, or the device fails its sentinel check.
        """
        try:
            self.platform.synchronize_device(self.device)
        except Exception as fatal:
            raise self._lost(describe_error(fatal)) from fatal
        fault = self.platform.check_device(self.device)
        if fault is not None:
            raise self._lost(fault.reason) from error
        with self._warning:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            logger.warning(
                "Platform %r failed at %s on %s (%s). Its device is synchronized instead: outputs "
                "stay correct and no longer overlap.",
                self.platform.name,
                doing,
                self.device,
                describe_error(error),
            )

    def diagnose(self, error: BaseException) -> BaseException:
        """Give the fault of the device in place of ``error``, if the device is lost."""
        import torch

        if isinstance(error, DeviceLostError):
            return error
        if isinstance(error, DeviceMemoryError | torch.OutOfMemoryError):
            # A device that says so works, and the check might find no memory either.
            return error
        fault = self.platform.check_device(self.device)
        if fault is None:
            return error
        lost = self._lost(fault.reason)
        lost.__cause__ = error
        return lost

    def _lost(self, reason: str) -> DeviceLostError:
        return DeviceLostError(
            f"Device {self.device} of platform {self.platform.name!r} is lost: {reason}",
            platform=self.platform.name,
            device=str(self.device),
        )


class AsyncOutputThread:
    """Brings outputs to the host in the background; a daemon thread.

    States: new, running (after ``start``), closed. ``submit`` is for one thread at a time: the one
    that queues the forwards. On a platform without streams the copies still leave the caller's
    thread, in order, but there is nothing to overlap on a device. ``given_up(label)`` is asked
    before each copy, on this thread; an error that it gives is the output's, in place of the copy.
    """

    def __init__(
        self,
        platform: Platform,
        sink: OutputSink[Any],
        *,
        device: torch.device | None = None,
        priority: int = 0,
        on_device_lost: Callable[[DeviceLostError], None] | None = None,
        given_up: GivenUp | None = None,
        forwards: ForwardLog | None = None,
    ) -> None:
        self.device = platform.device() if device is None else device
        self.transfer = OutputTransfer(
            platform,
            self.device,
            sink,
            on_device_lost=on_device_lost,
            given_up=given_up,
            forwards=forwards,
        )
        self._priority = priority
        # SimpleQueue is a C queue: a put wakes the thread without a Python-level lock.
        self._jobs: queue.SimpleQueue[OutputJob | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sidestream-output", daemon=True)
        self._started: Future[None] = Future()
        self._is_closed = False
        # Guards _is_closed together with the order of puts: no job behind the closing None.
        self._lock = threading.Lock()

    def start(self) -> AsyncOutputThread:
        """Start the thread and wait until it is bound to its device.

        Raises:
            PlatformError: The device can't be bound, or gives no side stream.
        """
        self._thread.start()
        self._started.result()
        return self

    def submit(
        self,
        output_id: str,
        tree: Any,
        *,
        private: bool = False,
        rpc_id: int = 0,
        attempt: int = 0,
        post_process: str | None = None,
        started: DeviceEvent | None = None,
        timings: OutputTimings | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> Future[Any]:
        """Queue one output, ordered behind what the caller queued on its stream so far.

        ``private`` True: nobody writes to these tensors again, so they need no clone. The future
        holds what the sink publishes: a :class:`HostSink`'s tree on the host, None of a
        :class:`SlotSink`; or an ``OutputTransferError``.

        Raises:
            PackingError: A leaf can't travel; names it. Nothing was queued.
            EngineClosedError: The thread was closed.
        """
        label = OutputLabel(
            output_id=output_id, rpc_id=rpc_id, attempt=attempt, post_process=post_process
        )
        forward = None
        if started is not None:
            forward = Forward(started=started, started_at=time.monotonic())
        job = self.transfer.prepare(label, tree, private=private, forward=forward, timings=timings)
        job.on_done = on_done
        return self.hand_over(job)

    def hand_over(self, job: OutputJob) -> Future[Any]:
        """Queue a prepared job."""
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("The output thread is closed and takes no more outputs.")
            self._jobs.put(job)
        return job.future

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all outputs that were submitted so far are out; False if time ran out.

        A thread that was not started yet has nobody to wait for: False if anything was submitted.
        """
        if self._thread.ident is None:
            return self._jobs.empty()
        passed = threading.Event()
        with self._lock:
            if not self._is_closed:
                self._jobs.put(passed)
        if self._is_closed:
            return self.close(timeout_s)
        return passed.wait(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Bring out what was submitted, then end; False if it is not done by then. Idempotent.

        What was submitted to a thread that was never started fails.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        if self._thread.ident is None:
            self._refuse_queued(EngineClosedError("The output thread was closed before it ran."))
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _refuse_queued(self, error: BaseException) -> None:
        with self._lock:
            self._is_closed = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if isinstance(job, threading.Event):
                job.set()
            elif job is not None:
                self.transfer.fail(job, error)

    def __enter__(self) -> AsyncOutputThread:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        platform = self.transfer.platform
        try:
            platform.set_device(self.device)
            stream = platform.side_stream(self.device, self._priority)
            self.transfer.start_clock(stream)
        except BaseException as error:  # noqa: BLE001 - boundary: start() raises it in its caller
            self._refuse_queued(error)
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            else:
                self._run_one(job, stream)
            # The loop variable would keep the last output's tensors alive until the next one.
            del job
        self.transfer.sink.close()

    def _run_one(self, job: OutputJob, stream: SideStream | None) -> None:
        try:
            self.transfer.run(job, stream)
        except BaseException:
            # Boundary: callbacks of whoever embeds this; later outputs have done nothing wrong.
            logger.exception("What follows output %r raised.", job.label.output_id)


def _is_incomplete(event: DeviceEvent) -> bool:
    try:
        return not event.query()
    except Exception as error:  # noqa: BLE001 - boundary: a vendor's event, which has failed before
        logger.debug("%r can't be asked: %s", event, error)
        return False


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


def _reached(event: DeviceEvent | None) -> DeviceEvent | None:
    """Give an event back if its device has passed it."""
    try:
        return event if event is not None and event.query() else None
    except Exception as error:  # noqa: BLE001 - boundary: a vendor's event; only times need it
        logger.debug("An event could not be asked: %s", error)
        return None
