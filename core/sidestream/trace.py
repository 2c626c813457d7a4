"""A timeline of finished outputs, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from sidestream.request import OutputTimings

_CONSUMER: Final = "consumer"
#: Lanes of the trace, top to bottom: what an output does there, from which time to which. Those in
#: which many outputs wait at a time come last.
_LANES: Final = (
    ("forward", "forward_started_at", "forward_ended_at"),
    ("copy", "copy_started_at", "copy_ended_at"),
    ("pump", "copy_ended_at", "ready_at"),
    (_CONSUMER, "ready_at", None),
    ("at the worker", "dispatched_at", "forward_started_at"),
    ("queued", "submitted_at", "dispatched_at"),
)
#: One process for all lanes; a row whose number is the process's would count as its main thread.
_PID: Final = 1
_FIRST_ROW: Final = 2


class Traced(Protocol):
    """What a trace needs of an output: a :class:`~sidestream.DiffusionOutput`, or less."""

    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def async_output_id(self) -> str | None: ...  # noqa: D102
    @property
    def timings(self) -> OutputTimings: ...  # noqa: D102


@dataclass(frozen=True)
class _Span:
    output: Traced
    start_ns: int
    end_ns: int


def write_trace(
    outputs: Iterable[Traced], path: str | Path, *, taken_at: Sequence[float] | None = None
) -> None:
    """Write a trace of ``outputs`` in Chrome's JSON format; open it with https://ui.perfetto.dev.

    One lane a stage, one time axis for all processes; outputs that are in a stage at the same time
    have a row each. Times that a platform can't tell are left out. ``taken_at``: when the caller
    had each output (``time.monotonic()``), for a lane of its own, from ready to taken.
    """
    outputs = list(outputs)
    events = [_named("process_name", 0, "sidestream")]
    row = _FIRST_ROW
    for name, start_name, end_name in _LANES:
        starts = [getattr(output.timings, start_name) for output in outputs]
        if end_name is not None:
            ends = [getattr(output.timings, end_name) for output in outputs]
        elif taken_at is not None:
            ends = list(taken_at)
        else:
            continue
        for spans in _rows(outputs, starts, ends):
            events.append(_named("thread_name", row, name))
            events.append({**_named("thread_sort_index", row, name), "args": {"sort_index": row}})
            events += [_event(span, row) for span in spans]
            row += 1
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _rows(
    outputs: Sequence[Traced], starts: Sequence[float | None], ends: Sequence[float | None]
) -> Iterator[list[_Span]]:
    """Put spans into as few rows as have none that overlap: viewers drop those that do."""
    spans = sorted(
        (
            _Span(output, round(start * 1e9), round(max(start, end) * 1e9))
            for output, start, end in zip(outputs, starts, ends, strict=True)
            if start is not None and end is not None
        ),
        key=lambda span: span.start_ns,
    )
    rows: list[list[_Span]] = [[]]
    for span in spans:
        free = (row for row in rows if not row or row[-1].end_ns <= span.start_ns)
        row = next(free, None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    yield from rows


def _named(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PID, "tid": row, "args": {"name": name}}


def _event(span: _Span, row: int) -> dict[str, Any]:
    timings = span.output.timings
    return {
        "name": span.output.request_id,
        "ph": "X",
        "pid": _PID,
        "tid": row,
        # Microseconds with three digits: viewers count in nanoseconds.
        "ts": span.start_ns / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {
            "output": span.output.async_output_id,
            "nbytes": timings.nbytes,
            "carrier": timings.carrier,
            "copy_hidden_share": timings.copy_hidden_share,
        },
    }
