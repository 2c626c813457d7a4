"""What is wrong, told from what a vendor's stack prints when it is broken, and what to do.

The patterns were seen by running the packages, or stand in the vendors' sources; what none of them
fits is named by how it failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sidestream.doctor.questions import Answer


@dataclass(frozen=True)
class Cause:
    """One word for what is wrong, and advice in a line."""

    word: str
    advice: str


@dataclass(frozen=True)
class _Known:
    pattern: re.Pattern[str]
    cause: Cause


def _known(word: str, pattern: str, advice: str) -> _Known:
    return _Known(re.compile(pattern, re.IGNORECASE), Cause(word, advice))


# The first that fits counts: the particular before the general. "{found}" is the first group.
_KNOWN: Final = (
    _known(
        "torch-missing",
        r"No module named 'torch'|torch is not installed",
        "Install the vendor's build of torch first, then the extra; see the README, 'Install'.",
    ),
    _known(
        "torch-cuda-build",
        r"Duplicated key 'pinned_reserve",
        "torch_npu aborts on a CUDA build of torch; install the CPU build over it: "
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu",
    ),
    _known(
        "cann-missing",
        r"(lib(?:hccl|ascendcl|ascend_hal|acl_\w+|ge_runner|graph)\.so)[^\n]*: cannot open",
        "Install CANN and run 'source .../ascend-toolkit/set_env.sh' in this shell: "
        "{found} is not on LD_LIBRARY_PATH.",
    ),
    _known(
        "cann-path",
        r"(ASCEND_(?:HOME|OPP)_PATH)[^\n]*(?:not exist|invalid|permission|not found)",
        "{found} leads nowhere: run 'source .../ascend-toolkit/set_env.sh' again.",
    ),
    _known(
        "two-accelerators",
        r"Two accelerators cannot be used at the same time",
        "Uninstall one of the two vendors' packages, or keep them in environments of their own.",
    ),
    _known(
        "ipex-mismatch",
        r"Extension for PyTorch\*? needs to work with|module 'os' has no attribute 'exit'",
        "Uninstall intel-extension-for-pytorch: it is at its end of life, fits torch 2.8 only, and "
        "torch.xpu works without it.",
    ),
    _known(
        "version-mismatch",
        r"undefined symbol",
        "It was built for another release of torch: install the one that belongs to this torch, "
        "or uninstall it.",
    ),
    _known(
        "driver-old",
        r"driver version is insufficient|driver on your system is too old",
        "Update the driver, or install a build of torch for an older runtime.",
    ),
    _known(
        "driver-missing",
        r"Found no NVIDIA driver|NVML Shared Library Not Found|Driver Not Loaded"
        r"|libmtml\.so: cannot open|libze_loader\.so\S*: cannot open",
        "Install the vendor's driver, or give the container its devices.",
    ),
    _known(
        "torch-build",
        r"Torch not compiled with (\w+) enabled",
        "This torch was built without {found}: install the vendor's build.",
    ),
    _known(
        "self-test",
        r"bytes copied from .* by a side stream are wrong|The self-test(?:'s copy)? "
        r"|returned \d+ of \d+ bytes changed",
        "Outputs would be corrupt: update the driver and the vendor's torch, and report it to the "
        "plugin's author.",
    ),
    _known(
        "no-devices",
        r"\b(?:507033|107001)\b|No (?:CUDA|HIP|XPU|NPU|MUSA) (?:GPUs|devices|device) (?:are|is)"
        r"|no CUDA-capable device|Invalid device(?: ordinal| id)?",
        "The runtime sees no such device: check the variables that hide devices and the driver.",
    ),
    _known(
        "library-missing",
        r"(\S+\.so[.\d]*): cannot open shared object file",
        "{found} is not found: install the vendor's runtime, or add its folder to LD_LIBRARY_PATH.",
    ),
    _known(
        "no-access",
        r"Permission denied",
        "This user may not open the device: check groups, or the container's devices.",
    ),
)

_CRASHED: Final = Cause(
    "crashed",
    "It ends its process: install the release that belongs to this torch, or uninstall it.",
)
_HUNG: Final = Cause(
    "hung", "It does not answer: look for a stuck driver, or give it longer with --timeout-s."
)
_FAILED: Final = Cause("failed", "Read the evidence; 'sidestream doctor --json' shows all of it.")
_BY_ERROR: Final[Mapping[str, Cause]] = {
    "PluginLoadError": Cause(
        "plugin-import", "Reinstall the plugin or uninstall it; others are not kept from working."
    ),
    "PluginContractError": Cause(
        "plugin-contract",
        "Report it to the plugin's author, or uninstall it; others are not kept from working.",
    ),
}


def cause_of(answer: Answer) -> Cause:
    """Name the cause of a failed answer."""
    for known in _KNOWN:
        if (match := known.pattern.search(answer.text)) is not None:
            found = match[1] if match.re.groups and match[1] else ""
            return Cause(known.cause.word, known.cause.advice.format(found=found))
    if answer.is_hung:
        return _HUNG
    if answer.is_crashed:
        return _CRASHED
    return cause_by_error(answer) or _FAILED


def cause_by_error(answer: Answer) -> Cause | None:
    """Name the cause by the class of the outermost error; None: that tells nothing."""
    return _BY_ERROR.get(answer.errors[0]["type"]) if answer.errors else None
