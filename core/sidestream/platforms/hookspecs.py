"""The hooks of a platform plugin, in the order of a device's life.

A plugin is a module that imports no vendor package at module level and marks its functions with
:data:`hookimpl`. ``probe``, ``set_device``, ``side_stream``, ``record_device_event`` and
``synchronize_device`` are required. A hook is called with an explicit ``torch.device``; it never
answers None where it could have answered: None from a required hook of a vendor is a
``PluginContractError``, only the no-op base ``cpu`` gives it a meaning (no side stream, hence the
synchronous path).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import pluggy

from sidestream.platforms.device import DeviceEvent, DeviceFault, HostPin, Probe, SideStream

if TYPE_CHECKING:
    import torch

PROJECT: Final = "sidestream"
hookspec: Final[pluggy.HookspecMarker] = pluggy.HookspecMarker(PROJECT)
hookimpl: Final[pluggy.HookimplMarker] = pluggy.HookimplMarker(PROJECT)

#: Hooks that every plugin implements; pluggy itself does not check this.
REQUIRED_HOOKS: Final = (
    "probe",
    "set_device",
    "side_stream",
    "record_device_event",
    "synchronize_device",
)


# --- before a device is used ------------------------------------------------------------------


@hookspec(firstresult=True)
def probe() -> Probe | None:
    """Say whether the platform is there, from files and metadata alone.

    Called in the main process, often for platforms that are absent: takes milliseconds, imports
    neither torch nor a vendor package, changes nothing, never raises.
    """


@hookspec(firstresult=True)
def set_device(device: torch.device) -> bool | None:
    """Bind the calling thread to ``device`` and answer True.

    Called once in each thread that touches the device, before anything else; the plugin imports
    its vendor package here. New threads start on device 0.
    """


# --- streams and events -----------------------------------------------------------------------


@hookspec(firstresult=True)
def side_stream(device: torch.device, priority: int) -> SideStream | None:
    """Make a stream beside the current one; its waits accept events of this plugin only.

    ``priority`` 0 is the default; lower is more urgent where the device knows priorities. Called
    on the output thread, and in step mode on the one that runs steps, which can use a stream that
    also is a ``JoiningStream``. None means that the platform has no streams.
    """


@hookspec(firstresult=True)
def record_device_event(device: torch.device, timing: bool) -> DeviceEvent | None:
    """Record an event on the calling thread's current stream, without blocking the host.

    Raises when it fails: a caller that got None from a vendor would copy unwritten memory.
    """


@hookspec(firstresult=True)
def synchronize_device(device: torch.device) -> bool | None:
    """Block until all work queued on ``device`` is done, and answer True."""


@hookspec(firstresult=True)
def check_device(device: torch.device) -> DeviceFault | None:
    """Write a sentinel, copy it back and compare; None means that the device is fine.

    Called after a failed forward or copy: on some stacks a lost device answers without an error.
    Must end within seconds and reports an exception as a fault.
    """


# --- host memory ------------------------------------------------------------------------------


@hookspec(firstresult=True)
def pin_host_memory(device: torch.device, address: int, nbytes: int) -> HostPin | None:
    """Page-lock an existing mapping so that the device can copy into it asynchronously.

    Verified by ``is_pinned()`` and not by the return code alone. None: not possible here.
    """


@hookspec(firstresult=True)
def pinned_buffer(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Allocate a page-locked uint8 tensor of ``nbytes``; None: not possible here."""


# --- housekeeping -----------------------------------------------------------------------------


@hookspec(firstresult=True)
def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Give (free, total) bytes of device memory."""


@hookspec(firstresult=True)
def empty_cache(device: torch.device) -> bool | None:
    """Give cached, unused device memory back to the device, and answer True."""


@hookspec(firstresult=True)
def distributed_backend() -> str | None:
    """Name the ``torch.distributed`` backend: nccl, hccl, xccl, mccl or gloo."""


@hookspec(firstresult=True)
def profiler_range(name: str) -> AbstractContextManager[None] | None:
    """Mark a range in the vendor's profiler."""
