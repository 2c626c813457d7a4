"""What a worker's death costs: only the request that it died of."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import sidestream
from sidestream import DiffusionRequest, SamplingParams


def request(prompt="x", *, seed=None, request_id=None):
    params = SamplingParams(height=8, width=8, seed=seed)
    return DiffusionRequest(prompt, params, request_id=request_id)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log"
    path.touch()
    return path


def runs(log):
    """List (prompt, seed) of every forward, in order."""
    return [tuple(line.split()[1:]) for line in log.read_text().splitlines()]


def mortal(make_engine, log, **config):
    return make_engine("Mortal", platform="cpu", pipeline_options={"log": str(log)}, **config)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Give engines of mortals, each for more than one test, with their logs."""
    running = {}

    def get(max_restarts, max_batch_size=1):
        key = max_restarts, max_batch_size
        if key not in running:
            log = tmp_path_factory.mktemp("mortal") / "log"
            config = sidestream.EngineConfig(
                pipeline="sidestream_pipes:Mortal",
                platform="cpu",
                pipeline_options={"log": str(log)},
                max_restarts=max_restarts,
                max_batch_size=max_batch_size,
            )
            log.touch()
            running[key] = sidestream.DiffusionEngine(config), log
        return running[key]

    yield get
    for engine, _ in running.values():
        engine.close(timeout_s=2)


def test_requests_that_were_with_a_dead_worker_run_again_with_the_same_seed(shared):
    engine, log = shared(max_restarts=3)
    restarts = engine.stats()["restarts"]
    first = engine.submit(request("die-once"))
    others = [engine.submit(request(seed=i)) for i in range(4)]
    pixels = first.result(60).output
    for i, other in enumerate(others):
        assert (other.result(60).output == i).all()
    seeds = [seed for prompt, seed in runs(log) if prompt == "die-once"]
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]
    assert pixels.flatten()[0].item() == pytest.approx(float(seeds[0]), rel=1e-6)
    assert engine.health().ok
    assert engine.stats()["restarts"] == restarts + 1
    assert engine.stats()["outputs"] == engine.stats()["queued"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_that_repeats_with_one_request_never_costs_an_innocent_one(shared, max_batch_size):
    engine, log = shared(max_restarts=1, max_batch_size=max_batch_size)
    with engine._loop._room:  # so that all are queued before the first is sent
        handles = [
            engine.submit(request("die" if i == 2 else "x", seed=i, request_id=f"r{i}"))
            for i in range(6)
        ]
    for i, handle in enumerate(handles):
        if i == 2:
            with pytest.raises(sidestream.WorkerDiedError) as caught:
                handle.result(60)
            assert caught.value.signal == "SIGKILL"
            assert "r2" in caught.value.request_ids
        else:
            assert (handle.result(60).output == i).all()
    # It ran twice, the second time alone; that second death is not counted against the worker.
    assert [prompt for prompt, _ in runs(log)].count("die") == 2
    assert engine.stats()["restarts"] == 2
    assert engine.health().ok
    assert (engine.submit(request(seed=9)).result(60).output == 9).all()


@pytest.mark.slow  # beside the test above, which has used the restart up
def test_after_the_last_restart_the_engine_refuses_with_the_cause(shared):
    engine, _ = shared(max_restarts=1, max_batch_size=4)
    if engine.stats()["restarts"] == 0:  # else an earlier test had the only one
        os.kill(engine.executor.collective_rpc("pid")[0], signal.SIGKILL)
        _until(lambda: engine.stats()["restarts"] == 1)
    os.kill(engine.executor.collective_rpc("pid")[0], signal.SIGKILL)
    _until(lambda: not engine.health().ok)
    assert "SIGKILL" in engine.health().reason
    with pytest.raises(sidestream.WorkerDiedError, match="SIGKILL"):
        engine.submit(request())
    with pytest.raises(sidestream.WorkerDiedError):
        engine.executor.collective_rpc("ping")


@pytest.mark.slow
def test_a_restart_that_fails_gives_up_with_its_own_reason(make_engine, log):
    engine = make_engine(
        "LoadDiesLater", platform="cpu", pipeline_options={"log": str(log)}, max_restarts=1
    )
    handle = engine.submit(request())
    with pytest.raises(sidestream.WorkerStartError, match="the weights are gone"):
        handle.result(60)
    assert "the weights are gone" in engine.health().reason


def test_a_call_to_a_dead_worker_is_never_run_again(shared):
    engine, _ = shared(max_restarts=3)
    restarts = engine.stats()["restarts"]
    pid = engine.executor.collective_rpc("pid")[0]
    os.kill(pid, signal.SIGSTOP)  # so that the call is with it when it dies
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.executor.collective_rpc, "echo", (1,))
        _until(lambda: engine.stats()["calls"] == 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(sidestream.WorkerDiedError):
            call.result(30)
    _until(lambda: engine.stats()["restarts"] == restarts + 1)
    assert engine.executor.collective_rpc("echo", (2,)) == [2]


def test_a_restart_that_fails_unforeseen_leaves_nobody_waiting(shared, monkeypatch):
    engine, _ = shared(max_restarts=3)  # for good: nothing comes behind this

    def no_room(*_args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine.executor.supervisor, "_make", no_room)
    handle = engine.submit(request("die"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        handle.result(30)
    assert "can't start new thread" in engine.health().reason


def test_closing_during_a_restart_leaves_nothing(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=3)
    handle = engine.submit(request("die-once"))
    _until(lambda: engine.health().groups[0].state == "restarting")
    engine.close(timeout_s=2)
    with pytest.raises(sidestream.EngineClosedError):
        handle.result(10)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_several_devices_share_the_work_and_each_restarts_alone(make_engine, count):
    engine = make_engine("Gradient", platform="sim", devices=[*range(count)], max_restarts=2)
    pids = engine.executor.collective_rpc("pid")
    assert len(set(pids)) == count
    devices = [d["device"] for d in engine.executor.collective_rpc("describe")]
    assert devices == [f"sim:{index}" for index in range(count)]
    handles = [engine.submit(request(seed=i)) for i in range(40)]
    for i, handle in enumerate(handles):
        assert (handle.result(60).output == i).all()
    os.kill(pids[1], signal.SIGKILL)
    handles = [engine.submit(request(seed=i)) for i in range(20)]
    for i, handle in enumerate(handles):
        assert (handle.result(60).output == i).all()
    assert engine.health().ok
    _until(lambda: [g.state for g in engine.health().groups] == ["running"] * count, timeout_s=60)
    again = engine.executor.collective_rpc("pid")
    assert again[1] != pids[1]
    assert (again[0], again[2:]) == (pids[0], pids[2:])
    assert engine.executor.collective_rpc("pid", ranks=[0]) == [pids[0]]
    with pytest.raises(sidestream.ConfigError, match="ranks"):
        engine.executor.collective_rpc("pid", ranks=[count])


def _until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
