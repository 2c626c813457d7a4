"""The thread that brings finished outputs to the host while the next forward runs.

::

    caller's thread                      side stream               output thread
    take apart, make private
    record an event
    wait, copy (queued, if a slot ──────> wait for that event
      waits for it), record an event      one copy a leaf ───────> waits for the copy, publishes
    queue the next forward

``submit`` does the left column. All it costs the caller are the microseconds of queueing; it is
there, and not on the output thread, because each call of a device there takes the GIL from a thread
that launches kernels: 24 wake-ups for each output and 17 % of a forward of 5 ms, against 13 and 9 %
(H200, ``docs/performance.md``). Where a copy can't be queued at once, the thread does it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import DeviceLostError, EngineClosedError
from sidestream.platforms.device import DeviceEvent, SideStream
from sidestream.platforms.platform import Platform
from sidestream.request import OutputTimings
from sidestream.worker.forwards import Forward, ForwardLog
from sidestream.worker.output_job import OutputJob
from sidestream.worker.sink import OutputLabel, OutputSink
from sidestream.worker.transfer import GivenUp, OutputTransfer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: How often it is looked whether an output is still being handed over: most take less.
_LOOK_S: Final = 0.001


class AsyncOutputThread:
    """Brings outputs to the host in the background; a daemon thread.

    States: new, running (after ``start``), closed. ``submit`` is for one thread at a time: the one
    that queues the forwards. On a platform without streams the copies still leave the caller's
    thread, in order, but there is nothing to overlap on a device. ``given_up(label)`` is asked
    when an output's turn comes, on this thread; an error that it gives is the output's, in place of
    its copy, which may be queued by then.
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
        # Made by the thread before start() returns.
        self._stream: SideStream | None = None
        # Whether the caller's thread may, too: see ``SideStream``.
        self._queues_freely = False
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
        """Queue a prepared job's copy, if that can be done at once; the thread does the rest.

        Raises:
            EngineClosedError: The thread was closed.
        """
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("The output thread is closed and takes no more outputs.")
            try:
                if self._stream is not None and self._queues_freely:
                    self.transfer.queue_copy(job, self._stream)
            finally:
                # Whatever comes, such as Ctrl-C: somebody may wait for it, and it has a place.
                self._jobs.put(job)
        return job.future

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all outputs that were submitted so far are out; False if time ran out.

        A thread that was not started yet has nobody to wait for: False if anything was submitted.
        """
        if self._thread.ident is None:
            return self._jobs.empty()
        passed = threading.Event()
        deadline = _deadline(timeout_s)
        if not self._put_mark(passed, deadline):
            return False
        if self._is_closed:
            return self.close(_left_s(deadline))
        return passed.wait(_left_s(deadline))

    def close(self, timeout_s: float | None = None) -> bool:
        """Bring out what was submitted, then end; False if it is not done by then. Idempotent.

        What was submitted to a thread that was never started fails.
        """
        deadline = _deadline(timeout_s)
        if not self._put_mark(None, deadline):
            return False
        if self._thread.ident is None:
            self._refuse_queued(EngineClosedError("The output thread was closed before it ran."))
            return True
        self._thread.join(_left_s(deadline))
        return not self._thread.is_alive()

    def _put_mark(self, mark: threading.Event | None, deadline: float | None) -> bool:
        """Put a mark behind the jobs, None: the end; nothing if it is closed. False: time ran out.

        Whoever hands an output over meanwhile may have to wait for its device.
        """
        # Looked at, not acquired for a time: Ctrl-C right behind that would leave it locked.
        while deadline is not None and self._lock.locked():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        with self._lock:
            if not self._is_closed:
                self._is_closed = mark is None
                self._jobs.put(mark)
        return True

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
            self._queues_freely = getattr(stream, "queues_freely", False)
            self._stream = stream
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
        finally:
            self.transfer.catch_up(job)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
