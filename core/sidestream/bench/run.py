"""Each table by its name, and all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sidestream.bench.bubble import bubble
from sidestream.bench.handoff import first_of_batch, handoff
from sidestream.bench.idle import idle
from sidestream.bench.overload import overload
from sidestream.bench.plan import Plan
from sidestream.bench.series import Sample, Session
from sidestream.bench.slowdown import slowdown
from sidestream.bench.table import Table
from sidestream.bench.throughput import Cell, throughput
from sidestream.bench.transport import transport


@dataclass(kw_only=True)
class Findings:
    """What a measurement gave."""

    tables: list[Table]
    #: For a plot: the shares of each workload.
    cells: list[Cell] = field(default_factory=list)
    #: For a trace or a timeline: the outputs of one series.
    samples: list[Sample] = field(default_factory=list)


Measure = Callable[[Session, Plan], Findings]


def _throughput(session: Session, plan: Plan) -> Findings:
    table, cells, samples = throughput(
        session, plan.throughput, rounds=plan.rounds, seconds=plan.seconds
    )
    return Findings(tables=[table], cells=cells, samples=samples)


def _bubble(session: Session, plan: Plan) -> Findings:
    table, samples = bubble(session, plan.bubble, count=plan.bubble_count)
    return Findings(tables=[table], samples=samples)


def _slowdown(session: Session, plan: Plan) -> Findings:
    table = slowdown(session, plan.slowdown, rounds=plan.slowdown_rounds, count=plan.slowdown_count)
    return Findings(tables=[table])


def _handoff(session: Session, plan: Plan) -> Findings:
    table, samples = handoff(session, plan.handoff, count=plan.handoff_count)
    return Findings(tables=[table, first_of_batch(session, plan.batch)], samples=samples)


def _transport(_session: Session, plan: Plan) -> Findings:
    return Findings(tables=[transport(plan.transport, seconds=plan.transport_seconds)])


def _idle(session: Session, plan: Plan) -> Findings:
    return Findings(tables=[idle(session, seconds=plan.idle_seconds)])


def _overload(session: Session, plan: Plan) -> Findings:
    return Findings(tables=[overload(session, plan.overload, seconds=plan.overload_seconds)])


#: In the order in which they are measured.
TABLES: Final[dict[str, Measure]] = {
    "handoff": _handoff,
    "slowdown": _slowdown,
    "throughput": _throughput,
    "bubble": _bubble,
    "overload": _overload,
    "idle": _idle,
    "transport": _transport,
}


def measure(name: str, session: Session, plan: Plan) -> Findings:
    """Measure the tables of one name, and note how long that took."""
    began = time.monotonic()
    findings = TABLES[name](session, plan)
    findings.tables[0].took_s = time.monotonic() - began
    return findings


def measure_all(session: Session, plan: Plan) -> Iterator[Findings]:
    """Measure everything, and give what there is after each part."""
    for name in TABLES:
        yield measure(name, session, plan)
