"""The group of commands, and what their failures look like to a shell.

Exit codes: 0 done, 1 failed with one line that says why, 2 used wrongly, 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

import sidestream
from sidestream.cli.bench import bench
from sidestream.cli.demo import demo
from sidestream.cli.doctor import doctor
from sidestream.cli.generate import generate
from sidestream.cli.make_checkpoint import make_checkpoint
from sidestream.cli.plugins import plugins
from sidestream.cli.verbosity import Verbosity, verbose_option
from sidestream.errors import SidestreamError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(sidestream.__version__, message="%(prog)s %(version)s")
@verbose_option
def cli() -> None:
    """Draw with diffusion models; outputs leave the device while the next one is being made."""


for command in (bench, demo, doctor, generate, make_checkpoint, plugins):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, ``sys.argv`` by default, and give its exit code."""
    verbosity = Verbosity()
    try:
        code = cli.main(arguments, prog_name="sidestream", standalone_mode=False, obj=verbosity)
    except click.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the end of the process: nobody else can show it
        _show(error, verbosity)
        return 1
    # click answers with the code of --help and the like; of ours, only doctor gives one.
    return code if isinstance(code, int) else 0


def _show(error: Exception, verbosity: Verbosity) -> None:
    if verbosity.verbose:
        traceback.print_exception(error)
        return
    text = " ".join(str(error).split())
    if not isinstance(error, SidestreamError | OSError):
        text = f"{type(error).__name__}: {text} ('--verbose' shows where)"
    click.echo(f"Error: {text}", err=True)


if __name__ == "__main__":
    main()
