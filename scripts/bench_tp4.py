"""Measure HunyuanImage-3.0's shape shared by several GPUs of one host, async off and on in turn.

    python scripts/bench_tp4.py --json FILE [--platform cuda] [--ranks 4] [--limit-s 540]

Random weights of the 80 B shape, built on the devices (see full_size_models.py); sums go through
the platform's own backend (NCCL). Prints the specification's table with these figures beside it.
Both ways' engines are up at once, 84 GB a device with four ranks; ``--apart`` starts each anew for
each round, for two ranks. FILE is written after each series. Exits with 1 when a check fails or
something was not run. ``--platform cpu --tiny`` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform as host
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from models_cuda import WAYS, Record, measure, together

import sidestream
from sidestream import (
    DiffusionEngine,
    DiffusionRequest,
    EngineConfig,
    SamplingParams,
    load_platform,
)

#: The specification's requests/s with four ranks, async off and on.
PUBLISHED = {768: (0.8370, 0.8533), 1024: (0.4773, 0.4802)}
#: What a series, and a start where engines are apart, may take: nothing begins later than that
#: before the limit.
SERIES_S, START_S = 20.0, 60.0


@contextmanager
def engine_of(way: str, arguments: Any, record: Record) -> Iterator[DiffusionEngine]:
    """Start the ranks of one way."""
    platform = load_platform(arguments.platform)
    options = {"kind": "hunyuan", "size": arguments.size}
    options |= {"platform": platform.name, "plugin": platform.reference}
    is_real = platform.name not in ("cpu", "sim")
    begun = time.monotonic()
    config = EngineConfig(
        pipeline="full_size_models:FullSize",
        pipeline_options=options,
        platform=platform.name,
        devices=tuple(range(arguments.ranks)) if is_real else (0,) * arguments.ranks,
        tensor_parallel_size=arguments.ranks,
        **WAYS["request"][way],
    )
    with DiffusionEngine(config) as engine:
        abouts = engine.executor.collective_rpc("about")
        parameters = sum(about["parameters"] for about in abouts)
        record.row(way=way, start_s=time.monotonic() - begun, ranks=abouts, held=parameters)
        yield engine


def work_of(pixels: int, arguments: Any) -> list[DiffusionRequest]:
    return [
        DiffusionRequest(
            "p" * (1 + seed),
            SamplingParams(
                height=pixels,
                width=pixels,
                guidance_scale=5.0,
                num_inference_steps=arguments.steps,
                seed=seed,
            ),
        )
        for seed in range(arguments.requests)
    ]


def run_series(
    engine: DiffusionEngine, pixels: int, repeat: int, way: str, arguments: Any, record: Record
) -> None:
    """Run one series of one way at one size and note it."""
    figures, done = measure(engine, work_of(pixels, arguments), together)
    times = [output.timings for output in done]
    taken = [time for time in times if time.ready_at is not None]
    ready = [t.ready_at - t.forward_ended_at for t in taken if t.forward_ended_at is not None]
    ready_ms = 1e3 * statistics.median(ready) if ready else None
    # From the first output to the last: the first forward has none before it to overlap with.
    rate = (len(done) - 1) / (taken[-1].ready_at - taken[0].ready_at)
    labels = {"size": pixels, "round": repeat, "way": way, "ready_ms": ready_ms, "rate": rate}
    record.row(**labels, **figures)
    record.compare(str(pixels), f"{way}, round {repeat}", work_of(pixels, arguments), done)


def run_all(arguments: Any, record: Record) -> None:
    """Run all rounds of all sizes, both ways in turn."""
    order = [(pixels, n) for pixels in arguments.pixels for n in range(arguments.rounds)]
    with ExitStack() as stack:
        engines: dict[str, DiffusionEngine] = {}
        for pixels, repeat in order:
            for way in WAYS["request"]:
                what = f"{pixels} px, round {repeat}, {way}"
                if not record.has(SERIES_S + (START_S if arguments.apart else 0.0)):
                    record.skip(what)
                    continue
                with ExitStack() as alone:
                    is_new = way not in engines or arguments.apart
                    if is_new:
                        owner = alone if arguments.apart else stack
                        engines[way] = owner.enter_context(engine_of(way, arguments, record))
                    if is_new or repeat == 0:
                        # Kernels chosen, memory for outputs made.
                        engines[way].generate(work_of(pixels, arguments)[:2])
                    run_series(engines[way], pixels, repeat, way, arguments, record)


def print_table(record: Record, arguments: Any) -> None:
    """Print the specification's table, and what the device waited and the reader."""
    print(
        f"\n{arguments.ranks} ranks, {arguments.steps} steps, {arguments.requests} requests a "
        "series; medians\n\n"
        "| pixels | async off (QPS) | async on (QPS) | change | spread | specification's change "
        "| device gap us, off, on | output ready ms, off, on |\n|---|---|---|---|---|---|---|---|"
    )
    for pixels in arguments.pixels:
        rows = {
            way: [r for r in record.rows if (r.get("size"), r["way"]) == (pixels, way)]
            for way in WAYS["request"]
        }
        if not all(rows.values()):
            continue
        rates = {way: [row["rate"] for row in rows[way]] for way in rows}
        off, on = (statistics.median(rates[way]) for way in ("off", "on"))
        spread = max(max(some) - min(some) for some in rates.values()) / off
        published = PUBLISHED.get(pixels)
        said = "-" if published is None else f"{100 * (published[1] / published[0] - 1):+.2f} %"
        gaps, ready = (
            ", ".join(_median([row.get(name) for row in rows[way]]) for way in ("off", "on"))
            for name in ("to_begin_median_us", "ready_ms")
        )
        print(
            f"| {pixels} | {off:.4f} | {on:.4f} | {100 * (on / off - 1):+.2f} % "
            f"| {100 * spread:.2f} % | {said} | {gaps} | {ready} |"
        )


def _median(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny", default="full")
    parser.add_argument("--pixels", type=int, nargs="+")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="one way's engine at a time")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.pixels = arguments.pixels or ([64] if arguments.size == "tiny" else [768, 1024])
    began = time.monotonic()
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "sidestream": sidestream.__version__,
        "torch": torch.__version__,
        "python": host.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "devices": torch.cuda.device_count(),
        "command": " ".join(sys.argv),
    }
    print(json.dumps(about, indent=1), flush=True)
    record = Record(arguments.json, about, began + arguments.limit_s)
    try:
        run_all(arguments, record)
    except Exception as error:  # noqa: BLE001 - boundary: what was measured is printed
        traceback.print_exc()
        record.check("it runs", False, f"{type(error).__name__}: {error}"[:400])
    print_table(record, arguments)
    print(f"-- all: {time.monotonic() - began:.0f} s", flush=True)
    failed = [check["check"] for check in record.checks if not check["ok"]]
    print(f"{len(failed)} check(s) failed: {failed}" if failed else "all checks passed")
    return 1 if failed or record.not_run else 0


if __name__ == "__main__":
    sys.exit(main())
