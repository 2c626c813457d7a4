"""A timeline of finished outputs, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from sidestream.output import DiffusionOutput

#: Lanes of the trace, top to bottom: what an output does there, from which time to which.
_LANES: Final = (
    ("queued", "submitted_at", "dispatched_at"),
    ("at the worker", "dispatched_at", "forward_started_at"),
    ("forward", "forward_started_at", "forward_ended_at"),
    ("copy", "copy_started_at", "copy_ended_at"),
    ("to the caller", "copy_ended_at", "ready_at"),
)


def write_trace(outputs: Iterable[DiffusionOutput], path: str | Path) -> None:
    """Write a trace of ``outputs`` in Chrome's JSON format; open it with https://ui.perfetto.dev.

    One lane a stage, one time axis for all processes; times that a platform can't tell are left
    out.
    """
    events = [*_lane_names(), *(event for output in outputs for event in _spans(output))]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _lane_names() -> Iterator[dict[str, Any]]:
    for lane, (name, _, _) in enumerate(_LANES):
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": lane,
            "args": {"name": name},
        }


def _spans(output: DiffusionOutput) -> Iterator[dict[str, Any]]:
    timings = output.timings
    for lane, (_, start_name, end_name) in enumerate(_LANES):
        start, end = getattr(timings, start_name), getattr(timings, end_name)
        if start is None or end is None:
            continue
        yield {
            "name": output.request_id,
            "ph": "X",
            "pid": 0,
            "tid": lane,
            "ts": start * 1e6,
            "dur": max(0.0, end - start) * 1e6,
            "args": {
                "output": output.async_output_id,
                "nbytes": timings.nbytes,
                "carrier": timings.carrier,
                "copy_hidden_share": timings.copy_hidden_share,
            },
        }
