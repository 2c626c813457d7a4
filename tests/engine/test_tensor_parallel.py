"""Groups of workers that share one model: all compute, one answers, they live and die as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import (
    ConfigError,
    DiffusionRequest,
    EngineConfig,
    ExecutionError,
    RequestAbortedError,
    RequestTimeoutError,
    SamplingParams,
    WorkerDiedError,
    WorkerStartError,
)
from sidestream.models.checkpoint import make_checkpoint
from sidestream.request import AbortOutcome

pytestmark = pytest.mark.slow


def start(pipeline="Summed", size=2, **config):
    config.setdefault("devices", (0,) * size)
    config.setdefault("platform", "sim")
    return sidestream.DiffusionEngine(
        EngineConfig(pipeline=f"tp_pipes:{pipeline}", tensor_parallel_size=size, **config)
    )


def request(prompt="x", *, seed=1, steps=1):
    params = SamplingParams(height=4, width=4, seed=seed, num_inference_steps=steps)
    return DiffusionRequest(prompt, params)


def pids(engine):
    return [rank.pid for group in engine.health().groups for rank in group.ranks]


@pytest.fixture(scope="module")
def group(_pipelines_on_path, is_running):
    """A group of two, for all tests here; restarted by some. None of it outlives the engine."""
    engine = start(max_restarts=1000)
    yield engine
    last = pids(engine)
    engine.close()
    assert len(last) == 2
    assert not any(is_running(pid) for pid in last)


@pytest.fixture
def engine(group, until):
    until(lambda: group.health().ok, timeout_s=60)
    group.executor.collective_rpc("take_events")
    return group


def events(engine):
    first, *others = engine.executor.collective_rpc("take_events")
    assert all(other == first for other in others)
    return first


class TestForwards:
    def test_every_rank_computes_and_rank_0_answers(self, engine):
        outputs = engine.generate(["a", "b", "c"], seed=10, num_inference_steps=2)
        # Two sums of 1 + 2.
        assert [float(output.output[0, 0, 0]) for output in outputs] == [16, 17, 18]
        assert outputs[0].timings.carrier == "slot"
        assert events(engine) == [1, 2] * 3

    def test_no_rank_keeps_an_output(self, engine, until):
        engine.generate("a", seed=1)
        until(lambda: not any(engine.executor.collective_rpc("holds_output")))

    def test_no_rank_but_the_first_makes_room_for_outputs(self, engine):
        engine.generate("a", seed=1)
        first, second = engine.executor.collective_rpc("describe")
        assert first["output_thread"]
        assert not second["output_thread"]
        assert first["slots"].made > 0
        assert second["slots"].made == 0

    def test_calls_go_to_the_ranks_that_are_named(self, engine):
        assert engine.executor.collective_rpc("world") == [(0, 2), (1, 2)]
        assert engine.executor.collective_rpc("world", ranks=[1]) == [(1, 2)]
        assert engine.executor.collective_rpc("world", ranks=[1, 0]) == [(1, 2), (0, 2)]
        with pytest.raises(ConfigError, match="0 to 1"):
            engine.executor.collective_rpc("world", ranks=[2])

    def test_all_ranks_get_commands_in_one_order(self, engine):
        """Else a call's sum on one rank would meet a forward's on the other."""
        added = []

        def call():
            for number in range(60):
                added.append(engine.executor.collective_rpc("add_up", (number,), timeout_s=60))

        thread = threading.Thread(target=call)
        thread.start()
        outputs = list(engine.imap(request(seed=seed) for seed in range(60)))
        thread.join()
        assert [float(output.output[0, 0, 0]) for output in outputs] == [s + 3 for s in range(60)]
        assert added == [[3 * number] * 2 for number in range(60)]

    def test_health_and_description_name_the_ranks(self, engine):
        (group,) = engine.health().groups
        assert [rank.rank for rank in group.ranks] == [0, 1]
        assert [rank.pid for rank in group.ranks] == engine.executor.collective_rpc("pid")
        assert all(rank.is_alive for rank in group.ranks)
        for rank in group.ranks:
            assert f"rank {rank.rank}: pid {rank.pid} on device 0" in engine.describe()


class TestGivingUp:
    def test_all_ranks_stop_at_the_step_that_rank_0_stops_at(self, engine, gate):
        handle = engine.submit(request(gate.prompt, steps=5))
        assert gate.reached() == "1"
        gate.open()
        # The other rank is behind this step already, and waits to hear.
        assert gate.reached() == "2"
        handle.abort()
        gate.open()
        with pytest.raises(RequestAbortedError) as caught:
            handle.result(30)
        assert (caught.value.outcome, caught.value.step) == (AbortOutcome.STOPPED, 2)
        assert events(engine) == [1, 2]
        assert float(engine.generate("a", seed=1)[0].output[0, 0, 0]) == 4

    def test_a_deadline_ends_the_forward_on_all_ranks(self, engine, gate):
        handle = engine.submit(request(gate.prompt, steps=5), timeout_s=1.5)
        assert gate.reached() == "1"
        with pytest.raises(RequestTimeoutError):
            handle.result(30)
        gate.open()
        assert events(engine) == [1]

    def test_no_rank_runs_what_was_given_up_before_it_started(self, engine, gate, until):
        running = engine.submit(request(gate.prompt))
        assert gate.reached() == "1"
        given_up = engine.submit(request(steps=3))
        until(lambda: engine.stats()["forwards"] == 2)
        given_up.abort()
        gate.open()
        assert given_up.abort(wait=True).outcome is AbortOutcome.NEVER_STARTED
        running.result(30)
        assert events(engine) == [1]


class TestFailures:
    def test_a_group_lives_on_when_all_ranks_fail_alike(self, engine):
        before = pids(engine)
        with pytest.raises(ExecutionError, match="no luck on 0"):
            engine.generate("raise-all", seed=1)
        assert float(engine.generate("a", seed=1)[0].output[0, 0, 0]) == 4
        assert pids(engine) == before

    def test_a_sum_on_the_simulated_device_is_refused(self, engine):
        with pytest.raises(ExecutionError, match="sum a copy on the CPU"):
            engine.generate("on-device", seed=1)

    @pytest.mark.parametrize(
        "prompt",
        ["raise 1", *(pytest.param(p, marks=pytest.mark.soak) for p in ("raise 0", "late 1"))],
    )
    def test_what_one_rank_raises_fails_the_request_and_the_group_starts_again(
        self, prompt, engine, until, is_running
    ):
        before = pids(engine)
        handle = engine.submit(request(prompt))
        with pytest.raises(ExecutionError, match=f"no luck on {prompt[-1]}"):
            handle.result(60)
        until(lambda: not any(is_running(pid) for pid in before))
        until(lambda: engine.health().ok and not set(pids(engine)) & set(before), timeout_s=60)
        assert float(engine.generate("a", seed=1)[0].output[0, 0, 0]) == 4

    def test_a_request_runs_again_after_a_rank_was_killed_in_it(
        self, engine, gate, until, is_running
    ):
        before = pids(engine)
        handle = engine.submit(request(f"{gate.prompt} of 1"))
        assert gate.reached() == "forward"
        os.kill(before[1], signal.SIGKILL)
        assert gate.reached(90) == "forward"
        assert not any(is_running(pid) for pid in before)
        gate.open()
        assert float(handle.result(60).output[0, 0, 0]) == 4

    @pytest.mark.soak
    def test_two_deaths_of_one_request_are_that_rank_s(self, engine, gate):
        handle = engine.submit(request(f"{gate.prompt} of 1"))
        for _ in range(2):
            assert gate.reached(90) == "forward"
            os.kill(pids(engine)[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            handle.result(60)
        assert caught.value.rank == 1
        assert caught.value.exit_code == -signal.SIGKILL

    @pytest.mark.soak
    def test_a_rank_that_hangs_is_named_and_ends_the_group(self, gate):
        with start(max_restarts=0, hang_timeout_s=2) as engine:
            handle = engine.submit(request(f"{gate.prompt} of 1"))
            assert gate.reached() == "forward"
            with pytest.raises(sidestream.WorkerHungError):
                handle.result(60)
            assert not engine.health().ok
            assert "hang_timeout_s" in engine.health().reason


@pytest.mark.soak
class TestStart:
    @pytest.mark.parametrize("how", ["raise", "kill"])
    def test_a_start_fails_by_the_rank_that_failed(self, how):
        with pytest.raises(WorkerStartError) as caught:
            start("FailsToLoad", pipeline_options={"how": how})
        assert caught.value.rank == 1
        assert ("no such weight" if how == "raise" else "SIGKILL") in str(caught.value)

    def test_all_ranks_warm_up(self):
        with start(warm_up=request(steps=2)) as engine:
            assert events(engine) == [1, 2]


@pytest.mark.soak
def test_all_ranks_run_a_batch_without_who_was_given_up(gate, until):
    with start("SummedTogether", max_batch_size=4) as engine:
        first = engine.submit(request(gate.prompt, steps=2))
        assert gate.reached() == "1"
        members = [engine.submit(request(seed=seed)) for seed in range(4)]
        gate.open()
        assert gate.reached() == "2"
        # At its last step the next ones are sent, and wait in the sockets.
        until(lambda: engine.stats()["forwards"] == 2)
        members[1].abort()
        gate.open()
        assert float(first.result(30).output[0, 0, 0]) == 7
        assert members[1].abort(wait=True).outcome is AbortOutcome.NEVER_STARTED
        rest = [members[0], *members[2:]]
        assert [float(member.result(30).output[0, 0, 0]) for member in rest] == [3, 5, 6]
        # One request and its two steps, three and their one.
        assert events(engine) == [1, 1, 2, 3, 1]


@pytest.mark.soak
class TestModels:
    @pytest.mark.parametrize(("size", "platform"), [(2, "cpu"), (2, "sim"), (4, "cpu")])
    @pytest.mark.parametrize("model", ["qwen-image", "hunyuan-image-3"])
    def test_the_images_are_those_of_one_process(self, model, size, platform, tmp_path):
        pytest.importorskip("diffusers")
        folder = make_checkpoint(model, tmp_path / "checkpoint")
        params = {"seed": 7, "num_inference_steps": 3, "output_type": "float"}
        config = {"model": folder, "platform": platform}
        with sidestream.DiffusionEngine(EngineConfig(**config)) as engine:
            alone = engine.generate(["a red apple", "a dog"], **params)
        shared = {"devices": (0,) * size, "tensor_parallel_size": size}
        with sidestream.DiffusionEngine(EngineConfig(**config, **shared)) as engine:
            together = engine.generate(["a red apple", "a dog"], **params)
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one.output, other.output, rtol=0, atol=1e-5)


@pytest.mark.soak
class TestManyRanks:
    def test_two_groups_share_the_requests(self, until):
        with start(devices=(0, 0, 0, 0), max_restarts=3) as engine:
            assert engine.executor.collective_rpc("world") == [(0, 2), (1, 2)] * 2
            outputs = engine.generate([str(i) for i in range(20)], seed=0)
            assert [float(o.output[0, 0, 0]) for o in outputs] == [s + 3 for s in range(20)]
            before = pids(engine)
            os.kill(before[3], signal.SIGKILL)
            until(lambda: len(set(pids(engine)) & set(before)) == 2, timeout_s=60)
            assert pids(engine)[:2] == before[:2]
            assert float(engine.generate("a", seed=1)[0].output[0, 0, 0]) == 4

    def test_four_ranks_are_gone_with_their_main_process(self, until, is_running):
        script = (
            "import sys, time, sidestream\n"
            f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'pipelines')!r})\n"
            "engine = sidestream.DiffusionEngine(sidestream.EngineConfig(\n"
            "    pipeline='tp_pipes:Summed', platform='cpu', devices=(0,) * 4,\n"
            "    tensor_parallel_size=4))\n"
            "(output,) = engine.generate('a', seed=0)\n"
            "pids = [rank.pid for rank in engine.health().groups[0].ranks]\n"
            "print(float(output.output[0, 0, 0]), *pids, flush=True)\n"
            "time.sleep(600)\n"
        )
        main = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        value, *ranks = main.stdout.readline().split()
        main.kill()
        main.communicate()
        assert float(value) == 10
        assert len(ranks) == 4
        until(lambda: not any(is_running(int(pid)) for pid in ranks), timeout_s=5)


class TestConfig:
    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
            ({"tensor_parallel_size": 2}, "a multiple of 2 device indices"),
            ({"tensor_parallel_size": 2, "devices": (0, 1, 2)}, "a multiple of 2 device indices"),
            (
                {"tensor_parallel_size": 2, "devices": (0, 1), "step_execution": True},
                "1 with step_execution=True",
            ),
        ],
    )
    def test_what_is_not_possible_is_refused(self, settings, named):
        with pytest.raises(ConfigError, match=named):
            EngineConfig(model="digits", **settings)
