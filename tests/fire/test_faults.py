"""Devices and plugins that fail: bits stay right, or the request and the device are named."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import (
    AsyncOutputThread,
    DeviceLostError,
    DiffusionRequest,
    ExecutionError,
    HostSink,
    OutputTransferError,
    SamplingParams,
    WorkerDiedError,
    load_platform,
)
from sidestream.platforms.registry import PLUGINS_VARIABLE

executors = pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
#: For what differs by no more than the cost of a worker's start.
mostly_uniproc = pytest.mark.parametrize(
    "executor", [pytest.param("multiproc", marks=pytest.mark.soak), "uniproc"]
)

REASON = "a wire came loose"
ALWAYS = 10**9


def request(prompt="x", *, seed=0, size=64, **inputs):
    return DiffusionRequest(
        prompt, SamplingParams(height=size, width=size, seed=seed), inputs=inputs or None
    )


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__


@pytest.fixture(autouse=True)
def _fresh_devices(sim):
    """Forget what the engines of this process did to its simulated devices."""
    yield
    if "faults_platforms" in sys.modules:
        orders = sys.modules["faults_platforms"].orders
        orders.update(dict.fromkeys(orders, 0))


@pytest.fixture
def engine_of(start):
    """Start an engine on a simulated device that the test may ruin."""

    def make(executor="multiproc", pipeline="Faulty", **config):
        config.setdefault("platform", "sim")
        return start(f"faults_pipes:{pipeline}", executor=executor, **config)

    return make


class Gate:
    """A named pipe that a thread of the worker waits at."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = str(path)

    def open(self):
        os.close(os.open(self.path, os.O_WRONLY))


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture
def plugin(monkeypatch):
    """Have the engines of this test know a plugin of ``faults_platforms``."""

    def know(name):
        monkeypatch.setenv(PLUGINS_VARIABLE, f"{name}=faults_platforms:{name}")
        return name

    return know


def all_right(engine, count=6):
    handles = [engine.submit(request(seed=i)) for i in range(count)]
    return all((handle.result(30).output == i).all() for i, handle in enumerate(handles))


# --- the device is lost -----------------------------------------------------------------------


def assert_lost(engine, guilty, innocent, wanted):
    """The guilty one gets the device's reason; the others hear that the worker is gone."""
    error = guilty.exception(30)
    assert isinstance(error, wanted)
    assert any(REASON in str(one) for one in chain(error))
    assert any(isinstance(one, DeviceLostError) for one in chain(error))
    for handle in innocent:
        other = handle.exception(30)
        if engine.config.executor == "multiproc":
            assert isinstance(other, WorkerDiedError)
            assert other.exit_code == 71
            assert REASON in str(other)
        else:
            assert isinstance(other, DeviceLostError)
            assert REASON in str(other)
    assert not engine.health().ok
    assert REASON in engine.health().reason
    gone = WorkerDiedError if engine.config.executor == "multiproc" else DeviceLostError
    with pytest.raises(gone, match=REASON):
        engine.submit(request())


@executors
def test_a_faulting_kernel_fails_its_request_and_not_the_one_behind_it(engine_of, gate, executor):
    engine = engine_of(executor)
    engine.executor.collective_rpc("hold_forwards", (gate.path,))
    guilty = engine.submit(request("fault", reason=REASON))
    innocent = [engine.submit(request(seed=i)) for i in range(1, 5)]
    for handle in (guilty, innocent[0]):
        handle.compute_done.result(30)
    # Both forwards are queued on the device now, and another request is in the worker's hands.
    assert not guilty.done()
    gate.open()
    assert_lost(engine, guilty, innocent, OutputTransferError)


@pytest.fixture
def stalled(engine_of, plugin, eventually):
    """Start an engine with a request whose forward is done and whose copy has begun, and stays."""

    def make(executor, **config):
        engine = engine_of(executor, platform=plugin("stalls"), **config)
        assert all_right(engine, 2)
        engine.executor.collective_rpc("order", ("stall", 1))
        innocent = engine.submit(request(seed=5))
        assert eventually(lambda: engine.executor.collective_rpc("is_stalled")[0])
        return engine, innocent

    yield make
    if "faults_platforms" in sys.modules:
        sys.modules["faults_platforms"].WatchedEvent.is_awaited = False


