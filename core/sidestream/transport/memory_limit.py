"""How much memory this process may still take before a control group kills it.

An rlimit answers with an error, a control group with SIGKILL: its limit has to be read before the
memory is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: cgroup v1 writes "no limit" as the largest page-aligned 63-bit number.
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True)
class _Controller:
    """File names of one cgroup version's memory controller."""

    filesystem: str
    limit: str
    usage: str
    #: Lines of ``memory.stat`` that count file pages. They fill up to the limit on any machine
    #: that reads checkpoints, and the kernel takes them back before it kills.
    reclaimable: tuple[str, ...]


_CONTROLLERS: Final = (
    _Controller("cgroup2", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _Controller(
        "cgroup",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_bytes(*, proc: Path = Path("/proc")) -> int | None:
    """Give the bytes that the tightest limit above this process still allows.

    Looks at the machine's own memory and at every control group from this process's up to the
    root, in either version. Some 0.1 ms: for each arena, not for each slot.

    Args:
        proc: Where procfs is mounted.

    Returns:
        Bytes, or None where nothing can be read.
    """
    bounds = [
        bound
        for controller, group in _groups(proc)
        if (bound := _left_in(group, controller)) is not None
    ]
    machine = _lines(proc / "meminfo").get("MemAvailable:")
    if machine is not None:
        bounds.append(machine * 1024)
    return min(bounds, default=None)


@functools.cache  # a process stays in the groups that it was started in
def _groups(proc: Path) -> tuple[tuple[_Controller, Path], ...]:
    """Find this process's control groups and those above them, as far as they have a limit."""
    found = []
    for controller in _CONTROLLERS:
        own = _own_group(proc, controller)
        mount, root = next(_mounts(proc, controller), (None, ""))
        if own is None or mount is None:
            continue
        # In a container the mount often shows a subtree only, or a namespace hides the prefix.
        group = mount / own.removeprefix(root.rstrip("/")).lstrip("/")
        found += [
            (controller, path)
            for path in (group, *group.parents)
            if path.is_relative_to(mount) and (path / controller.limit).exists()
        ]
    return tuple(found)


def _own_group(proc: Path, controller: _Controller) -> str | None:
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller.filesystem == "cgroup2":
            if number == "0" and not names:
                return path
        elif "memory" in names.split(","):
            return path
    return None


def _mounts(proc: Path, controller: _Controller) -> Iterator[tuple[Path, str]]:
    """Yield (mount point, root of the mount) of a controller's file system."""
    for line in _text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] != controller.filesystem:
            continue
        if controller.filesystem == "cgroup2" or "memory" in kind[2].split(","):
            yield Path(fields[4]), fields[3]


def _left_in(group: Path, controller: _Controller) -> int | None:
    limit, usage = _number(group / controller.limit), _number(group / controller.usage)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    stat = _lines(group / "memory.stat")
    reclaimable = sum(stat.get(name, 0) for name in controller.reclaimable)
    return max(0, limit - max(0, usage - reclaimable))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _lines(path: Path) -> dict[str, int]:
    """Read ``name number`` lines."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
