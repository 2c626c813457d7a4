"""Requests that share a forward."""

from __future__ import annotations

import os
import time

import pytest

import sidestream
from sidestream import DiffusionRequest, SamplingParams

ways = pytest.mark.parametrize(("platform", "executor"), [("cpu", "uniproc"), ("sim", "multiproc")])


def request(prompt="x", *, seed=0, height=8, request_id=None, steps=None):
    params = SamplingParams(height=height, width=8, seed=seed, num_inference_steps=steps)
    return DiffusionRequest(prompt, params, request_id=request_id)


def submit_together(engine, requests):
    """Submit requests so that none is sent before all are queued."""
    with engine._loop._room:
        return [engine.submit(r) for r in requests]


@pytest.fixture
def batching(engines):
    """Give engines that run up to eight requests together."""

    def get(platform, executor):
        engine = engines("Batching", platform, executor, max_batch_size=8)
        engine.executor.collective_rpc("seen")  # that of earlier tests
        return engine

    return get


@ways
def test_compatible_requests_share_a_forward_and_each_gets_its_own_output(
    batching, platform, executor
):
    engine = batching(platform, executor)
    handles = submit_together(
        engine, [request(seed=i, request_id=f"r{i}", height=8 + 8 * (i % 2)) for i in range(6)]
    )
    for i, handle in enumerate(handles):
        output = handle.result(30)
        assert output.request_id == f"r{i}"
        assert output.output.shape == (3, 8 + 8 * (i % 2), 8)
        assert (output.output == i).all()
    seen = engine.executor.collective_rpc("seen")[0]
    assert sorted(seen) == [["r0", "r2", "r4"], ["r1", "r3", "r5"]]
    batch_id, _, _ = handles[0].async_output_id.partition("/")
    assert handles[2].async_output_id.startswith(f"{batch_id}/")
    assert engine.executor.wait_output_ready(handles[0].async_output_id) is handles[0].future()


def test_without_support_or_without_the_setting_each_request_runs_alone(make_engine):
    plain = make_engine("Gradient", platform="cpu", executor="uniproc", max_batch_size=4)
    handles = submit_together(plain, [request(seed=i) for i in range(3)])
    assert [int(h.result(30).output[0, 0, 0]) for h in handles] == [0, 1, 2]
    batching = make_engine("Batching", platform="cpu", executor="uniproc")
    for handle in submit_together(batching, [request(request_id=str(i)) for i in range(3)]):
        handle.result(30)
    assert batching.executor.collective_rpc("seen")[0] == [["0"], ["1"], ["2"]]


@ways
def test_a_member_that_fails_fails_alone(batching, platform, executor):
    engine = batching(platform, executor)
    prompts = ["x", "member", "none", "x"]
    good, member, none, last = submit_together(
        engine, [request(p, seed=i, request_id=f"r{i}") for i, p in enumerate(prompts)]
    )
    assert (good.result(30).output == 0).all()
    assert (last.result(30).output == 3).all()
    with pytest.raises(sidestream.ExecutionError, match="only me") as caught:
        member.result(30)
    assert caught.value.request_id == "r1"
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(sidestream.OutputTransferError, match="None"):
        none.result(30)
    assert engine.executor.collective_rpc("seen")[0] == [["r0", "r1", "r2", "r3"]]


@ways
def test_when_a_batch_dies_of_one_member_the_others_run_again_without_it(
    batching, platform, executor
):
    engine = batching(platform, executor)
    prompts = ["x", "raise", "x"]
    first, bad, last = submit_together(
        engine, [request(p, seed=i, request_id=f"r{i}") for i, p in enumerate(prompts)]
    )
    assert (first.result(30).output == 0).all()
    assert (last.result(30).output == 2).all()
    with pytest.raises(sidestream.ExecutionError, match="one of you is bad"):
        bad.result(30)
    seen = engine.executor.collective_rpc("seen")[0]
    assert seen == [["r0", "r1", "r2"], ["r0"], ["r1"], ["r2"]]
    stats = engine.stats()
    assert stats["outputs"] == stats["queued"] == stats["forwards"] == 0


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    """Give a function that lets the gated forward go into its step k, once it is there."""
    folder = tmp_path_factory.mktemp("gates")
    for step in (1, 2, 3):
        os.mkfifo(folder / str(step))

    def open_gate(step):
        (folder / str(step)).write_text("go")

    open_gate.folder = str(folder)
    return open_gate


