"""``sidestream bench``: tables of what asynchronous output is worth on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sidestream.bench.workload import OUTPUTS, Workload
from sidestream.cli.figures import Figures
from sidestream.cli.verbosity import verbose_option

if TYPE_CHECKING:
    from sidestream.bench.plan import Plan
    from sidestream.bench.series import Session

Command = TypeVar("Command", bound=Callable[..., Any])

_FILE: Final = click.Path(dir_okay=False, writable=True, path_type=Path)
_POSITIVE: Final = click.IntRange(min=1)
_plot = click.option("--plot", "plot_file", type=_FILE, help="Draw the shares as a PNG file.")
_forwards = click.option(
    "--forward-ms", "forwards_ms", type=float, multiple=True, help="Length of a forward; repeats."
)
_outputs = click.option(
    "--output", "outputs", type=click.Choice(list(OUTPUTS)), multiple=True, help="Repeats."
)


def _trace(command: Command) -> Command:
    for option in (
        click.option(
            "--timeline", "timeline_file", type=_FILE, help="Draw some outputs as a PNG file."
        ),
        click.option(
            "--trace", "trace_file", type=_FILE, help="Write them for https://ui.perfetto.dev."
        ),
    ):
        command = option(command)
    return command


def _common(command: Command) -> Command:
    for option in (
        verbose_option,
        click.option("--json", "json_file", type=_FILE, help="Write all figures there as JSON."),
        click.option(
            "--platform", help="A name from 'sidestream plugins'; default: the one available."
        ),
    ):
        command = option(command)
    return command


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
@click.option(
    "--requests", type=click.IntRange(min=2), default=8, help="Requests of the model a series."
)
@click.option("--rounds", type=_POSITIVE, help="How often each way is measured, in turn.")
@_plot
@_trace
def throughput(
    platform: str | None,
    forwards_ms: tuple[float, ...],
    outputs: tuple[str, ...],
    model: str | None,
    sizes: tuple[int, ...],
    steps: int | None,
    requests: int,
    rounds: int | None,
    **files: Path | None,
) -> None:
    """Requests/s without and with asynchronous output, as shares of the limit."""
    with _session(platform) as (session, plan):
        plan = dataclasses.replace(plan, rounds=rounds or plan.rounds)
        if model is None:
            work = _workloads(plan.throughput, forwards_ms, outputs)
            plan = dataclasses.replace(plan, throughput=work)
            _measure("throughput", session, plan, **files)
            return
        from sidestream.bench.model import model_throughput
        from sidestream.bench.run import timed

        squares: list[tuple[int, int] | None] = [(size, size) for size in sizes]
        parts = model_throughput(
            {"model": model, "platform": session.platform.name},
            squares or [None],
            requests=requests,
            rounds=plan.rounds,
            steps=steps,
        )
        Figures(session, **files).take(timed(parts))


@bench.command()
@_common
@_forwards
@_outputs
@_trace
def bubble(
    platform: str | None,
    forwards_ms: tuple[float, ...],
    outputs: tuple[str, ...],
    **files: Path | None,
) -> None:
    """How long the device idles between two forwards."""
    with _session(platform) as (session, plan):
        work = _workloads(plan.bubble, forwards_ms, outputs)
        _measure("bubble", session, dataclasses.replace(plan, bubble=work), **files)


@bench.command()
@_common
def slowdown(platform: str | None, **files: Path | None) -> None:
    """What bringing outputs out costs the forwards that run meanwhile."""
    with _session(platform) as (session, plan):
        _measure("slowdown", session, plan, **files)


@bench.command()
@_common
@_outputs
@_trace
def handoff(platform: str | None, outputs: tuple[str, ...], **files: Path | None) -> None:
    """From a tensor on the device to a readable one here, alone and in a batch."""
    with _session(platform) as (session, plan):
        if outputs:
            plan = dataclasses.replace(plan, handoff=outputs, batch=outputs)
        _measure("handoff", session, plan, **files)


@bench.command()
@_common
@_outputs
def transport(platform: str | None, outputs: tuple[str, ...], **files: Path | None) -> None:
    """From a tensor to a view of it in another process, on the CPU."""
    with _session(platform) as (session, plan):
        if outputs:
            plan = dataclasses.replace(plan, transport=outputs)
        _measure("transport", session, plan, **files)


@bench.command()
@_common
def idle(platform: str | None, **files: Path | None) -> None:
    """What it costs to be there: an idle engine, an import, the command line."""
    with _session(platform) as (session, plan):
        _measure("idle", session, plan, **files)


@bench.command()
@_common
def overload(platform: str | None, **files: Path | None) -> None:
    """More requests than the device can do, and outputs that nobody takes."""
    with _session(platform) as (session, plan):
        _measure("overload", session, plan, **files)


@bench.command(name="all")
@_common
@_plot
@_trace
def every(platform: str | None, **files: Path | None) -> None:
    """All tables, and which goals are missed."""
    from sidestream.bench.run import TABLES, measure

    with _session(platform) as (session, plan):
        figures = Figures(session, **files)
        for name, measurement in TABLES.items():
            if session.has_device:
                figures.announce(name, measurement.planned_s(plan, engines=session.engines))
            figures.take(measure(name, session, plan))
        figures.summarize()


@contextlib.contextmanager
def _session(platform: str | None) -> Iterator[tuple[Session, Plan]]:
    from sidestream.bench.plan import plan_for
    from sidestream.bench.series import Session

    with Session(platform) as session:
        yield session, plan_for(session)


def _measure(name: str, session: Session, plan: Plan, **files: Path | None) -> None:
    from sidestream.bench.run import measure

    Figures(session, **files).take(measure(name, session, plan))


def _workloads(
    planned: Sequence[Workload], forwards_ms: Sequence[float], outputs: Sequence[str]
) -> Sequence[Workload]:
    from sidestream.bench.plan import grid

    if not forwards_ms and not outputs:
        return planned
    lengths_s = [ms / 1e3 for ms in forwards_ms] or _unique(w.forward_s for w in planned)
    return grid(lengths_s, outputs or _unique(w.output for w in planned))


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
