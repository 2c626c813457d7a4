"""``sidestream bench``: tables of what asynchronous output is worth on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sidestream.bench.workload import OUTPUTS, Workload
from sidestream.cli.verbosity import verbose_option

if TYPE_CHECKING:
    from sidestream.bench.plan import Plan
    from sidestream.bench.series import Sample, Session
    from sidestream.bench.table import Table
    from sidestream.bench.throughput import Cell

Command = TypeVar("Command", bound=Callable[..., Any])

_FILE: Final = click.Path(dir_okay=False, writable=True, path_type=Path)
_POSITIVE: Final = click.IntRange(min=1)

_platform = click.option(
    "--platform", help="A name from 'sidestream plugins'; default: the one available."
)
_json = click.option("--json", "json_file", type=_FILE, help="Write all figures there as JSON.")
_trace = click.option(
    "--trace", "trace_file", type=_FILE, help="Write a timeline for https://ui.perfetto.dev."
)
_plot = click.option("--plot", "plot_file", type=_FILE, help="Draw the shares as a PNG file.")
_forwards = click.option(
    "--forward-ms", "forwards_ms", type=float, multiple=True, help="Length of a forward; repeats."
)
_outputs = click.option(
    "--output", "outputs", type=click.Choice(list(OUTPUTS)), multiple=True, help="Repeats."
)


def _common(command: Command) -> Command:
    return _platform(_json(verbose_option(command)))


@click.group()
def bench() -> None:
    """Measure, each figure beside its bound.

    Forwards are synthetic: work of a given length on the device with outputs of a given size. On
    'cpu' and 'sim' the workloads are small; there order and counts are checked, and times mean
    little.
    """


@bench.command()
@_common
@_forwards
@_outputs
@click.option("--model", help="Measure this model: a folder, a hub id, or 'digits'.")
@click.option("--size", "sizes", type=_POSITIVE, multiple=True, help="Pixels, square; repeats.")
@click.option("--steps", type=_POSITIVE, help="Denoising steps of the model.")
@click.option("--requests", type=_POSITIVE, default=8, help="Requests of the model a series.")
@click.option("--rounds", type=_POSITIVE, help="How often each way is measured, in turn.")
@_plot
@_trace
def throughput(
    platform: str | None,
    json_file: Path | None,
    forwards_ms: tuple[float, ...],
    outputs: tuple[str, ...],
    model: str | None,
    sizes: tuple[int, ...],
    steps: int | None,
    requests: int,
    rounds: int | None,
    plot_file: Path | None,
    trace_file: Path | None,
) -> None:
    """Requests/s without and with asynchronous output, as shares of the limit."""
    from sidestream.bench.throughput import throughput as measure

    with _session(platform) as (session, plan):
        if model is not None:
            from sidestream.bench.model import model_throughput

            config = {"model": model, "platform": session.platform.name}
            squares: list[tuple[int, int] | None] = [(size, size) for size in sizes]
            table, samples = model_throughput(
                config,
                squares or [None],
                requests=requests,
                rounds=rounds or plan.rounds,
                steps=steps,
            )
            cells: list[Cell] = []
        else:
            work = _workloads(plan.throughput, forwards_ms, outputs)
            table, cells, samples = measure(
                session, work, rounds=rounds or plan.rounds, seconds=plan.seconds
            )
        _finish(session, [table], json_file)
        _draw(session, cells, plot_file)
        _write_trace(samples, trace_file)


@bench.command()
@_common
@_forwards
@_outputs
@_trace
def bubble(
    platform: str | None,
    json_file: Path | None,
    forwards_ms: tuple[float, ...],
    outputs: tuple[str, ...],
    trace_file: Path | None,
) -> None:
    """How long the device idles between two forwards."""
    from sidestream.bench.bubble import bubble as measure

    with _session(platform) as (session, plan):
        work = _workloads(plan.bubble, forwards_ms, outputs)
        table, samples = measure(session, work, count=plan.bubble_count)
        _finish(session, [table], json_file)
        _write_trace(samples, trace_file)


@bench.command()
@_common
def slowdown(platform: str | None, json_file: Path | None) -> None:
    """What bringing outputs out costs the forwards that run meanwhile."""
    with _session(platform) as (session, plan):
        _finish(session, [_slowdown(session, plan)], json_file)


@bench.command()
@_common
@_outputs
@_trace
def handoff(
    platform: str | None,
    json_file: Path | None,
    outputs: tuple[str, ...],
    trace_file: Path | None,
) -> None:
    """From a tensor on the device to a readable one here, alone and in a batch."""
    with _session(platform) as (session, plan):
        tables, samples = _handoff(session, plan, outputs)
        _finish(session, tables, json_file)
        _write_trace(samples, trace_file)


@bench.command()
@_common
@_outputs
def transport(platform: str | None, json_file: Path | None, outputs: tuple[str, ...]) -> None:
    """From a tensor to a view of it in another process, on the CPU."""
    with _session(platform) as (session, plan):
        _finish(session, [_transport(plan, outputs)], json_file)


@bench.command()
@_common
def idle(platform: str | None, json_file: Path | None) -> None:
    """What it costs to be there: an idle engine, an import, the command line."""
    with _session(platform) as (session, plan):
        _finish(session, [_idle(session, plan)], json_file)


@bench.command()
@_common
def overload(platform: str | None, json_file: Path | None) -> None:
    """More requests than the device can do, and outputs that nobody takes."""
    with _session(platform) as (session, plan):
        _finish(session, [_overload(session, plan)], json_file)


@bench.command(name="all")
@_common
@_plot
@_trace
def every(
    platform: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    trace_file: Path | None,
) -> None:
    """All tables, and which goals are missed."""
    from sidestream.bench.bubble import bubble as measure_bubble
    from sidestream.bench.throughput import throughput as measure_throughput

    tables: list[Table] = []
    with _session(platform) as (session, plan):

        def done(*more: Table) -> None:
            # After each: a run that is cut short leaves what it had.
            tables.extend(more)
            _finish(session, tables, json_file, show=more)

        handed, samples = _handoff(session, plan, ())
        done(*handed)
        done(measure_bubble(session, plan.bubble, count=plan.bubble_count)[0])
        done(_slowdown(session, plan))
        table, cells, samples = measure_throughput(
            session, plan.throughput, rounds=plan.rounds, seconds=plan.seconds
        )
        _draw(session, cells, plot_file)
        _write_trace(samples, trace_file)
        done(table)
        done(_overload(session, plan))
        done(_idle(session, plan))
        done(_transport(plan, ()))
    missed = [goal for table in tables for goal in table.goals if not goal.is_met]
    met = sum(len(table.goals) for table in tables) - len(missed)
    click.echo(f"{met} goals met, {len(missed)} missed.")
    for goal in missed:
        click.echo(f"  {goal}")


@contextlib.contextmanager
def _session(platform: str | None) -> Iterator[tuple[Session, Plan]]:
    from sidestream.bench.plan import plan_for
    from sidestream.bench.series import Session

    with Session(platform) as session:
        yield session, plan_for(session)


def _workloads(
    planned: Sequence[Workload], forwards_ms: Sequence[float], outputs: Sequence[str]
) -> Sequence[Workload]:
    from sidestream.bench.plan import grid

    if not forwards_ms and not outputs:
        return planned
    lengths = [ms / 1e3 for ms in forwards_ms] or _unique(w.forward_s for w in planned)
    return grid(lengths, outputs or _unique(w.output for w in planned))


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _slowdown(session: Session, plan: Plan) -> Table:
    from sidestream.bench.slowdown import slowdown as measure

    return measure(session, plan.slowdown, rounds=plan.slowdown_rounds, count=plan.slowdown_count)


def _handoff(
    session: Session, plan: Plan, outputs: Sequence[str]
) -> tuple[list[Table], list[Sample]]:
    from sidestream.bench.handoff import first_of_batch
    from sidestream.bench.handoff import handoff as measure

    table, samples = measure(session, outputs or plan.handoff, count=plan.handoff_count)
    return [table, first_of_batch(session, outputs or plan.batch)], samples


def _transport(plan: Plan, outputs: Sequence[str]) -> Table:
    from sidestream.bench.transport import transport as measure

    return measure(outputs or plan.transport, seconds=plan.transport_seconds)


def _idle(session: Session, plan: Plan) -> Table:
    from sidestream.bench.idle import idle as measure

    return measure(session, seconds=plan.idle_seconds)


def _overload(session: Session, plan: Plan) -> Table:
    from sidestream.bench.overload import overload as measure

    return measure(session, plan.overload, seconds=plan.overload_seconds)


def _finish(
    session: Session,
    tables: Sequence[Table],
    json_file: Path | None,
    *,
    show: Sequence[Table] | None = None,
) -> None:
    from sidestream.bench.about import about
    from sidestream.bench.table import to_json

    for table in tables if show is None else show:
        click.echo(table.to_text() + "\n")
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(tables, about(session)), indent=1) + "\n")


def _draw(session: Session, cells: Sequence[Cell], plot_file: Path | None) -> None:
    if plot_file is None or not cells:
        return
    from sidestream.cli.shares import draw_shares

    rows = [
        (cell.name, {"asynchronous output": cell.on, "synchronous": cell.off}) for cell in cells
    ]
    title = f"sidestream bench throughput on {session.device_name}"
    draw_shares(rows, title, "requests/s as a share of forwards with their outputs dropped").save(
        plot_file, optimize=True
    )


def _write_trace(samples: Sequence[Sample], trace_file: Path | None) -> None:
    if trace_file is not None:
        from sidestream.trace import write_trace

        write_trace(samples, trace_file, taken_at=[sample.taken_at for sample in samples])
