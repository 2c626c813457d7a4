"""Step mode: one denoising step a call; requests join and leave between two, and come to ends."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import sidestream
from sidestream import AbortOutcome, DiffusionRequest, SamplingParams

#: What answers within milliseconds is given more by tests that share their machine.
PROMPT_S = 20

CPU = ("cpu", "multiproc", {})
LOCAL = ("cpu", "uniproc", {})
SIM = ("sim", "multiproc", {})
SIM_ASYNC = ("sim", "multiproc", {"async_final_step": True})
WAYS = pytest.mark.parametrize(
    "way", [CPU, LOCAL, SIM, SIM_ASYNC], ids=["cpu", "uniproc", "sim", "sim-async"]
)


def request(seed=0, prompt="x", steps=3, name=None, **extra):
    params = SamplingParams(height=64, width=64, seed=seed, num_inference_steps=steps, extra=extra)
    return DiffusionRequest(prompt, params, request_id=name)


@pytest.fixture
def stepped(engines):
    """Give a shared engine in step mode whose pipeline has forgotten what it did."""

    def get(way):
        platform, executor, config = way
        engine = engines(
            "step_pipes:SharedWalk",
            platform,
            executor,
            streaming_output=True,
            max_batch_size=2,
            **config,
        )
        engine.executor.collective_rpc("take_events")
        return engine

    return get


def let_on(gate, handle):
    """Open a gate whenever its request is there, until that is done."""
    while not handle.done():
        if gate.look():
            gate.open()
        time.sleep(0.001)


def events_of(engine):
    return engine.executor.collective_rpc("take_events")[0]


def check_nothing_is_left(engine, until):
    assert engine.drain(PROMPT_S)
    # A request that timed out is answered before its worker is done with it.
    until(lambda: engine.executor.collective_rpc("describe")[0]["states"] == 0)
    stats = engine.stats()
    assert stats["outputs"] == stats["calls"] == stats["queued"] == stats["aborting"] == 0
    # A place is given back just after its output was sent.
    free = engine.config.max_resident
    until(lambda: engine.executor.collective_rpc("describe")[0]["places_free"] == free)


# --- what runs ------------------------------------------------------------------------------------


@WAYS
def test_each_request_gets_its_own_steps(stepped, until, way):
    engine = stepped(way)
    handles = [engine.submit(request(seed, steps=2 + seed % 3)) for seed in range(8)]
    for seed, handle in enumerate(handles):
        assert (handle.result(PROMPT_S).output == seed + 2 + seed % 3).all()
    del handles
    check_nothing_is_left(engine, until)


@WAYS
def test_requests_at_different_steps_share_forwards(stepped, make_gate, way):
    engine, gate = stepped(way), make_gate()
    first = engine.submit(request(1, gate.prompt, name="first"))
    assert gate.reached() == "1"
    second = engine.submit(request(2, name="second"))
    gate.open()
    for step in "23":  # of the first; the second is one behind
        assert gate.reached() == step
        gate.open()
    assert (first.result(PROMPT_S).output == 4).all()
    assert (second.result(PROMPT_S).output == 5).all()
    assert events_of(engine) == [
        ("prepare", "first"),
        ("step", "first"),
        ("prepare", "second"),
        ("steps", ["first", "second"]),
        ("steps", ["first", "second"]),
        ("decode", "first"),
        ("step", "second"),
        ("decode", "second"),
    ]


def test_requests_that_share_no_forward_take_turns(stepped, make_gate):
    engine, gate = stepped(CPU), make_gate()
    first = engine.submit(request(1, f"alone {gate.prompt}", name="first"))
    assert gate.reached() == "1"
    second = engine.submit(request(2, "alone", steps=2, name="second"))
    gate.open()
    for _ in "23":
        gate.reached()
        gate.open()
    first.result(PROMPT_S)
    second.result(PROMPT_S)
    assert [name for what, name in events_of(engine) if what == "step"] == [
        "first",
        "first",
        "second",
        "first",
        "second",
    ]


def test_a_device_holds_no_more_requests_than_it_may(stepped, make_gate):
    engine, gate = stepped(CPU), make_gate()
    handles = [engine.submit(request(0, gate.prompt, steps=1))]
    assert gate.reached() == "1"
    handles += [engine.submit(request(seed, steps=1)) for seed in range(1, 9)]
    assert "may" not in engine.describe()
    gate.open()
    assert [h.result(PROMPT_S).output.flatten()[0] for h in handles] == list(range(1, 10))
    # Four: two places of two requests each. The gate had kept the others out until its step.
    in_worker, most = 0, 0
    for what, _ in events_of(engine):
        in_worker += {"prepare": 1, "decode": -1}.get(what, 0)
        most = max(most, in_worker)
    assert most == engine.config.max_resident == 4


def test_a_call_of_a_method_runs_between_two_steps(stepped, make_gate, until):
    engine, gate = stepped(CPU), make_gate()
    handle = engine.submit(request(1, gate.prompt, name="r"))
    assert gate.reached() == "1"
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(events_of, engine)
        until(lambda: engine.stats()["calls"] == 1)
        gate.open()
        assert gate.reached() == "2"
        # It may have been sent just behind the second step.
        gate.open()
        assert gate.reached() == "3"
        assert call.result(PROMPT_S)[-1] == ("step", "r")
        gate.open()
    assert (handle.result(PROMPT_S).output == 4).all()


def test_a_worker_in_step_mode_refuses_whole_forwards(stepped):
    with pytest.raises(sidestream.InvalidRequestError, match="step_execution=False"):
        stepped(CPU).executor.execute_model(request())


def test_a_pipeline_without_stages_is_refused_when_it_is_loaded(make_engine):
    with pytest.raises(sidestream.WorkerStartError, match="missing: prepare_encode") as caught:
        make_engine("step_pipes:NoStages", step_execution=True, executor="uniproc")
    assert isinstance(caught.value.__cause__, sidestream.ConfigError)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"async_final_step": True}, "async_final_step"),
        ({"step_execution": True, "async_final_step": True, "async_output": False}, "async_output"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, field):
    with pytest.raises(sidestream.ConfigError, match=field):
        sidestream.EngineConfig(model="digits", **settings)


def test_streaming_output_turns_step_mode_on():
    config = sidestream.EngineConfig(model="digits", streaming_output=True)
    assert config.step_execution


# --- the table of the configuration ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "settings", "mode", "copies", "has_pump", "has_output_thread"),
    [
        # In short it is in test_observability.py.
        pytest.param("sim", {}, "request", "on", True, True, marks=pytest.mark.soak),
        ("sim", {"step_execution": True}, "step", "synchronous", False, False),
        (
            "sim",
            {"step_execution": True, "async_final_step": True},
            "step",
            "final step only",
            True,
            True,
        ),
        (
            "cpu",
            {"step_execution": True, "async_final_step": True},
            "step",
            "synchronous, as this platform has no streams, or none to rely on",
            True,
            False,
        ),
    ],
)
def test_each_cell_of_the_table_holds_and_a_death_in_a_step_leaves_no_future_pending(
    make_engine, platform, settings, mode, copies, has_pump, has_output_thread
):
    before = set(threading.enumerate())
    engine = make_engine("step_pipes:Walk", platform=platform, **settings)
    assert (engine.submit(request(1)).result(PROMPT_S).output == 4).all()
    ours = {thread.name for thread in set(threading.enumerate()) - before}
    (theirs,) = engine.executor.collective_rpc("threads")
    assert ours == {"sidestream-engine"} | ({"sidestream-pump"} if has_pump else set())
    assert ("sidestream-output" in theirs) is has_output_thread
    said = {True: "started", False: "not started"}
    assert (
        f"mode: {mode}; async output: {copies}; pump: {said[has_pump]}; worker's output thread: "
        f"{said[has_output_thread]}"
    ) in engine.describe()
    if mode == "step":
        check_a_death_leaves_no_future_pending(engine)


def check_a_death_leaves_no_future_pending(engine):
    handles = [engine.submit(request(seed, "kill-2")) for seed in range(6)]
    for handle in handles:
        assert isinstance(handle.exception(PROMPT_S), sidestream.WorkerDiedError)
        assert isinstance(handle.compute_done.exception(0), sidestream.WorkerDiedError)
        with pytest.raises(sidestream.WorkerDiedError):
            list(handle.events())
    assert not engine.health().ok
    with pytest.raises(sidestream.WorkerDiedError):
        engine.executor.collective_rpc("ping")
    with pytest.raises(sidestream.WorkerDiedError):
        engine.submit(request())


@pytest.fixture(scope="module")
def mortal(_pipelines_on_path):
    """Give an engine without a pump that restarts once: for a death, then for the last one."""
    config = sidestream.EngineConfig(
        pipeline="step_pipes:Walk",
        step_execution=True,
        max_restarts=1,
        hang_timeout_s=1.5,
        start_timeout_s=200,
    )
    engine = sidestream.DiffusionEngine(config)
    yield engine
    engine.close(timeout_s=2)


def test_without_a_pump_a_death_is_noticed_at_rest_and_told_by_health(mortal, until):
    engine = mortal
    process = engine.executor.workers[0].process
    process.signal_group(signal.SIGKILL)
    process.is_gone(PROMPT_S)
    assert not engine.health().ok
    until(lambda: engine.health().ok)
    assert engine.executor.restarts == 1
    assert (engine.submit(request(1)).result(PROMPT_S).output == 4).all()


# --- the device -----------------------------------------------------------------------------------


def test_a_step_is_answered_when_it_is_queued(stepped):
    engine = stepped(SIM_ASYNC)
    call = engine.executor.collective_rpc
    call("hold_forwards")
    handle = engine.submit(request(1))
    handle.compute_done.result(PROMPT_S)
    assert not handle.done()
    call("release_forwards")
    assert (handle.result(PROMPT_S).output == 4).all()


def test_with_the_copy_held_the_next_first_step_completes_if_the_final_step_is_asynchronous(
    stepped,
):
    engine = stepped(SIM_ASYNC)
    call = engine.executor.collective_rpc
    call("hold_copies")
    first = engine.submit(request(1))
    first.compute_done.result(PROMPT_S)
    second = engine.submit(request(2))
    assert next(second.events()).step == 1
    call("finish_forwards", timeout_s=PROMPT_S)
    assert not first.done()
    call("release_copies")
    assert (first.result(PROMPT_S).output == 4).all()
    assert (second.result(PROMPT_S).output == 5).all()


@pytest.mark.parametrize("way", [SIM, SIM_ASYNC], ids=["off", "on"])
def test_with_what_copies_run_on_held_the_next_first_step_is_queued_only_if_it_is_asynchronous(
    stepped, make_gate, way
):
    engine, gate = stepped(way), make_gate()
    # The hold begins in the decoding and ends with the gate.
    first = engine.submit(request(1, f"hold-copies {gate.prompt}", steps=1))
    assert gate.reached() == "1"
    gate.open()
    assert gate.reached() == "copies"
    second = engine.submit(request(2))
    first_step = ThreadPoolExecutor(1).submit(next, second.events())
    if way is SIM_ASYNC:
        assert first_step.result(PROMPT_S).step == 1
    else:
        with pytest.raises(TimeoutError):
            first_step.result(0.5)
    assert not first.done()
    gate.open()
    assert (first.result(PROMPT_S).output == 2).all()
    assert (second.result(PROMPT_S).output == 5).all()


def test_the_times_of_an_output_cover_all_its_steps(stepped):
    times = stepped(SIM_ASYNC).submit(request(1)).result(PROMPT_S).timings
    points = [
        times.submitted_at,
        times.dispatched_at,
        times.forward_started_at,
        times.forward_ended_at,
        times.copy_started_at,
        times.copy_ended_at,
        times.ready_at,
    ]
    assert None not in points
    assert points == sorted(points)


# --- giving up ------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("step", [1, 3])
def test_an_abort_in_a_step_frees_the_state_and_decodes_nothing(stepped, gate, until, way, step):
    engine = stepped(way)
    handle = engine.submit(request(1, gate.prompt, name="given-up"))
    for _ in range(1, step):
        gate.reached()
        gate.open()
    assert gate.reached() == str(step)
    handle.abort()
    gate.open()
    result = handle.abort(wait=True, timeout_s=PROMPT_S)
    assert (result.outcome, result.step) == (AbortOutcome.STOPPED, step - 1)
    assert engine.executor.collective_rpc("count_latents") == [0]
    assert ("decode", "given-up") not in events_of(engine)
    check_nothing_is_left(engine, until)


def test_an_abort_takes_effect_while_others_are_in_a_step(stepped, make_gate, until):
    engine, gate, other = stepped(CPU), make_gate(), make_gate()
    handle = engine.submit(request(1, f"alone {gate.prompt}", steps=9))
    assert gate.reached() == "1"
    neighbor = engine.submit(request(2, f"alone {other.prompt}", steps=2))
    gate.open()
    assert gate.reached() == "2"
    gate.open()
    assert other.reached() == "1"
    handle.abort()
    other.open()
    # Before the neighbor's next step is over, and before its own.
    assert handle.abort(wait=True, timeout_s=PROMPT_S).step == 2
    assert other.reached() == "2"
    other.open()
    assert (neighbor.result(PROMPT_S).output == 4).all()
    check_nothing_is_left(engine, until)


def test_an_abort_in_a_shared_step_leaves_the_other_alone(stepped, gate):
    engine = stepped(CPU)
    handles = [engine.submit(request(seed, gate.prompt, steps=2)) for seed in range(2)]
    gate.reached()
    handles[0].abort()
    gate.open()
    let_on(gate, handles[1])
    assert handles[0].abort(wait=True, timeout_s=PROMPT_S).outcome is AbortOutcome.STOPPED
    assert (handles[1].result().output == 3).all()


def test_an_abort_of_what_waits_and_of_what_was_stepped_to_its_end(stepped, gate):
    engine = stepped(SIM_ASYNC)
    call = engine.executor.collective_rpc
    call("hold_copies")
    done = engine.submit(request(1, steps=1))
    done.compute_done.result(PROMPT_S)
    done.abort()
    busy = [engine.submit(request(2, f"alone {gate.prompt}", steps=1))]
    gate.reached()
    queued = engine.submit(request(3))
    assert queued.abort().outcome is AbortOutcome.NEVER_STARTED
    gate.open()
    call("release_copies")
    outcome = done.abort(wait=True, timeout_s=PROMPT_S).outcome
    # The copy may have been queued before the abort was seen.
    assert outcome in (AbortOutcome.DETACHED, AbortOutcome.ALREADY_OUT)
    assert (busy[0].result(PROMPT_S).output == 3).all()


def test_a_deadline_drops_the_state(stepped, gate, until):
    engine = stepped(CPU)
    handle = engine.submit(request(1, gate.prompt, name="late"), timeout_s=1.0)
    assert gate.reached() == "1"
    assert isinstance(handle.exception(PROMPT_S), sidestream.RequestTimeoutError)
    gate.open()
    check_nothing_is_left(engine, until)
    assert ("decode", "late") not in events_of(engine)


# --- failures -------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("where", ["raise-prepare", "raise-2", "raise-decode"])
def test_a_request_that_fails_fails_alone(stepped, until, way, where):
    engine = stepped(way)
    good, bad, other = [
        engine.submit(request(seed, prompt)) for seed, prompt in enumerate(["x", where, "x"])
    ]
    error = bad.exception(PROMPT_S)
    assert isinstance(error, sidestream.ExecutionError)
    assert isinstance(error.__cause__, ValueError)
    assert (good.result(PROMPT_S).output == 3).all()
    assert (other.result(PROMPT_S).output == 5).all()
    check_nothing_is_left(engine, until)
    assert engine.executor.collective_rpc("count_latents") == [0]


@pytest.mark.soak
def test_after_a_death_requests_run_again_from_their_first_step(make_engine, tmp_path, until):
    engine = make_engine(
        "step_pipes:Walk",
        step_execution=True,
        max_restarts=3,
        pipeline_options={"log": str(tmp_path / "log")},
    )
    dies_once, innocent, dies = [
        engine.submit(request(seed, prompt))
        for seed, prompt in enumerate(["kill-once-2", "x", "kill-1"])
    ]
    assert (dies_once.result(60).output == 3).all()
    assert (innocent.result(60).output == 4).all()
    assert isinstance(dies.exception(60), sidestream.WorkerDiedError)
    until(lambda: engine.health().ok)
    assert [event.step for event in dies_once.events() if event.kind == "step"] == [1, 2, 3]


def test_a_step_that_hangs_is_found_out(mortal, gate):
    assert (mortal.submit(request(1)).result(PROMPT_S).output == 4).all()
    handle = mortal.submit(request(1, gate.prompt))  # which nobody opens
    assert isinstance(handle.exception(PROMPT_S), sidestream.WorkerHungError)


# --- bounds and ends ------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_close_finishes_what_has_begun(make_engine, gate):
    engine = make_engine(
        "step_pipes:Walk",
        executor="uniproc",
        step_execution=True,
        max_pending_outputs=1,
        max_queued_requests=1,
    )
    begun = engine.submit(request(1, gate.prompt))
    assert gate.reached() == "1"
    queued = engine.submit(request(2))
    with pytest.raises(sidestream.QueueFullError):
        engine.submit(request(3))
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert isinstance(queued.exception(PROMPT_S), sidestream.EngineClosedError)
    gate.open()
    let_on(gate, begun)
    assert (begun.result(PROMPT_S).output == 4).all()
    closing.join(PROMPT_S)
    assert not closing.is_alive()


@pytest.mark.slow
def test_several_devices_step_side_by_side_and_close_ends_what_takes_too_long(
    make_engine, make_gate
):
    engine = make_engine("step_pipes:Walk", platform="sim", step_execution=True, devices=(0, 1))
    gates = [make_gate(), make_gate()]
    handles = [
        engine.submit(request(seed, gate.prompt, steps=2)) for seed, gate in enumerate(gates)
    ]
    for step in "12":
        for gate in gates:
            assert gate.reached() == step
        gates[0].open()
        if step == "1":
            gates[1].open()
    assert (handles[0].result(PROMPT_S).output == 2).all()
    began = time.monotonic()
    engine.close(timeout_s=0.2)
    assert time.monotonic() - began < PROMPT_S
    assert isinstance(handles[1].exception(0), sidestream.EngineClosedError)
