"""How long the device idles between two forwards though the next request is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from sidestream.bench.findings import Findings
from sidestream.bench.series import Sample, Series, Session, Way, run_series, warm_up
from sidestream.bench.table import Table, known, median, percentile
from sidestream.bench.workload import Workload

#: The goals of a forward that never waits for the device, in microseconds.
_P50_US: Final = 50.0
_P99_US: Final = 200.0
WAYS: Final[tuple[Way, ...]] = ("on", "off")


def bubble(
    session: Session, workloads: Sequence[Workload], *, count: int = 200
) -> Iterator[Findings]:
    """Measure the gaps of ``count`` forwards of each workload, both ways.

    A gap is from the end of one forward's last kernel to the end of the next one's first, which is
    very small: device time by events, and no less than what the device idled. Each workload also
    runs with a wait for the device at the end of its forward, as many pipelines have one: then the
    host is never ahead, and the gap is what the host does between two forwards. Those need half as
    many. Gives the table after each workload, and its outputs for a trace.
    """
    table = Table(
        name="bubble",
        title="Device idle time between two forwards, in microseconds",
    )
    samples: list[Sample] = []
    for workload in workloads:
        for waits in (False, True):
            for way in WAYS:
                kind = dataclasses.replace(workload, waits=waits)
                series = _run(session, kind, way, waiting(count) if waits else count)
                _report(table, session, workload, series, way, waits)
                if way == "on" and not waits:
                    samples = list(series.samples)
        yield Findings(tables=[table], samples=samples)


def waiting(count: int) -> int:
    """Give how many forwards that wait for the device are measured beside ``count`` others."""
    return max(4, count // 2)


def _run(session: Session, workload: Workload, way: Way, count: int) -> Series:
    engine = session.engine(way)
    warm_up(engine, workload)
    return run_series(engine, workload, count)


def _report(
    table: Table, session: Session, workload: Workload, series: Series, way: Way, waits: bool
) -> None:
    # The first forward finds an idle device, and the second may come before the host is ahead.
    forwards = series.forwards[2:]
    gaps_us = [1e6 * gap for gap in known([forward.gap_s for forward in forwards])]
    found_idle = [f.found_idle for f in forwards if f.found_idle is not None]
    name = f"{1e3 * workload.forward_s:g} ms, {workload.output}"
    p50, p99 = percentile(gaps_us, 0.5), percentile(gaps_us, 0.99)
    table.add(
        workload=name,
        output=way,
        waits=waits,
        p50_us=p50,
        p99_us=p99,
        max_us=max(gaps_us, default=float("nan")),
        share_of_forward=median(gaps_us) / (1e6 * workload.forward_s),
        found_idle=sum(found_idle),
        forwards=len(forwards),
        bound_us=0.0,
    )
    if session.has_device and way == "on" and not waits:
        table.goal(f"{name}: gap, p50", p50, bound=_P50_US, unit="us")
        table.goal(f"{name}: gap, p99", p99, bound=_P99_US, unit="us")
        table.goal(f"{name}: forwards that found the device idle", sum(found_idle), bound=0)
