"""Step mode prepares a request beside the steps of others; proven by order, streams are held."""

from __future__ import annotations

import logging

import pytest

import sidestream
from sidestream import AbortOutcome, DiffusionRequest, SamplingParams
from sidestream.testing import sim

PROMPT_S = 20
#: How long something is watched that must not happen.
A_WHILE_S = 0.2


def request(seed=0, prompt="x", steps=3):
    params = SamplingParams(height=64, width=64, seed=seed, num_inference_steps=steps)
    return DiffusionRequest(prompt, params)


@pytest.fixture
def steps():
    """The stream that steps run on, of engines in this process."""
    stream = sim.default_stream(0)
    yield stream
    for one in (stream, *sim.side_streams(0)):
        one.release()


CONFIG = {"async_final_step": True, "step_execution": True, "max_pending_outputs": 4}


@pytest.fixture
def start(engines, monkeypatch, steps):
    """Give a shared engine in step mode in this process, also on one of ``faults_platforms``.

    Its device is idle.
    """

    def get(platform="sim", make=engines):
        if platform != "sim":
            monkeypatch.setenv("SIDESTREAM_PLUGINS", f"{platform}=faults_platforms:{platform}")
        engine = make("step_pipes:Besides", platform=platform, executor="uniproc", **CONFIG)
        engine.executor.collective_rpc("take_events")
        steps.synchronize()
        return engine

    return get


@pytest.fixture
def busy(steps, gate):
    """Submit a request and hold what runs its steps; gives its handle.

    One step of it is queued; the others come once their gate is opened.
    """

    def begin(engine, gate=gate):
        handle = engine.submit(request(1, f"alone {gate.prompt}"))
        assert gate.reached() == "1"
        steps.synchronize()  # what was prepared on it may be needed by the next one, too
        steps.hold()
        gate.open()
        assert gate.reached() == "2"
        return handle

    return begin


def let_all_be_queued(gate):
    """Open the gates of the steps that are left."""
    gate.open()
    assert gate.reached() == "3"
    gate.open()


@pytest.fixture
def recovery():
    """Make devices whole again, which others in this process share."""
    yield
    sim.reset()


@pytest.fixture
def order():
    """Have platforms of ``faults_platforms`` go wrong once."""
    import faults_platforms

    yield lambda what: faults_platforms.orders.update({what: 1})
    faults_platforms.orders.update(dict.fromkeys(faults_platforms.orders, 0))


def streams_of(engine):
    events = engine.executor.collective_rpc("take_events")[0]
    return [name for what, name in events if what == "prepared"]


# --- where it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_of_it", [1, 3])
def test_a_request_is_prepared_while_all_steps_of_another_are_held(
    start, busy, gate, steps, steps_of_it
):
    engine = start()
    first = busy(engine)
    second = engine.submit(request(2, "alone", steps=steps_of_it))
    let_all_be_queued(gate)
    second.compute_done.result(PROMPT_S)
    first.compute_done.result(PROMPT_S)
    assert not first.done()
    assert not second.done()
    steps.release()
    assert (first.result(PROMPT_S).output == 4).all()
    assert (second.result(PROMPT_S).output == 2 + steps_of_it).all()
    before, beside = streams_of(engine)
    assert before == steps.name != beside
    times = second.result().timings
    assert times.dispatched_at <= times.forward_started_at <= times.forward_ended_at
    assert 0.0 <= first.result().timings.copy_hidden_share <= 1.0


def test_where_outputs_are_copied_at_once_a_request_is_prepared_beside_steps_all_the_same(
    engines, busy, gate, steps
):
    config = {**CONFIG, "async_final_step": False}
    engine = engines("step_pipes:Besides", "sim", "uniproc", **config)
    engine.executor.collective_rpc("take_events")
    steps.synchronize()
    first = busy(engine)
    second = engine.submit(request(2, "alone"))
    gate.open()
    assert gate.reached() == "3"  # which comes behind the preparing
    steps.release()
    gate.open()
    assert (first.result(PROMPT_S).output == 4).all()
    assert (second.result(PROMPT_S).output == 5).all()
    before, beside = streams_of(engine)
    assert before == steps.name != beside


def test_on_a_device_that_is_idle_a_request_is_prepared_where_its_steps_run(start, steps):
    engine = start()
    for seed in range(3):
        assert (engine.submit(request(seed)).result(PROMPT_S).output == seed + 3).all()
        engine.executor.collective_rpc("ping")  # behind the last step's command
        steps.synchronize()
    assert streams_of(engine) == [steps.name] * 3


