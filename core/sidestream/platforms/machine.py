"""What a probe reads of the machine: device files, libraries, variables. Nothing is imported.

Each function says in one line what is missing and what to do, or None.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from sidestream.platforms.device import Probe

_LOADER_CACHE: Final = Path("/etc/ld.so.cache")


def probe_by(
    name: str, device_type: str, found: str, checks: Iterable[Callable[[], str | None]]
) -> Probe:
    """Make a probe; what the first check with an objection says is why not, else ``found``."""
    problem = next((problem for check in checks if (problem := check()) is not None), None)
    return Probe(
        name=name, device_type=device_type, available=problem is None, reason=problem or found
    )


def hidden_devices(*variables: str) -> str | None:
    """Say which variable hides all devices: it is empty, or starts with a minus."""
    for variable in variables:
        value = os.environ.get(variable)
        if value is not None and (not value.strip() or value.strip().startswith("-")):
            return f"{variable}={value!r} hides all devices; unset it or name some"
    return None


def unusable_nodes(nodes: Sequence[str], advice: str) -> str | None:
    """Say that none of these device files (patterns) is there, or that this user can't open one."""
    found = [path for node in nodes for path in sorted(Path("/").glob(node.lstrip("/")))]
    if not found:
        return f"there is no {' or '.join(nodes)}; {advice}"
    if not any(os.access(path, os.R_OK | os.W_OK) for path in found):
        return f"{found[0]} can't be opened by this user; check its permissions and groups"
    return None


def missing_pci_vendor(vendor: int, maker: str, advice: str) -> str | None:
    """Say that no device on the PCI bus is of that vendor."""
    for path in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            if int(path.read_text(), 16) == vendor:
                return None
        except (OSError, ValueError):
            continue  # it was unplugged
    return f"there is no {maker} device on the PCI bus (vendor {vendor:#06x}); {advice}"


def missing_libraries(
    libraries: Sequence[str], advice: str, *, folders: Sequence[Path] = (), home: str | None = None
) -> str | None:
    """Say which shared libraries the loader would not find.

    ``folders`` count as searched too, and ``lib64`` in the one that the variable ``home`` names.
    """
    searched = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    searched += folders
    if home is not None and os.environ.get(home):
        searched.append(Path(os.environ[home]) / "lib64")
    try:
        cache = _LOADER_CACHE.read_bytes()
    except OSError:
        cache = b""
    missing = [
        library
        for library in libraries
        if library.encode() not in cache and not any((one / library).exists() for one in searched)
    ]
    return f"{', '.join(missing)} can't be found; {advice}" if missing else None


def missing_backend(package: str, install: str) -> str | None:
    """Say that torch, or a vendor's package for it, is not installed."""
    for name in ("torch", package):
        if name not in sys.modules and find_spec(name) is None:
            return f"{name} is not installed; install it: {install}"
    return None


def installed_version(distribution: str) -> str | None:
    """Give the version of an installed distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def minor(full: str) -> str:
    """Shorten a version to its first two numbers: "2.13.0+cpu" to "2.13"."""
    return ".".join(full.split("+")[0].split(".")[:2])
