from __future__ import annotations

import sys
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
    config.setdefault("start_timeout_s", 60)
    config.setdefault("max_restarts", 0)  # restarts have tests of their own
    return sidestream.DiffusionEngine(
        sidestream.EngineConfig(pipeline=f"sidestream_pipes:{pipeline}", **config)
    )


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


@pytest.fixture(scope="session")
def engines():
    """Give engines that tests share and leave as they were: a start costs seconds."""
    running = {}

    def get(pipeline: str, platform: str = "cpu", executor: str = "multiproc"):
        key = (pipeline, platform, executor)
        if key not in running:
            running[key] = _start(pipeline, platform=platform, executor=executor)
        engine = running[key]
        assert engine.health().ok
        assert engine.drain(30)
        return engine

    yield get
    for engine in running.values():
        engine.close()