@pytest.mark.parametrize(
    ("platform", "prompt"),
    [("sim", "between"), ("unsure", "x")],
    ids=["a pipeline that forbids it", "a platform whose streams can't be joined"],
)
def test_where_it_can_not_be_done_a_request_is_prepared_between_steps(
    start, busy, gate, steps, platform, prompt
):
    engine = start(platform)
    first = busy(engine)
    second = engine.submit(request(2, f"alone {prompt}"))
    gate.open()
    with pytest.raises(TimeoutError):
        second.compute_done.result(A_WHILE_S)
    steps.release()
    assert gate.reached() == "3"
    gate.open()
    assert (first.result(PROMPT_S).output == 4).all()
    assert (second.result(PROMPT_S).output == 5).all()
    assert streams_of(engine) == [steps.name] * 2


# --- what is asked of the pipeline ----------------------------------------------------------------


@pytest.mark.slow
def test_a_hook_that_a_call_adds_is_seen_for_the_next_request(engines, busy, gate, steps):
    engine = engines("hook_pipes:Hooked", "sim", "uniproc", **CONFIG)
    call = engine.executor.collective_rpc
    call("take_events")
    first = busy(engine)
    second = engine.submit(request(2, "alone"))
    gate.open()
    assert gate.reached() == "3"  # which comes behind the preparing
    steps.release()
    gate.open()
    for handle in (first, second):
        handle.result(PROMPT_S)
    before, beside = streams_of(engine)
    assert before == steps.name != beside
    call("add_hook")
    first = busy(engine)
    second = engine.submit(request(2, "alone"))
    gate.open()
    with pytest.raises(TimeoutError):
        second.compute_done.result(A_WHILE_S)
    steps.release()
    assert gate.reached() == "3"
    gate.open()
    for handle in (first, second):
        handle.result(PROMPT_S)
    assert streams_of(engine) == [steps.name] * 2
    call("remove_hook")


# --- what waits for what --------------------------------------------------------------------------


def test_steps_wait_for_what_was_prepared_on_the_device(start, busy, gate, steps):
    engine = start()
    first = busy(engine)
    second = engine.submit(request(2, "alone hold-prepare"))
    let_all_be_queued(gate)
    second.compute_done.result(PROMPT_S)
    steps.release()
    with pytest.raises(TimeoutError):
        second.result(A_WHILE_S)
    for stream in sim.side_streams(0):
        stream.release()
    assert (second.result(PROMPT_S).output == 5).all()
    assert (first.result(PROMPT_S).output == 4).all()


@pytest.mark.parametrize(
    ("fault", "prompt"),
    [("join forgets to wait", "alone hold-prepare"), ("join forgets the memory", "alone")],
)
def test_a_planted_missing_wait_reads_poison(start, busy, gate, steps, order, fault, prompt):
    engine = start("joinable")
    order(fault)
    first = busy(engine)
    second = engine.submit(request(2, prompt))
    let_all_be_queued(gate)
    second.compute_done.result(PROMPT_S)
    steps.release()
    if "wait" in fault:
        steps.synchronize()  # what was prepared is still held
    for stream in sim.side_streams(0):
        stream.release()
    assert second.result(PROMPT_S).output.isnan().all()
    assert (first.result(PROMPT_S).output == 4).all()


def test_a_method_that_was_called_may_have_changed_what_preparing_reads(start, busy, gate, steps):
    engine = start()
    first = busy(engine)
    call = engine.executor.collective_rpc
    let_all_be_queued(gate)
    first.compute_done.result(PROMPT_S)
    call("take_events")
    second = engine.submit(request(2))
    with pytest.raises(TimeoutError):
        second.compute_done.result(A_WHILE_S)
    steps.release()
    assert (second.result(PROMPT_S).output == 5).all()


