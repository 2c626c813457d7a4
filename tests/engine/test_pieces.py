"""The pieces that an engine of somebody else's takes one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import AsyncOutputThread, HostSink, load_platform, to_host

EMBED = Path(__file__).parents[2] / "examples" / "embed.py"


@pytest.mark.slow
@pytest.mark.parametrize("platform", [pytest.param("cpu", marks=pytest.mark.soak), "sim"])
def test_the_embedding_example_runs(platform):
    run = subprocess.run(
        [sys.executable, EMBED, platform], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert "'engine': (1024, 1024, 3) torch.float32" in run.stdout


def test_the_embedding_example_is_short():
    marked = [line for line in EMBED.read_text().splitlines() if "(*)" in line]
    engine = EMBED.read_text().split("def worker")[1].split("if __name__")[0]
    assert len([line for line in engine.splitlines() if line.strip()]) < 40
    assert len(marked) < 15


@pytest.fixture
def device():
    platform = load_platform("sim")
    platform.set_device(platform.device(0))
    return platform.device(0)


def test_to_host_gives_the_same_tree_on_the_host(device):
    tree = {"a": torch.arange(6, device=device).reshape(2, 3), "b": [torch.ones(2), "text"]}
    host = to_host(tree).result(30)
    assert host["a"].device.type == "cpu"
    assert host["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert host["b"][1] == "text"
    assert to_host(torch.ones(3)).result(30).tolist() == [1, 1, 1]


def test_an_output_thread_drains_closes_and_then_refuses(device):
    platform = load_platform("sim")
    thread = AsyncOutputThread(platform, HostSink(platform, device), device=device).start()
    futures = [thread.submit(str(i), torch.full((8,), i, device=device)) for i in range(20)]
    assert thread.drain(30)
    assert all(future.done() for future in futures)
    assert thread.close(30)
    assert thread.close(30)
    with pytest.raises(sidestream.EngineClosedError):
        thread.submit("late", torch.ones(1))


def test_a_leaf_that_cannot_travel_is_named_in_the_caller(device):
    platform = load_platform("sim")
    with (
        AsyncOutputThread(platform, HostSink(platform, device), device=device) as thread,
        pytest.raises(ValueError, match=r"\['bad'\]"),
    ):
        thread.submit("x", {"good": torch.ones(2, device=device), "bad": lambda: None})
