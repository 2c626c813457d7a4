from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import sidestream

PIPELINES = str(Path(__file__).parents[1] / "pipelines")


@pytest.fixture(autouse=True, scope="session")
def _pipelines_on_path():
    sys.path.insert(0, PIPELINES)
    yield
    sys.path.remove(PIPELINES)


def _start(pipeline: str, **config) -> sidestream.DiffusionEngine:
    config.setdefault("start_timeout_s", 200)
    config.setdefault("max_restarts", 0)  # restarts have tests of their own
    reference = pipeline if ":" in pipeline else f"sidestream_pipes:{pipeline}"
    return sidestream.DiffusionEngine(sidestream.EngineConfig(pipeline=reference, **config))


@pytest.fixture
def make_engine():
    """Make engines by the name of a test pipeline, for tests that hurt them; closed at the end."""
    engines = []

    def make(pipeline: str, **config):
        engines.append(_start(pipeline, **config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close(timeout_s=2)


class Gate:
    """Two named pipes: forwards of ``abort_pipes`` say where they are and wait to be let on."""

    def __init__(self, folder: Path):
        self.prompt = f"gated {folder}"
        self._go = folder / "go"
        os.mkfifo(self._go)
        os.mkfifo(folder / "at")
        # Non-blocking, else it would wait here for the first writer.
        self._at = os.open(folder / "at", os.O_RDONLY | os.O_NONBLOCK)

    def reached(self, timeout_s: float = 60) -> str:
        """Wait until a forward is at a gate; gives which."""
        deadline = time.monotonic() + timeout_s
        # Without a writer it is at its end, which counts as readable.
        while not (where := self.look()):
            if time.monotonic() > deadline:
                pytest.fail(f"No forward came to its gate within {timeout_s} s.")
            time.sleep(0.002)
        return where

    def look(self) -> str:
        """Tell which gate a forward has come to since the last look, if any."""
        try:
            return os.read(self._at, 100).decode().strip()
        except BlockingIOError:
            return ""  # there is a writer that has not written yet

    def open(self) -> None:
        """Let the forward on that is at its gate."""
        self._go.write_text("go")

    def close(self) -> None:
        # Whoever still waits is let on: a thread of this process can't be ended.
        end = os.open(self._go, os.O_RDWR | os.O_NONBLOCK)
        os.close(end)
        os.close(self._at)


@pytest.fixture
def make_gate(tmp_path):
    """Make gates, for forwards that wait at the same time."""
    gates = []

    def make():
        folder = tmp_path / f"gate-{len(gates)}"
        folder.mkdir()
        gates.append(Gate(folder))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


@pytest.fixture
def gate(make_gate):
    return make_gate()


@pytest.fixture
def until():
    """Wait until a condition holds that nothing reports; fails after a minute."""

    def wait(condition, timeout_s: float = 60):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    return wait


#: Pipelines that one worker can play in turn.
PLAIN = {"Gradient", "OneBuffer", "HostBuffer", "Echo", "Failing"}
#: What the shared engines are told, so that a test may ask whether it arrived.
TOLD = {"pipeline_options": {"a": [1, 2]}, "dtype": "float16"}


@pytest.fixture(scope="session")
def engines():
    """Give engines that tests share and leave as they were: a start costs seconds.

    Of the plain pipelines one at a time: the next call may turn it into another.
    """
    running = {}

    def get(pipeline: str, platform: str = "cpu", executor: str = "multiproc", **config):
        loaded = "Chameleon" if pipeline in PLAIN else pipeline
        key = loaded, platform, executor, *sorted(config.items())
        if key not in running:
            running[key] = _start(loaded, platform=platform, executor=executor, **TOLD, **config)
        engine = running[key]
        assert engine.health().ok
        assert engine.drain(30)
        if pipeline in PLAIN:
            engine.executor.collective_rpc("become", (pipeline,))
        return engine

    yield get
    for engine in running.values():
        engine.close()
