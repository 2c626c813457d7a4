"""Streams, events and checks for vendors whose torch module has the shape of ``torch.cuda``.

A plugin makes a :class:`TorchDevice` and takes its methods over as hooks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceEvent, DeviceFault
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.sentinel import SENTINEL_BYTES, check_by_sentinel

if TYPE_CHECKING:
    import torch

_FIRST_PAUSE_S: Final = 0.0001
_LONGEST_PAUSE_S: Final = 0.002


class TorchModule(Protocol):
    """The part of ``torch.cuda`` that its kin (``torch.npu``, ``torch.xpu``, ...) have too."""

    # ruff: noqa: D102 - torch documents them
    @property
    def Stream(self) -> Callable[..., Any]: ...

    @property
    def Event(self) -> Callable[..., Any]: ...

    def set_device(self, device: Any) -> None: ...

    def current_stream(self, device: Any) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def synchronize(self, device: Any) -> None: ...

    def mem_get_info(self, device: Any) -> tuple[int, int]: ...

    def empty_cache(self) -> None: ...


class TorchEvent:
    """An event of a vendor's torch module; recorded when it is made."""

    def __init__(self, platform: str, device: torch.device, event: Any, *, timing: bool) -> None:
        #: The plugin that made it, and the device it was recorded on: what a stream checks.
        self.platform: Final = platform
        self.device: Final = device
        #: Whether it can be asked for times.
        self.timing: Final = timing
        #: The vendor's event.
        self.native: Final = event

    def query(self) -> bool:
        """Tell whether the device passed this point."""
        return bool(self.native.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the host until the device passed this point; False if the time ran out first."""
        if timeout_s is None:
            # A blocking event sleeps in the driver; no vendor has such a wait with a timeout.
            self.native.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while not self.native.query():
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

    def __init__(self, maker: TorchDevice, device: torch.device, stream: Any) -> None:
        self._maker: Final = maker
        self._device: Final = device
        self._entered: Final = _EnteredContexts()
        #: The vendor's stream.
        self.native: Final = stream

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later work on this stream wait for ``event``.

        Raises:
            PlatformError: The event is another platform's, or another device's.
        """
        self.native.wait_event(_own(event, self._maker.platform, self._device).native)

    def record_event(self, timing: bool = False) -> TorchEvent:
        """Record an event after all work queued here so far."""
        return self._maker.recorded(self._device, self.native, timing=timing)

    def synchronize(self) -> None:
        """Block the host until all work queued here is done."""
        # By an event: a stream's own wait spins.
        self.record_event().wait()

    def __enter__(self) -> TorchStream:
        context = self._maker.load().stream(self.native)
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


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """Hooks in terms of a torch module, for a plugin to take over one by one::

        _device = TorchDevice(platform="cuda", load=_torch_cuda)
        set_device = _device.set_device

    Holds no state.
    """

    #: The plugin's name.
    platform: str
    #: Imports the vendor package and gives its torch module; called by each hook.
    load: Callable[[], TorchModule]
    #: What an event is made with beside ``enable_timing``; the vendor's own class and not the
    #: generic ``torch.Event``, whose host wait spins whatever its arguments say.
    event_options: Mapping[str, bool] = field(default_factory=dict)

    @hookimpl
    def set_device(self, device: torch.device) -> bool:
        """Bind the calling thread."""
        self.load().set_device(device)
        return True

    @hookimpl
    def side_stream(self, device: torch.device, priority: int) -> TorchStream:
        """Make a stream; a priority that is less urgent than the default counts as the default."""
        native = self.load().Stream(device=device, priority=min(priority, 0))
        return TorchStream(self, device, native)

    @hookimpl
    def record_device_event(self, device: torch.device, timing: bool) -> TorchEvent:
        """Record an event on the calling thread's current stream of ``device``."""
        return self.recorded(device, self.load().current_stream(device), timing=timing)

    def recorded(self, device: torch.device, stream: Any, *, timing: bool) -> TorchEvent:
        """Record an event on a stream of the vendor's."""
        event = self.load().Event(enable_timing=timing, **self.event_options)
        event.record(stream)
        return TorchEvent(self.platform, device, event, timing=timing)

    @hookimpl
    def synchronize_device(self, device: torch.device) -> bool:
        """Drain the device."""
        self.load().synchronize(device)
        return True

    @hookimpl
    def pinned_buffer(self, device: torch.device, nbytes: int) -> torch.Tensor | None:
        """Allocate by torch, which rounds up to a power of two; None if it is not page-locked."""
        import torch

        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        # torch_npu answers a failed allocation with a null pointer instead of an error.
        return buffer if buffer.data_ptr() and buffer.is_pinned() else None

    @hookimpl
    def memory_info(self, device: torch.device) -> tuple[int, int]:
        """Ask the driver for (free, total) bytes."""
        free, total = self.load().mem_get_info(device)
        return free, total

    @hookimpl
    def empty_cache(self, device: torch.device) -> bool:
        """Free what torch's allocator caches, on all devices of this process."""
        self.load().empty_cache()
        return True

    @hookimpl
    def check_device(self, device: torch.device) -> DeviceFault | None:
        """Send a sentinel there and back on a stream of its own: a queued forward is no fault."""
        outbound = self.pinned_buffer(device, SENTINEL_BYTES)
        inbound = self.pinned_buffer(device, SENTINEL_BYTES)
        return check_by_sentinel(device, self.side_stream(device, 0), outbound, inbound)


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
