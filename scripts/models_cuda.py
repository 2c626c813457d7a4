"""Measure models of the released sizes in request mode and in step mode on an accelerator.

    python scripts/models_cuda.py --json FILE [--platform cuda] [--size full] [--limit-s 450]

Random weights (see full_size_models.py): Qwen-Image, one of four ranks' share of HunyuanImage-3.0,
Helios. Asynchronous output off and on in turn, on one device. Measures request times and how long
the device idles between two requests; checks that outputs are equal bit for bit. FILE is written
after each series. Exits with 1 when a check fails or something was not run.

``--sections qwen-prepare`` alone takes under a minute: Qwen-Image of the released width with 8 of
its 60 layers, in one worker whose requests are in turn prepared between the steps of others and
beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform as host
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sidestream
from sidestream import (
    DiffusionEngine,
    DiffusionRequest,
    EngineConfig,
    SamplingParams,
    load_platform,
)
from sidestream.output import EventKind

#: Between the answer to a request's last step but two and the submit of the next request, which is
#: to be prepared in front of the last step: the engine has sent the last step but one by then.
RELAY_PAUSE_S = 0.01
GOAL_S = 50e-6
#: The device's wait for a step in front of which a request was prepared.
PREPARED_US = "to_step_prepared_between_median_us"
WAYS = {
    "request": {"off": {"async_output": False}, "on": {}},
    "step": {
        "off": {"step_execution": True},
        "on": {"step_execution": True, "async_final_step": True},
    },
    # One engine; its pipeline is told the way before each series.
    "prepare": {
        "between": {"step_execution": True, "async_final_step": True},
        "beside": {"step_execution": True, "async_final_step": True},
    },
}


@dataclass(frozen=True)
class Section:
    """A model in one mode, and the sizes that it runs; ``least_s``: it takes about so long."""

    kind: str
    mode: str
    sizes: tuple[dict[str, Any], ...]
    tiny: dict[str, Any]
    params: dict[str, Any]
    least_s: float
    #: What stands for the whole model where not all of it is needed.
    full: str = "full"


_QWEN_SIZES = ({"height": 512, "width": 512}, {"height": 1024, "width": 1024})
_GUIDED = {"true_cfg_scale": 4.0}
_SQUARE = {"height": 64, "width": 64}
_VIDEO = ({"height": 384, "width": 640, "num_frames": 33},)
_TINY_VIDEO = {"height": 32, "width": 32, "num_frames": 33}
#: What matters most first: a run that is cut keeps what it had.
SECTIONS = {
    "qwen-prepare": Section(
        "qwen", "prepare", _QWEN_SIZES[1:], _SQUARE, _GUIDED, 45, full="shallow"
    ),
    "qwen-step": Section("qwen", "step", _QWEN_SIZES, _SQUARE, _GUIDED, 90),
    "hunyuan": Section("hunyuan", "request", _QWEN_SIZES[1:], _SQUARE, {"guidance_scale": 5.0}, 60),
    "helios-step": Section("helios", "step", _VIDEO, _TINY_VIDEO, {"guidance_scale": 1.0}, 60),
    "helios": Section("helios", "request", _VIDEO, _TINY_VIDEO, {"guidance_scale": 1.0}, 60),
    "qwen": Section("qwen", "request", _QWEN_SIZES, _SQUARE, _GUIDED, 80),
}


@dataclass
class Record:
    """What the run has to say, written down as it comes."""

    path: Path
    about: dict[str, Any]
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    #: By model and size, then by seed: the first output's digest and who made it.
    outputs: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)

    def row(self, **figures: Any) -> None:
        self.rows.append(figures)
        hidden = ("gaps_us", "marks")
        shown = (f"{k}={_show(v)}" for k, v in figures.items() if k not in hidden)
        print("  ".join(shown), flush=True)
        self.write()

    def check(self, what: str, ok: bool, detail: str = "") -> None:
        self.checks.append({"check": what, "ok": ok, "detail": detail})
        print(f"{'ok  ' if ok else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
        self.write()

    def skip(self, what: str) -> None:
        self.not_run.append(what)
        print(f"---- not run: {what}", flush=True)
        self.write()

    def has(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.deadline

    def write(self) -> None:
        said = {**self.about, "checks": self.checks, "not_run": self.not_run, "rows": self.rows}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(said, indent=1))
        partial.replace(self.path)

    def compare(self, model: str, way: str, work: list[DiffusionRequest], done: list[Any]) -> None:
        """Check that outputs are those of whoever ran these requests first, and no two alike."""
        known = self.outputs.setdefault(model, {})
        digests, same, others = [], True, set()
        for request, output in zip(work, done, strict=True):
            pixels = output.output
            digest = hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()
            digests.append(None if pixels.min() == pixels.max() else digest)
            first, by = known.setdefault(request.sampling_params.seed or 0, (digest, way))
            same &= digest == first
            if by != way:
                others.add(by)
        if others:
            whose = "; ".join(sorted(others))
            what = f"{model} {way}: outputs are those of {whose}, bit for bit"
            self.check(what, same, f"{len(done)} compared")
        differ = len({*digests} - {None}) == len(done)
        self.check(f"{model} {way}: each output is another picture", differ)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def engines_of(section: Section, arguments: Any, record: Record) -> Iterator[dict[str, Any]]:
    """Start both ways' engines at once; two of the largest fit one device."""
    platform = load_platform(arguments.platform)
    size = section.full if arguments.size == "full" else arguments.size

    def start(settings: dict[str, Any]) -> tuple[DiffusionEngine, float]:
        begun = time.monotonic()
        options = {"kind": section.kind, "size": size}
        options |= {"platform": platform.name, "plugin": platform.reference}
        engine = DiffusionEngine(
            EngineConfig(
                pipeline="full_size_models:FullSize",
                pipeline_options=options,
                platform=platform.name,
                host_buffer_bytes=2 << 30,
                **settings,
            )
        )
        return engine, time.monotonic() - begun

    with ThreadPoolExecutor(2) as pool:
        ways = dict(WAYS[section.mode])
        if section.mode == "prepare":
            ways = {"both": ways["beside"]}
        futures = {way: pool.submit(start, settings) for way, settings in ways.items()}
    engines: dict[str, DiffusionEngine] = {}
    try:
        for way, future in futures.items():
            engines[way], start_s = future.result()
            (about,) = engines[way].executor.collective_rpc("about")
            labels = {"model": section.kind, "mode": section.mode, "way": way}
            record.row(**labels, size=size, start_s=start_s, **about)
        yield engines if "both" not in engines else dict.fromkeys(WAYS["prepare"], engines["both"])
    finally:
        for future in futures.values():
            if future.exception() is None:
                future.result()[0].close()


