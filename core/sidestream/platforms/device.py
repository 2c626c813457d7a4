"""What a platform plugin returns: probe results, streams, events, pinned memory, faults.

Streams and events of one plugin belong together. A foreign event must raise *before* it reaches
torch, which skips such a wait without an error and lets the copy overtake the forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


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

    One whose attribute ``queues_freely`` is True may be given work ahead of time, by the thread
    that queues the forwards: neither a call of it nor recording an event on it makes the host
    wait, and a wait for an event of it waits for nothing behind that event. Of others only the
    output thread makes use, for one output after the other.
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


@runtime_checkable
class JoiningStream(SideStream, Protocol):
    """A side stream whose work the stream of a forward can go on with; not required of plugins.

    Without it step mode prepares requests on the stream of the other requests' steps.
    """

    def join_current(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for all work queued here; returns at once.

        On the device: the host does not wait. ``tensors`` were made on this stream and are used by
        the current one from now on: once they die, their memory is not given to anybody else
        before what the current stream has queued by then is done (``Tensor.record_stream``).

        Raises:
            PlatformError: One of them can't be done.
        """
        ...


class HostPin(Protocol):
    """A page-locked range of an existing mapping; close it before the range is unmapped."""

    def close(self) -> None:
        """Unlock the pages; idempotent."""
        ...
