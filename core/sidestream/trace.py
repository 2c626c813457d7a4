"""A timeline of finished outputs, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from sidestream.request import OutputTimings

#: Lanes of the trace, top to bottom: what an output does there, from which time to which.
_LANES: Final = (
    ("queued", "submitted_at", "dispatched_at"),
    ("at the worker", "dispatched_at", "forward_started_at"),
    ("forward", "forward_started_at", "forward_ended_at"),
    ("copy", "copy_started_at", "copy_ended_at"),
    ("pump", "copy_ended_at", "ready_at"),
)
_CONSUMER: Final = "consumer"


class Traced(Protocol):
    """What a trace needs of an output: a :class:`~sidestream.DiffusionOutput`, or less."""

    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def async_output_id(self) -> str | None: ...  # noqa: D102
    @property
    def timings(self) -> OutputTimings: ...  # noqa: D102


def write_trace(
    outputs: Iterable[Traced], path: str | Path, *, taken_at: Sequence[float] | None = None
) -> None:
    """Write a trace of ``outputs`` in Chrome's JSON format; open it with https://ui.perfetto.dev.

    One lane a stage, one time axis for all processes; times that a platform can't tell are left
    out. ``taken_at``: when the caller had each output (``time.monotonic()``), for a lane of its
    own, from ready to taken.
    """
    names = [name for name, _, _ in _LANES] + ([] if taken_at is None else [_CONSUMER])
    events = list(_lane_names(names))
    for index, output in enumerate(outputs):
        events += _spans(output)
        if taken_at is not None and output.timings.ready_at is not None:
            events.append(_span(output, len(_LANES), output.timings.ready_at, taken_at[index]))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _lane_names(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    for lane, name in enumerate(names):
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": lane,
            "args": {"name": name},
        }


def _spans(output: Traced) -> Iterator[dict[str, Any]]:
    timings = output.timings
    for lane, (_, start_name, end_name) in enumerate(_LANES):
        start, end = getattr(timings, start_name), getattr(timings, end_name)
        if start is not None and end is not None:
            yield _span(output, lane, start, end)


def _span(output: Traced, lane: int, start: float, end: float) -> dict[str, Any]:
    return {
        "name": output.request_id,
        "ph": "X",
        "pid": 0,
        "tid": lane,
        "ts": start * 1e6,
        "dur": max(0.0, end - start) * 1e6,
        "args": {
            "output": output.async_output_id,
            "nbytes": output.timings.nbytes,
            "carrier": output.timings.carrier,
            "copy_hidden_share": output.timings.copy_hidden_share,
        },
    }
