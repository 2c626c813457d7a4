"""Memory for outputs is made before the first request, where their size is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sidestream import DiffusionRequest, ExecutionError, SamplingParams, WorkerStartError
from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.transport.arena import SlotPool
from sidestream.worker.pipeline import LoadedPipeline
from sidestream.worker.warm_up import declared_nbytes, reserve_outputs

pytestmark = pytest.mark.slow

PIXELS = 256


def request(seed=0, size=PIXELS):
    return DiffusionRequest("x", SamplingParams(height=size, width=size, seed=seed))


def slots(engine):
    return engine.executor.collective_rpc("describe")[0]["slots"]


def run(engine, count=24):
    for i, output in enumerate(engine.imap([request(i) for i in range(count)])):
        assert output.timings.carrier == "slot"
        assert (output.output == i).all()


@pytest.mark.parametrize(
    ("pipeline", "config"),
    [
        ("bench_pipes:SaysItsSize", {"platform": "sim"}),
        ("Gradient", {"platform": "sim", "warm_up": request()}),
    ],
)
def test_no_arena_is_made_after_the_start(make_engine, pipeline, config):
    engine = make_engine(pipeline, pipeline_options={"size": PIXELS}, **config)
    before = slots(engine)
    assert before.made == 1
    assert before.arena_bytes >= 4 * 3 * PIXELS * PIXELS * 4
    run(engine)
    assert slots(engine).made == 1


def test_a_warm_up_that_fails_is_told_at_the_start(make_engine):
    with pytest.raises(WorkerStartError, match="no such color") as failed:
        make_engine("Failing", platform="cpu", warm_up=DiffusionRequest("value"))
    assert isinstance(failed.value.__cause__, ExecutionError)


def test_a_warm_up_that_can_not_be_sent_or_is_none_is_refused(make_engine):
    with pytest.raises(InvalidRequestError, match="warm_up"):
        make_engine(
            "Gradient", platform="cpu", warm_up=DiffusionRequest("x", inputs={"f": lambda: 0})
        )
    with pytest.raises(ConfigError, match="warm_up"):
        make_engine("Gradient", platform="cpu", warm_up="a prompt")


@pytest.mark.parametrize("size", [-0.5, "large", True])
def test_a_size_that_is_none_is_refused(size):
    pipeline = SimpleNamespace(output_nbytes=lambda params: size)
    with pytest.raises(ConfigError, match="output_nbytes"):
        declared_nbytes(LoadedPipeline(pipeline))


def test_a_pipeline_may_not_know():
    assert declared_nbytes(LoadedPipeline(SimpleNamespace())) is None
    assert declared_nbytes(LoadedPipeline(SimpleNamespace(output_nbytes=lambda p: None))) is None


def test_a_share_without_room_for_one_output_is_told_with_what_to_set(caplog):
    reserve_outputs(SlotPool(1 << 20), 1 << 21, 4)
    assert f"Set host_buffer_bytes to {1 << 23} or more" in caplog.text


def test_without_memory_the_start_goes_on_and_says_so(caplog):
    pool = SlotPool(1 << 40)
    reserve_outputs(pool, 1 << 39, 2)
    assert "before the first request" in caplog.text
    assert pool.stats.made == 0