def run_section(section: Section, arguments: Any, record: Record) -> None:
    tiny = arguments.size == "tiny"
    with engines_of(section, arguments, record) as engines:
        for size in (section.tiny,) if tiny else section.sizes:
            name = f"{section.kind} {'x'.join(map(str, size.values()))}"
            if section.full != "full" and not tiny:
                name += f" ({section.full})"
            work = [
                DiffusionRequest(
                    "p" * (1 + seed),
                    SamplingParams(
                        **size, **section.params, num_inference_steps=arguments.steps, seed=seed
                    ),
                )
                for seed in range(arguments.requests)
            ]
            all_series = STEP_SERIES if section.mode == "step" else TOGETHER
            for engine in engines.values():
                engine.generate(work[:2])  # warm: kernels chosen, memory for outputs made
            for repeat in range(arguments.rounds):
                for series, run in all_series.items():
                    for way, engine in engines.items():
                        what = f"{name} {section.mode} {way}, {series}, round {repeat}"
                        if not record.has(20 if not tiny else 0):
                            record.skip(what)
                            continue
                        labels = {"model": section.kind, "size": name, "mode": section.mode}
                        labels |= {"way": way, "series": series, "round": repeat}
                        if section.mode == "prepare":
                            engine.executor.collective_rpc("prepare_beside", (way == "beside",))
                        figures, done = measure(engine, work, run)
                        record.row(**labels, **figures)
                        labelled = f"{section.mode} {way}, {series}, round {repeat}"
                        record.compare(name, labelled, work, done)
                        if series == "relay":
                            judge(what, figures, way, tiny, record)
                if section.mode == "prepare":
                    judge_prepare(name, repeat, record, tiny)