# --- giving up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "timeout_s",
    [
        pytest.param(None, id="an abort"),
        pytest.param(1.0, id="a deadline", marks=pytest.mark.slow),
    ],
)
def test_a_request_is_given_up_while_it_is_prepared_beside_steps_that_are_held(
    start, busy, make_gate, until, steps, timeout_s
):
    engine = start()
    call = engine.executor.collective_rpc
    gate, other = make_gate(), make_gate()
    first = busy(engine, gate)
    late = engine.submit(request(2, f"alone gated-prepare {other.prompt}"), timeout_s=timeout_s)
    gate.open()
    assert other.reached() == "prepare"
    if timeout_s is None:
        late.abort()
        other.open()
        result = late.abort(wait=True, timeout_s=PROMPT_S)
        assert (result.outcome, result.step) == (AbortOutcome.STOPPED, 0)
    else:
        assert isinstance(late.exception(PROMPT_S), sidestream.RequestTimeoutError)
        other.open()
    assert gate.reached() == "3"
    assert not first.done()
    third = engine.submit(request(3, "alone"))
    gate.open()
    third.compute_done.result(PROMPT_S)
    steps.release()
    assert (first.result(PROMPT_S).output == 4).all()
    assert (third.result(PROMPT_S).output == 6).all()
    before, *beside = streams_of(engine)
    assert len(beside) == 2
    assert before == steps.name not in beside
    assert call("count_latents") == [0]
    assert call("describe")[0]["states"] == 0
    until(lambda: call("describe")[0]["places_free"] == engine.config.max_resident)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("raise-prepare", sidestream.ExecutionError),
        ("fill-memory", sidestream.DeviceMemoryError),
    ],
)
def test_a_request_that_fails_while_it_is_prepared_fails_alone(
    start, busy, gate, steps, prompt, wanted
):
    engine = start()
    first = busy(engine)
    bad = engine.submit(request(2, f"alone {prompt}"))
    gate.open()
    assert isinstance(bad.exception(PROMPT_S), wanted)
    assert gate.reached() == "3"
    gate.open()
    assert not first.done()
    steps.release()
    assert (first.result(PROMPT_S).output == 4).all()
    assert (engine.submit(request(3)).result(PROMPT_S).output == 6).all()
    assert engine.executor.collective_rpc("describe")[0]["states"] == 0


def test_where_streams_can_not_be_joined_any_more_the_device_is_synchronized_and_that_said_once(
    start, make_engine, busy, gate, steps, order, caplog
):
    engine = start("joinable", make_engine)
    order("join raises")
    first = busy(engine)
    second = engine.submit(request(2, "alone"))
    let_all_be_queued(gate)
    assert (first.result(PROMPT_S).output == 4).all()
    assert (second.result(PROMPT_S).output == 5).all()
    assert (engine.submit(request(3)).result(PROMPT_S).output == 6).all()
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "the driver's pipe is broken" in warnings[0]
    assert len(set(streams_of(engine))) == 2


def test_a_device_that_fails_in_preparing_leaves_no_future_pending(
    start, make_engine, busy, gate, recovery
):
    engine = start(make=make_engine)
    handles = [busy(engine)]
    handles += [engine.submit(request(seed, "alone break-prepare")) for seed in (2, 3)]
    gate.open()
    for handle in handles:
        assert isinstance(handle.exception(PROMPT_S), sidestream.DeviceLostError)
    assert not engine.health().ok


@pytest.mark.slow
def test_a_device_that_fails_in_preparing_is_not_the_fault_of_an_output_on_its_way(
    make_engine, tmp_path, until
):
    engine = make_engine(
        "step_pipes:Besides",
        platform="sim",
        step_execution=True,
        async_final_step=True,
        max_restarts=3,
        pipeline_options={"log": str(tmp_path / "log")},
    )
    innocent = engine.submit(request(1, "hold-once-1", steps=1))
    innocent.compute_done.result(PROMPT_S)
    guilty = engine.submit(request(2, "break-prepare"))
    assert (innocent.result(60).output == 2).all()
    assert isinstance(guilty.exception(60), sidestream.RequestError)
    until(lambda: engine.health().ok)
    assert (engine.submit(request(3)).result(PROMPT_S).output == 6).all()


@pytest.mark.soak
def test_after_a_death_in_preparing_all_that_were_there_run_again(make_engine, tmp_path):
    engine = make_engine(
        "step_pipes:Besides",
        platform="sim",
        step_execution=True,
        async_final_step=True,
        max_restarts=1,
        pipeline_options={"log": str(tmp_path / "log")},
    )
    stepped = engine.submit(request(1, "alone hold-once-1"))
    stepped.compute_done.result(PROMPT_S)
    prepared = engine.submit(request(2, "alone kill-prepare"))
    assert (stepped.result(60).output == 4).all()
    assert (prepared.result(60).output == 5).all()
