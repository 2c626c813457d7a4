"""Streams of the simulated accelerator, and which one is current in a thread.

Order holds within a stream and nowhere else, as on a real device: whoever forgets to wait for an
event reads memory that isn't written yet.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final

from sidestream.platforms.device import DeviceEvent
from sidestream.testing.sim.event import CHANGED, SimEvent, own_event
from sidestream.testing.sim.lane import Kernel, Lane, Wait

if TYPE_CHECKING:
    import torch

    from sidestream.testing.sim.device import SimDevice


class SimStream:
    """A first-in, first-out queue of kernels on one device.

    States: running, or held between :meth:`hold` and :meth:`release`. Dropping the last reference
    finishes what is queued and ends the thread; a held stream is kept until it is released.
    """

    #: See ``SideStream``.
    queues_freely: Final = True

    def __init__(self, device: SimDevice, name: str, priority: int = 0) -> None:
        #: The device that the stream belongs to.
        self.device: Final = device
        #: Such as ``"sim:0 default"`` or ``"sim:0 side 1"``; its thread's name too.
        self.name: Final = name
        #: As asked for; changes nothing here.
        self.priority: Final = priority
        self._lane: Final = Lane(device, name)
        weakref.finalize(self, self._lane.end).atexit = False

    def __repr__(self) -> str:
        return f"<SimStream {self.name!r}{' held' if self._lane.is_held else ''}>"

    # --- what a test chooses ----------------------------------------------------------------

    def hold(self) -> None:
        """Let nothing more complete here, from before the next kernel on.

        Returns once the kernel that runs now, if any, is done; launching goes on as usual.
        """
        with CHANGED:
            self._lane.is_held = True
            self.device.held_streams.add(self)
            CHANGED.wait_for(lambda: not self._lane.is_busy)

    def release(self) -> None:
        """Undo :meth:`hold`; does nothing to a stream that isn't held."""
        with CHANGED:
            self._lane.is_held = False
            self.device.held_streams.discard(self)
            CHANGED.notify_all()

    # --- the device's interface -------------------------------------------------------------

    def launch(self, kernel: Kernel) -> None:
        """Queue a kernel; returns at once.

        Raises:
            SimDeviceError: The device is in error.
        """
        self.device.raise_fault()
        self._lane.queue.put(kernel)

    def put_unchecked(self, kernel: Kernel) -> None:
        """Queue a kernel from a finalizer, which can neither raise nor take a lock."""
        self._lane.queue.put(kernel)

    def mark(self, timing: bool = False) -> SimEvent:
        """Record an event for the simulator's own use; never fails on a test's demand."""
        self.device.raise_fault()
        return self._lane.mark(timing)

    def record_event(self, timing: bool = False) -> SimEvent:
        """Record an event after all work queued here so far.

        Raises:
            SimDeviceError: The device is in error, or a test asked for this failure.
        """
        faults = self.device.faults
        if faults.take("fail_next_records"):
            raise self.device.demanded("Recording an event", "fail_next_records")
        if faults.take("next_event_never_fires"):
            self.device.raise_fault()
            return self.device.withhold(SimEvent(self.device, timing))
        return self.mark(timing)

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later work on this stream wait for ``event``; returns at once.

        Raises:
            PlatformError: The event belongs to another platform; nothing was queued.
            SimDeviceError: The device is in error, or a test asked for this failure.
        """
        own = own_event(event)
        if self.device.faults.take("fail_next_waits"):
            raise self.device.demanded("Waiting for an event", "fail_next_waits")
        self.await_event(own)

    def await_event(self, event: SimEvent) -> None:
        """Queue a wait for the simulator's own use; never fails on a test's demand."""
        self.device.raise_fault()
        self._lane.queue.put(Wait(event))

    def join_current(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for what is queued here; returns at once.

        ``tensors`` of this stream stay whole until the current stream is done with them.

        Raises:
            SimDeviceError: The device is in error, or a test asked for this failure.
        """
        current = self.device.current_stream
        current.wait_event(self.record_event())
        for tensor in tensors:
            tensor.record_stream(current)  # type: ignore[arg-type]  # no stream of torch's

    def synchronize(self) -> None:
        """Block the host until all work queued here is done.

        Raises:
            SimDeviceError: The device is in error, or comes to be while waiting.
        """
        self.mark().wait()

    def __enter__(self) -> SimStream:
        CURRENT.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        CURRENT.leave()


class _Current(threading.local):
    """The calling thread's current device, and its current stream on each device."""

    def __init__(self) -> None:
        self.device_index = 0
        self.streams: dict[int, SimStream] = {}
        self._outer: list[tuple[int, int, SimStream | None]] = []

    def enter(self, stream: SimStream) -> None:
        index = stream.device.index
        self._outer.append((self.device_index, index, self.streams.get(index)))
        self.device_index = index
        self.streams[index] = stream

    def leave(self) -> None:
        self.device_index, index, stream = self._outer.pop()
        if stream is None:
            del self.streams[index]
        else:
            self.streams[index] = stream


#: Each thread sees its own.
CURRENT: Final = _Current()