@mostly_uniproc
@pytest.mark.parametrize("prompt", ["fault", "fault_and_wait"])
def test_a_request_that_was_computed_is_not_blamed_for_the_next_ones_fault(
    stalled, executor, prompt
):
    engine, innocent = stalled(executor)
    guilty = engine.submit(request(prompt, reason=REASON))
    # The fault may show before the guilty one's forward is over, or at its copy.
    assert_lost(engine, guilty, [innocent], (ExecutionError, OutputTransferError))


@pytest.mark.soak  # it starts two workers
def test_a_request_that_was_computed_when_the_device_broke_runs_again(stalled):
    engine, innocent = stalled("multiproc", max_restarts=2)
    guilty = engine.submit(request("fault", reason=REASON))
    error = guilty.exception(30)
    assert isinstance(error, ExecutionError | OutputTransferError)
    assert any(REASON in str(one) for one in chain(error))
    assert (innocent.result(60).output == 5).all()
    assert engine.stats()["restarts"] == 1


@pytest.mark.soak  # it starts three workers
@pytest.mark.timeout(240)
def test_of_a_batch_that_broke_the_device_only_the_guilty_member_fails(engine_of):
    engine = engine_of(pipeline="BatchFaulty", max_batch_size=3, max_restarts=3)
    with engine._loop._room:  # none is sent before all are queued
        first, guilty, last = (
            engine.submit(request(seed=1)),
            engine.submit(request("break")),
            engine.submit(request(seed=3)),
        )
    error = guilty.exception(120)
    assert isinstance(error, OutputTransferError)
    assert any(REASON in str(one) for one in chain(error))
    assert (first.result(60).output == 1).all()
    assert (last.result(60).output == 3).all()


@pytest.mark.parametrize("attempt", range(5))
def test_a_forward_that_meets_the_fault_of_the_one_before_does_not_take_it_over(engine_of, attempt):
    engine = engine_of("uniproc")
    assert all_right(engine, 2)
    guilty = engine.submit(request("fault", reason=REASON))
    # Asks its own device for a number: on the forward's thread, while the output thread waits.
    innocent = engine.submit(request("number"))
    assert_lost(engine, guilty, [innocent], OutputTransferError)


@mostly_uniproc
def test_a_fault_that_shows_in_its_own_forward_is_that_requests(engine_of, executor):
    engine = engine_of(executor)
    assert all_right(engine, 2)
    guilty = engine.submit(request("fault_and_wait", reason=REASON))
    innocent = [engine.submit(request()) for _ in range(3)]
    assert_lost(engine, guilty, innocent, ExecutionError)


@mostly_uniproc
def test_without_async_output_a_fault_is_its_requests_too(engine_of, executor):
    engine = engine_of(executor, async_output=False)
    guilty = engine.submit(request("fault", reason=REASON))
    innocent = [engine.submit(request()) for _ in range(3)]
    assert_lost(engine, guilty, innocent, OutputTransferError)


def test_a_device_that_is_lost_while_idle_is_found_by_the_next_request(engine_of, eventually):
    engine = engine_of("uniproc")
    assert all_right(engine)
    engine.executor.collective_rpc("fault", (REASON,))
    error = engine.submit(request()).exception(30)
    assert any(REASON in str(one) for one in chain(error))
    assert eventually(lambda: not engine.health().ok)  # the request is answered before


def test_a_failing_forward_is_no_fault_of_the_device(engine_of, sim):
    engine = engine_of("uniproc")
    # Whatever the check of the device does, it may not wait behind what is held here.
    sim.default_stream().hold()
    error = engine.submit(request("raise", what="is frozen")).exception(30)
    assert isinstance(error, ExecutionError)
    sim.default_stream().release()
    assert all_right(engine)


