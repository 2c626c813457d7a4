"""The guide names every command and every option of the command line."""

from pathlib import Path

import click
import pytest

from sidestream.cli.main import cli

GUIDE = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text(encoding="utf-8")


def options(command):
    parameters = [p for p in command.params if isinstance(p, click.Option)]
    return {option for parameter in parameters for option in parameter.opts}


@pytest.mark.parametrize("name", cli.commands)
def test_the_guide_names_the_command_and_its_options(name):
    assert f"sidestream {name}" in GUIDE
    missing = {option for option in options(cli.commands[name]) if f"`{option}" not in GUIDE}
    assert not missing


def test_the_guide_names_the_options_of_all_commands():
    assert all(f"`{option}" in GUIDE for option in options(cli) - {"-h"})
