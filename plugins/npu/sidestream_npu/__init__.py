"""Huawei Ascend NPUs, by ``torch_npu``: see ``plugins/npu/README.md``."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from sidestream.platforms.device import Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.host_memory import HostRuntime
from sidestream.platforms.machine import hidden_devices, missing_libraries, probe_by, unusable_nodes
from sidestream.platforms.options import flag
from sidestream.platforms.torch_build import missing_pair, other_build
from sidestream.platforms.torch_device import TorchDevice, with_devices

#: "0" records events without waiting for the stream first; read its README before.
SYNCHRONIZE_VARIABLE: Final = "SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD"

_CPU_WHEELS: Final = "https://download.pytorch.org/whl/cpu"
_INSTALL: Final = (
    f"pip install torch==2.13.0 --index-url {_CPU_WHEELS}, and then pip install torch-npu==2.13.0"
)


def _torch_npu() -> Any:
    import torch
    import torch_npu  # noqa: F401 - makes torch.npu

    npu = torch.npu  # type: ignore[attr-defined]
    # Recording an event with no device there ends the process, past any except.
    return with_devices("npu", npu, "npu-smi info shows what the driver sees")


# The driver's wait for an event hangs for good once a launch before it was lost: asked instead.
_device = TorchDevice(
    platform="npu",
    load=_torch_npu,
    waits_before_record=partial(flag, SYNCHRONIZE_VARIABLE, default=True),
    host_wait="poll",
    runtime=HostRuntime(
        getter="npurt",
        register="npuHostRegister",
        unregister="npuHostUnregister",
        flags=0x2,  # MAPPED; with ACL_HOST_REG_PINNED alone copies are three times slower
    ),
)
set_device, side_stream = _device.set_device, _device.side_stream
record_device_event, synchronize_device = _device.record_device_event, _device.synchronize_device
check_device, pinned_buffer = _device.check_device, _device.pinned_buffer
pin_host_memory, memory_info = _device.pin_host_memory, _device.memory_info
empty_cache, profiler_range = _device.empty_cache, _device.profiler_range


@hookimpl
def probe() -> Probe:
    """Look at torch_npu's and torch's versions, CANN's libraries and the driver's device nodes."""
    return probe_by(
        "npu",
        "npu",
        "torch_npu, CANN and the Ascend driver are there",
        (
            partial(missing_pair, "torch_npu", _INSTALL),
            partial(
                other_build,
                "a CPU",
                lambda build: build.cuda is None,
                _INSTALL,
                why=", and importing torch_npu in a CUDA build ends the process",
            ),
            partial(
                missing_libraries,
                ("libascendcl.so", "libhccl.so"),
                "install CANN and source its set_env.sh",
                home="ASCEND_HOME_PATH",
            ),
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
def distributed_backend() -> str:
    """Name HCCL."""
    return "hccl"
