"""How outputs leave the worker's main thread: to the output thread, or copied at once; or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import DeviceLostError, RequestAbortedError
from sidestream.platforms.device import DeviceEvent
from sidestream.platforms.platform import Platform
from sidestream.request import OutputTimings
from sidestream.transport.control_page import ControlPage
from sidestream.transport.failure import detach_frames
from sidestream.worker.aborts import Aborts
from sidestream.worker.forwards import Forward, ForwardLog
from sidestream.worker.output_thread import AsyncOutputThread
from sidestream.worker.pipeline import Payload
from sidestream.worker.sink import OutputLabel, OutputSink
from sidestream.worker.transfer import OutputTransfer, transfer_error

if TYPE_CHECKING:
    import torch

#: How long the outputs before a device's failure may take to show whose it is.
_BLAME_S: Final = 10.0


class HandOver:
    """The last thing that a worker's main thread does for an output; used by that thread.

    States: made, started (there is a sink and, if copies are to run in the background, an output
    thread), closed.
    """

    thread: AsyncOutputThread | None = None
    transfer: OutputTransfer

    def __init__(
        self, control: ControlPage, on_device_lost: Callable[[DeviceLostError], None]
    ) -> None:
        self._control = control
        self._on_device_lost = on_device_lost
        self.aborts = Aborts(control, self._answer_aborted)
        self.forwards = ForwardLog()
        # Guards the count of outputs, which both threads raise.
        self._counting = threading.Lock()

    def start(
        self,
        platform: Platform,
        device: torch.device,
        sink: OutputSink[Any],
        *,
        in_background: bool,
    ) -> None:
        """Take the sink, and start the output thread if ``in_background`` and the platform can."""
        self._platform = platform
        hooks: Any = {
            "on_device_lost": self._on_device_lost,
            "given_up": self.aborts.reason,
            "forwards": self.forwards,
        }
        if in_background and platform.is_asynchronous:
            self.thread = AsyncOutputThread(platform, sink, device=device, **hooks).start()
            self.transfer = self.thread.transfer
        else:
            self.transfer = OutputTransfer(platform, device, sink, **hooks)

    def close(self) -> None:
        """Bring out pending outputs and end the output thread; idempotent."""
        if self.thread is not None:
            self.thread.close()
        else:
            self.transfer.sink.close()

    def drain(self) -> None:
        """Wait until every output handed over so far has left the device."""
        if self.thread is not None:
            self.thread.drain()

    def begin_forward(
        self,
        *,
        is_shared: bool = False,
        accuse: Callable[[DeviceLostError], None] | None = None,
    ) -> Forward:
        """Enter a forward that begins now, with its start on the device where that can be told.

        ``accuse`` answers for its request where the device fails in it, on the output thread.
        """
        return self.forwards.begin(self._record(), is_shared=is_shared, accuse=accuse)

    def begin_step(self) -> Forward:
        """Enter a call of step mode; only where copies may run beside it."""
        if self.thread is None:
            return Forward(started_at=time.monotonic())
        return self.begin_forward()

    def end_step(self, forward: Forward) -> None:
        """Note where a call of step mode ends on the device."""
        if self.thread is not None:
            forward.ended = self._record()
        forward.end()

    def _record(self) -> DeviceEvent | None:
        return self.transfer.record() if self._platform.is_asynchronous else None

    def hand_over(
        self,
        label: OutputLabel,
        payload: Payload,
        forward: Forward,
        timings: OutputTimings,
        on_done: Callable[[], None],
    ) -> None:
        """Bring a payload out; ``on_done`` is called when its device memory is free."""
        reason = self.aborts.reason(label) or payload.error
        tree, private = payload.tree, payload.is_private
        del payload  # whoever hears of the end below finds the device memory free
        if reason is not None:
            del tree
            on_done()
            if not label.is_chunk:  # of a part the end of its request will tell
                self.transfer.publish_error(label, reason)
            return
        try:
            job = self.transfer.prepare(
                label,
                tree,
                private=private,
                copies_now=self.thread is None,
                forward=forward,
                timings=timings,
            )
            del tree
        except BaseException as error:  # noqa: BLE001 - boundary: one payload; others go on
            on_done()
            self.fail(error, partial(self.fail_output, label), forward)
            return
        job.on_done = on_done
        if self.thread is not None:
            self.thread.hand_over(job)
        else:
            self.transfer.run(job, None)

    def fail(
        self,
        error: BaseException,
        answer: Callable[[BaseException], None],
        forward: Forward | None = None,
    ) -> None:
        """Report with ``answer`` what failed on this thread, and what that says of the device.

        Of a device that fails in a ``forward`` over several requests nobody can tell whose it is:
        they hear of the worker's end, and may run again, each alone.
        """
        # They hold the forward's tensors, and the check of the device needs some memory too.
        detach_frames(error)
        found = self.transfer.diagnose(error)
        if not isinstance(found, DeviceLostError):
            answer(found)
            return
        # The fault may be of an earlier forward whose output is on its way. Then the output thread
        # comes upon it, says whose it is and ends the worker while this waits.
        is_out = self.thread is None or self.thread.drain(_BLAME_S)
        if is_out and (forward is None or not forward.is_shared):
            answer(found)
        self._on_device_lost(found)

    def fail_output(self, label: OutputLabel, error: BaseException) -> None:
        """Say that an output will not come, by ``error``."""
        self.transfer.publish_error(label, transfer_error(label, error))

    def count_output(self) -> None:
        """Count one output as out, on the control page; any thread."""
        with self._counting:
            self._control.outputs += 1

    def _answer_aborted(self, label: OutputLabel, error: RequestAbortedError) -> None:
        self.transfer.publish_error(label, error)
        self.count_output()
