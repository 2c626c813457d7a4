"""What it costs to be there: an idle engine, an import, the command line."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
import sys
import time
from typing import Final

from sidestream.bench.pipelines import usage_of_this_process
from sidestream.bench.series import Session, call, settle
from sidestream.bench.table import Table
from sidestream.bench.workload import Workload

_IDLE_SHARE: Final = 0.005
_IMPORT_S: Final = 0.3
_HELP_S: Final = 0.4
_DEPENDENCIES: Final = 6
_STARTS: Final = 5


def idle(session: Session, *, seconds: float = 5.0) -> Table:
    """Measure an engine that waits for requests, and how quickly processes start.

    Starts are the quickest of some: whatever else the machine does can only add. The CPU time of
    the cheapest stands beside it.
    """
    table = Table(name="idle", title="What it costs to be there")
    share, wakeups = _idle_engine(session, seconds)
    table.add(what="idle engine: share of a core", value=share, bound=_IDLE_SHARE)
    table.add(what="idle engine: wake-ups a second", value=wakeups, bound=None)
    bare, bare_cpu = _quickest_s("-c", "pass")
    imported, imported_cpu = _quickest_s("-c", "import sidestream")
    helped, helped_cpu = _quickest_s("-m", "sidestream.cli.main", "--help")
    table.add(what="python -c pass: seconds", value=bare, bound=None, cpu_s=bare_cpu)
    table.add(
        what="import sidestream: seconds",
        value=imported - bare,
        bound=_IMPORT_S,
        cpu_s=imported_cpu - bare_cpu,
    )
    table.add(what="sidestream --help: seconds", value=helped, bound=_HELP_S, cpu_s=helped_cpu)
    needed = base_dependencies()
    if needed:
        table.add(what="base dependencies", value=len(needed), bound=_DEPENDENCIES)
        table.notes.append(f"Base dependencies: {', '.join(needed)}.")
    for row in table.rows:
        if row["bound"] is not None:
            table.goal(row["what"], row["value"], bound=row["bound"])
    return table


def base_dependencies() -> list[str]:
    """List what an installation without extras brings; nothing if it is none."""
    try:
        requirements = importlib.metadata.requires("sidestream") or []
    except importlib.metadata.PackageNotFoundError:
        return []  # run from a source tree
    return [line for line in requirements if "extra ==" not in line]


def _idle_engine(session: Session, seconds: float) -> tuple[float, float]:
    engine = session.engine("on")
    for _ in engine.imap(Workload(output="64px", forward_s=0.001).requests(2)):
        pass
    settle(engine)
    before = call(engine, "usage"), usage_of_this_process()
    began = time.monotonic()
    time.sleep(seconds)  # it is what is measured: nothing happens
    after = call(engine, "usage"), usage_of_this_process()
    elapsed_s = time.monotonic() - began
    cpu_s = sum(b.cpu_s - a.cpu_s for a, b in zip(before, after, strict=True))
    wakeups = sum(b.wakeups - a.wakeups for a, b in zip(before, after, strict=True))
    return cpu_s / elapsed_s, wakeups / elapsed_s


def _quickest_s(*arguments: str) -> tuple[float, float]:
    times, cpu_times = [], []
    for _ in range(_STARTS):
        began, began_cpu_s = time.perf_counter(), _children_cpu_s()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
        cpu_times.append(_children_cpu_s() - began_cpu_s)
    return min(times), min(cpu_times)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
