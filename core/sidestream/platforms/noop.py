"""The no-op base, ``cpu``: no streams and no events, hence the synchronous path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestream.platforms.device import DeviceEvent, Probe, SideStream
from sidestream.platforms.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def probe() -> Probe:
    """Answer that a CPU is there, but never win over an accelerator."""
    return Probe(
        name="cpu",
        device_type="cpu",
        available=True,
        reason="always there; outputs are copied on the calling thread",
        auto=False,
        device_count=1,
    )


@hookimpl
def set_device(device: torch.device) -> bool:
    """Do nothing: a thread needs no binding to the CPU."""
    return True


@hookimpl
def side_stream(device: torch.device, priority: int) -> SideStream | None:
    """Answer None: the CPU has no streams."""
    return None


@hookimpl
def record_device_event(device: torch.device, timing: bool) -> DeviceEvent | None:
    """Answer None: work on the CPU is done when its call returns."""
    return None


@hookimpl
def synchronize_device(device: torch.device) -> bool:
    """Do nothing: nothing is ever queued."""
    return True


@hookimpl
def empty_cache(device: torch.device) -> bool:
    """Do nothing: torch's CPU allocator keeps no cache."""
    return True


@hookimpl
def distributed_backend() -> str:
    """Name gloo, the backend for CPU tensors."""
    return "gloo"