# --- recording and waiting fail ---------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"fail_next_records": 1},
        {"fail_next_records": ALWAYS},
        {"fail_next_waits": 1},
        {"fail_next_waits": ALWAYS},
        {"fail_next_waits": ALWAYS, "fail_next_records": ALWAYS},
    ],
    ids=["a record", "all records", "a wait", "all waits", "all of both"],
)
def test_a_platform_that_fails_to_record_or_to_wait_runs_right_and_says_so_once(
    engine_of, caplog, sim, fields
):
    engine = engine_of("uniproc")
    engine.executor.collective_rpc("set_faults", (), fields)
    sim.default_stream().hold()
    handles = [engine.submit(request(seed=i)) for i in range(6)]
    with pytest.raises(TimeoutError):
        handles[0].result(0.1)  # whatever it does instead of waiting, it waits
    sim.default_stream().release()
    for i, handle in enumerate(handles):
        assert (handle.result(30).output == i).all()
    assert all_right(engine)
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "Platform 'sim' failed at" in warnings[0]
    assert "no longer overlap" in warnings[0]
    assert engine.health().ok


@mostly_uniproc
def test_a_platform_that_fails_to_record_before_its_first_output_starts_all_the_same(
    engine_of, executor
):
    engine = engine_of(
        executor, pipeline_options={"fail_from_load_on": {"fail_next_records": ALWAYS}}
    )
    assert all_right(engine)


@pytest.mark.slow
def test_a_worker_process_warns_on_the_stderr_of_its_engine(engine_of, capfd):
    engine = engine_of("multiproc")
    engine.executor.collective_rpc("set_faults", (), {"fail_next_waits": ALWAYS})
    assert all_right(engine)
    assert capfd.readouterr().err.count("Platform 'sim' failed at waiting for an event") == 1


@pytest.mark.parametrize("times", [1, ALWAYS])
@pytest.mark.parametrize("what", ["wait raises", "wait answers False", "wait_event raises"])
def test_whatever_a_vendors_event_raises_the_device_is_synchronized_instead(
    engine_of, plugin, caplog, what, times
):
    engine = engine_of("uniproc", platform=plugin("unsure"))
    engine.executor.collective_rpc("order", (what, times))
    assert all_right(engine)
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "Platform 'unsure' failed at waiting for" in warnings[0]


@pytest.mark.slow
@executors
def test_an_event_that_never_fires_holds_up_its_output_until_the_engine_closes(engine_of, executor):
    engine = engine_of(executor)
    (pid,) = engine.executor.collective_rpc("pid")
    silent = engine.submit(request("silence"))
    behind = [engine.submit(request()) for _ in range(3)]
    silent.compute_done.result(30)
    with pytest.raises(TimeoutError):
        silent.result(0.2)
    engine.close(timeout_s=0.3)
    for handle in (silent, *behind):
        assert isinstance(handle.exception(0), sidestream.EngineClosedError)
    assert executor == "uniproc" or not Path(f"/proc/{pid}").exists()


@mostly_uniproc
def test_an_event_that_never_fires_fails_its_request_at_the_deadline(engine_of, executor):
    engine = engine_of(executor)
    silent = engine.submit(request("silence"), timeout_s=0.5)
    error = silent.exception(30)
    assert isinstance(error, sidestream.RequestTimeoutError)
    assert error.timeout_s == 0.5
    engine.close(timeout_s=0.3)


# --- plugins that are refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gives_foreign_events", "record_device_event"),
        ("accepts_foreign_events", "'accepts_foreign_events' accepts events that are not"),
        ("skips_waits", r"Plugin 'skips_waits': \d+ of .* wrong .* record_device_event"),
    ],
)
@mostly_uniproc
def test_a_plugin_that_would_corrupt_outputs_is_refused_at_start(
    engine_of, plugin, executor, name, said
):
    with pytest.raises(sidestream.WorkerStartError, match=said) as caught:
        engine_of(executor, platform=plugin(name))
    assert caught.value.stage == "platform"
    assert isinstance(caught.value.__cause__, sidestream.PlatformError | sidestream.PluginError)


# --- one copy fails ---------------------------------------------------------------------------


def test_a_copy_that_cannot_begin_fails_its_output_alone(engine_of, plugin):
    engine = engine_of("uniproc", platform=plugin("unsure"))
    engine.executor.collective_rpc("order", ("enter raises", 1))
    error = engine.submit(request()).exception(30)
    assert isinstance(error, OutputTransferError)
    assert "the stream can't be made current" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert all_right(engine)


