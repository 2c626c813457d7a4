"""AMD ROCm, by a ROCm build's ``torch.cuda``: see ``plugins/rocm/README.md``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidestream.platforms.device import HostPin, Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import HostRuntime
from sidestream.platforms.machine import hidden_devices, probe_by, unusable_nodes
from sidestream.platforms.options import nbytes as nbytes_option
from sidestream.platforms.torch_build import other_build
from sidestream.platforms.torch_device import TorchDevice

if TYPE_CHECKING:
    import torch

#: The largest mapping that is registered; more failed on some cards, and pages of registered memory
#: that move stall the queues of all processes. 64 MiB is what an arena of outputs holds.
LOCK_LIMIT_VARIABLE: Final = "SIDESTREAM_ROCM_LOCK_LIMIT_BYTES"
LOCK_LIMIT_BYTES: Final = 64 << 20

_INSTALL: Final = (
    "pip install torch --index-url https://download.pytorch.org/whl/rocm7.0 (or your ROCm's number)"
)


def _torch_cuda() -> Any:
    import torch

    return torch.cuda


# A HIP build keeps the names of CUDA, the device type included.
_device = TorchDevice(
    platform="rocm",
    load=_torch_cuda,
    event_options={"blocking": True},
    runtime=HostRuntime(
        getter="cudart",
        register="cudaHostRegister",
        unregister="cudaHostUnregister",
        clear_error=("libamdhip64", "hipGetLastError"),
    ),
    marker=lambda: _torch_cuda().nvtx,
)
set_device, side_stream = _device.set_device, _device.side_stream
record_device_event, synchronize_device = _device.record_device_event, _device.synchronize_device
check_device, pinned_buffer = _device.check_device, _device.pinned_buffer
memory_info, empty_cache = _device.memory_info, _device.empty_cache
profiler_range = _device.profiler_range


@hookimpl
def probe() -> Probe:
    """Look at torch's build, the environment and the driver's device nodes."""
    return probe_by(
        "rocm",
        "cuda",
        "torch is a ROCm build and the amdgpu driver is there",
        (
            partial(other_build, "a ROCm", lambda build: build.hip is not None, _INSTALL),
            partial(
                hidden_devices,
                "HIP_VISIBLE_DEVICES",
                "ROCR_VISIBLE_DEVICES",
                "CUDA_VISIBLE_DEVICES",
            ),
            partial(
                unusable_nodes,
                ("/dev/kfd",),
                "install the amdgpu driver, or start the container with --device /dev/kfd "
                "--device /dev/dri; the user has to be in the groups render and video",
            ),
        ),
    )


@hookimpl
def pin_host_memory(device: torch.device, address: int, nbytes: int) -> HostPin | None:
    """Register the mapping with the HIP runtime, unless it is large."""
    is_large = nbytes > nbytes_option(LOCK_LIMIT_VARIABLE, LOCK_LIMIT_BYTES)
    return None if is_large else _device.pin_host_memory(device, address, nbytes)


@hookimpl
def distributed_backend() -> str:
    """Name NCCL: torch has RCCL under that name."""
    return "nccl"
