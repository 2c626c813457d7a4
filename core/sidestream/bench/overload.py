"""More requests than the device can do, and outputs that nobody takes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from sidestream.bench.series import Session, call, limit_of, settle, warm_up
from sidestream.bench.table import Table, percentile
from sidestream.bench.throughput import requests_in
from sidestream.bench.workload import Workload
from sidestream.errors import QueueFullError

if TYPE_CHECKING:
    from sidestream.engine import DiffusionEngine
    from sidestream.output import DiffusionOutput

LOADS: Final = (0.5, 1.0, 2.0, 4.0)
#: Requests whose outputs nobody takes.
LYING: Final = 32
_QUEUE: Final = 16
_CONFIG: Final[dict[str, Any]] = {"max_queued_requests": _QUEUE}
#: Under overload nothing may be lost of what the device can do.
_SHARE: Final = 0.95


def overload(session: Session, workload: Workload, *, seconds: float = 2.0) -> Table:
    """Offer requests at a fixed pace for ``seconds``, at shares of the limit and beyond it.

    The bound of the rate is the limit; that of the time from submit to readable is what a full
    queue (``max_queued_requests=16``) takes at that rate, with the two forwards at the worker.
    A last row lets outputs lie: what the engine then holds is bound by ``host_buffer_bytes``.
    """
    table = Table(name="overload", title="Requests at a fixed pace, with a queue of 16")
    engine = session.engine("on", **_CONFIG)
    warm_up(engine, workload)
    limit = limit_of(engine, workload, requests_in(seconds, workload))
    for load in LOADS:
        _offer(table, session, engine, workload, limit, load, seconds)
    session.drop("on", **_CONFIG)
    _let_lie(table, session, workload)
    return table


def _offer(
    table: Table,
    session: Session,
    engine: DiffusionEngine,
    workload: Workload,
    limit: float,
    load: float,
    seconds: float,
) -> None:
    pace_s = 1 / (load * limit)
    offered = max(1, round(seconds / pace_s))
    total_s: list[float] = []
    # Guards the list, which the threads of the pool append to.
    noting = threading.Lock()

    def take(handle: Any) -> None:
        output: DiffusionOutput = handle.result()
        taken_at = time.monotonic()
        with noting:
            total_s.append(taken_at - (output.timings.submitted_at or taken_at))

    refused = 0
    began = time.monotonic()
    # A thread for all that may be waited for at a time: it lets an output go once it is read.
    with ThreadPoolExecutor(_QUEUE + 4) as takers:
        for number, request in enumerate(workload.requests(offered)):
            time.sleep(max(0.0, began + number * pace_s - time.monotonic()))
            try:
                takers.submit(take, engine.submit(request))
            except QueueFullError:
                refused += 1
    elapsed_s = time.monotonic() - began
    settle(engine)
    rate = len(total_s) / elapsed_s
    table.add(
        load=f"{load:g} x limit",
        offered_per_s=offered / elapsed_s if refused == 0 else load * limit,
        done_per_s=rate,
        done_to_limit=rate / limit,
        refused=refused,
        total_p50_ms=1e3 * percentile(total_s, 0.5),
        total_p99_ms=1e3 * percentile(total_s, 0.99),
        bound_ms=1e3 * (_QUEUE + 3) / limit,
    )
    if session.has_device and load > 1:
        table.goal(f"{load:g} x limit: rate to limit", rate / limit, bound=_SHARE, at_least=True)


def _let_lie(table: Table, session: Session, workload: Workload) -> None:
    """Submit without taking anything, see what is held, then take it all."""
    allowed = 8 * workload.nbytes
    engine = session.engine("on", host_buffer_bytes=allowed)
    warm_up(engine, workload)
    handles = [engine.submit(request) for request in workload.requests(LYING)]
    previous = -1
    while (ready := sum(handle.done() for handle in handles)) > previous:
        previous = ready
        time.sleep(max(0.2, 6 * workload.forward_s))
    held = ready * workload.nbytes
    for handle in handles:
        handle.result()
    table.add(
        load="nobody takes",
        held_mb=held / 1e6,
        # What was at the worker when the limit was reached comes out all the same.
        bound_mb=(allowed + 3 * workload.nbytes) / 1e6,
        done_to_limit=None,
        refused=0,
    )
    table.goal(
        "nobody takes: bytes held",
        held / 1e6,
        bound=(allowed + 3 * workload.nbytes) / 1e6,
        unit="MB",
    )
    call(engine, "take_forwards")
    session.drop("on", host_buffer_bytes=allowed)
