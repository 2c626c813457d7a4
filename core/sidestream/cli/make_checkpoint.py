"""``sidestream make-checkpoint``: a small folder of a model's real classes, with random weights."""

from __future__ import annotations

from pathlib import Path

import click

from sidestream.cli.verbosity import verbose_option


@click.command("make-checkpoint")
@click.argument("kind")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@verbose_option
def make_checkpoint(kind: str, folder: Path) -> None:
    """Write a small random-weight checkpoint of KIND (such as qwen-image) into FOLDER.

    For tests and trials: it loads like the real model, offline, and draws noise.
    """
    from sidestream.models.checkpoint import make_checkpoint

    make_checkpoint(kind, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    click.echo(f"Wrote {kind} to {folder} ({size / 1e6:.1f} MB).")
