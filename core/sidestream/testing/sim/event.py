"""Events of the simulated accelerator."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceEvent

if TYPE_CHECKING:
    from sidestream.testing.sim.device import SimDevice

PLATFORM: Final = "sim"

#: Guards the state of every stream and event and the devices' errors; notified when any changes.
#: One for all, because a stream may wait for another device's event. No finalizer takes it.
CHANGED: Final = threading.Condition()


class SimEvent:
    """A point in a stream's work.

    States: queued, then reached for good; the stream's thread moves it. Once its device is in
    error every question raises instead.
    """

    __slots__ = ("_device", "_reached_at", "_timing")

    def __init__(self, device: SimDevice, timing: bool = False) -> None:
        self._device: Final = device
        self._timing: Final = timing
        self._reached_at: float | None = None

    @property
    def device(self) -> SimDevice:
        """The device whose stream reaches the event."""
        return self._device

    @property
    def is_reached(self) -> bool:
        """Whether the stream passed this point, asked without a word about the device's health."""
        return self._reached_at is not None

    def query(self) -> bool:
        """Tell whether the device passed this point; never blocks.

        Raises:
            SimDeviceError: The device is in error.
        """
        self._device.raise_fault()
        return self.is_reached

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the host until the device passed this point; False if the time ran out first.

        Raises:
            SimDeviceError: The device is in error, or comes to be while waiting.
        """
        with CHANGED:
            CHANGED.wait_for(lambda: self.is_reached or self._device.fault is not None, timeout_s)
        self._device.raise_fault()
        return self.is_reached

    def elapsed_s(self, earlier: DeviceEvent) -> float:
        """Give the seconds between the moments at which the streams reached both events.

        Raises:
            PlatformError: One is foreign, not recorded with timing, or not reached yet.
        """
        first, last = own_event(earlier), self
        if first._reached_at is None or last._reached_at is None:
            raise PlatformError(
                "Can't tell the time between two events before the device reached both; "
                "wait() for them first.",
                platform=PLATFORM,
            )
        if not (first._timing and last._timing):
            raise PlatformError(
                "Can't tell the time between events recorded without timing; "
                "record both with timing=True.",
                platform=PLATFORM,
            )
        return last._reached_at - first._reached_at

    def reach(self) -> None:
        """Mark the point as passed; called by the stream's thread."""
        with CHANGED:
            self._reached_at = time.monotonic()
            CHANGED.notify_all()


def own_event(event: object) -> SimEvent:
    """Give the event back if it is of this platform; a foreign one raises ``PlatformError``."""
    if isinstance(event, SimEvent):
        return event
    raise PlatformError(
        f"A {type(event).__module__}.{type(event).__qualname__} is not an event of platform "
        f"'{PLATFORM}'; record one with record_device_event() or with a stream of that platform.",
        platform=PLATFORM,
    )
