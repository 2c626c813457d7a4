"""From a tensor on the device to a readable tensor in the main process, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sidestream.bench.pipelines import usage_of_this_process
from sidestream.bench.series import (
    Sample,
    Series,
    Session,
    call,
    run_series,
    sample_of,
    settle,
    warm_up,
)
from sidestream.bench.table import Table, known, median, percentile
from sidestream.bench.workload import OUTPUTS, Workload

if TYPE_CHECKING:
    from sidestream.engine import DiffusionEngine

#: The goals: times the pure copy, plus that many seconds.
_READY_FACTOR: Final = 1.1
_READY_PLUS_S: Final = 0.0005
_D2H_SHARE: Final = 0.9
_WORKSPACE_BYTES: Final = 64 << 20
LONE_FORWARD_S: Final = 0.005
BATCH: Final = 8
BATCHES: Final = 20
BATCH_FORWARD_S: Final = 0.02
_BATCH_WAIT_S: Final = 10.0
_PROFILED: Final = 5


def handoff(
    session: Session, outputs: Sequence[str], *, forward_s: float = LONE_FORWARD_S, count: int = 60
) -> tuple[Table, list[Sample]]:
    """Measure ``count`` lone requests for each kind of output.

    ``ready`` is from the forward's end, on the device, until the pump has the message; ``read``
    until the caller has read from the tensor. The bound is a copy of the same bytes into a
    page-locked buffer by itself.
    """
    table = Table(
        name="handoff", title="Device tensor to readable tensor in the main process, one at a time"
    )
    samples: list[Sample] = []
    for output in outputs:
        workload = Workload(output=output, forward_s=forward_s)
        engine = session.engine("on")
        warm_up(engine, workload)
        series = _one_by_one(engine, workload, count)
        _report(table, session, workload, series)
        samples = list(series.samples)
    _check_workspace(table, session)
    return table, samples


def first_of_batch(session: Session, outputs: Sequence[str], *, rounds: int = BATCHES) -> Table:
    """Measure when the first and the last output of a forward over eight requests is ready."""
    table = Table(
        name="batch", title=f"Outputs of a forward over {BATCH} requests: ready after its end"
    )
    # The wait is only there to be filled, also by a host that is late: eight are sent at once.
    engine = session.engine("on", max_batch_size=BATCH, max_batch_wait_s=_BATCH_WAIT_S)
    for output in outputs:
        workload = Workload(output=output, forward_s=BATCH_FORWARD_S)
        warm_up(engine, workload, BATCH)
        firsts, lasts = [], []
        for _ in range(rounds):
            series = run_series(engine, workload, BATCH, window=BATCH)
            if len(series.forwards) != 1:
                continue
            ready = _ready_s(series)
            firsts.append(ready[0])
            lasts.append(ready[-1])
        pure_s = session.pure_copy_s(workload.nbytes)
        share = median([first / last for first, last in zip(firsts, lasts, strict=True)])
        table.add(
            output=output,
            first_ms=1e3 * median(firsts),
            last_ms=1e3 * median(lasts),
            share=share,
            pure_copy_ms=1e3 * pure_s,
            bound=1 / BATCH,
            forwards=len(firsts),
        )
        if session.has_device:
            table.goal(f"{output}: first of {BATCH}, share of the whole", share, bound=0.25)
    session.drop("on", max_batch_size=BATCH, max_batch_wait_s=_BATCH_WAIT_S)
    return table


def _one_by_one(engine: DiffusionEngine, workload: Workload, count: int) -> Series:
    worker, host, samples = [call(engine, "usage")], [usage_of_this_process()], []
    slots = [call(engine, "describe").get("slots")]
    for number, request in enumerate(workload.requests(count)):
        samples.append(sample_of(workload, engine.submit(request).result(), number))
    settle(engine)
    worker.append(call(engine, "usage"))
    host.append(usage_of_this_process())
    slots.append(call(engine, "describe").get("slots"))
    forwards = call(engine, "take_forwards")
    return Series(samples=samples, forwards=forwards, worker=worker, host=host, slots=slots)


def _report(table: Table, session: Session, workload: Workload, series: Series) -> None:
    times = [sample.timings for sample in series.samples]
    ready, read = _ready_s(series), _read_s(series)
    copy_s = percentile([t.copy_s or 0.0 for t in times], 0.5)
    pure_s = session.pure_copy_s(workload.nbytes)
    moved = times[-1].nbytes
    count = len(times)
    allocated = [usage.device_allocations for usage in series.worker]
    table.add(
        output=workload.output,
        mb=workload.nbytes / 1e6,
        ready_p50_ms=1e3 * percentile(ready, 0.5),
        ready_p99_ms=1e3 * percentile(ready, 0.99),
        read_p50_ms=1e3 * percentile(read, 0.5),
        read_p99_ms=1e3 * percentile(read, 0.99),
        pure_copy_ms=1e3 * pure_s,
        copy_ms=1e3 * copy_s,
        copy_gb_per_s=moved / copy_s / 1e9 if copy_s else float("nan"),
        copies=_copies(session, workload),
        bytes_to_pixels=moved / workload.pixels,
        faults=series.used("minor_faults") / count,
        cpu_s_per_gb=_cpu_s(series) / (moved * count / 1e9),
        made=series.blocks_made,
    )
    if not session.has_device:
        return
    name = workload.output
    bound = _READY_FACTOR * pure_s + _READY_PLUS_S
    table.goal(f"{name}: ready, p50", 1e3 * percentile(ready, 0.5), bound=1e3 * bound, unit="ms")
    if copy_s:
        table.goal(f"{name}: D2H rate to peak", pure_s / copy_s, bound=_D2H_SHARE, at_least=True)
    if workload.dtype == "uint8":
        table.goal(f"{name}: bytes to pixels x 3", moved / workload.pixels, bound=1.0)
    if series.blocks_made is not None:
        table.goal(f"{name}: arenas and one-shots made", series.blocks_made, bound=0)
    before, after = allocated
    if before is not None and after is not None:
        table.goal(f"{name}: device allocations made", after - before, bound=0)


def _cpu_s(series: Series) -> float:
    """Give the CPU seconds of the output thread and the main process: the forward's left out."""
    thread = series.worker[1].output_thread_cpu_s - series.worker[0].output_thread_cpu_s
    return thread + series.host[1].cpu_s - series.host[0].cpu_s


