"""``sidestream plugins``: which platforms this machine knows, and why each can or can't be used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from sidestream.cli.verbosity import verbose_option
from sidestream.errors import SidestreamError

if TYPE_CHECKING:
    from sidestream.platforms.registry import PluginRecord


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@verbose_option
def plugins(as_json: bool) -> None:
    """List the platform plugins, with what each says of this machine.

    The one that an engine would use is marked. A plugin that can't be loaded is listed with its
    reason, and the exit code is 0 all the same.
    """
    from sidestream.platforms.registry import PlatformRegistry

    registry = PlatformRegistry.discover()
    try:
        selected, problem = registry.select().name, None
    except SidestreamError as error:  # the list is what explains it
        selected, problem = None, str(error)
    if as_json:
        listed = [_as_json(record, record.name == selected) for record in registry.records]
        click.echo(json.dumps(listed, indent=2))
        return
    _print_table([_as_row(record, record.name == selected) for record in registry.records])
    if problem is not None:
        click.echo(f"None is selected: {problem}")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    rows = [("", "PLATFORM", "STATE", "DEVICES", "FROM", "REASON"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for *cells, reason in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo("  ".join((*padded, reason)))


def _state(record: PluginRecord) -> str:
    if record.probe is None:
        return "broken"
    return "available" if record.probe.available else "absent"


def _as_row(record: PluginRecord, selected: bool) -> tuple[str, ...]:
    count = record.probe.device_count if record.probe is not None else None
    return (
        "*" if selected else "",
        record.name,
        _state(record),
        "-" if count is None else str(count),
        record.distribution or record.reference,
        record.reason,
    )


def _as_json(record: PluginRecord, selected: bool) -> dict[str, Any]:
    probe = record.probe
    return {
        "name": record.name,
        "state": _state(record),
        "selected": selected,
        "reason": record.reason,
        "device_type": probe.device_type if probe is not None else None,
        "device_count": probe.device_count if probe is not None else None,
        "auto": probe.auto if probe is not None else None,
        "reference": record.reference,
        "distribution": record.distribution,
        "hooks": list(record.hooks),
    }
