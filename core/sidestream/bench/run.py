"""Each table by its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from sidestream.bench.bubble import bubble
from sidestream.bench.findings import Findings
from sidestream.bench.handoff import first_of_batch, handoff
from sidestream.bench.idle import idle
from sidestream.bench.overload import overload
from sidestream.bench.plan import Plan
from sidestream.bench.series import Session
from sidestream.bench.slowdown import slowdown
from sidestream.bench.throughput import throughput
from sidestream.bench.transport import transport

Measure = Callable[[Session, Plan], Iterator[Findings]]


def _throughput(session: Session, plan: Plan) -> Iterator[Findings]:
    yield from throughput(session, plan.throughput, rounds=plan.rounds, seconds=plan.seconds)


def _bubble(session: Session, plan: Plan) -> Iterator[Findings]:
    yield from bubble(session, plan.bubble, count=plan.bubble_count)


def _slowdown(session: Session, plan: Plan) -> Iterator[Findings]:
    yield from slowdown(
        session, plan.slowdown, rounds=plan.slowdown_rounds, seconds=plan.slowdown_seconds
    )


def _handoff(session: Session, plan: Plan) -> Iterator[Findings]:
    table, samples = handoff(session, plan.handoff, count=plan.handoff_count)
    yield Findings(tables=[table, first_of_batch(session, plan.batch)], samples=samples)


def _transport(_session: Session, plan: Plan) -> Iterator[Findings]:
    yield Findings(tables=[transport(plan.transport, seconds=plan.transport_seconds)])


def _idle(session: Session, plan: Plan) -> Iterator[Findings]:
    yield Findings(tables=[idle(session, seconds=plan.idle_seconds)])


def _overload(session: Session, plan: Plan) -> Iterator[Findings]:
    yield Findings(tables=[overload(session, plan.overload, seconds=plan.overload_seconds)])


#: In the order in which they are measured: the quick ones first, so that a run that is cut short
#: has most of them. The first one gives the outputs that are drawn.
TABLES: Final[dict[str, Measure]] = {
    "bubble": _bubble,
    "slowdown": _slowdown,
    "handoff": _handoff,
    "overload": _overload,
    "idle": _idle,
    "transport": _transport,
    "throughput": _throughput,
}


def measure(name: str, session: Session, plan: Plan) -> Iterator[Findings]:
    """Measure the tables of one name, as :func:`timed` gives them."""
    return timed(TABLES[name](session, plan))


def timed(parts: Iterator[Findings]) -> Iterator[Findings]:
    """Give what there is after each part, and once more at the end, with how long it took."""
    began = time.monotonic()
    for findings in parts:
        yield findings
    findings.tables[0].took_s = time.monotonic() - began
    yield findings
