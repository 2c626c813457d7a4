"""Requests that take too long, workers that hang, and those that are only slow."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import sidestream
from sidestream import AbortOutcome, DiffusionRequest, SamplingParams
from sidestream.executor.hang_watch import HangWatch
from sidestream.scheduler.deadlines import Deadlines

#: Long enough for a request to be at its worker, on a busy machine too.
SOON_S = 1.0


def request(prompt="x", *, seed=0, steps=None, request_id=None):
    params = SamplingParams(height=8, width=8, seed=seed, num_inference_steps=steps)
    return DiffusionRequest(prompt, params, request_id=request_id)


def call(engine, method, *args):
    return engine.executor.collective_rpc(method, args, timeout_s=30)[0]


@pytest.fixture(params=["cpu-uniproc", "sim-multiproc"])
def engine(request, engines):
    engine = engines("abort_pipes:Steps", *request.param.split("-"))
    call(engine, "take_events")
    yield engine
    assert engine.drain(30)
    stats = engine.stats()
    assert (stats["outputs"], stats["queued"]) == (0, 0)


# --- deadlines ----------------------------------------------------------------------------------


def test_a_request_that_is_due_in_the_queue_never_runs(engine, gate):
    running = engine.submit(request(gate.prompt, request_id="running"))
    assert gate.reached() == "forward"
    sent = engine.submit(request(request_id="sent", seed=1))
    late = engine.submit(request(request_id="late"), timeout_s=0.05)
    with pytest.raises(sidestream.RequestTimeoutError, match=r"'late'.*0\.05 s.*queue") as caught:
        late.result(30)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.timeout_s == 0.05
    assert caught.value.request_id == "late"
    assert late.compute_done.exception(0) is not None
    gate.open()
    assert running.result(30)
    assert (sent.result(30).output == 1).all()
    assert call(engine, "take_events") == [["running"], "decode", ["sent"], "decode"]


def test_a_request_that_is_due_between_two_steps_fails_at_once_and_frees_its_worker(
    engine, gate, until
):
    stale = engine.stats()["stale_messages"]
    late = engine.submit(request(gate.prompt, steps=9), timeout_s=SOON_S)
    assert gate.reached() == "1"
    other = engine.submit(request(seed=3))
    # The gate is closed: the answer does not wait for the worker.
    with pytest.raises(sidestream.RequestTimeoutError, match="with a worker"):
        late.result(30)
    assert engine.stats()["aborting"] == 1
    gate.open()
    assert (other.result(30).output == 3).all()
    assert call(engine, "take_events") == [[None], 1, [None], "decode"]
    until(lambda: engine.stats()["stale_messages"] == stale + 1)
    until(lambda: engine.stats()["aborting"] == 0)  # counted, then forgotten
    assert late.abort(wait=True).outcome is AbortOutcome.ALREADY_OUT


def test_a_late_output_is_discarded_and_counted(engine, gate, until):
    before = engine.stats()
    late = engine.submit(request(gate.prompt), timeout_s=SOON_S)
    assert gate.reached() == "forward"
    with pytest.raises(sidestream.RequestTimeoutError):
        late.result(30)
    gate.open()
    until(lambda: engine.stats()["stale_messages"] == before["stale_messages"] + 1)
    after = engine.stats()
    assert after["completed"] == before["completed"]
    assert after["failed"] == before["failed"] + 1
    until(lambda: engine.stats()["aborting"] == 0)
    with pytest.raises(sidestream.RequestTimeoutError):
        late.result(0)


def test_a_batch_goes_on_without_the_one_that_is_due(make_engine, gate, until):
    engine = make_engine("abort_pipes:Steps", platform="cpu", executor="uniproc", max_batch_size=3)
    with engine._loop._room:
        first = engine.submit(request(gate.prompt, seed=1, steps=2))
        late = engine.submit(request(seed=2, steps=2), timeout_s=SOON_S)
        last = engine.submit(request(seed=3, steps=2))
    assert gate.reached() == "1"
    with pytest.raises(sidestream.RequestTimeoutError):
        late.result(30)
    gate.open()
    assert gate.reached() == "2"
    gate.open()
    assert (first.result(30).output == 1).all()
    assert (last.result(30).output == 3).all()
    until(lambda: engine.stats()["aborting"] == 0)
    assert call(engine, "take_events")[1:] == [1, 2, "decode"]


def test_the_configured_deadline_holds_where_submit_names_none(make_engine, gate):
    engine = make_engine(
        "abort_pipes:Steps", platform="cpu", executor="uniproc", request_timeout_s=SOON_S
    )
    patient = engine.submit(request(gate.prompt, seed=5), timeout_s=math.inf)
    assert gate.reached() == "forward"
    with pytest.raises(sidestream.RequestTimeoutError) as caught:
        engine.generate([request()])
    assert caught.value.timeout_s == SOON_S
    gate.open()
    assert (patient.result(30).output == 5).all()


def test_no_time_at_all_is_never_enough(engine):
    with pytest.raises(sidestream.RequestTimeoutError, match="queue"):
        engine.submit(request(), timeout_s=0).result(30)
    assert call(engine, "take_events") == []


def test_any_time_that_a_request_may_have_is_enough_if_it_is(engine):
    for timeout_s in (60, 1e300, math.inf, None):
        assert (engine.submit(request(seed=2), timeout_s=timeout_s).result(30).output == 2).all()


@pytest.mark.parametrize("timeout_s", [-1, -math.inf, math.nan, "1", True])
def test_what_is_no_duration_is_refused_in_submit(engines, timeout_s):
    engine = engines("abort_pipes:Steps", "cpu", "uniproc")
    with pytest.raises(sidestream.InvalidRequestError, match="timeout_s"):
        engine.submit(request(), timeout_s=timeout_s)
    with pytest.raises(sidestream.ConfigError, match="request_timeout_s"):
        sidestream.EngineConfig(model="digits", request_timeout_s=timeout_s)


def test_requests_that_are_done_leave_no_deadlines_behind(engine):
    for _ in range(15):
        handles = [engine.submit(request(), timeout_s=3600) for _ in range(20)]
        for handle in handles:
            handle.result(30)
    assert len(engine._loop._deadlines) < 200


def test_the_nearest_deadline_is_known_and_what_is_due_comes_in_order():
    deadlines = Deadlines()
    assert deadlines.next_at() is None
    for key, due_at in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        deadlines.add(key, due_at)
    assert deadlines.next_at() == 1.0
    assert deadlines.take_due(2.0) == ["a", "b"]
    assert deadlines.take_due(2.5) == []
    assert deadlines.next_at() == 3.0


# --- hung workers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_stands_still_is_ended_and_health_says_so(make_engine, gate, until):
    engine = make_engine("abort_pipes:Steps", platform="cpu", hang_timeout_s=1.5)
    pid = call(engine, "pid")
    handle = engine.submit(request(gate.prompt, steps=2))
    behind = engine.submit(request())
    assert gate.reached() == "1"
    os.kill(pid, signal.SIGSTOP)
    for one in (handle, behind):
        with pytest.raises(sidestream.WorkerHungError, match=r"hang_timeout_s=1\.5") as caught:
            one.result(30)
        assert caught.value.pid == pid
        assert caught.value.silent_s >= 1.5
    assert not engine.health().ok
    assert "no sign of progress" in engine.health().reason
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists())
    with pytest.raises(sidestream.WorkerHungError):
        engine.submit(request())


@pytest.mark.soak  # it starts two workers
def test_a_hung_worker_counts_as_dead_and_its_request_runs_again(make_engine, tmp_path):
    engine = make_engine(
        "abort_pipes:HangsOnce",
        platform="cpu",
        max_restarts=1,
        hang_timeout_s=1.0,
        pipeline_options={"marker": str(tmp_path / "marker")},
    )
    assert (engine.submit(request("hang", seed=9)).result(90).output == 9).all()
    assert engine.stats()["restarts"] == 1
    assert engine.health().ok


def test_a_thread_that_hangs_breaks_its_engine(make_engine, gate):
    engine = make_engine(
        "abort_pipes:Steps", platform="cpu", executor="uniproc", hang_timeout_s=0.3
    )
    handle = engine.submit(request(gate.prompt))
    with pytest.raises(sidestream.WorkerHungError, match="multiproc"):
        handle.result(30)
    with pytest.raises(sidestream.WorkerHungError):
        engine.submit(request())
    assert not engine.health().ok
    gate.open()


def test_a_slow_worker_whose_steps_go_on_is_left_alone(make_engine, gate):
    engine = make_engine(
        "abort_pipes:Steps", platform="cpu", executor="uniproc", hang_timeout_s=1.5
    )
    handle = engine.submit(request(gate.prompt, seed=4, steps=5))
    for step in range(1, 6):
        assert gate.reached() == str(step)
        time.sleep(0.5)  # what is tested here is time
        gate.open()
    assert (handle.result(30).output == 4).all()
    assert engine.health().ok


def test_a_call_may_take_its_time(make_engine):
    engine = make_engine(
        "abort_pipes:Steps", platform="cpu", executor="uniproc", hang_timeout_s=0.5
    )
    napping = threading.Thread(target=call, args=(engine, "nap", 1.5))
    napping.start()
    handle = engine.submit(request(seed=1))
    assert (handle.result(30).output == 1).all()
    napping.join()


class Clock:
    """A watch with a clock that only a test moves."""

    def __init__(self, timeout_s):
        self.watch = HangWatch(timeout_s)
        self.now = 100.0

    def look(self, heartbeat, busy_since):
        """Go to the point in time at which the watch wants to look, and look."""
        self.now = self.watch.look_at
        return self.watch.look(heartbeat, busy_since, self.now)


def test_a_watch_tells_hung_from_slow():
    clock = Clock(8.0)
    clock.watch.begin(heartbeat=0, now=100.0)
    for heartbeat in range(1, 50):  # slow
        assert clock.look(heartbeat, 100.0) is None
    moved_at = clock.now
    while (silent_s := clock.look(49, 100.0)) is None:  # hung
        assert clock.now < moved_at + 8.0
    assert silent_s == pytest.approx(8.0)


def test_a_message_is_a_sign_of_life_too():
    clock = Clock(8.0)
    clock.watch.begin(heartbeat=5, now=100.0)
    while clock.now < 140.0:
        clock.watch.message(clock.now)
        assert clock.look(5, 100.0) is None
    while clock.look(5, 100.0) is None:
        pass
    assert clock.now == pytest.approx(140.0, abs=8.0 + 2.0)


def test_an_idle_worker_is_not_watched_and_new_work_starts_the_clock_anew():
    clock = Clock(8.0)
    assert clock.watch.look_at is None
    clock.watch.begin(heartbeat=0, now=100.0)
    assert clock.look(0, None) is None
    assert clock.watch.look_at is None
    clock.watch.begin(heartbeat=0, now=1000.0)
    assert clock.look(0, 1000.0) is None
    # What it has now, it has had for a second only; what it had before is out.
    clock.now = 1020.0
    assert clock.watch.look(0, 1019.0, clock.now) is None


def test_a_watch_without_a_limit_never_looks():
    watch = HangWatch(math.inf)
    watch.begin(heartbeat=0, now=100.0)
    assert watch.look_at is None
