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


@pytest.fixture
def make_engine():
    """Make engines by the name of a test pipeline; closed at the end."""
    engines = []

    def make(pipeline: str, **config):
        config.setdefault("start_timeout_s", 60)
        engine = sidestream.DiffusionEngine(
            sidestream.EngineConfig(pipeline=f"sidestream_pipes:{pipeline}", **config)
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(timeout_s=2)


def request(prompt: str = "x", *, seed: int = 0, height: int = 64, width: int = 64, **fields):
    return sidestream.DiffusionRequest(
        prompt=prompt,
        sampling_params=sidestream.SamplingParams(height=height, width=width, seed=seed),
        **fields,
    )
