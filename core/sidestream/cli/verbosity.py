"""How much a command says when something goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])


@dataclass
class Verbosity:
    """State of one invocation: quiet until somebody says ``--verbose``."""

    verbose: bool = False


def verbose_option(command: Command) -> Command:
    """Add ``--verbose`` to a command; the group has it too, so it may stand on either side."""
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_raise_verbosity,
        help="Show the log, and the whole traceback of an error.",
    )(command)


def _raise_verbosity(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.ensure_object(Verbosity).verbose:
        context.ensure_object(Verbosity).verbose = True
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
