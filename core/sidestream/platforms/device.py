"""What a platform plugin returns: probe results, streams, events, pinned memory, faults.

Streams and events of one plugin belong together. A foreign event must raise *before* it reaches
torch, which skips such a wait without an error and lets the copy overtake the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a plugin can say of its platform without importing a vendor package."""

    name: str
    #: ``torch.device`` type; ROCm's is "cuda".
    device_type: str
    available: bool
    #: Why not, and what to install; or what was found.
    reason: str
    #: False: only when it is named.
    auto: bool = True
    device_count: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceFault:
    """Evidence that a device no longer computes or copies correctly."""

    reason: str


@runtime_checkable
class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Tell whether the device passed this point; never blocks."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the host until the device passed this point; False if the time ran out first.

        Releases the GIL and spends next to no CPU.
        """
        ...

    def elapsed_s(self, earlier: DeviceEvent) -> float | None:
        """Give the device seconds since ``earlier``; both complete and recorded with timing.

        None where the platform can't time events.
        """
        ...


@runtime_checkable
class SideStream(Protocol):
    """A queue of device work beside the one that forwards run on.

    ``with stream:`` makes it the calling thread's current stream.
    """

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later work on this stream wait for ``event``; returns at once.

        Raises:
            PlatformError: The event belongs to another platform.
        """
        ...

    def record_event(self, timing: bool = False) -> DeviceEvent:
        """Record an event after all work queued here so far."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work queued here is done."""
        ...

    def __enter__(self) -> SideStream: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class HostPin(Protocol):
    """A page-locked range of an existing mapping; close it before the range is unmapped."""

    def close(self) -> None:
        """Unlock the pages; idempotent."""
        ...
