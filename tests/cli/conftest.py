"""A small checkpoint that draws noise, and the command line in a process of its own."""

import subprocess
import sys

import pytest

from sidestream.models.checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint("qwen-image", tmp_path_factory.mktemp("checkpoint") / "qwen-image")


@pytest.fixture
def start():
    """Give a function that starts ``sidestream`` with arguments; ends what is left of them."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "sidestream.cli.main", *map(str, arguments)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
