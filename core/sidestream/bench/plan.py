"""What is measured where nobody says otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sidestream.bench.series import Session
from sidestream.bench.workload import Workload


def grid(forwards_s: Sequence[float], outputs: Sequence[str]) -> list[Workload]:
    """Combine each output with each length of a forward."""
    return [
        Workload(output=output, forward_s=forward_s)
        for output, forward_s in itertools.product(outputs, forwards_s)
    ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Workloads and how long to measure each."""

    throughput: Sequence[Workload]
    rounds: int
    seconds: float
    bubble: Sequence[Workload]
    bubble_count: int
    slowdown: Sequence[Workload]
    slowdown_rounds: int
    #: In blocks, of a round.
    slowdown_seconds: float
    handoff: Sequence[str]
    handoff_count: int
    batch: Sequence[str]
    transport: Sequence[str]
    transport_seconds: float
    overload: Workload
    overload_seconds: float
    idle_seconds: float = field(default=5.0)


#: An accelerator; ``budget`` says how long it takes. The last bubble is the one to look at.
DEVICE: Final = Plan(
    throughput=grid((0.005, 0.02, 0.1, 0.5), ("512px", "1024px", "2048px", "4x1024px", "81x720p")),
    rounds=3,
    seconds=0.8,
    bubble=[
        Workload(forward_s=0.005),
        Workload(forward_s=0.02),
        Workload(forward_s=0.02, output="81x720p"),
    ],
    bubble_count=200,
    slowdown=[
        Workload(forward_s=0.02),
        Workload(forward_s=0.02, output="81x720p"),
        Workload(forward_s=0.02, output="81x720p", kind="memory"),
        Workload(forward_s=0.005, kind="launch"),
        Workload(forward_s=0.02, kind="launch"),
        Workload(forward_s=0.02, output="4x1024px-float32", kind="launch"),
    ],
    slowdown_rounds=5,
    slowdown_seconds=2.5,
    handoff=("512px", "1024px", "1024px-float32", "4x1024px-float32", "81x720p"),
    handoff_count=60,
    batch=("1024px", "4x1024px-float32"),
    transport=("1024px-float32", "81x720p-bfloat16"),
    transport_seconds=2.0,
    overload=Workload(forward_s=0.02),
    overload_seconds=1.5,
)

#: The CPU and the simulated accelerator: order and counts rather than times.
SMALL: Final = Plan(
    throughput=grid((0.01, 0.02), ("64px", "512px")),
    rounds=1,
    seconds=0.1,
    bubble=[Workload(output="64px", forward_s=0.01)],
    bubble_count=20,
    slowdown=[Workload(output="64px", forward_s=0.01)],
    slowdown_rounds=1,
    slowdown_seconds=2.0,
    handoff=("64px", "1024px", "1024px-float32"),
    handoff_count=20,
    batch=("64px",),
    transport=(
        "1024px",
        "1024px-float32",
        "4x1024px-float32",
        "81x720p",
        "81x720p-bfloat16",
    ),
    transport_seconds=3.0,
    overload=Workload(output="64px", forward_s=0.02),
    overload_seconds=1.0,
)


def plan_for(session: Session) -> Plan:
    """Choose by whether there is an accelerator."""
    return DEVICE if session.has_device else SMALL
