"""A model's requests a second with and without asynchronous output."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sidestream.bench.blocks import ratio_of
from sidestream.bench.findings import Findings
from sidestream.bench.series import Sample
from sidestream.bench.table import Table, median
from sidestream.config import EngineConfig
from sidestream.engine import DiffusionEngine
from sidestream.request import DiffusionRequest, SamplingParams

#: Requests of each size before those that count.
_WARM: Final = 2


def model_throughput(
    config: dict[str, Any],
    sizes: Sequence[tuple[int, int] | None],
    *,
    requests: int = 8,
    rounds: int = 3,
    steps: int | None = None,
) -> Iterator[Findings]:
    """Measure a model at each size (height, width; None: its own), both ways in turn.

    ``config`` are fields of :class:`EngineConfig`. Both engines run at a time, so the device has
    to hold the model twice. A series' clock starts at its first output. The change is the median of
    those of ``rounds`` rounds; six or more give a 95 % interval, fewer their range. Gives the table
    after each size.
    """
    table = Table(
        name="model",
        title=f"{_name(config['model'])}: requests/s without and with asynchronous output",
    )
    samples: list[Sample] = []
    with (
        DiffusionEngine(EngineConfig(**config, async_output=False)) as off,
        DiffusionEngine(EngineConfig(**config)) as on,
    ):
        if not on.platform.is_asynchronous:
            table.notes.append(
                f"{on.platform.name!r} has no asynchronous output: both ways are the same there, "
                "and a change is noise."
            )
        if rounds < 2:
            table.notes.append("One round: its spread is not known, so no change is shown by it.")
        for size in sizes:
            rates: dict[DiffusionEngine, list[float]] = {off: [], on: []}
            for engine in (off, on):
                _series(engine, size, _WARM, steps)
            for number in range(rounds):
                # Every other round the other way first: a drift of the machine favors neither.
                for engine in (off, on) if number % 2 == 0 else (on, off):
                    taken = _series(engine, size, requests, steps)
                    first, last = taken[0].taken_at, taken[-1].taken_at
                    rates[engine].append((requests - 1) / (last - first))
                    if engine is on:
                        samples = taken
            _report(table, size, rates[off], rates[on])
            yield Findings(tables=[table], samples=samples)


def _name(model: str | Path) -> str:
    folder = Path(model)
    return folder.name if folder.is_dir() else str(model)


def _series(
    engine: DiffusionEngine, size: tuple[int, int] | None, count: int, steps: int | None
) -> list[Sample]:
    height, width = size or (None, None)
    work = (
        DiffusionRequest(
            "a photograph of a lighthouse at dusk",
            SamplingParams(height=height, width=width, num_inference_steps=steps, seed=number),
            request_id=str(number),
        )
        for number in range(count)
    )
    return [
        Sample(output.request_id, output.async_output_id, output.timings, time.monotonic())
        for output in engine.imap(work)
    ]


def _report(
    table: Table, size: tuple[int, int] | None, off: Sequence[float], on: Sequence[float]
) -> None:
    ratio = ratio_of(list(zip(on, off, strict=True)))
    table.rows.append(
        {
            "Resolution": "the model's own" if size is None else f"{size[0]}x{size[1]}",
            "Async Off (QPS)": median(off),
            "Async On (QPS)": median(on),
            "Change": _percent(ratio.value),
            "Spread": f"{_percent(ratio.low)} to {_percent(ratio.high)}",
            "Rounds": ratio.pairs,
        }
    )
    if ratio.low <= 1 <= ratio.high:
        table.notes.append(
            f"{table.rows[-1]['Resolution']}: the change is within the spread of the rounds."
        )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f}%"
