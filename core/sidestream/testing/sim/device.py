"""The simulated devices: their streams, their memory's size, and what is wrong with them.

Imports no torch, so that the plugin module can be imported without it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Final

from sidestream.errors import PlatformError
from sidestream.testing.sim.event import CHANGED, PLATFORM, SimEvent
from sidestream.testing.sim.faults import Faults, SimDeviceError
from sidestream.testing.sim.lane import Kernel, Lane
from sidestream.testing.sim.stream import CURRENT, SimStream

DEVICE_COUNT: Final = 4


class SimDevice:
    """One device.

    States: well, or in error from the first failing kernel on; only :meth:`recover` leads back.
    In error it skips kernels, still passes events, and every call on it raises.
    """

    def __init__(self, index: int) -> None:
        self.index: Final = index
        self.name: Final = f"{PLATFORM}:{index}"
        self.faults = Faults()
        #: The first failure.
        self.fault: SimDeviceError | None = None
        #: Its ``torch.device``, and the CPU's ``torch.Generator`` that random operators draw from;
        #: from the registration on.
        self.torch_device: Any = None
        self.generator: Any = None
        #: Whether this is a forked child's useless copy.
        self.is_forsaken = False
        #: What works for streams, dropped ones included.
        self.lanes: Final[set[Lane]] = set()
        #: Keeps held streams, whose threads could not end, from being collected.
        self.held_streams: Final[set[SimStream]] = set()
        self._default_stream: SimStream | None = None
        self._side_streams: Final[weakref.WeakValueDictionary[int, SimStream]] = (
            weakref.WeakValueDictionary()
        )
        self._side_streams_made = 0
        # Guards the three above. Not CHANGED, which all streams need while a new thread starts.
        self._making: Final = threading.Lock()
        # CHANGED guards these two.
        self._withheld: Final[list[SimEvent]] = []
        self._used_bytes = 0
        # Sizes of freed allocations. Finalizers append to it: they may take no lock.
        self._freed: Final[deque[int]] = deque()

    # --- streams ----------------------------------------------------------------------------

    @property
    def default_stream(self) -> SimStream:
        """The stream of whoever names none; made when it is first needed."""
        if self._default_stream is None:
            with self._making:
                if self._default_stream is None:
                    self._default_stream = SimStream(self, f"{self.name} default")
        return self._default_stream

    @property
    def current_stream(self) -> SimStream:
        """The calling thread's stream on this device."""
        return CURRENT.streams.get(self.index) or self.default_stream

    def side_stream(self, priority: int) -> SimStream:
        """Make a stream beside the default one."""
        self.raise_fault()
        with self._making:
            self._side_streams_made += 1
            number = self._side_streams_made
            stream = SimStream(self, f"{self.name} side {number}", priority)
            self._side_streams[number] = stream
        return stream

    @property
    def side_streams(self) -> tuple[SimStream, ...]:
        """The side streams that somebody still holds, oldest first."""
        with self._making:
            return tuple(stream for _, stream in sorted(self._side_streams.items()))

    def synchronize(self) -> None:
        """Block the host until all work queued on any stream is done."""
        self.raise_fault()
        for event in self._mark_all():
            event.wait()

    def _mark_all(self) -> list[SimEvent]:
        # Of lanes, not of streams: one that was dropped may still have work to finish.
        with CHANGED:
            return [lane.mark() for lane in self.lanes]

    # --- errors -----------------------------------------------------------------------------

    def fail(self, where: str, error: BaseException) -> None:
        """Put the device in error, unless it is already; called by a stream's thread."""
        fault = SimDeviceError(
            f"{self.name} is in error since {where} failed: {type(error).__name__}: {error}. "
            "Every later call on this device fails, as on a real one; end the process."
        )
        fault.__cause__ = error
        with CHANGED:
            self.fault = self.fault or fault
            CHANGED.notify_all()

    def raise_fault(self) -> None:
        """Raise ``SimDeviceError`` that names the first failure, if the device is in error."""
        fault = self.fault
        if fault is not None:
            raise SimDeviceError(str(fault)) from fault.__cause__

    def demanded(self, what: str, field: str) -> SimDeviceError:
        """Make the error of a failure that a test asked for."""
        return SimDeviceError(
            f"{what} on {self.name} failed because faults({self.index}).{field} asked for it."
        )

    def withhold(self, event: SimEvent) -> SimEvent:
        """Keep an event that nothing shall reach but :meth:`unblock`."""
        with CHANGED:
            self._withheld.append(event)
        return event

    # --- memory -----------------------------------------------------------------------------

    def take_memory(self, nbytes: int) -> bool:
        """Count an allocation; False if the device has too little memory left for it."""
        with CHANGED:
            self._drain_freed()
            if self._used_bytes + nbytes > self.faults.memory_bytes:
                return False
            self._used_bytes += nbytes
            return True

    def give_memory(self, nbytes: int) -> None:
        """Count an allocation as gone; called by finalizers."""
        self._freed.append(nbytes)

    @property
    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        with CHANGED:
            self._drain_freed()
            total = self.faults.memory_bytes
            return max(0, total - self._used_bytes), total

    def _drain_freed(self) -> None:
        while self._freed:
            self._used_bytes -= self._freed.popleft()

    # --- ends -------------------------------------------------------------------------------

    def unblock(self) -> None:
        """Release every stream and reach every event that was withheld."""
        with CHANGED:
            held, withheld = tuple(self.held_streams), tuple(self._withheld)
            self._withheld.clear()
        for stream in held:
            stream.release()
        for event in withheld:
            event.reach()

    def drain(self, timeout_s: float) -> None:
        """Block until every stream is idle, also on a device in error."""
        events = self._mark_all()
        with CHANGED:
            if not CHANGED.wait_for(lambda: all(event.is_reached for event in events), timeout_s):
                raise PlatformError(
                    f"{self.name} still has work queued after {timeout_s} s.", platform=PLATFORM
                )

    def recover(self) -> None:
        """Be as new, which no real device can."""
        with CHANGED:
            self.fault = None
            self.faults = Faults()
        self.seed()

    def seed(self, seed: int | None = None) -> None:
        """Seed random operators that are launched on the default stream from now on."""
        generator, value = self.generator, self.index if seed is None else seed
        if self._default_stream is not None:
            # In the stream's order: what was launched before still draws from the old state.
            kernel = Kernel("manual_seed", lambda: generator.manual_seed(value))
            self._default_stream.put_unchecked(kernel)
        elif generator is not None:
            generator.manual_seed(value)

    def forsake_child(self) -> None:
        """Put the device in error in a forked child, where its streams have no threads."""
        if self.lanes:
            self.is_forsaken = True
            self.fault = SimDeviceError(
                f"{self.name} was used before this process was forked: its threads stayed in the "
                "parent. Start the process with subprocess or the 'spawn' method instead."
            )

    def abandon(self, timeout_s: float) -> None:
        """End every stream's thread without finishing what is queued."""
        with CHANGED:
            lanes = tuple(self.lanes)
        for lane in lanes:
            lane.abandon(timeout_s)


#: The machine's devices: as global as hardware is. No thread runs before a device is used.
DEVICES: Final = tuple(SimDevice(index) for index in range(DEVICE_COUNT))


def device_at(index: int | None) -> SimDevice:
    """Give the device of that index; None: the calling thread's current one.

    Raises:
        PlatformError: There is no such device.
    """
    number = CURRENT.device_index if index is None else index
    if not 0 <= number < DEVICE_COUNT:
        raise PlatformError(
            f"There is no device {PLATFORM}:{number}; there are {PLATFORM}:0 to "
            f"{PLATFORM}:{DEVICE_COUNT - 1}.",
            platform=PLATFORM,
        )
    return DEVICES[number]
