"""What a worker's death costs: only the request that it died of."""

from __future__ import annotations

import os
import signal
import threading
import time

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


def test_requests_that_were_with_a_dead_worker_run_again_with_the_same_seed(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=3)
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
    assert engine.stats()["restarts"] == 1
    assert engine.stats()["outputs"] == engine.stats()["queued"] == 0


def test_a_crash_that_repeats_with_one_request_never_costs_an_innocent_one(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=1)
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


def test_a_batch_that_dies_runs_again_one_by_one(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=2, max_batch_size=4)
    with engine._loop._room:  # so that all are queued before the first is sent
        handles = [engine.submit(request("die" if i == 1 else "x", seed=i)) for i in range(3)]
    assert (handles[0].result(60).output == 0).all()
    assert (handles[2].result(60).output == 2).all()
    with pytest.raises(sidestream.WorkerDiedError):
        handles[1].result(60)


def test_after_the_last_restart_the_engine_refuses_with_the_cause(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=1)
    for attempt in range(2):
        pid = engine.executor.collective_rpc("pid")[0]
        os.kill(pid, signal.SIGKILL)
        if attempt == 0:
            _until(lambda: engine.stats()["restarts"] == 1)
    _until(lambda: not engine.health().ok)
    assert "SIGKILL" in engine.health().reason
    with pytest.raises(sidestream.WorkerDiedError, match="SIGKILL"):
        engine.submit(request())
    with pytest.raises(sidestream.WorkerDiedError):
        engine.executor.collective_rpc("ping")


def test_a_restart_that_fails_gives_up_with_its_own_reason(make_engine, log):
    engine = make_engine(
        "LoadDiesLater", platform="cpu", pipeline_options={"log": str(log)}, max_restarts=1
    )
    handle = engine.submit(request())
    with pytest.raises(sidestream.WorkerStartError, match="the weights are gone"):
        handle.result(60)
    assert "the weights are gone" in engine.health().reason


def test_a_restart_that_fails_unforeseen_leaves_nobody_waiting(make_engine, log, monkeypatch):
    engine = mortal(make_engine, log, max_restarts=1)

    def no_room(*_args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine.executor, "_make", no_room)
    handle = engine.submit(request("die-once"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        handle.result(30)
    assert "can't start new thread" in engine.health().reason


def test_a_call_to_a_dead_worker_is_never_run_again(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=2)
    pid = engine.executor.collective_rpc("pid")[0]
    os.kill(pid, signal.SIGSTOP)  # so that the call is with it when it dies
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(sidestream.WorkerDiedError):
        engine.executor.collective_rpc("echo", (1,))
    _until(lambda: engine.stats()["restarts"] == 1)
    assert engine.executor.collective_rpc("echo", (2,)) == [2]


def test_closing_during_a_restart_leaves_nothing(make_engine, log):
    engine = mortal(make_engine, log, max_restarts=3)
    handle = engine.submit(request("die-once"))
    _until(lambda: engine.health().groups[0].state == "restarting")
    engine.close(timeout_s=2)
    with pytest.raises(sidestream.EngineClosedError):
        handle.result(10)


def test_four_devices_share_the_work_and_each_restarts_alone(make_engine):
    engine = make_engine("Gradient", platform="sim", devices=[0, 1, 2, 3], max_restarts=2)
    pids = engine.executor.collective_rpc("pid")
    assert len(set(pids)) == 4
    devices = [d["device"] for d in engine.executor.collective_rpc("describe")]
    assert devices == ["sim:0", "sim:1", "sim:2", "sim:3"]
    handles = [engine.submit(request(seed=i)) for i in range(40)]
    for i, handle in enumerate(handles):
        assert (handle.result(60).output == i).all()
    os.kill(pids[1], signal.SIGKILL)
    handles = [engine.submit(request(seed=i)) for i in range(20)]
    for i, handle in enumerate(handles):
        assert (handle.result(60).output == i).all()
    assert engine.health().ok
    _until(lambda: [g.state for g in engine.health().groups] == ["running"] * 4, timeout_s=60)
    again = engine.executor.collective_rpc("pid")
    assert again[1] != pids[1]
    assert [again[i] for i in (0, 2, 3)] == [pids[i] for i in (0, 2, 3)]
    assert engine.executor.collective_rpc("pid", ranks=[2]) == [pids[2]]
    with pytest.raises(sidestream.ConfigError, match="ranks"):
        engine.executor.collective_rpc("pid", ranks=[4])


def _until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