def judge(what: str, figures: dict[str, Any], way: str, tiny: bool, record: Record) -> None:
    """Check that a relay came about as it should, and the goal."""
    gaps = figures["to_first_step_us"]
    record.check(f"{what}: last steps with the next request's first behind them", len(gaps) > 0)
    if way == "on" and gaps and not tiny:
        median_us = statistics.median(gaps)
        record.check(
            f"{what}: the device idles at most 0.05 ms",
            median_us <= 1e6 * GOAL_S,
            f"{median_us:.1f} us",
        )


def judge_prepare(size: str, repeat: int, record: Record, tiny: bool) -> None:
    """Check that requests were prepared in front of others' steps, and which way idles longer."""
    place = {"size": size, "round": repeat, "mode": "prepare"}
    figures = {row["way"]: row for row in record.rows if place.items() <= row.items()}
    if len(figures) < len(WAYS["prepare"]):
        return  # it says already what was not run
    what = f"{size} round {repeat}"
    waits = [figures.get(way, {}).get(PREPARED_US) for way in WAYS["prepare"]]
    between_us, beside_us = waits
    is_measured = between_us is not None and beside_us is not None
    record.check(f"{what}: requests prepared between others' steps, both ways", is_measured)
    if is_measured and not tiny:
        detail = f"{beside_us:.0f} us in place of {between_us:.0f} us"
        is_less = beside_us < between_us
        record.check(f"{what}: prepared beside steps the device idles less", is_less, detail)


def measure(
    engine: DiffusionEngine,
    work: list[DiffusionRequest],
    run: Callable[[DiffusionEngine, list[DiffusionRequest]], list[Any]],
) -> tuple[dict[str, Any], list[Any]]:
    """Run one series; give its figures and outputs."""
    engine.executor.collective_rpc("take_marks")
    begun = time.monotonic()
    done = run(engine, work)
    wall_s = time.monotonic() - begun
    marks, *_ = engine.executor.collective_rpc("take_marks")  # rank 0's
    times = [output.timings for output in done]
    prepares = [1e3 * mark.host_s for mark in marks if mark.kind == "prepare"]
    hidden = [t.copy_hidden_share for t in times[:-1] if t.copy_hidden_share is not None]
    figures = {
        "requests": len(done),
        "requests_per_s": len(done) / wall_s,
        "request_s": statistics.median(t.forward_s for t in times),
        "total_s": statistics.median(t.total_s for t in times),
        "copy_ms": 1e3 * statistics.median(t.copy_s for t in times),
        "copy_hidden": statistics.median(hidden) if hidden else None,
        "prepare_host_ms": statistics.median(prepares) if prepares else None,
        "nbytes": times[0].nbytes,
        "carrier": times[-1].carrier,
        **gaps(marks),
        "marks": [vars(mark) for mark in marks],
    }
    return figures, done


def gaps(marks: list[Any]) -> dict[str, Any]:
    """Give what the device waited behind each request's end, in microseconds, by what came next.

    ``to_begin``: the next forward (request mode). ``to_first_step``: the next request's first step;
    in request mode with all that is in front of it, in step mode where it was prepared before.
    ``to_other_step``: in step mode, a later step of another request. ``to_step_prepared_between``:
    in step mode, any step where a request was prepared in between. ``found_idle``: of how many of
    these the host came when the device had nothing to do.
    """
    found: dict[str, list[float]] = {
        "to_begin": [],
        "to_first_step": [],
        "to_other_step": [],
        "to_step_prepared_between": [],
    }
    idle = 0
    for place, mark in enumerate(marks):
        if mark.kind != "end":
            continue
        since_s, prepared = 0.0, False
        for later in marks[place + 1 :]:
            since_s += later.since_s or 0.0
            prepared |= later.kind == "prepare"
            if later.kind == "begin":
                found["to_begin"].append(1e6 * since_s)
                idle += bool(later.found_idle)
            if later.kind == "end":
                break
            if later.kind == "step":
                kind = "to_first_step" if later.step == 0 else "to_other_step"
                found["to_step_prepared_between" if prepared else kind].append(1e6 * since_s)
                idle += bool(later.found_idle)
                break
    lists = {f"{name}_us": values for name, values in found.items() if values}
    medians = {f"{name}_median_us": statistics.median(v) for name, v in found.items() if v}
    return {**medians, "found_idle": idle, "to_first_step_us": [], **lists}


def together(engine: DiffusionEngine, work: list[DiffusionRequest]) -> list[Any]:
    """Submit all at once; in step mode two of them take steps in turn."""
    return engine.generate(work)


