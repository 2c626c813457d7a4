"""``sidestream doctor``: what of this machine can be used, and what to do about the rest."""

from __future__ import annotations

import json
import shutil
import textwrap
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from sidestream.cli.verbosity import verbose_option

if TYPE_CHECKING:
    from sidestream.doctor.report import Copies, Finding, Report, Worth

_EXIT_INTERNAL: Final = 2
_MARKS: Final = {
    "usable": ("ok", "green"),
    "available": ("-", None),
    "absent": ("-", None),
    "limited": ("low", "yellow"),
    "broken": ("FAIL", "red"),
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--platform",
    metavar="NAME",
    help="Judge this one, and run it whatever its probe says; default: what an engine would use.",
)
@click.option(
    "--device", "device_index", default=0, show_default=True, type=click.IntRange(0), metavar="N"
)
@click.option(
    "--forward-s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="How long a forward of yours takes: says whether asynchronous output is worth it.",
)
@click.option(
    "--output-bytes",
    default=3 << 20,
    show_default=True,
    type=click.IntRange(1, 8 << 30),
    metavar="N",
    help="The size of an output of yours; the default is an image of 1024 x 1024 pixels.",
)
@click.option(
    "--timeout-s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="How long each thing that is tried may take.",
)
@verbose_option
def doctor(
    as_json: bool,
    platform: str | None,
    device_index: int,
    forward_s: float | None,
    output_bytes: int,
    timeout_s: float,
) -> int:
    """Look at torch, every platform and the system's limits; say what is wrong and what to do.

    Whatever may abort or hang is run in processes of its own. Exit code 0: what an engine would
    use works, and nothing that is installed is broken; 1: not so; 2: the examination itself failed.
    """
    from sidestream.doctor.examination import Settings, examine

    settings = Settings(
        platform=platform,
        device_index=device_index,
        output_bytes=output_bytes,
        forward_s=forward_s,
        timeout_s=timeout_s,
    )
    try:
        report = examine(settings)
        shown = json.dumps(report.as_json(), indent=2) if as_json else _page(report)
    except Exception as error:  # noqa: BLE001 - boundary: a failure here is no finding
        traceback.print_exception(error)
        click.echo(
            "Error: the examination failed, a bug in sidestream; please report it.", err=True
        )
        return _EXIT_INTERNAL
    click.echo(shown)
    return report.exit_code


def _page(report: Report) -> str:
    """Lay the report out for a person."""
    width = max(
        len(each.name)
        for each in (*report.platforms, *report.extensions, *report.limits, report.torch)
    )
    parts = [f"sidestream {report.version}, Python {report.python}, {report.system}"]
    parts += ["", *_rows([report.torch], width)]
    parts += ["", "Platforms", *_rows(report.platforms, width)]
    if report.extensions:
        parts += ["", "Packages that extend torch", *_rows(report.extensions, width)]
    parts += ["", "Limits", *_rows(report.limits, width)]
    if report.copies is not None:
        parts += ["", *_copy_rows(report.copies)]
    if report.worth is not None:
        parts += ["", _worth_line(report.worth)]
    return "\n".join((*parts, "", *_verdict(report)))


def _rows(findings: Iterable[Finding], width: int) -> list[str]:
    rows = []
    for finding in findings:
        mark, color = _MARKS[finding.state]
        head = f"  {click.style(mark.ljust(4), fg=color)}  {finding.name.ljust(width)}  "
        indent = " " * (10 + width)
        lines = list(finding.evidence)
        if finding.cause is not None and finding.state != "absent":
            lines[0] = f"{finding.cause}: {lines[0]}"
        # What to do about a device that is simply not there, the evidence says.
        if finding.advice is not None and finding.cause != "absent":
            lines.append(f"-> {finding.advice}")
        heads = [head] + [indent] * (len(lines) - 1)
        rows += [_wrapped(line, start, indent) for line, start in zip(lines, heads, strict=True)]
    return rows


def _wrapped(line: str, head: str, indent: str) -> str:
    columns = max(60, min(shutil.get_terminal_size().columns, 120) - len(indent))
    shown: list[str] = []
    # Lines for a shell start on a line of their own and stay whole: they are there to be copied.
    for part in line.replace(": pip install", ":\npip install").splitlines():
        if part.startswith("pip install"):
            shown.append(part)
        else:
            shown += textwrap.wrap(part, columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join((head if i == 0 else indent) + text for i, text in enumerate(shown))


def _copy_rows(copies: Copies) -> list[str]:
    rows = [
        f"Copies from {copies.device} ({copies.platform}), outputs of {copies.output_bytes:,} bytes"
    ]
    for route in copies.routes:
        free = "asynchronous" if route.is_asynchronous else "the host waits"
        rows.append(
            f"  into {route.memory:<20} {route.bytes_per_s / 1e9:7.2f} GB/s   "
            f"{1e3 * route.output_s:8.3f} ms an output   {free}"
        )
    return rows


def _worth_line(worth: Worth) -> str:
    verdict = "is worth it" if worth.is_worth_it else "changes little"
    return (
        f"Asynchronous output {verdict} for forwards of {worth.forward_s:g} s: copies of "
        f"{1e3 * worth.copy_s:.3f} ms, {100 * worth.gain:.2f} % more outputs a second; "
        f"{worth.reason}."
    )


def _verdict(report: Report) -> list[str]:
    selection = report.selection
    how = {"argument": "--platform", "variable": "SIDESTREAM_PLATFORM", "auto": "automatic choice"}
    if selection.platform is None:
        return [f"No platform can be selected ({how[selection.by]}): {selection.reason}"]
    chosen = f"An engine gets {selection.platform!r} ({how[selection.by]})"
    if report.is_usable:
        return [f"{chosen}, which works."]
    broken = [
        each.name
        for each in (report.torch, *report.platforms, *report.extensions, *report.limits)
        if each.state == "broken"
    ]
    return [f"{chosen}. Broken: {', '.join(broken)}."]
