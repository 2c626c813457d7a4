"""Intel GPUs, by torch's own ``torch.xpu``: see ``plugins/xpu/README.md``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from sidestream.platforms.device import Probe
from sidestream.platforms.hookspecs import hookimpl
from sidestream.platforms.machine import (
    installed_version,
    minor,
    missing_pci_vendor,
    probe_by,
    unusable_nodes,
)
from sidestream.platforms.torch_build import other_build, torch_build
from sidestream.platforms.torch_device import TorchDevice

_INSTALL: Final = "pip install torch --index-url https://download.pytorch.org/whl/xpu"
_INTEL: Final = 0x8086


def _torch_xpu() -> Any:
    import torch

    return torch.xpu


def _itt() -> Any:
    from torch.profiler import itt

    return itt if itt.is_available() else None  # type: ignore[no-untyped-call]


# No pin_host_memory: torch.xpu can't register memory, so outputs go through a staging buffer. The
# host waits for a stream: Event.synchronize has hung for good under load.
_device = TorchDevice(platform="xpu", load=_torch_xpu, host_wait="stream", marker=_itt)
set_device, side_stream = _device.set_device, _device.side_stream
record_device_event, synchronize_device = _device.record_device_event, _device.synchronize_device
check_device, pinned_buffer = _device.check_device, _device.pinned_buffer
memory_info, empty_cache = _device.memory_info, _device.empty_cache
profiler_range = _device.profiler_range


@hookimpl
def probe() -> Probe:
    """Look at torch's build and the driver's device nodes; report Intel's old extension."""
    probe = probe_by(
        "xpu",
        "xpu",
        "torch is an XPU build and a GPU driver is there",
        (
            partial(
                other_build,
                "an XPU",
                lambda build: build.xpu is not None or "+xpu" in build.version,
                _INSTALL,
            ),
            partial(
                unusable_nodes,
                ("/dev/dri/renderD*", "/dev/dxg"),
                "install Intel's GPU driver, or start the container with --device /dev/dri; the "
                "user has to be in the group render",
            ),
            partial(missing_pci_vendor, _INTEL, "Intel", "check that the GPU is passed through"),
        ),
    )
    return replace(probe, reason=probe.reason + _note_on_ipex())


@hookimpl
def distributed_backend() -> str:
    """Name XCCL."""
    return "xccl"


def _note_on_ipex() -> str:
    """Say what an installed intel_extension_for_pytorch, at the end of its life, means here."""
    ipex, build = installed_version("intel-extension-for-pytorch"), torch_build()
    if ipex is None or build is None:
        return ""
    note = f"; intel_extension_for_pytorch {ipex} is not used here, torch.xpu replaces it"
    if minor(ipex) != minor(build.version):
        note += f", and importing it fails with torch {build.version}: uninstall it"
    return note