def relay(engine: DiffusionEngine, work: list[DiffusionRequest]) -> list[Any]:
    """Submit each when the one before has two steps left: it is prepared in front of the last."""
    handles = [engine.submit(work[0])]
    for request in work[1:]:
        steps = request.sampling_params.num_inference_steps
        for event in handles[-1].events():
            if event.kind is EventKind.STEP and event.step == steps - 2:
                time.sleep(RELAY_PAUSE_S)
                break
        handles.append(engine.submit(request))
    return [handle.result(120) for handle in handles]


TOGETHER = {"together": together}
STEP_SERIES = {"relay": relay, "together": together}


#: Columns of the tables for docs/performance.md: a heading, a figure, its factor, a format.
_TIMES = (
    ("request ms", "request_s", 1e3, "{:.0f}"),
    ("requests/s", "requests_per_s", 1, "{:.4f}"),
    ("copy ms", "copy_ms", 1, "{:.3f}"),
)
COLUMNS = {
    ("request", "together"): (
        *_TIMES,
        ("copy hidden", "copy_hidden", 1, "{:.2f}"),
        ("to the next forward us", "to_begin_median_us", 1, "{:.1f}"),
        ("to its first step us", "to_first_step_median_us", 1, "{:.0f}"),
    ),
    ("step", "relay"): (
        ("to the next one's first step us", "to_first_step_median_us", 1, "{:.1f}"),
        ("copy ms", "copy_ms", 1, "{:.3f}"),
    ),
    ("step", "together"): (
        *_TIMES,
        ("to another's step us", "to_other_step_median_us", 1, "{:.1f}"),
        ("with a prepare between us", PREPARED_US, 1, "{:.0f}"),
    ),
    ("prepare", "together"): (
        ("requests/s", "requests_per_s", 1, "{:.4f}"),
        ("to another's step us", "to_other_step_median_us", 1, "{:.1f}"),
        ("with a prepare between us", PREPARED_US, 1, "{:.1f}"),
        ("host in prepare ms", "prepare_host_ms", 1, "{:.2f}"),
        ("found idle", "found_idle", 1, "{:d}"),
    ),
}


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print what docs/performance.md says, the ways beside each other such as "off, on"."""
    for (mode, series), columns in COLUMNS.items():
        chosen = [row for row in rows if (row["mode"], row.get("series")) == (mode, series)]
        if not chosen:
            continue
        headings = ["size", "round", *(heading for heading, *_ in columns)]
        names = list(WAYS[mode])
        print(f"\n{mode} mode, {series}; {', '.join(names)}\n\n| {' | '.join(headings)} |")
        print("|---" * len(headings) + "|")
        for size, repeat in dict.fromkeys((row["size"], row["round"]) for row in chosen):
            ways = {r["way"]: r for r in chosen if (r["size"], r["round"]) == (size, repeat)}
            cells = [size, str(repeat)]
            for _, name, factor, form in columns:
                values = [ways.get(way, {}).get(name) for way in names]
                cells.append(
                    ", ".join("-" if v is None else form.format(factor * v) for v in values)
                )
            print(f"| {' | '.join(cells)} |")


def main() -> int:
    """Run all sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--size", default="full", choices=["full", "tiny"])
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny")
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--limit-s", type=float, default=450.0)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    began = time.monotonic()
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "sidestream": sidestream.__version__,
        "torch": torch.__version__,
        "python": host.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "command": " ".join(sys.argv),
    }
    print(json.dumps(about, indent=1), flush=True)
    record = Record(arguments.json, about, began + arguments.limit_s)
    for name in arguments.sections:
        section = SECTIONS[name]
        if arguments.size == "full" and not record.has(section.least_s):
            record.skip(name)
            continue
        try:
            run_section(section, arguments, record)
        except Exception as error:  # noqa: BLE001 - boundary: one model; the others are measured
            traceback.print_exc()
            record.check(f"{name} runs", False, f"{type(error).__name__}: {error}"[:400])
        print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    print_tables(record.rows)
    failed = [check["check"] for check in record.checks if not check["ok"]]
    print(f"{len(failed)} check(s) failed: {failed}" if failed else "all checks passed")
    return 1 if failed or record.not_run else 0


if __name__ == "__main__":
    sys.exit(main())
