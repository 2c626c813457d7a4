"""Huawei Ascend NPUs, by ``torch_npu``: see ``plugins/npu/README.md``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import PlatformError
from sidestream.platforms.device import HostPin, Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.machine import (
    hidden_devices,
    missing_backend,
    probe_by,
    unusable_nodes,
)
from sidestream.platforms.options import flag
from sidestream.platforms.torch_device import TorchDevice
from sidestream.platforms.torch_stream import TorchEvent
from sidestream_npu.causes import INSTALL, missing_cann, unfit_torch

if TYPE_CHECKING:
    import torch

#: "0" records events without waiting for the stream first; read its README before.
SYNCHRONIZE_VARIABLE: Final = "SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD"

#: ACL_HOST_REG_MAPPED; with ACL_HOST_REG_PINNED alone copies are three times slower.
_MAPPED: Final = 0x2


def _torch_npu() -> Any:
    import torch
    import torch_npu  # noqa: F401 - makes torch.npu

    npu = torch.npu  # type: ignore[attr-defined]
    # Recording an event with no device there ends the process, past any except.
    if npu.device_count() == 0:
        raise PlatformError(
            "torch_npu sees no device; npu-smi info shows what the driver sees.", platform="npu"
        )
    return npu


# The driver's wait for an event hangs for good once a launch before it was lost: asked instead.
_device = TorchDevice(platform="npu", load=_torch_npu, host_wait="poll")
set_device, side_stream = _device.set_device, _device.side_stream
synchronize_device, check_device = _device.synchronize_device, _device.check_device
pinned_buffer, memory_info = _device.pinned_buffer, _device.memory_info
empty_cache, profiler_range = _device.empty_cache, _device.profiler_range


@hookimpl
def probe() -> Probe:
    """Look at torch_npu's and torch's versions, CANN's libraries and the driver's device nodes."""
    return probe_by(
        "npu",
        "npu",
        "torch_npu, CANN and the Ascend driver are there",
        (
            partial(missing_backend, "torch_npu", INSTALL),
            unfit_torch,
            missing_cann,
            partial(hidden_devices, "ASCEND_RT_VISIBLE_DEVICES"),
            partial(
                unusable_nodes,
                ("/dev/davinci[0-9]*",),
                "install the Ascend driver, or start the container with --device /dev/davinci0 "
                "--device /dev/davinci_manager; the user has to be in the group HwHiAiUser",
            ),
        ),
    )


@hookimpl
def record_device_event(device: torch.device, timing: bool) -> TorchEvent:
    """Record on the current stream, by default once all that is queued there is done."""
    stream = _torch_npu().current_stream(device)
    waits = flag(SYNCHRONIZE_VARIABLE, default=True)
    if waits and not _device.recorded(device, stream, False).wait():
        raise PlatformError(f"The stream of {device} did not finish its work.", platform="npu")
    return _device.recorded(device, stream, timing)


@hookimpl
def pin_host_memory(device: torch.device, address: int, nbytes: int) -> HostPin | None:
    """Register the mapping where this torch_npu can and the driver really does so."""
    npu = _torch_npu()
    if not hasattr(npu, "npurt"):
        return None
    runtime = npu.npurt()
    return _device.lock(
        device,
        address,
        nbytes,
        register=partial(runtime.npuHostRegister, address, nbytes, _MAPPED),
        unregister=partial(runtime.npuHostUnregister, address),
    )


@hookimpl
def distributed_backend() -> str:
    """Name HCCL."""
    return "hccl"
