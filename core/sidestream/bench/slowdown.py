"""What bringing outputs out costs the forwards that run meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sidestream.bench.pipelines import Forward
from sidestream.bench.series import Session, call, limit_of, run_series, warm_up
from sidestream.bench.table import Table, known, median
from sidestream.bench.workload import Workload

#: The goals: how much longer a forward may take.
_DEVICE_BOUND: Final = 0.005
_LAUNCH_BOUND: Final = 0.01


def slowdown(
    session: Session, workloads: Sequence[Workload], *, rounds: int = 5, count: int = 60
) -> Table:
    """Compare forwards alone, through the engine with outputs dropped, and with outputs kept.

    A forward that fills the device is timed by device events. One of small kernels, of which the
    host is the limit, is timed on the host from its first launch to its last: whatever else runs
    in the worker's process takes from it. Each round runs all three; ratios are of one round.
    """
    table = Table(
        name="slowdown",
        title="Time of a forward, relative to the same with its output dropped",
    )
    for workload in workloads:
        _measure(table, session, workload, rounds, count)
    return table


def _measure(table: Table, session: Session, workload: Workload, rounds: int, count: int) -> None:
    engine = session.engine("on")
    dropped = workload.without_output()
    warm_up(engine, workload)
    alone, through, kept, wakeups, cpu_s = [], [], [], [], []
    for _ in range(rounds):
        limit_of(engine, workload, count)
        alone.append(_typical_s(workload, call(engine, "take_forwards")))
        through.append(_typical_s(workload, run_series(engine, dropped, count).forwards))
        series = run_series(engine, workload, count)
        kept.append(_typical_s(workload, series.forwards))
        before, after = series.worker
        wakeups.append((after.wakeups - before.wakeups) / count)
        cpu_s.append((after.output_thread_cpu_s - before.output_thread_cpu_s) / count)
    by_copy = median([k / t for k, t in zip(kept, through, strict=True)])
    by_all = median([k / a for k, a in zip(kept, alone, strict=True)])
    name = f"{workload.kind}, {1e3 * workload.forward_s:g} ms, {workload.output}"
    table.add(
        forward=name,
        alone_ms=1e3 * median(alone),
        dropped_ms=1e3 * median(through),
        kept_ms=1e3 * median(kept),
        kept_to_dropped=by_copy,
        kept_to_alone=by_all,
        wakeups_per_output=median(wakeups),
        output_thread_us=1e6 * median(cpu_s),
    )
    if session.has_device:
        bound = 1 + (_LAUNCH_BOUND if workload.kind == "launch" else _DEVICE_BOUND)
        table.goal(f"{name}: with outputs, relative to dropped", by_copy, bound=bound)


def _typical_s(workload: Workload, forwards: Sequence[Forward]) -> float:
    # The first one of a series starts on an idle device.
    if workload.kind == "launch":
        return median([forward.host_s for forward in forwards[1:]])
    timed = known([forward.device_s for forward in forwards[1:]])
    return median(timed or [forward.host_s for forward in forwards[1:]])
