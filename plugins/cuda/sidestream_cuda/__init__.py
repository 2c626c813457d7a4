"""NVIDIA CUDA, by ``torch.cuda``: see ``plugins/cuda/README.md``."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from sidestream.platforms.device import Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import HostRuntime
from sidestream.platforms.machine import hidden_devices, probe_by, unusable_nodes
from sidestream.platforms.torch_build import other_build
from sidestream.platforms.torch_device import TorchDevice

_INSTALL: Final = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


def _torch_cuda() -> Any:
    import torch

    return torch.cuda


_device = TorchDevice(
    platform="cuda",
    load=_torch_cuda,
    event_options={"blocking": True},
    runtime=HostRuntime(
        getter="cudart",
        register="cudaHostRegister",
        unregister="cudaHostUnregister",
        clear_error=("libcudart", "cudaGetLastError"),
    ),
    marker=lambda: _torch_cuda().nvtx,
)
set_device, side_stream = _device.set_device, _device.side_stream
record_device_event, synchronize_device = _device.record_device_event, _device.synchronize_device
check_device, pinned_buffer = _device.check_device, _device.pinned_buffer
pin_host_memory, memory_info = _device.pin_host_memory, _device.memory_info
empty_cache, profiler_range = _device.empty_cache, _device.profiler_range


@hookimpl
def probe() -> Probe:
    """Look at torch's build, the environment and the driver's device nodes."""
    return probe_by(
        "cuda",
        "cuda",
        "torch is a CUDA build and the NVIDIA driver is there",
        (
            partial(
                other_build,
                "a CUDA",
                lambda build: build.cuda is not None and build.hip is None,
                _INSTALL,
            ),
            partial(hidden_devices, "CUDA_VISIBLE_DEVICES"),
            partial(
                unusable_nodes,
                ("/dev/nvidiactl", "/dev/dxg"),
                "install the NVIDIA driver, or start the container with --gpus all",
            ),
        ),
    )


@hookimpl
def distributed_backend() -> str:
    """Name NCCL."""
    return "nccl"
