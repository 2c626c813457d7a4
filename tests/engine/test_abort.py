"""Giving requests up, wherever they are: what the answer says is true, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sidestream
from sidestream import AbortOutcome, AbortResult, DiffusionEngine, DiffusionRequest, SamplingParams

NEVER_STARTED = AbortResult(AbortOutcome.NEVER_STARTED)
DETACHED = AbortResult(AbortOutcome.DETACHED)
ALREADY_OUT = AbortResult(AbortOutcome.ALREADY_OUT)
REQUESTED = AbortResult(AbortOutcome.REQUESTED)


def stopped(step):
    return AbortResult(AbortOutcome.STOPPED, step)


def request(prompt="x", *, seed=0, steps=None, request_id=None):
    params = SamplingParams(height=8, width=8, seed=seed, num_inference_steps=steps)
    return DiffusionRequest(prompt, params, request_id=request_id)


def submit_together(engine, requests):
    """Submit requests so that none is sent before all are queued."""
    with engine._loop._room:
        return [engine.submit(r) for r in requests]


def call(engine, method, *args):
    return engine.executor.collective_rpc(method, args, timeout_s=30)[0]


def hold_copies(engine, gate):
    """Hold the copies until the gate opens."""
    call(engine, "hold_copies_at", gate.prompt)
    assert gate.reached() == "copies"


def state(engine, handle):
    for line in engine.describe().splitlines():
        if f"({handle.async_output_id})" in line:
            return line.split()[-1]
    return "done"


def take_all_places(engine, gate):
    """Run two forwards whose copies are held."""
    hold_copies(engine, gate)
    handles = []
    for seed in range(engine.config.max_pending_outputs):
        handles.append(engine.submit(request(seed=seed)))
        handles[-1].compute_done.result(30)
    return handles


def assert_nothing_is_left(engine):
    """Nobody waits, no mark is set, every place is free, and the next request is fine."""
    assert engine.drain(30)
    assert (engine.submit(request(seed=7)).result(30).output == 7).all()
    call(engine, "drain_async_outputs")  # a place is free only when its output was sent
    stats = engine.stats()
    names = ("queued", "outputs", "forwards", "calls", "aborting")
    assert {name: stats[name] for name in names} == dict.fromkeys(names, 0)
    assert call(engine, "describe")["places_free"] == engine.config.max_pending_outputs
    assert not engine._loop._deadlines.take_due(float("inf"))


@pytest.fixture(scope="module")
def steps_engines():
    running = {}

    def get(platform, executor):
        key = platform, executor
        if key not in running:
            running[key] = DiffusionEngine(
                sidestream.EngineConfig(
                    pipeline="abort_pipes:Steps",
                    platform=platform,
                    executor=executor,
                    max_batch_size=4,
                    start_timeout_s=200,
                )
            )
        call(running[key], "take_events")
        return running[key]

    yield get
    for engine in running.values():
        engine.close(2)


@pytest.fixture(params=["cpu-uniproc", "sim-multiproc"])
def engine(request, steps_engines):
    engine = steps_engines(*request.param.split("-"))
    yield engine
    assert_nothing_is_left(engine)


@pytest.fixture(params=["sim-uniproc", "sim-multiproc"])
def sim_engine(request, steps_engines):
    """An engine with an output thread, on which copies can be held."""
    engine = steps_engines(*request.param.split("-"))
    call(engine, "clear_copies")
    yield engine
    assert_nothing_is_left(engine)


# --- where a request may be ---------------------------------------------------------------------


def test_a_queued_request_is_taken_back_at_once(engine, gate, until):
    running = engine.submit(request(gate.prompt, steps=2, request_id="running"))
    assert gate.reached() == "1"
    queued = engine.submit(request(request_id="queued"))
    assert queued.abort() == NEVER_STARTED
    assert engine.stats()["queued"] == 0
    for future in (queued.compute_done, queued.output_ready, queued.future()):
        with pytest.raises(sidestream.RequestAbortedError, match="never started") as caught:
            future.result(0)
        assert caught.value.outcome is AbortOutcome.NEVER_STARTED
        assert caught.value.step is None
        assert caught.value.request_id == "queued"
    gate.open()
    assert gate.reached() == "2"
    gate.open()
    assert running.result(30)
    assert call(engine, "take_events") == [["running"], 1, 2, "decode"]


def test_a_request_that_waits_at_its_worker_never_starts(engine, gate, until):
    running = engine.submit(request(gate.prompt, steps=2, request_id="running"))
    assert gate.reached() == "1"
    sent = engine.submit(request(request_id="sent"))
    gate.open()
    assert gate.reached() == "2"  # the last step: the next forward is sent
    until(lambda: state(engine, sent) == "dispatched")
    assert sent.abort() == REQUESTED
    assert not sent.done()
    gate.open()
    assert sent.abort(wait=True, timeout_s=30) == NEVER_STARTED
    assert running.result(30)
    assert call(engine, "take_events") == [["running"], 1, 2, "decode"]


def test_a_request_that_waits_for_a_place_never_starts(sim_engine, gate, until):
    engine = sim_engine
    out = take_all_places(engine, gate)
    waiting = engine.submit(request(request_id="waiting"))
    until(lambda: state(engine, waiting) == "dispatched")
    # The copies are held all the while: only the abort ends the wait.
    assert waiting.abort(wait=True, timeout_s=30) == NEVER_STARTED
    assert not any(handle.done() for handle in out)
    gate.open()
    for i, handle in enumerate(out):
        assert (handle.result(30).output == i).all()
    assert ["waiting"] not in call(engine, "take_events")


def test_a_batch_that_waits_for_a_place_starts_without_who_gave_up(sim_engine, gate, until):
    engine = sim_engine
    take_all_places(engine, gate)
    call(engine, "take_events")
    batch = submit_together(engine, [request(seed=i, request_id=f"r{i}") for i in range(3)])
    until(lambda: state(engine, batch[0]) == "dispatched")
    assert batch[1].abort(wait=True, timeout_s=30) == NEVER_STARTED
    gate.open()
    assert (batch[0].result(30).output == 0).all()
    assert (batch[2].result(30).output == 2).all()
    assert call(engine, "take_events") == [["r0", "r2"], "decode"]


@pytest.mark.parametrize("guard", ["", "guarded"])
def test_a_forward_with_steps_ends_within_one_step_and_decodes_nothing(engine, gate, guard):
    handle = engine.submit(request(f"{gate.prompt} {guard}", steps=5))
    assert gate.reached() == "1"
    gate.open()
    assert gate.reached() == "2"
    assert handle.abort() == REQUESTED
    gate.open()
    assert handle.abort(wait=True, timeout_s=30) == stopped(2)
    assert not call(engine, "holds_latents")
    assert call(engine, "describe")["places_free"] == engine.config.max_pending_outputs
    assert call(engine, "take_events")[1:] == [1, 2]
    with pytest.raises(sidestream.RequestAbortedError, match="stopped at step 2") as caught:
        handle.result(0)
    assert caught.value.step == 2


def test_a_stopped_forward_gives_its_device_memory_back(sim_engine, gate):
    free_bytes = call(sim_engine, "free_bytes")
    handle = sim_engine.submit(request(gate.prompt, steps=2))
    assert gate.reached() == "1"
    handle.abort()
    gate.open()
    assert handle.abort(wait=True, timeout_s=30) == stopped(1)
    call(sim_engine, "finish_forwards")
    assert call(sim_engine, "free_bytes") == free_bytes
    assert call(sim_engine, "copies") == []


def test_a_pipeline_that_swallows_the_end_of_a_step_makes_an_output_that_is_dropped(engine, gate):
    handle = engine.submit(request(f"{gate.prompt} stubborn", steps=1))
    assert gate.reached() == "1"
    handle.abort()
    gate.open()
    assert handle.abort(wait=True, timeout_s=30) == DETACHED
    assert call(engine, "take_events")[1:] == [1, "decode"]


def test_a_forward_without_steps_runs_to_its_end_and_its_output_is_dropped(engine, gate):
    handle = engine.submit(request(gate.prompt))
    assert gate.reached() == "forward"
    assert handle.abort() == REQUESTED
    gate.open()
    assert handle.abort(wait=True, timeout_s=30) == DETACHED
    assert handle.compute_done.exception(0) is None
    assert call(engine, "describe")["places_free"] == engine.config.max_pending_outputs
    with pytest.raises(sidestream.RequestAbortedError, match="detached"):
        handle.result(0)


@pytest.mark.parametrize("given_up", [0, 1, 2])
def test_a_batch_goes_on_for_those_who_still_want_it(engine, gate, given_up):
    batch = submit_together(
        engine,
        [request(p, seed=i, steps=2) for i, p in enumerate([gate.prompt, "x", "x"])],
    )
    assert gate.reached() == "1"
    assert batch[given_up].abort() == REQUESTED
    gate.open()
    assert gate.reached() == "2"
    gate.open()
    assert batch[given_up].abort(wait=True, timeout_s=30) == DETACHED
    for i, handle in enumerate(batch):
        if i != given_up:
            assert (handle.result(30).output == i).all()
    assert call(engine, "take_events")[1:] == [1, 2, "decode"]


def test_a_batch_that_nobody_wants_ends_within_one_step(engine, gate):
    batch = submit_together(engine, [request(p, steps=3) for p in (gate.prompt, "x", "x")])
    assert gate.reached() == "1"
    assert [handle.abort() for handle in batch] == [REQUESTED] * 3
    gate.open()
    assert [handle.abort(wait=True, timeout_s=30) for handle in batch] == [stopped(1)] * 3
    assert call(engine, "take_events")[1:] == [1]


def test_of_a_batch_that_fails_only_those_run_again_who_still_want_it(engine, gate):
    prompts = [f"{gate.prompt} raise", "x", "x"]
    bad, good, unwanted = submit_together(
        engine, [request(p, seed=i, steps=1, request_id=f"r{i}") for i, p in enumerate(prompts)]
    )
    assert gate.reached() == "1"
    unwanted.abort()
    gate.open()
    assert gate.reached() == "1"  # the bad one, alone
    gate.open()
    assert unwanted.abort(wait=True, timeout_s=30) == DETACHED
    assert (good.result(30).output == 1).all()
    with pytest.raises(sidestream.ExecutionError, match="one of you is bad"):
        bad.result(30)
    ran = [event for event in call(engine, "take_events") if isinstance(event, list)]
    assert ran == [["r0", "r1", "r2"], ["r0"], ["r1"]]


def test_an_output_that_waits_to_be_copied_is_dropped(sim_engine, gate, until):
    engine = sim_engine
    free_bytes = call(engine, "free_bytes")
    hold_copies(engine, gate)
    first, second = engine.submit(request(seed=1)), engine.submit(request(seed=2))
    second.compute_done.result(30)
    assert second.abort() == REQUESTED
    gate.open()
    assert second.abort(wait=True, timeout_s=30) == DETACHED
    assert (first.result(30).output == 1).all()
    assert call(engine, "free_bytes") == free_bytes


def test_an_output_that_is_being_copied_comes_out(sim_engine, gate, until):
    engine = sim_engine
    hold_copies(engine, gate)
    handle = engine.submit(request(seed=3))
    until(lambda: call(engine, "is_copying"))
    assert handle.abort() == REQUESTED
    gate.open()
    assert handle.abort(wait=True, timeout_s=30) == ALREADY_OUT
    assert (handle.result(0).output == 3).all()


def test_an_output_that_is_out_stays(engine):
    handle = engine.submit(request(seed=4))
    handle.result(30)
    assert handle.abort() == handle.abort(wait=True) == ALREADY_OUT
    assert (handle.result(0).output == 4).all()


# --- who asks -----------------------------------------------------------------------------------


def test_many_threads_may_abort_one_request_and_hear_the_same(engine, gate, until):
    handle = engine.submit(request(gate.prompt, steps=2))
    assert gate.reached() == "1"
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(handle.abort, wait=True, timeout_s=30) for _ in range(8)]
        until(lambda: engine.stats()["aborting"] == 1)
        gate.open()
        assert {answer.result(30) for answer in answers} == {stopped(1)}
    assert handle.abort() == handle.abort(wait=True) == stopped(1)


def test_who_waits_for_the_answer_may_stop_waiting(engine, gate):
    handle = engine.submit(request(gate.prompt, steps=2))
    assert gate.reached() == "1"
    with pytest.raises(TimeoutError):
        handle.abort(wait=True, timeout_s=0.05)
    assert not handle.done()
    gate.open()
    assert handle.abort(wait=True, timeout_s=30) == stopped(1)


def test_an_engine_aborts_by_handle_and_by_whatever_id_its_callers_gave(engine, gate):
    running = engine.submit(request(gate.prompt, seed=3, steps=2, request_id="kept"))
    assert gate.reached() == "1"
    ids = ["", "a/b", "twice", "twice", None]
    queued = [engine.submit(request(request_id=name)) for name in ids]
    assert engine.abort(queued[4]) == engine.abort(queued[4], wait=True) == [NEVER_STARTED]
    assert engine.abort("twice") == [NEVER_STARTED] * 2
    assert engine.abort("twice", wait=True) == []  # nobody has that id any more
    assert engine.abort(["", "never seen", queued[1]]) == [NEVER_STARTED] * 2
    assert engine.abort(queued[4].request_id) == []
    assert engine.abort([]) == []
    assert engine.stats()["queued"] == 0
    gate.open()
    assert gate.reached() == "2"  # it was none of theirs
    gate.open()
    assert (running.result(30).output == 3).all()
    assert engine.abort([running, running], wait=True) == [ALREADY_OUT] * 2


def test_an_engine_tells_all_before_it_waits_for_any(engine, gate):
    batch = submit_together(
        engine, [request(p, steps=3, request_id="all") for p in (gate.prompt, "x", "x")]
    )
    assert gate.reached() == "1"
    with pytest.raises(TimeoutError):
        engine.abort("all", wait=True, timeout_s=0.05)
    gate.open()
    assert engine.abort(batch, wait=True, timeout_s=30) == [stopped(1)] * 3


def test_an_engine_aborts_nothing_where_it_is_given_what_is_not_its_own(
    engine, steps_engines, gate
):
    on_cpu = engine.config.platform == "cpu"
    other = steps_engines(*(("sim", "multiproc") if on_cpu else ("cpu", "uniproc")))
    handle = engine.submit(request(gate.prompt, seed=5))
    assert gate.reached() == "forward"
    for wrong in (3, None, [handle, b"x"], request("x"), [handle, other.submit(request())]):
        with pytest.raises(sidestream.InvalidRequestError, match=r"abort\(\)"):
            engine.abort(wrong)
    assert engine.stats()["aborting"] == 0
    gate.open()
    assert (handle.result(30).output == 5).all()


def test_after_close_an_abort_says_what_had_become_of_the_request(make_engine, gate, until):
    engine = make_engine("abort_pipes:Steps", platform="cpu", executor="uniproc")
    running = engine.submit(request(gate.prompt))
    assert gate.reached() == "forward"
    queued = [engine.submit(request()) for _ in range(4)]
    assert queued[3].abort() == NEVER_STARTED
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(queued[2].done)  # before the one that runs: no more than its own successor follows it
    gate.open()
    closing.join(30)
    assert running.abort(wait=True) == ALREADY_OUT
    assert queued[2].abort(wait=True) == ALREADY_OUT
    assert isinstance(queued[2].exception(0), sidestream.EngineClosedError)
    assert queued[1].exception(0) is not queued[2].exception(0)
    assert queued[3].abort(wait=True) == NEVER_STARTED


def test_a_forked_child_has_nothing_to_abort(engine, gate):
    handle = engine.submit(request(gate.prompt, seed=6))
    assert gate.reached() == "forward"
    child = os.fork()
    if child == 0:
        try:
            handle.abort()
        except sidestream.EngineClosedError:
            os._exit(42)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    gate.open()
    assert (handle.result(30).output == 6).all()


def test_canceling_agenerate_aborts_its_requests(engine, gate, until):
    other = engine.submit(request(seed=1))

    async def main():
        requests = [request(gate.prompt, steps=3), *(request() for _ in range(5))]
        task = asyncio.ensure_future(engine.agenerate(requests))
        assert await asyncio.to_thread(gate.reached) == "1"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until(lambda: engine.stats()["aborting"] == 1)
    gate.open()
    assert engine.drain(30)
    events = call(engine, "take_events")
    assert events[-1] == 1
    assert (other.result(30).output == 1).all()


def test_closing_imap_early_aborts_what_is_under_way(engine, gate, until):
    outputs = engine.imap([request(seed=1), request(gate.prompt, steps=3), request(), request()])
    assert (next(outputs).output == 1).all()
    assert gate.reached() == "1"
    outputs.close()
    until(lambda: engine.stats()["aborting"] == 1)
    gate.open()
    assert engine.drain(30)
    assert call(engine, "take_events")[-1] == 1


def test_the_first_failure_in_generate_aborts_the_others(engine, gate, until):
    requests = [request("raise", steps=1), request(gate.prompt, steps=3), request()]
    with pytest.raises(sidestream.ExecutionError, match="one of you is bad"):
        engine.generate(requests)
    until(lambda: engine.stats()["outputs"] == 0 or engine.stats()["aborting"] == 1)

    def is_over():
        if gate.look() == "1":
            gate.open()
        return engine.stats()["outputs"] == 0

    # The second may be at its gate or not have started: it gets no further than its first step.
    until(is_over)
    assert call(engine, "take_events")[-1] == 1


# --- with everything else -----------------------------------------------------------------------


def test_qwen_image_stops_between_two_steps(make_engine, gate):
    engine = make_engine(
        "gated_qwen_pipes:GatedQwenImage", model="digits", platform="cpu", executor="uniproc"
    )
    handle = engine.submit(DiffusionRequest(gate.prompt, SamplingParams(seed=1)))
    assert gate.reached() == "1"
    gate.open()
    assert gate.reached() == "2"
    assert handle.abort() == REQUESTED
    gate.open()
    assert handle.abort(wait=True, timeout_s=60) == stopped(2)
    assert call(engine, "count_decoded") == 0
    (output,) = engine.generate(["7"], seed=0)
    assert output.output.shape == (1, 64, 64, 3)
    assert call(engine, "count_decoded") == 1


@pytest.mark.soak  # it starts two workers
def test_what_was_given_up_does_not_run_again_when_its_worker_dies(make_engine, gate, until):
    engine = make_engine("abort_pipes:Steps", platform="cpu", max_restarts=1)
    pid = call(engine, "pid")
    running = engine.submit(request(gate.prompt, steps=2))
    assert gate.reached() == "1"
    waiting = engine.submit(request(request_id="waiting"))
    until(lambda: state(engine, waiting) == "dispatched")
    assert running.abort() == waiting.abort() == REQUESTED
    os.kill(pid, 9)
    assert running.abort(wait=True, timeout_s=30) == AbortResult(AbortOutcome.STOPPED)
    assert waiting.abort(wait=True, timeout_s=30) == NEVER_STARTED
    after = engine.submit(request(seed=7, request_id="after"))
    assert (after.result(60).output == 7).all()
    assert call(engine, "take_events") == [["after"], "decode"]


@pytest.mark.soak  # it starts two workers
def test_of_several_workers_the_one_that_has_the_request_gives_it_up(make_engine, make_gate):
    engine = make_engine("abort_pipes:Steps", platform="sim", devices=(0, 1))
    idle = engine.submit(request(seed=1))
    assert idle.result(60)
    gates = [make_gate(), make_gate()]
    handles = [engine.submit(request(g.prompt, seed=i, steps=1)) for i, g in enumerate(gates)]
    assert [gate.reached() for gate in gates] == ["1", "1"]
    assert handles[1].abort() == REQUESTED
    for gate in gates:
        gate.open()
    assert handles[1].abort(wait=True, timeout_s=30) == stopped(1)
    assert (handles[0].result(30).output == 0).all()


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("rounds", "turns"), [(3, 15), pytest.param(20, 25, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(600)
def test_many_aborts_leave_nothing(steps_engines, until, rounds, turns):
    engine = steps_engines("sim", "multiproc")
    rng = random.Random(5)
    pids = [os.getpid(), call(engine, "pid")]
    outcomes = []
    sizes = []

    def count_descriptors():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    for _ in range(rounds):
        for _ in range(turns):
            handles = [engine.submit(request(seed=i, steps=2)) for i in range(20)]
            rng.choice(handles).compute_done.exception(30)
            for handle in rng.sample(handles, len(handles)):
                handle.abort()
            outcomes += [handle.abort(wait=True, timeout_s=30).outcome for handle in handles]
        call(engine, "take_events")
        del handles, handle
        gc.collect()
        sizes.append([resident_bytes(pid) for pid in pids])
        if len(sizes) == 2:
            call(engine, "drain_async_outputs")
            descriptors = count_descriptors()
    assert len(outcomes) == rounds * turns * 20
    assert {AbortOutcome.NEVER_STARTED, AbortOutcome.ALREADY_OUT} < set(outcomes)
    assert_nothing_is_left(engine)
    for grown in (last - first for first, last in zip(sizes[1], sizes[-1], strict=True)):
        assert grown < 8 << 20
    until(lambda: count_descriptors() == descriptors)
