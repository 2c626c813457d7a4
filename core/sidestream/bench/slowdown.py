"""What bringing outputs out costs the forwards that run meanwhile."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sidestream.bench.blocks import Block, Ratio, groups_in, ratio_of, run_blocks
from sidestream.bench.findings import Findings
from sidestream.bench.pipelines import Forward
from sidestream.bench.series import Series, Session, call, limit_of, run_series, warm_up
from sidestream.bench.table import Table, known, median
from sidestream.bench.workload import Workload

#: The goals: how much longer a forward may take.
_DEVICE_BOUND: Final = 0.005
_LAUNCH_BOUND: Final = 0.01
#: Forwards without an engine, and outputs whose wake-ups are counted, in each round.
COUNTED: Final = 12


def slowdown(
    session: Session, workloads: Sequence[Workload], *, rounds: int = 5, seconds: float = 2.0
) -> Iterator[Findings]:
    """Compare forwards whose outputs are kept with the same whose outputs are dropped.

    Both go through one engine in blocks that take turns, for ``seconds`` a round, so that the
    forwards that are compared are parts of a second apart; a third of it for those that fill the
    device, whose events tell more from fewer. Two times are compared: a forward, and the whole
    period from its start to the next one's, which also holds what is done between two forwards. One
    that fills the device is timed by device events. One of small kernels, of which the host is the
    limit, is timed on the host: whatever else runs in the worker's process takes from it.

    Each round also runs forwards alone, without an engine, and outputs by themselves to count
    wake-ups. Gives the table after each workload.
    """
    table = Table(
        name="slowdown",
        title="Time of a forward, and of a period from one's start to the next one's, with outputs "
        "kept relative to dropped (95 %)",
    )
    for workload in workloads:
        _measure(table, session, workload, rounds, groups_of(workload, seconds))
        yield Findings(tables=[table])


def groups_of(workload: Workload, seconds: float) -> int:
    """Give how many groups of blocks a round has."""
    return groups_in(seconds if workload.kind == "launch" else seconds / 3, workload.forward_s)


def _measure(table: Table, session: Session, workload: Workload, rounds: int, groups: int) -> None:
    engine = session.engine("on")
    dropped = workload.without_output()
    warm_up(engine, workload)
    alone: list[float] = []
    outputs: list[Series] = []
    found: list[tuple[list[Block], list[Block]]] = []
    for _ in range(rounds):
        limit_of(engine, workload, COUNTED)
        alone.append(_forward_s(workload, call(engine, "take_forwards")))
        outputs.append(run_series(engine, workload, COUNTED))
        found += run_blocks(engine, workload, dropped, groups)
    forwards, periods = (
        [(_mean(take, workload, kept), _mean(take, workload, other)) for kept, other in found]
        for take in (_block_s, _period_s)
    )
    by_forward, by_period = ratio_of(forwards), ratio_of(periods)
    kept_s = median([kept for kept, _ in forwards])
    name = f"{workload.kind}, {1e3 * workload.forward_s:g} ms, {workload.output}"
    table.add(
        forward=name,
        dropped_ms=1e3 * median([dropped for _, dropped in forwards]),
        forward_ratio=by_forward.value,
        forward_95=by_forward.interval,
        period_ratio=by_period.value,
        period_95=by_period.interval,
        to_alone=kept_s / median(alone),
        groups=by_forward.pairs,
        wakeups_per_output=median([_used(s, "wakeups") for s in outputs]),
        output_thread_us=1e6 * median([_used(s, "output_thread_cpu_s") for s in outputs]),
    )
    if session.has_device:
        bound = 1 + (_LAUNCH_BOUND if workload.kind == "launch" else _DEVICE_BOUND)
        _goal(table, f"{name}: forward", by_forward, bound)
        _goal(table, f"{name}: period", by_period, bound)


def _goal(table: Table, what: str, ratio: Ratio, bound: float) -> None:
    table.goal(f"{what}, kept to dropped (95 %: {ratio.interval})", ratio.value, bound=bound)


def _forward_s(workload: Workload, forwards: Sequence[Forward]) -> float:
    # The first one of a series starts on an idle device, and that of a block beside another's copy.
    timed = known([_time_s(workload, forward) for forward in forwards[1:]])
    return median(timed or [forward.host_s for forward in forwards[1:]])


def _block_s(workload: Workload, block: Block) -> float:
    return _forward_s(workload, block[:-1])


def _mean(
    take: Callable[[Workload, Block], float], workload: Workload, blocks: Sequence[Block]
) -> float:
    return statistics.fmean(take(workload, block) for block in blocks)


def _time_s(workload: Workload, forward: Forward) -> float | None:
    return forward.host_s if workload.kind == "launch" else forward.device_s


def _period_s(workload: Workload, block: Block) -> float:
    """Give the mean from one forward's start to the next one's: what counts is their sum."""
    counted = block[1:]
    if workload.kind != "launch":
        timed = [_device_period_s(one, following) for one, following in itertools.pairwise(counted)]
        if None not in timed:
            return sum(known(timed)) / len(timed)
    return (counted[-1].began_at - counted[0].began_at) / (len(counted) - 1)


def _device_period_s(forward: Forward, following: Forward) -> float | None:
    if forward.device_s is None or following.gap_s is None:
        return None
    return forward.device_s + following.gap_s


def _used(series: Series, what: str) -> float:
    before, after = series.worker
    used: float = getattr(after, what) - getattr(before, what)
    return used / len(series.samples)