@executors
def test_copies_that_fail_half_way_give_their_slots_back(engine_of, executor):
    # Room for one such output: a slot that was not given back would show at once.
    engine = engine_of(executor, "PrivateFaulty", host_buffer_bytes=6 << 20)
    call = engine.executor.collective_rpc
    for _ in range(4):
        # The first leaf's copy is under way when the second finds no device memory.
        error = engine.submit(request("scattered", spare_bytes=1 << 20)).exception(30)
        assert isinstance(error, OutputTransferError)
        assert any(isinstance(one, torch.OutOfMemoryError) for one in chain(error))
        call("give_memory")
    output = engine.submit(request(seed=4, size=512)).result(30)
    assert (output.output == 4).all()
    assert output.timings.carrier == ("slot" if executor == "multiproc" else "host")
    assert engine.health().ok


@pytest.mark.parametrize("spare_bytes", [1 << 20, 0])
def test_running_out_of_device_memory_fails_the_request_and_not_the_device(engine_of, spare_bytes):
    engine = engine_of("uniproc")
    for prompt, wanted in [
        ("out_of_memory", sidestream.DeviceMemoryError),
        ("scattered", OutputTransferError),  # its private copy finds no room
    ]:
        error = engine.submit(request(prompt, spare_bytes=spare_bytes)).exception(30)
        assert isinstance(error, wanted)
        engine.executor.collective_rpc("give_memory")
    assert all_right(engine)


# --- the output thread by itself --------------------------------------------------------------


@pytest.fixture
def output_thread(plugin):
    """Make output threads on the platform ``unsure``, not started yet."""

    def make(name="unsure", **sink):
        platform = load_platform(plugin(name))
        device = platform.device(0)
        platform.set_device(device)
        return AsyncOutputThread(platform, HostSink(platform, device, **sink), device=device)

    return make


def test_what_was_submitted_to_a_thread_that_does_not_start_fails_with_its_reason(output_thread):
    thread = output_thread("no_streams")
    early = thread.submit("early", {"a": 1})
    with pytest.raises(sidestream.PlatformError, match="no stream is left"):
        thread.start()
    with pytest.raises(OutputTransferError, match="no stream is left"):
        early.result(0)
    with pytest.raises(sidestream.EngineClosedError):
        thread.submit("late", {"a": 1})
    assert thread.drain(5)
    assert thread.close(5)


def test_what_was_submitted_to_a_thread_that_never_started_fails_at_its_close(output_thread):
    thread = output_thread()
    early = thread.submit("early", torch.ones(4))
    assert not thread.drain(5)
    assert thread.close()
    with pytest.raises(OutputTransferError, match="closed before it ran"):
        early.result(0)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_receiver_that_raises_fails_that_output_alone(output_thread, kind):
    def deliver(label, tree, timings, nbytes):
        if label.output_id == "first":
            raise kind("not this one")

    with output_thread(deliver=deliver) as thread:
        first, second = thread.submit("first", torch.ones(4)), thread.submit("second", [1, 2])
        with pytest.raises(OutputTransferError, match="not this one"):
            first.result(30)
        assert second.result(30) == [1, 2]


def test_a_callback_on_the_output_thread_that_exits_does_not_end_it(output_thread, caplog):
    def callback(_future):
        raise SystemExit(3)

    thread = output_thread()
    first = thread.submit("first", torch.ones(4))
    first.add_done_callback(callback)
    with thread:
        assert thread.submit("second", [1, 2]).result(30) == [1, 2]
    assert (first.result(0) == 1).all()
    assert "What follows output 'first' raised" in caplog.text


def test_an_output_under_way_can_not_be_canceled(output_thread):
    with output_thread() as thread:
        future = thread.submit("one", torch.ones(4))
        assert not future.cancel()
        assert (future.result(30) == 1).all()


def test_a_reader_without_memory_for_an_error_gets_it_in_few_words(output_thread):
    told = []

    def deliver(label, tree, timings, nbytes):
        raise ValueError("not this one")

    def fail(label, error):
        told.append(error)
        if len(told) == 1:
            raise MemoryError

    with output_thread(deliver=deliver, fail=fail) as thread:
        thread.submit("one", torch.ones(4)).exception(30)
    long, brief = told
    assert str(brief) == str(long)
    assert isinstance(brief, OutputTransferError)
    assert long.__cause__ is not None
    assert brief.__cause__ is None
