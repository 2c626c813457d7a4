"""What the operating system allows this process, and what the environment's variables do."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Final

from sidestream.autoload import AUTOLOAD_VARIABLE
from sidestream.config import EngineConfig
from sidestream.doctor.report import Finding, State
from sidestream.doctor.vendors import PRETENDING

#: The usual default; an engine with workers for eight devices is far from it.
_ENOUGH_DESCRIPTORS: Final = 1024
_FEWEST_DESCRIPTORS: Final = 64
_MEMFD_BYTES: Final = 1 << 20
_MIB: Final = 1 << 20


def find_limits(environment: Mapping[str, str]) -> tuple[Finding, ...]:
    """Look at shared memory, process descriptors, descriptors, page-locking and variables."""
    return (
        _memfd(),
        _pidfd(),
        _memory(),
        _descriptors(),
        _page_locks(),
        *_variables(environment),
    )


def _memfd() -> Finding:
    from sidestream.transport.memory import HostMemoryError, allocate

    try:
        fd, mapping = allocate(_MEMFD_BYTES)
    except HostMemoryError as error:
        return Finding(
            name="memfd",
            state=State.BROKEN,
            cause="memfd-refused",
            evidence=(error.reason,),
            advice="Outputs travel in sealed memfds: let the sandbox or container allow them.",
        )
    os.close(fd)
    return Finding(
        name="memfd",
        state=State.USABLE,
        evidence=(f"{_size(mapping.nbytes)} made, sealed and mapped",),
    )


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            name="pidfd",
            state=State.BROKEN,
            cause="pidfd-refused",
            evidence=(f"pidfd_open: {error.strerror}",),
            advice="Workers are watched by pidfds: Linux 5.3 or newer, and a sandbox that allows "
            "them; or EngineConfig(executor='uniproc').",
        )
    return Finding(name="pidfd", state=State.USABLE, evidence=("a process can be watched",))


def _memory() -> Finding:
    from sidestream.transport.memory_limit import available_bytes

    default = EngineConfig.host_buffer_bytes
    available = available_bytes()
    if available is None:
        return Finding(name="memory", state=State.USABLE, evidence=("its limit is not known",))
    seen = f"{_size(available)} before a limit; host_buffer_bytes is {_size(default)} by default"
    if available >= default:
        return Finding(name="memory", state=State.USABLE, evidence=(seen,))
    return Finding(
        name="memory",
        state=State.LIMITED,
        cause="memory-low",
        evidence=(seen,),
        advice=f"Raise the container's memory limit, or set host_buffer_bytes below {available}.",
    )


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_number(soft)} (RLIMIT_NOFILE; at most {_number(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_DESCRIPTORS:
        return Finding(name="descriptors", state=State.USABLE, evidence=(seen,))
    return Finding(
        name="descriptors",
        state=State.LIMITED if soft >= _FEWEST_DESCRIPTORS else State.BROKEN,
        cause="descriptors-low",
        evidence=(seen,),
        advice=f"ulimit -n {_ENOUGH_DESCRIPTORS}: each worker takes about ten.",
    )


def _page_locks() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = f"{_bytes(soft)} (RLIMIT_MEMLOCK; at most {_bytes(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _MIB:
        # CUDA and ROCm lock pages in the kernel driver, which does not ask for this limit.
        return Finding(name="page-locks", state=State.USABLE, evidence=(seen,))
    return Finding(
        name="page-locks",
        state=State.LIMITED,
        cause="page-locks-low",
        evidence=(seen,),
        advice="ulimit -l unlimited (container: --ulimit memlock=-1), for runtimes that use mlock.",
    )


def _variables(environment: Mapping[str, str]) -> list[Finding]:
    """Report variables that change what torch or sidestream take a device for."""
    names = [name for name in PRETENDING if environment.get(name) not in (None, "", "0")]
    findings = [
        Finding(
            name="environment",
            state=State.LIMITED,
            cause="stands-in-for-cuda",
            evidence=(f"{name}={environment[name]!r}",),
            advice=f"Unset {name}: with it 'cuda' means another vendor's device.",
        )
        for name in names
    ]
    if (value := environment.get(AUTOLOAD_VARIABLE)) is not None:
        seen = f"{AUTOLOAD_VARIABLE}={value!r} (sidestream sets it to '0' for itself)"
        findings.append(Finding(name="environment", state=State.USABLE, evidence=(seen,)))
    return findings


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _bytes(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else _size(limit)


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB" if nbytes >= _MIB else f"{nbytes / 1024:,.0f} KiB"