@pytest.fixture(scope="module")
def stepping(gates):
    """Give an engine in whose forwards the gates are."""
    config = sidestream.EngineConfig(
        pipeline="sidestream_pipes:Stepping",
        platform="cpu",
        max_batch_size=8,
        pipeline_options={"gates": gates.folder},
    )
    with sidestream.DiffusionEngine(config) as engine:
        yield engine


def test_seven_that_come_while_one_runs_share_the_next_forward(stepping, gates):
    engine = stepping
    handles = [engine.submit(request("gated", steps=2, request_id="r0"))]
    _until(lambda: _state(engine, "r0") == "dispatched")
    handles += [engine.submit(request(steps=2, request_id=f"r{i}")) for i in range(1, 8)]
    gates(1)
    gates(2)
    for handle in handles:
        handle.result(30)
    seen = engine.executor.collective_rpc("seen")[0]
    assert seen == [["r0"], [f"r{i}" for i in range(1, 8)]]


def test_the_next_batch_is_bound_at_the_last_step_of_the_running_forward(stepping, gates):
    engine = stepping
    running = engine.submit(request("gated", steps=3, request_id="running"))
    _until(lambda: _state(engine, "running") == "dispatched")
    waiting = engine.submit(request(steps=3, request_id="next"))
    gates(1)
    assert _state(engine, "next") == "queued"
    gates(2)  # behind it the last step begins, and the worker says so
    _until(lambda: _state(engine, "next") == "dispatched")
    assert not running.done()
    gates(3)
    assert running.result(30)
    assert waiting.result(30)


def test_a_batch_waits_for_company_as_long_as_it_is_told(make_engine):
    engine = make_engine(
        "Batching", platform="cpu", executor="uniproc", max_batch_size=3, max_batch_wait_s=20.0
    )
    handles = [engine.submit(request(request_id=str(i))) for i in range(3)]
    for handle in handles:
        handle.result(15)  # full: nobody waits 20 s
    assert engine.executor.collective_rpc("seen")[0] == [["0", "1", "2"]]
    quick = make_engine(
        "Batching", platform="cpu", executor="uniproc", max_batch_size=3, max_batch_wait_s=0.05
    )
    assert quick.submit(request()).result(15)


def test_a_batch_can_be_run_past_the_queue(batching):
    engine = batching("sim", "multiproc")
    (answer,) = engine.executor.collective_rpc(
        "execute_model_batch", ([request(seed=i) for i in range(3)],)
    )
    assert len({output_id.partition("/")[0] for output_id in answer.async_output_ids}) == 1
    for i, output_id in enumerate(answer.async_output_ids):
        future = engine.executor.wait_output_ready(output_id)
        assert (future.result(30).output == i).all()


def test_qwen_image_batches_equal_each_request_alone_within_rounding():
    prompts = ["7", "three", "a handwritten 5"]
    config = {"model": "digits", "platform": "cpu", "executor": "uniproc"}
    with sidestream.DiffusionEngine(sidestream.EngineConfig(**config)) as engine:
        alone = engine.generate(prompts, seed=5)
    with sidestream.DiffusionEngine(
        sidestream.EngineConfig(**config, max_batch_size=4, max_batch_wait_s=5.0)
    ) as engine:
        # Three do not fill a batch of four; a fourth does.
        together = engine.generate([*prompts, "1"], seed=5)
        assert together[0].async_output_id.startswith("batch-")
    for one, member in zip(alone, together, strict=False):
        assert (one.output.int() - member.output.int()).abs().max() <= 1


def _state(engine, request_id):
    for line in engine.describe().splitlines():
        if f"'{request_id}'" in line:
            return line.split()[-1]
    return "done"


def _until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
