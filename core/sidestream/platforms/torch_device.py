"""Hooks for vendors whose torch module has the shape of ``torch.cuda``.

A plugin makes a :class:`TorchDevice` and takes its methods over as hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceFault, HostPin
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import HostRuntime
from sidestream.platforms.sentinel import SENTINEL_BYTES, check_by_sentinel
from sidestream.platforms.torch_stream import HostWait, TorchEvent, TorchStream

if TYPE_CHECKING:
    import torch


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

    def device(self, device: Any) -> AbstractContextManager[Any]: ...

    def synchronize(self, device: Any) -> None: ...

    def mem_get_info(self, device: Any) -> tuple[int, int]: ...

    def empty_cache(self) -> None: ...


def with_devices(platform: str, module: Any, advice: str) -> Any:
    """Give a vendor's torch module, unless it sees no device.

    Raises:
        PlatformError: It sees none; ``advice`` says what to do.
    """
    if module.device_count() == 0:
        raise PlatformError(f"{module.__name__} sees no device; {advice}.", platform=platform)
    return module


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
    #: Whether what is queued has to be done before an event is recorded; asked each time.
    waits_before_record: Callable[[], bool] = lambda: False
    #: How the host waits for an event without a timeout.
    host_wait: HostWait = "event"
    #: What page-locks mappings; None: nothing does.
    runtime: HostRuntime | None = None
    #: Gives a module whose ``range(message, *args)`` marks a range in the vendor's profiler; None:
    #: torch's own profiler does.
    marker: Callable[[], Any] = lambda: None

    @hookimpl
    def set_device(self, device: torch.device) -> bool:
        """Bind the calling thread."""
        self.load().set_device(device)
        return True

    @hookimpl
    def side_stream(self, device: torch.device, priority: int) -> TorchStream:
        """Make a stream; a priority that is less urgent than the default counts as the default."""
        native = self.load().Stream(device=device, priority=min(priority, 0))
        return TorchStream(
            self.platform,
            device,
            native,
            enter=lambda stream: self.load().stream(stream),
            record=self.recorded,
            current=lambda device: self.load().current_stream(device),
            queues_freely=self.host_wait == "event" and not self.waits_before_record(),
        )

    @hookimpl
    def record_device_event(self, device: torch.device, timing: bool) -> TorchEvent:
        """Record an event on the calling thread's current stream of ``device``."""
        stream = self.load().current_stream(device)
        if self.waits_before_record() and not self.recorded(device, stream, False).wait():
            raise PlatformError(
                f"The stream of {device} did not finish its work.", platform=self.platform
            )
        return self.recorded(device, stream, timing)

    def recorded(self, device: torch.device, stream: Any, timing: bool) -> TorchEvent:
        """Record an event on a stream of the vendor's."""
        event = self.load().Event(enable_timing=timing, **self.event_options)
        event.record(stream)
        return TorchEvent(
            self.platform, device, event, timing=timing, stream=stream, host_wait=self.host_wait
        )

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
        # Some vendors answer a failed allocation with a null pointer instead of an error.
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

    @hookimpl
    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range in the vendor's profiler, or in torch's own."""
        marker = self.marker()
        if marker is not None:
            marked: AbstractContextManager[None] = marker.range("{}", name)
            return marked
        from torch.profiler import record_function

        return record_function(name)

    @hookimpl
    def pin_host_memory(self, device: torch.device, address: int, nbytes: int) -> HostPin | None:
        """Page-lock a mapping by :attr:`runtime`; None if there is none, or torch lacks it."""
        runtime, module = self.runtime, self.load()
        functions = None if runtime is None else getattr(module, runtime.getter, None)
        if runtime is None or functions is None:
            return None
        # A runtime works for the thread's device, and would open a context on device 0.
        return runtime.lock(
            self.platform, functions(), address, nbytes, inside=lambda: module.device(device)
        )
