"""What stands behind a stream: a queue and the thread that works it off.

Imports no torch before the thread starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from sidestream.testing.sim.event import CHANGED, SimEvent

if TYPE_CHECKING:
    from sidestream.testing.sim.device import SimDevice


class Kernel:
    """Work for a stream: ``run`` is called by its thread; ``name`` is what an error says."""

    __slots__ = ("name", "run")

    def __init__(self, name: object, run: Callable[[], object]) -> None:
        self.name = name
        self.run = run


class Wait:
    """Makes a stream's thread wait for an event."""

    __slots__ = ("event",)

    def __init__(self, event: SimEvent) -> None:
        self.event = event


class Lane:
    """A stream's queue and the thread that works it off.

    The thread holds this and not the :class:`SimStream`, so that dropping the stream ends it.
    States: working, listed in its device's ``lanes``; then ended, for good.
    """

    def __init__(self, device: SimDevice, name: str) -> None:
        self.device: Final = device
        # A C queue: its put() may be called in a finalizer, at any point of any thread.
        self.queue: Final[SimpleQueue[Kernel | SimEvent | Wait | None]] = SimpleQueue()
        self.is_held = False
        self.is_busy = False
        self.is_abandoned = False
        self.thread: Final = threading.Thread(target=self._work, name=name, daemon=True)
        with CHANGED:
            device.lanes.add(self)
        self.thread.start()

    def mark(self, timing: bool = False) -> SimEvent:
        """Queue an event that is reached after all work queued so far."""
        event = SimEvent(self.device, timing)
        self.queue.put(event)
        return event

    def end(self) -> None:
        """Let the thread end after the work that is queued; doesn't block."""
        self.queue.put(None)

    def abandon(self, timeout_s: float) -> None:
        """End the thread after the kernel that runs, whatever is queued or held."""
        with CHANGED:
            self.is_abandoned = True
            CHANGED.notify_all()
        self.queue.put(None)
        self.thread.join(timeout_s)

    def _work(self) -> None:
        import torch

        # Inference mode lets one thread write tensors that were made in any mode.
        with torch.inference_mode():
            while (work := self.queue.get()) is not None and self._start():
                self._perform(work)
                # Before the next get(): an idle thread must not keep the last kernel's memory.
                del work
                self._finish()
        self._leave()

    def _perform(self, work: Kernel | SimEvent | Wait) -> None:
        if isinstance(work, SimEvent):
            work.reach()
        elif isinstance(work, Wait):
            self._wait(work.event)
        elif self.device.fault is None:
            try:
                work.run()
            except BaseException as error:  # noqa: BLE001  # boundary: the device's, not the host's
                self.device.fail(f"kernel '{work.name}' on stream '{self.thread.name}'", error)

    def _start(self) -> bool:
        with CHANGED:
            while self.is_held and not self.is_abandoned:
                CHANGED.wait()
            self.is_busy = True
            return not self.is_abandoned

    def _finish(self) -> None:
        with CHANGED:
            self.is_busy = False
            if self.is_held:
                CHANGED.notify_all()

    def _leave(self) -> None:
        # In one go: whoever marks all lanes of a device holds the same lock.
        with CHANGED:
            self.device.lanes.discard(self)
            while not self.queue.empty():
                work = self.queue.get()
                if isinstance(work, SimEvent):
                    work.reach()

    def _wait(self, event: SimEvent) -> None:
        with CHANGED:
            self.is_busy = False  # hold() need not wait for a stream that waits
            CHANGED.notify_all()
            CHANGED.wait_for(
                lambda: event.is_reached or event.device.fault is not None or self.is_abandoned
            )
        self._start()
        if event.device.fault is not None and event.device is not self.device:
            self.device.fail(f"wait on stream '{self.thread.name}'", event.device.fault)
