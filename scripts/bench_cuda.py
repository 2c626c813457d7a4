"""Measure everything that docs/performance.md says of an accelerator, in one call.

    python scripts/bench_cuda.py --out FOLDER [--platform cuda] [--sections bubble,throughput]

The tables of ``sidestream bench all``, ways to bring outputs out (``bench_variants.py``), and
models with both ways' engines up. Says how long each should take before it begins; what would pass
``--seconds`` is left out. Writes figures.json, shares.png, timeline.png and trace.json after each
part, so that a call that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench_variants import planned_s as planned_variants_s
from bench_variants import variants

from sidestream.bench.budget import START_S
from sidestream.bench.findings import Findings
from sidestream.bench.model import model_throughput
from sidestream.bench.plan import Plan, plan_for
from sidestream.bench.run import TABLES, timed
from sidestream.bench.series import Session
from sidestream.cli.figures import Figures

#: What a model's engine takes to start beside a synthetic one's, and a request of these models,
#: roughly.
LIBRARIES_S = 8.0
REQUEST_S = 0.25
#: Requests of a series, and how often each way runs in turn. Short: a shared host is slow for
#: seconds at a time.
REQUESTS, ROUNDS = 4, 12
SMALL_REQUESTS, SMALL_ROUNDS = 3, 1
#: Pixels of the model with random weights.
SIZES, SMALL_SIZES = (512, 1024), (64,)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the run."""

    name: str
    planned_s: float
    measure: Callable[[], Iterator[Findings]]
    #: Why it can't be measured here, if so.
    missing: str | None = None


def sections(session: Session, plan: Plan) -> list[Section]:
    """List all parts in their order: the quick ones first, models last."""
    found = {}
    for number, (name, measurement) in enumerate(TABLES.items()):
        found[name] = Section(
            name=name,
            planned_s=measurement.planned_s(plan, engines=2 if number else 0),
            measure=partial(measurement.measure, session, plan),
        )
    platform = session.platform.name
    compared = Section(
        name="variants",
        planned_s=planned_variants_s(platform),
        measure=lambda: variants(platform),
    )
    order = list(found.values())
    order.insert(list(TABLES).index("slowdown") + 1, compared)
    return [*order, *models(session)]


def models(session: Session) -> list[Section]:
    """List the models: the one that comes along, and a small Qwen-Image with random weights."""
    absent = [name for name in ("diffusers", "transformers") if not importlib.util.find_spec(name)]
    missing = f"{' and '.join(absent)} can't be imported" if absent else None
    sizes = SIZES if session.has_device else SMALL_SIZES
    requests = REQUESTS if session.has_device else SMALL_REQUESTS
    rounds = ROUNDS if session.has_device else SMALL_ROUNDS
    config = {"platform": session.platform.name}

    def digits() -> Iterator[Findings]:
        return model_throughput(
            {**config, "model": "digits"}, [None], requests=requests, rounds=rounds
        )

    def qwen_image() -> Iterator[Findings]:
        with tempfile.TemporaryDirectory() as folder:
            model = make_qwen_image(Path(folder) / "Qwen-Image, small, random weights")
            yield from model_throughput(
                {**config, "model": str(model)},
                [(size, size) for size in sizes],
                requests=requests,
                rounds=rounds,
            )

    start_s = 2 * (START_S + LIBRARIES_S)
    size_s = 2 * (rounds * requests + 2) * REQUEST_S
    return [
        Section(name="digits", planned_s=start_s + size_s, measure=digits, missing=missing),
        Section(
            name="qwen-image",
            planned_s=start_s + 4 + len(sizes) * size_s,
            measure=qwen_image,
            missing=missing,
        ),
    ]


def make_qwen_image(folder: Path) -> Path:
    """Write a checkpoint that takes some tens of milliseconds a request."""
    from sidestream.models.checkpoint import build_qwen_image, save_checkpoint

    pipeline = build_qwen_image(seed=0, num_layers=4, num_heads=32)
    defaults = {
        "height": 512,
        "width": 512,
        "num_inference_steps": 4,
        "true_cfg_scale": 4.0,
        "negative_prompt": " ",
    }
    save_checkpoint(pipeline, folder, defaults)
    return folder


def run(parts: list[Section], figures: Figures, limit_s: float) -> bool:
    """Measure part by part while there is time; tells whether all that could be measured was."""
    planned = sum(part.planned_s for part in parts if part.missing is None)
    print(f"-- {planned:.0f} s planned, {limit_s:.0f} s allowed", flush=True)
    began, whole = time.monotonic(), True
    for part in parts:
        spent_s = time.monotonic() - began
        if part.missing is not None:
            print(f"-- {part.name}: skipped: {part.missing}", flush=True)
            continue
        if spent_s + part.planned_s > limit_s:
            left = f"{part.planned_s:.0f} s planned, {limit_s - spent_s:.0f} s left"
            print(f"-- {part.name}: skipped: {left}", flush=True)
            whole = False
            continue
        figures.announce(part.name, part.planned_s)
        try:
            figures.take(timed(part.measure()))
        except Exception:  # noqa: BLE001 - boundary: one part; the others go on
            traceback.print_exc()
            whole = False
        now_s = time.monotonic() - began
        print(f"-- {part.name}: {now_s - spent_s:.0f} s, {now_s:.0f} s so far", flush=True)
    return whole


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="for the whole call")
    parser.add_argument("--sections", help="by name, with commas; default: all")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with Session(arguments.platform) as session:
        parts = sections(session, plan_for(session))
        if arguments.sections:
            wanted = arguments.sections.split(",")
            unknown = set(wanted) - {part.name for part in parts}
            if unknown:
                parser.error(f"no such sections: {', '.join(sorted(unknown))}")
            parts = [part for part in parts if part.name in wanted]
        figures = Figures(
            session,
            json_file=out / "figures.json",
            plot_file=out / "shares.png",
            trace_file=out / "trace.json",
            timeline_file=out / "timeline.png",
        )
        whole = run(parts, figures, arguments.seconds)
        figures.summarize()
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
