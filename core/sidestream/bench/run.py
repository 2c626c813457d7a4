"""Each table by its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sidestream.bench import budget
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


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the tables of one name come from."""

    measure: Callable[[Session, Plan], Iterator[Findings]]
    #: Seconds on an accelerator, without the starts of engines that all share.
    lasts_s: Callable[[Plan], float]
    #: How many engines it uses of those that all share.
    engines: int = 0

    def planned_s(self, plan: Plan, *, engines: int = 0) -> float:
        """Give the seconds on an accelerator, where ``engines`` are up; said before it begins."""
        return self.lasts_s(plan) + budget.START_S * max(0, self.engines - engines)


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
TABLES: Final[dict[str, Measurement]] = {
    "bubble": Measurement(measure=_bubble, lasts_s=budget.bubble_s, engines=2),
    "slowdown": Measurement(measure=_slowdown, lasts_s=budget.slowdown_s, engines=1),
    "handoff": Measurement(measure=_handoff, lasts_s=budget.handoff_s, engines=1),
    "overload": Measurement(measure=_overload, lasts_s=budget.overload_s),
    "idle": Measurement(measure=_idle, lasts_s=budget.idle_s, engines=1),
    "transport": Measurement(measure=_transport, lasts_s=budget.transport_s),
    "throughput": Measurement(measure=_throughput, lasts_s=budget.throughput_s, engines=2),
}


def measure(name: str, session: Session, plan: Plan) -> Iterator[Findings]:
    """Measure the tables of one name, as :func:`timed` gives them."""
    return timed(TABLES[name].measure(session, plan))


def timed(parts: Iterator[Findings]) -> Iterator[Findings]:
    """Give what there is after each part, and once more at the end, with how long it took."""
    began = time.monotonic()
    for findings in parts:
        yield findings
    findings.tables[0].took_s = time.monotonic() - began
    yield findings
