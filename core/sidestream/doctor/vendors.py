"""What belongs to each known vendor on a machine: device nodes, variables, packages.

Only to explain: which platforms there are, and whether they work, the plugins say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """The marks of one vendor's stack."""

    #: Where device nodes are; globs, the first that matches anything counts.
    nodes: tuple[str, ...]
    #: Of those, nodes whose parent in /sys has this PCI vendor id; None: the path tells enough.
    pci_vendor: str | None = None
    #: Environment variables that hide devices.
    hiding: tuple[str, ...] = ()
    #: The package that teaches torch the device; None: torch's own build does.
    extension: str | None = None
    #: The module of the management library.
    management: str | None = None
    #: Who may open the nodes, as advice.
    groups: str = ""


VENDORS: Final[Mapping[str, Vendor]] = {
    "cuda": Vendor(
        nodes=("/dev/nvidiactl", "/dev/dxg"),
        hiding=("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        management="pynvml",
        groups="start the container with --gpus all",
    ),
    "rocm": Vendor(
        nodes=("/dev/kfd",),
        hiding=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        groups="add the user to the groups render and video "
        "(container: --device /dev/kfd --device /dev/dri)",
    ),
    "npu": Vendor(
        nodes=("/dev/davinci[0-9]*",),
        hiding=("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"),
        extension="torch_npu",
        groups="add the user to the group HwHiAiUser (container: --device /dev/davinci0 and so on)",
    ),
    "xpu": Vendor(
        nodes=("/dev/dri/renderD*",),
        pci_vendor="0x8086",
        hiding=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
        management="pyzes",
        groups="add the user to the group render (container: --device /dev/dri)",
    ),
    "musa": Vendor(
        nodes=("/dev/mtgpu*",),
        hiding=("MUSA_VISIBLE_DEVICES",),
        extension="torch_musa",
        management="pymtml",
        groups="start the container with the vendor's runtime",
    ),
}

#: Packages that change torch when they are imported, and load by no entry point of torch's.
PATCHERS: Final = ("intel_extension_for_pytorch", "torchada")
#: Variables with which such packages stand in for CUDA: what says "cuda" is then another device.
PRETENDING: Final = ("TORCH_TRANSFER_TO_NPU", "TORCHADA_FORCE_CUDA_AVAILABLE")


def nodes_of(vendor: Vendor) -> list[str]:
    """List the vendor's device nodes on this machine."""
    for pattern in vendor.nodes:
        path = Path(pattern)
        found = [node for node in sorted(path.parent.glob(path.name)) if _fits(node, vendor)]
        if found:
            return [str(node) for node in found]
    return []


def inaccessible(nodes: list[str]) -> list[str]:
    """Give those that this user can't open."""
    return [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]


def hiding_variable(vendor: Vendor) -> str | None:
    """Name a variable that hides all devices, as ``NAME='value'``."""
    for name in vendor.hiding:
        value = os.environ.get(name)
        if value is not None and (value.strip() in ("", "void") or value.strip().startswith("-")):
            return f"{name}={value!r}"
    return None


def _fits(node: Path, vendor: Vendor) -> bool:
    if vendor.pci_vendor is None:
        return True
    try:
        found = Path(f"/sys/class/drm/{node.name}/device/vendor").read_text("ascii").strip()
    except OSError:
        return False
    return found == vendor.pci_vendor
