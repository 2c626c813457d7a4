"""Requests a second, with and without asynchronous output, as shares of the limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from sidestream.bench.findings import Cell, Findings
from sidestream.bench.series import Series, Session, limit_of, run_series, warm_up
from sidestream.bench.table import Table, known, median
from sidestream.bench.workload import Workload

#: A gain under this share of the limit is none.
_NO_GAIN: Final = 0.002
_FEWEST, _MOST = 3, 200


def throughput(
    session: Session,
    workloads: Sequence[Workload],
    *,
    rounds: int = 3,
    seconds: float = 0.5,
) -> Iterator[Findings]:
    """Measure each workload in ``rounds`` rounds of about ``seconds`` a series.

    A round is the limit (outputs dropped on the device, no engine in between), a series with
    asynchronous output, and one without, each round beginning with another of them; a share is
    that of its own round's limit. Gives after each workload the table and the shares so far, and
    the outputs of its last asynchronous series for a trace.
    """
    table = Table(
        name="throughput",
        title="Requests/s as shares of the limit (outputs dropped on the device); median (range)",
    )
    if not session.platform.is_asynchronous:
        table.notes.append(
            f"{session.platform.name!r} has no asynchronous output: both ways are the same there, "
            "and a gain is noise."
        )
    cells: list[Cell] = []
    for workload in workloads:
        count = requests_in(seconds, workload)
        cell, limits, last = _measure(session, workload, rounds, count)
        _report(table, session, workload, cell, limits, last)
        cells.append(cell)
        yield Findings(tables=[table], cells=cells, samples=list(last.samples))


def requests_in(seconds: float, workload: Workload) -> int:
    """Give how many requests a series has."""
    return max(_FEWEST, min(_MOST, math.ceil(seconds / workload.forward_s)))


def _measure(
    session: Session, workload: Workload, rounds: int, count: int
) -> tuple[Cell, list[float], Series]:
    engines = {"on": session.engine("on"), "off": session.engine("off")}
    for engine in engines.values():
        warm_up(engine, workload)
    limits: list[float] = []
    shares: dict[str, list[float]] = {way: [] for way in engines}
    ways = ["limit", *engines]
    for _ in range(rounds):
        rates: dict[str, float] = {}
        for way in ways:
            if way == "limit":
                rates[way] = limit_of(engines["on"], workload, count)
                continue
            series = run_series(engines[way], workload, count)
            rates[way] = series.rate
            if way == "on":
                last = series
        limits.append(rates["limit"])
        for way, found in shares.items():
            found.append(rates[way] / rates["limit"])
        # What one does to the device's clock, the next one has.
        ways.append(ways.pop(0))
    name = f"{1e3 * workload.forward_s:g} ms, {workload.output}"
    return Cell(name=name, **shares), limits, last


def _report(
    table: Table,
    session: Session,
    workload: Workload,
    cell: Cell,
    limits: Sequence[float],
    last: Series,
) -> None:
    copy_s = median(known([sample.timings.copy_s for sample in last.samples]))
    limit, on, off = median(limits), median(cell.on), median(cell.off)
    # One copy at a time leaves the device: nothing is quicker than all of them one by one.
    bound = min(1.0, 1 / (copy_s * limit)) if copy_s > 0 else 1.0
    gain = on - off
    table.add(
        workload=cell.name,
        limit_per_s=limit,
        on=on,
        on_range=_range(cell.on),
        off=off,
        off_range=_range(cell.off),
        bound=bound,
        copy_ms=1e3 * copy_s,
        gain=f"{100 * gain / off:+.2f} %" if gain > _NO_GAIN else "none",
        made=last.blocks_made,
        carrier=last.samples[-1].timings.carrier,
    )
    if not session.has_device:
        return
    is_video = workload.shape[0] > 16
    if bound == 1.0 and (workload.forward_s >= 0.02 or is_video):
        goal = 0.99 if is_video else 0.995
        table.goal(f"{cell.name}: share of the limit", on, bound=goal, at_least=True)
    if last.blocks_made is not None:
        table.goal(f"{cell.name}: arenas made while it ran", last.blocks_made, bound=0)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4f}-{max(values):.4f}"
