"""Moore Threads GPUs, by ``torch_musa``: see ``plugins/musa/README.md``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from sidestream.platforms.device import Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import HostRuntime
from sidestream.platforms.machine import (
    hidden_devices,
    missing_backend,
    missing_libraries,
    missing_pci_vendor,
    probe_by,
)
from sidestream.platforms.torch_device import TorchDevice

_INSTALL: Final = (
    "pip install the wheels of torch and torch_musa that "
    "https://github.com/MooreThreads/torch_musa/releases has together"
)
_MOORE_THREADS: Final = 0x1ED5


def _torch_musa() -> Any:
    import torch
    import torch_musa  # noqa: F401 - makes torch.musa

    return torch.musa  # type: ignore[attr-defined]


# synchronize_device is torch.musa's: that of torch.accelerator raises there.
_device = TorchDevice(
    platform="musa",
    load=_torch_musa,
    runtime=HostRuntime(
        getter="musart",
        register="musaHostRegister",
        unregister="musaHostUnregister",
        clear_error=("libmusart", "musaGetLastError"),
    ),
)
set_device, side_stream = _device.set_device, _device.side_stream
record_device_event, synchronize_device = _device.record_device_event, _device.synchronize_device
check_device, pinned_buffer = _device.check_device, _device.pinned_buffer
pin_host_memory, memory_info = _device.pin_host_memory, _device.memory_info
empty_cache, profiler_range = _device.empty_cache, _device.profiler_range


@hookimpl
def probe() -> Probe:
    """Look at torch_musa, the MUSA runtime, the environment and the PCI bus."""
    return probe_by(
        "musa",
        "musa",
        "torch_musa, the MUSA runtime and a Moore Threads GPU are there",
        (
            partial(missing_backend, "torch_musa", _INSTALL),
            partial(
                missing_libraries,
                ("libmusart.so",),
                "install the MUSA toolkit and name its lib folder in LD_LIBRARY_PATH",
                folders=(Path("/usr/local/musa/lib"),),
            ),
            partial(hidden_devices, "MUSA_VISIBLE_DEVICES"),
            partial(
                missing_pci_vendor,
                _MOORE_THREADS,
                "Moore Threads",
                "check that the GPU is passed through",
            ),
        ),
    )


@hookimpl
def distributed_backend() -> str:
    """Name MCCL."""
    return "mccl"