def _copies(session: Session, workload: Workload) -> float | None:
    """Count the device's copies that carry pixels, for each output; None without its profiler."""
    if session.platform.device_type != "cuda":
        return None
    engine = session.engine("on")
    call(engine, "start_profile")
    for request in workload.requests(_PROFILED):
        engine.submit(request).result()
    settle(engine)
    copies = call(engine, "stop_profile")
    moved: float = sum(nbytes for _, nbytes in copies) / workload.nbytes
    return moved / _PROFILED


def _check_workspace(table: Table, session: Session) -> None:
    frames, height, width, _ = OUTPUTS["81x720p"][0]
    used = call(session.engine("on"), "workspace_bytes", frames, height, width)
    if used is not None:
        table.goal(
            "uint8 of 81x720p on the device: workspace",
            used / 1e6,
            bound=_WORKSPACE_BYTES / 1e6,
            unit="MB",
        )


def _ready_s(series: Series) -> list[float]:
    ready = [sample.timings.ready_at for sample in series.samples]
    return [at - end for at, end in zip(known(ready), _ends(series), strict=True)]


def _read_s(series: Series) -> list[float]:
    return [s.taken_at - end for s, end in zip(series.samples, _ends(series), strict=True)]


def _ends(series: Series) -> list[float]:
    """Give when the forward of each output ended; a batch's outputs have one forward."""
    ends = known([forward.ended_at for forward in series.forwards])
    return ends * len(series.samples) if len(ends) == 1 else ends
