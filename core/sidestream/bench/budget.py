"""How long each table should take on an accelerator, from the plan alone.

Without the engines that tables share.
"""

from __future__ import annotations

from typing import Final

from sidestream.bench.blocks import BLOCK, ORDER
from sidestream.bench.bubble import WAYS, waiting
from sidestream.bench.handoff import BATCH_FORWARD_S, BATCHES, LONE_FORWARD_S
from sidestream.bench.overload import LOADS, LYING
from sidestream.bench.plan import Plan
from sidestream.bench.slowdown import COUNTED, groups_of
from sidestream.bench.throughput import requests_in
from sidestream.bench.workload import Workload

#: Seconds that an engine takes to start and end, and a process that imports torch: upper ends of
#: what was seen with an accelerator.
START_S: Final = 7.0
_PROCESS_S: Final = 4.0
#: What a series takes beside its forwards, and a workload of another kind or size.
_SERIES_S: Final = 0.06
_WORKLOAD_S: Final = 0.4
#: Bytes a second from a device, where a table has copies that nothing runs beside.
_COPY_RATE: Final = 40e9


def _copy_s(output: str) -> float:
    return Workload(output=output).nbytes / _COPY_RATE


def bubble_s(plan: Plan) -> float:
    """Give the seconds of the bubbles."""
    total_s = 0.0
    for workload in plan.bubble:
        forwards = plan.bubble_count + waiting(plan.bubble_count)
        copies = plan.bubble_count + 2 * waiting(plan.bubble_count)  # what hides none
        total_s += len(WAYS) * forwards * workload.forward_s + copies * _copy_s(workload.output)
        total_s += _WORKLOAD_S + 4 * _SERIES_S
    return total_s


def slowdown_s(plan: Plan) -> float:
    """Give the seconds of the forwards that outputs slow down."""
    total_s = 0.0
    for workload in plan.slowdown:
        groups = groups_of(workload, plan.slowdown_seconds)
        forwards = 2 * COUNTED + BLOCK * (1 + len(ORDER) * groups)
        # Small kernels take longer in company than they did when they were counted.
        longer = 1.15 if workload.kind == "launch" else 1.0
        total_s += plan.slowdown_rounds * (forwards * workload.forward_s * longer + 3 * _SERIES_S)
        total_s += _WORKLOAD_S
    return total_s


def handoff_s(plan: Plan) -> float:
    """Give the seconds of the hand-offs, alone and in a batch."""
    total_s = START_S + 5.0  # the batches' engine, and the profiler
    for output in plan.handoff:
        total_s += plan.handoff_count * (LONE_FORWARD_S + 2 * _copy_s(output) + 0.003)
        total_s += _WORKLOAD_S
    for output in plan.batch:
        total_s += BATCHES * (BATCH_FORWARD_S + 8 * _copy_s(output) + _SERIES_S) + _WORKLOAD_S
    return total_s


def overload_s(plan: Plan) -> float:
    """Give the seconds of more requests than the device can do."""
    forward_s = plan.overload.forward_s
    paced_s = len(LOADS) * (plan.overload_seconds + 20 * forward_s)
    alone_s = requests_in(plan.overload_seconds, plan.overload) * forward_s
    return 2 * START_S + alone_s + paced_s + 3 * LYING * forward_s


def idle_s(plan: Plan) -> float:
    """Give the seconds of an idle engine."""
    return plan.idle_seconds + 5.0


def transport_s(plan: Plan) -> float:
    """Give the seconds of the transport, which needs no device."""
    return len(plan.transport) * (plan.transport_seconds + _PROCESS_S)


def throughput_s(plan: Plan) -> float:
    """Give the seconds of the throughput."""
    total_s = 0.0
    for workload in plan.throughput:
        forwards = 3 * requests_in(plan.seconds, workload)
        copies = forwards / 3
        round_s = forwards * workload.forward_s + copies * _copy_s(workload.output) + 3 * _SERIES_S
        total_s += plan.rounds * round_s + _WORKLOAD_S
    return total_s
