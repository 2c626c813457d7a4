"""Measure everything that docs/performance.md says of an accelerator, in one call.

    python scripts/bench_cuda.py --out FOLDER [--platform cuda]

First ways to bring outputs out beside a launch-bound forward, then ``sidestream bench all``. Writes
figures.json, variants.json, shares.png, timeline.png and trace.json; under nine minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sidestream import AsyncOutputThread, ResultChannel, ResultPumpThread, SlotSink, load_platform
from sidestream.bench.forwards import forwards_on
from sidestream.bench.pipelines import usage_of_this_process
from sidestream.bench.workload import Workload
from sidestream.cli.main import run
from sidestream.worker.output_thread import OutputJob

#: (forward in seconds, output)
CASES = ((0.005, "1024px"), (0.02, "1024px"), (0.02, "4x1024px-float32"))
ROUNDS = 5
#: Elsewhere than on a real device: only that it runs.
SMALL_CASES, SMALL_ROUNDS = ((0.005, "64px"),), 1
FORWARDS = {0.005: 80, 0.02: 25}


class MainEnqueues(AsyncOutputThread):
    """The thread of the forwards queues the copy too; this one only waits and sends."""

    def hand_over(self, job: OutputJob) -> Any:
        transfer = self.transfer
        if not hasattr(self, "stream"):
            self.stream = transfer.platform.side_stream(self.device, 0)
        job.destination = transfer.sink.allocate(job.packed.nbytes)
        self.stream.wait_event(job.event)
        with self.stream:
            job.packed.write(job.destination.buffer, non_blocking=True)
            job.event = transfer.record()
        return super().hand_over(job)

    def _run_one(self, job: OutputJob, stream: Any) -> None:
        job.event.wait()
        job.packed.drop()
        self.transfer.sink.publish(job.label, job.packed, job.destination, job.timings)
        job.future.set_result(None)
        job.finish()


class Untimed(AsyncOutputThread):
    """As it is, without the device's times of the copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transfer._device_times = lambda job, begun, ended, started_at: job.timings


#: name, class of the output thread (None: outputs are dropped), switch interval
VARIANTS: tuple[tuple[str, type[AsyncOutputThread] | None, float], ...] = (
    ("dropped", None, 0.005),
    ("output thread", AsyncOutputThread, 0.005),
    ("output thread, no device times", Untimed, 0.005),
    ("main thread enqueues", MainEnqueues, 0.005),
    ("output thread, switch interval 0.5 ms", AsyncOutputThread, 0.0005),
    ("main thread enqueues, switch interval 0.5 ms", MainEnqueues, 0.0005),
)


def run_variants(platform_name: str, ends: list[Any], results: Any) -> None:
    """Run each variant in turn over the same forwards; in a process of its own, as a worker is."""
    platform = load_platform(platform_name)
    device = platform.device(0)
    platform.set_device(device)
    work = forwards_on(device)
    threads = []
    for (_, cls, _), end in zip(VARIANTS, ends, strict=True):
        if cls is not None:
            sink = SlotSink(end.messages, end.releases, platform, device, budget_bytes=1 << 30)
            sink.reserve(60 << 20, 4)
            threads.append(cls(platform, sink, device=device).start())
        else:
            threads.append(None)
    is_real = platform_name not in ("cpu", "sim")
    for forward_s, output in CASES if is_real else SMALL_CASES:
        workload = Workload(output=output, forward_s=forward_s, kind="launch")
        times: dict[str, list[float]] = {name: [] for name, _, _ in VARIANTS}
        wakeups: dict[str, list[float]] = {name: [] for name, _, _ in VARIANTS}
        for _ in range(ROUNDS if is_real else SMALL_ROUNDS):
            for (name, _, interval_s), thread in zip(VARIANTS, threads, strict=True):
                sys.setswitchinterval(interval_s)
                took, woken = series(platform, device, work, workload, thread)
                times[name].append(took)
                wakeups[name].append(woken)
        sys.setswitchinterval(0.005)
        for name in times:
            ratios = [t / d for t, d in zip(times[name], times["dropped"], strict=True)]
            results.put(
                {
                    "forward_ms": 1e3 * forward_s,
                    "output": output,
                    "variant": name,
                    "forward_ms_measured": 1e3 * statistics.median(times[name]),
                    "to_dropped": statistics.median(ratios),
                    "to_dropped_min": min(ratios),
                    "to_dropped_max": max(ratios),
                    "wakeups_per_output": statistics.median(wakeups[name]),
                }
            )
    for thread in threads:
        if thread is not None:
            thread.close()
    results.put(None)


def series(
    platform: Any, device: Any, work: Any, workload: Workload, thread: AsyncOutputThread | None
) -> tuple[float, float]:
    """Give the mean seconds from one forward's first launch to the next one's, and wake-ups."""
    count = FORWARDS[workload.forward_s]
    dtype = getattr(torch, workload.dtype)
    pending: list[Any] = []
    platform.synchronize_device(device)
    woken = usage_of_this_process().wakeups
    began = time.perf_counter()
    for number in range(count):
        started = platform.record_device_event(device, timing=True)
        work.queue(workload.kind, workload.forward_s)
        tensor = torch.full(workload.shape, number % 100, device=device, dtype=dtype)
        if thread is not None:
            pending.append(thread.submit(f"out-{number}", tensor, private=True, started=started))
            if len(pending) > 2:
                pending.pop(0).result(60)
        else:
            platform.record_device_event(device, timing=True)
    took_s = (time.perf_counter() - began) / count
    for future in pending:
        future.result(60)
    return took_s, (usage_of_this_process().wakeups - woken) / count


def variants(platform: str, out: Path) -> None:
    """Start the process that runs the variants and the pump that reads from it."""
    context = multiprocessing.get_context("spawn")
    pairs = [ResultChannel.pair() for _ in VARIANTS]
    results = context.Queue()
    process = context.Process(
        target=run_variants, args=(platform, [ends for _, ends in pairs], results)
    )
    process.start()
    for _, ends in pairs:
        ends.close()
    pump = ResultPumpThread([channel for channel, _ in pairs], lambda _, d: d.open()).start()
    rows = []
    while (row := results.get(timeout=120)) is not None:
        rows.append(row)
        print("  ".join(f"{name}={show(value)}" for name, value in row.items()), flush=True)
        (out / "variants.json").write_text(json.dumps(rows, indent=1))
    process.join(60)
    pump.stop()


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    variants(arguments.platform, out)
    print(f"-- variants: {time.monotonic() - began:.0f} s", flush=True)
    files = {
        "json": "figures.json",
        "plot": "shares.png",
        "trace": "trace.json",
        "timeline": "timeline.png",
    }
    options = [part for name, file in files.items() for part in (f"--{name}", str(out / file))]
    code = run(["bench", "all", "--platform", arguments.platform, *options])
    print(f"-- all: {time.monotonic() - began:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
