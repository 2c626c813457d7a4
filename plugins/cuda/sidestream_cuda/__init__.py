"""NVIDIA CUDA, by ``torch.cuda``: see ``plugins/cuda/README.md``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidestream.platforms.device import HostPin, Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import clear_pending_error, lock_mapping
from sidestream.platforms.torch_build import torch_build
from sidestream.platforms.torch_device import TorchDevice

if TYPE_CHECKING:
    import torch


def _torch_cuda() -> Any:
    import torch

    return torch.cuda


_device = TorchDevice(platform="cuda", load=_torch_cuda, event_options={"blocking": True})
set_device = _device.set_device
side_stream = _device.side_stream
record_device_event = _device.record_device_event
synchronize_device = _device.synchronize_device
check_device = _device.check_device
pinned_buffer = _device.pinned_buffer
memory_info = _device.memory_info
empty_cache = _device.empty_cache


@hookimpl
def probe() -> Probe:
    """Look at torch's build, the environment and the driver's device nodes."""
    problem = _problem()
    return Probe(
        name="cuda",
        device_type="cuda",
        available=problem is None,
        reason=problem or "torch is a CUDA build and the NVIDIA driver is there",
    )


@hookimpl
def pin_host_memory(device: torch.device, address: int, nbytes: int) -> HostPin | None:
    """Register the mapping with the CUDA runtime; not while a graph is captured."""
    cuda = _torch_cuda()
    runtime = cuda.cudart()

    def on_device(call: Callable[..., Any], *arguments: int) -> int:
        # The runtime works for the thread's device, and would open a context on device 0.
        with cuda.device(device):
            code = int(call(*arguments))
            if code != 0:
                clear_pending_error("libcudart", "cudaGetLastError")
            return code

    return lock_mapping(
        "cuda",
        address,
        nbytes,
        register=lambda: on_device(runtime.cudaHostRegister, address, nbytes, 0),
        unregister=lambda: on_device(runtime.cudaHostUnregister, address),
    )


@hookimpl
def distributed_backend() -> str:
    """Name NCCL."""
    return "nccl"


@hookimpl
def profiler_range(name: str) -> AbstractContextManager[None]:
    """Mark an NVTX range."""
    marked: AbstractContextManager[None] = _torch_cuda().nvtx.range("{}", name)
    return marked


def _problem() -> str | None:
    """Say why CUDA can't be used here, or None."""
    build = torch_build()
    if build is None:
        return 'torch is not installed; install it: pip install "sidestream[cuda]"'
    if build.cuda is None or build.hip is not None:
        return (
            f"torch {build.version} is not a CUDA build; install one: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all devices; unset it or name some"
    nodes = [node for node in ("/dev/nvidiactl", "/dev/dxg") if Path(node).exists()]
    if not nodes:
        return (
            "there is no NVIDIA driver (neither /dev/nvidiactl nor /dev/dxg); install it, or "
            "start the container with --gpus all"
        )
    if not os.access(nodes[0], os.R_OK | os.W_OK):
        return f"{nodes[0]} can't be opened by this user; check its permissions and groups"
    return None
