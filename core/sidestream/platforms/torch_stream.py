"""Streams and events of a torch module in the shape of ``torch.cuda``, closed to foreign events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceEvent

if TYPE_CHECKING:
    import torch

_FIRST_PAUSE_S: Final = 0.0001
_LONGEST_PAUSE_S: Final = 0.002
#: Longer than a forward that nobody takes for hung (``EngineConfig.hang_timeout_s``, 300 s), whose
#: work a wait may be behind; what is not done by then is looked into.
POLL_LIMIT_S: Final = 240.0

#: How the host waits without a timeout: asleep in the driver for the event; asleep in the driver
#: for all of the event's stream; or awake now and then to ask, for at most ``POLL_LIMIT_S``.
HostWait = Literal["event", "stream", "poll"]


class TorchEvent:
    """An event of a vendor's torch module, recorded when it is made."""

    def __init__(
        self,
        platform: str,
        device: torch.device,
        event: Any,
        *,
        timing: bool,
        stream: Any = None,
        host_wait: HostWait = "event",
    ) -> None:
        #: The plugin that made it, and the device it was recorded on: what a stream checks.
        self.platform: Final = platform
        self.device: Final = device
        #: Whether it can be asked for times.
        self.timing: Final = timing
        #: The vendor's event.
        self.native: Final = event
        self._stream: Final = stream
        self._host_wait: Final = host_wait
        # Once reached it stays so. Set by a wait alone, which is what outputs are sent by.
        self._is_reached = False

    def query(self) -> bool:
        """Tell whether the device passed this point."""
        return self._is_reached or bool(self.native.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the host until the device passed this point; False if the time ran out first.

        Without a timeout False means that the device did not get here, though it says that it is
        done, or took longer than ``POLL_LIMIT_S``.
        """
        self._is_reached = self._is_reached or self._wait(timeout_s)
        return self._is_reached

    def _wait(self, timeout_s: float | None) -> bool:
        if timeout_s is not None:
            return self._poll(timeout_s)
        if self._host_wait == "poll":
            return self._poll(POLL_LIMIT_S)
        if self._host_wait == "stream":
            self._stream.synchronize()
            return self.query()
        self.native.synchronize()
        return True

    def _poll(self, timeout_s: float) -> bool:
        # No vendor has a wait in the driver that ends after a time.
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while not self.query():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def elapsed_s(self, earlier: DeviceEvent) -> float:
        """Give the device seconds since ``earlier``.

        Raises:
            PlatformError: One of them is foreign, not complete, or recorded without timing.
        """
        before = _own(earlier, self.platform, self.device)
        if not (self.timing and before.timing and before.query() and self.query()):
            raise PlatformError(
                "The time between two events is known once both are complete, and only if both "
                "were recorded with timing=True.",
                platform=self.platform,
            )
        return float(before.native.elapsed_time(self.native)) / 1e3


class TorchStream:
    """A stream of a vendor's torch module that refuses any event but its platform's own.

    May be entered in several threads, and again inside itself.
    """

    def __init__(
        self,
        platform: str,
        device: torch.device,
        stream: Any,
        *,
        enter: Callable[[Any], AbstractContextManager[Any]],
        record: Callable[[torch.device, Any, bool], TorchEvent],
        current: Callable[[torch.device], Any],
        queues_freely: bool = False,
    ) -> None:
        self._platform: Final = platform
        self._device: Final = device
        self._enter: Final = enter
        self._record: Final = record
        self._current: Final = current
        self._entered: Final = _EnteredContexts()
        #: The vendor's stream.
        self.native: Final = stream
        #: See ``SideStream``.
        self.queues_freely: Final = queues_freely

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later work on this stream wait for ``event``.

        Raises:
            PlatformError: The event is another platform's, or another device's.
        """
        self.native.wait_event(_own(event, self._platform, self._device).native)

    def record_event(self, timing: bool = False) -> TorchEvent:
        """Record an event after all work queued here so far."""
        return self._record(self._device, self.native, timing)

    def join_current(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for all work queued here.

        ``tensors`` of this stream stay whole until the current stream is done with them.
        """
        current = self._current(self._device)
        current.wait_event(self.record_event().native)
        for tensor in tensors:
            tensor.record_stream(current)

    def synchronize(self) -> None:
        """Block the host until all work queued here is done.

        Raises:
            PlatformError: It did not get done.
        """
        # By an event: a stream's own wait spins on some devices, and can't be given up.
        if not self.record_event().wait():
            raise PlatformError(
                f"A side stream of {self._device} (platform {self._platform!r}) did not finish "
                "its work; the device may be lost.",
                platform=self._platform,
            )

    def __enter__(self) -> TorchStream:
        context = self._enter(self.native)
        context.__enter__()
        self._entered.stack.append(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.stack.pop().__exit__(kind, error, traceback)


class _EnteredContexts(threading.local):
    """What this thread has entered: a vendor's context restores the stream of its own thread."""

    def __init__(self) -> None:
        self.stack: list[AbstractContextManager[Any]] = []


def _own(event: object, platform: str, device: torch.device) -> TorchEvent:
    """Give the event back if it is this platform's and device's.

    torch itself takes any object for an event: it skips the wait for another vendor's, and for
    some it crashes.
    """
    # Not isinstance: a subclass could bring anything as its native event.
    if type(event) is not TorchEvent or event.platform != platform:
        raise PlatformError(
            f"A stream or event of platform {platform!r} was given {event!r}, which is no event "
            "of that platform. Record it with the same Platform.",
            platform=platform,
        )
    if event.device != device:
        raise PlatformError(
            f"A stream or event of {device} was given an event of {event.device}; both have to "
            "be of one device.",
            platform=platform,
        )
    return event
