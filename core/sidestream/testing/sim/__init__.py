"""A simulated accelerator: ``torch.device("sim")``, made of threads, for tests without hardware.

Truly asynchronous: an operator only queues a kernel, memory that no kernel has written yet is full
of poison, and streams run independently of each other. So a missing wait reads poison every time
instead of now and then. It is a platform plugin like any other, but never chosen by itself::

    from sidestream.testing import sim

    device = sim.device()                     # torch.device("sim", 0)
    sim.default_stream().hold()               # nothing completes on that stream ...
    total = torch.ones(4, device=device).sum()
    sim.default_stream().release()            # ... until now
    assert total.item() == 4

Importing this module imports no torch and registers nothing. Registration, by the first use of a
device, is for the whole process: ``torch.accelerator`` and ``torch.Event`` mean ``sim`` from then
on, and no other PrivateUse1 device type (npu, musa) can be used.

Limits: a device without an index is the thread's current one for factories, but ``sim:0`` for
``Tensor.to``; ``out=`` doesn't resize; freed memory is not reused, only overwritten when another
stream had it.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NoReturn

from sidestream.platforms.device import DeviceEvent, DeviceFault, HostPin, Probe, SideStream
from sidestream.platforms.hookspecs import hookimpl
from sidestream.testing.sim.device import DEVICE_COUNT, DEVICES, SimDevice, device_at
from sidestream.testing.sim.event import PLATFORM, SimEvent
from sidestream.testing.sim.faults import Faults, SimDeviceError
from sidestream.testing.sim.host import COPIES, PAGE_LOCKS, CopyRecord
from sidestream.testing.sim.lane import Kernel
from sidestream.testing.sim.stream import CURRENT, SimStream

if TYPE_CHECKING:
    import torch

__all__ = [
    "CopyRecord",
    "Faults",
    "SimDeviceError",
    "SimEvent",
    "SimStream",
    "clear_copies",
    "copies",
    "default_stream",
    "device",
    "fault",
    "faults",
    "reset",
    "side_streams",
]

_CHECK_TIMEOUT_S: Final = 5.0
_DRAIN_TIMEOUT_S: Final = 10.0


# --- the platform's hooks ---------------------------------------------------------------------


@hookimpl
def probe() -> Probe:
    """Answer yes wherever torch is installed, but only when named."""
    has_torch = importlib.util.find_spec("torch") is not None
    return Probe(
        name=PLATFORM,
        device_type=PLATFORM,
        available=has_torch,
        reason=(
            f"{DEVICE_COUNT} simulated devices, made of threads, for tests"
            if has_torch
            else 'torch is not installed: pip install "sidestream[cpu]"'
        ),
        auto=False,
        device_count=DEVICE_COUNT,
    )


@hookimpl
def set_device(device: torch.device) -> bool:
    """Make it the calling thread's current device, and known to torch."""
    CURRENT.device_index = _use(device).index
    return True


@hookimpl
def side_stream(device: torch.device, priority: int) -> SideStream:
    """Make a stream with a thread of its own."""
    return _use(device).side_stream(priority)


@hookimpl
def record_device_event(device: torch.device, timing: bool) -> DeviceEvent:
    """Record an event on the calling thread's current stream."""
    return _use(device).current_stream.record_event(timing)


@hookimpl
def synchronize_device(device: torch.device) -> bool:
    """Block until every stream of the device is idle."""
    _use(device).synchronize()
    return True


@hookimpl
def check_device(device: torch.device) -> DeviceFault | None:
    """Copy a sentinel to the device and back, on a stream of its own."""
    from sidestream.testing.sim.transfer import find_corruption

    try:
        reason = find_corruption(_use(device), _CHECK_TIMEOUT_S)
    except SimDeviceError as error:
        reason = str(error)
    return None if reason is None else DeviceFault(reason=reason)


@hookimpl
def pin_host_memory(device: torch.device, address: int, nbytes: int) -> HostPin | None:
    """Make copies into that range asynchronous."""
    if _use(device).faults.refuse_page_locking:
        return None
    return PAGE_LOCKS.lock(address, nbytes)


@hookimpl
def pinned_buffer(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Allocate page-locked host memory, full of poison."""
    if _use(device).faults.refuse_page_locking:
        return None
    from sidestream.testing.sim.memory import page_locked_buffer

    return page_locked_buffer(nbytes)


@hookimpl
def memory_info(device: torch.device) -> tuple[int, int]:
    """Give free and total bytes, as allocations were counted."""
    return _use(device).memory_info


@hookimpl
def empty_cache(device: torch.device) -> bool:
    """Do nothing: there is no cache."""
    return True


@hookimpl
def distributed_backend() -> str:
    """Name gloo, which works on the CPU tensors behind the device's."""
    return "gloo"


@hookimpl
def profiler_range(name: str) -> AbstractContextManager[None]:
    """Mark a range in torch's own profiler."""
    from torch.profiler import record_function

    return record_function(name)


# --- what a test controls ---------------------------------------------------------------------


def device(index: int = 0) -> torch.device:
    """Give ``torch.device("sim", index)``, which torch knows only after a first use."""
    _find(index)
    import torch

    return torch.device(PLATFORM, index)


def default_stream(index: int = 0) -> SimStream:
    """Give the stream that work of a device runs on unless a side stream is current."""
    return _find(index).default_stream


def side_streams(index: int = 0) -> tuple[SimStream, ...]:
    """Give the side streams of a device that somebody still holds, oldest first."""
    return _find(index).side_streams


def copies() -> tuple[CopyRecord, ...]:
    """Give the latest finished copies to the host, oldest first; at most 4,096."""
    return tuple(COPIES)


def clear_copies() -> None:
    """Forget the copies that :func:`copies` gives."""
    COPIES.clear()


def faults(index: int = 0) -> Faults:
    """Give the failures that a device shall show; set its fields."""
    return _find(index).faults


def fault(
    index: int = 0, reason: str = "injected by a test", stream: SimStream | None = None
) -> None:
    """Queue a kernel that fails, on the default stream if none is given.

    Once it runs the device is in error, for good: only :func:`reset` leads back.
    """

    def kernel() -> NoReturn:
        raise RuntimeError(reason)

    (stream or default_stream(index)).launch(Kernel("fault", kernel))


def reset() -> None:
    """Bring every device back to its first state: nothing held, queued, failed or logged.

    No real device can do that; it lets tests share a process.

    Raises:
        PlatformError: A stream is still busy after 10 s.
    """
    for one in DEVICES:
        one.unblock()
    for one in DEVICES:
        one.drain(_DRAIN_TIMEOUT_S)
    for one in DEVICES:
        one.recover()
    COPIES.clear()


def _use(device: torch.device) -> SimDevice:
    return _find(device.index)


def _find(index: int | None) -> SimDevice:
    from sidestream.testing.sim.backend import register

    register()
    return device_at(index)
