"""Moore Threads GPUs, by ``torch_musa``: see ``plugins/musa/README.md``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidestream.platforms.device import HostPin, Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import clear_pending_error
from sidestream.platforms.machine import (
    hidden_devices,
    missing_backend,
    missing_libraries,
    missing_pci_vendor,
    probe_by,
)
from sidestream.platforms.torch_device import TorchDevice

if TYPE_CHECKING:
    import torch

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
_device = TorchDevice(platform="musa", load=_torch_musa)
set_device, side_stream = _device.set_device, _device.side_stream
record_device_event, synchronize_device = _device.record_device_event, _device.synchronize_device
check_device, pinned_buffer = _device.check_device, _device.pinned_buffer
memory_info, empty_cache = _device.memory_info, _device.empty_cache
profiler_range = _device.profiler_range


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
def pin_host_memory(device: torch.device, address: int, nbytes: int) -> HostPin | None:
    """Register the mapping with the MUSA runtime."""
    runtime = _torch_musa().musart()
    return _device.lock(
        device,
        address,
        nbytes,
        register=partial(runtime.musaHostRegister, address, nbytes, 0),
        unregister=partial(runtime.musaHostUnregister, address),
        forget_error=partial(clear_pending_error, "libmusart", "musaGetLastError"),
    )


@hookimpl
def distributed_backend() -> str:
    """Name MCCL."""
    return "mccl"
