"""What becomes of a platform whose streams, events or page-locked memory are not as promised."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import DiffusionRequest, EngineConfig, SamplingParams
from sidestream.errors import ConfigError, DeviceLostError
from sidestream.platforms.platform import load_platform
from sidestream.platforms.self_test import self_test
from sidestream.testing import sim
from sidestream.worker.output_thread import AsyncOutputThread
from sidestream.worker.sink import HostSink
from sidestream.worker.staging import Staging

pytestmark = pytest.mark.slow

PIPELINES = str(Path(__file__).parents[1] / "pipelines")

#: Definitions that spoil the relay to ``sim``: each is enough to be refused.
FAULTS = {
    "events that are always complete": """
        class Complete:
            def query(self):
                return True

            def wait(self, timeout_s=None):
                return True

            def elapsed_s(self, earlier):
                return 0.0

        @hookimpl
        def record_device_event(device, timing):
            return Complete()
    """,
    "streams that take any event": """
        class Careless(Relay):
            def wait_event(self, event):
                if isinstance(event, sim.SimEvent):
                    self.stream.wait_event(event)

        @hookimpl
        def side_stream(device, priority):
            return Careless(sim.side_stream(device, priority))
    """,
    "no stream is left": """
        @hookimpl
        def side_stream(device, priority):
            raise RuntimeError("no stream is left")
    """,
}


@pytest.fixture
def engine_of(plugins, monkeypatch):
    """Start an engine on a relay to ``sim`` that differs by these definitions."""
    monkeypatch.syspath_prepend(PIPELINES)
    engines = []

    def make(also="", executor="uniproc", **config):
        plugins.add_relay("relay", also=also)
        engine = sidestream.DiffusionEngine(
            EngineConfig(
                pipeline="sidestream_pipes:Gradient",
                platform="relay",
                executor=executor,
                max_restarts=0,
                start_timeout_s=200,
                **config,
            )
        )
        engines.append(engine)
        return engine

    yield make
    sim.default_stream().release()
    for engine in engines:
        engine.close()
    sim.reset()


def request(seed):
    return DiffusionRequest("", SamplingParams(seed=seed, height=256, width=256))


def assert_right(engine, count=4):
    for seed, output in enumerate(engine.imap([request(seed) for seed in range(count)])):
        assert bool((output.output == seed).all())


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


# --- on_platform_fault ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "ignore", None])
def test_there_are_two_ways_to_take_a_fault(value):
    with pytest.raises(ConfigError, match=r"on_platform_fault.*'refuse' or 'synchronous'"):
        EngineConfig(model="digits", on_platform_fault=value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_platform_that_fails_its_test_is_refused(engine_of, fault):
    with pytest.raises(sidestream.WorkerStartError) as raised:
        engine_of(FAULTS[fault])
    assert raised.value.stage == "platform"


@pytest.mark.parametrize("fault", FAULTS)
def test_or_it_runs_synchronously_with_one_warning(engine_of, caplog, fault):
    engine = engine_of(FAULTS[fault], on_platform_fault="synchronous")
    [warning] = warnings(caplog)
    assert "Platform 'relay' failed its self-test on sim:0 and runs synchronously" in warning
    sim.default_stream().hold()
    handle = engine.submit(request(3))
    with pytest.raises(TimeoutError):
        handle.result(0.2)  # nothing of what is wrong is used to tell when the forward is done
    sim.default_stream().release()
    assert bool((handle.result(30).output == 3).all())
    assert_right(engine)
    assert len(warnings(caplog)) == 1
    assert not engine.executor.worker["output_thread"]
    assert "synchronous, as this platform has no streams, or none to rely on" in engine.describe()


def test_a_worker_process_runs_synchronously_too_and_says_so_once(engine_of, capfd):
    fault = FAULTS["events that are always complete"]
    engine = engine_of(fault, "multiproc", on_platform_fault="synchronous")
    assert_right(engine)
    assert not engine.executor.worker["output_thread"]
    engine.close()
    assert capfd.readouterr().err.count("runs synchronously") == 1


def test_a_good_platform_stays_asynchronous(engine_of, caplog):
    engine = engine_of(on_platform_fault="synchronous")
    assert_right(engine)
    assert engine.executor.worker["output_thread"]
    assert warnings(caplog) == []


def test_a_device_whose_plain_copies_are_wrong_too_is_always_refused(engine_of):
    sim.faults().drop_copies = True
    with pytest.raises(sidestream.WorkerStartError, match="copied synchronously are wrong too"):
        engine_of(on_platform_fault="synchronous")


# --- the self-test --------------------------------------------------------------------------------


@pytest.fixture
def rounds_of(plugins):
    """Run the self-test on a relay; gives how many rounds it took."""

    def run(also):
        plugins.add_relay("relay", also=also)
        platform = load_platform("relay")
        platform.set_device(platform.device())
        sim.clear_copies()
        self_test(platform, platform.device())
        return len([copy for copy in sim.copies() if copy.nbytes == 1 << 20 and copy.pinned])

    yield run
    sim.reset()


#: Records an event that surely is incomplete until the copy is waited for, or surely complete.
RECORDING = """
    class Releasing(sim.SimEvent):
        __slots__ = ()

        def wait(self, timeout_s=None):
            sim.default_stream().release()
            return super().wait(timeout_s)

    class Patient(Relay):
        def record_event(self, timing=False):
            event = super().record_event(timing)
            event.__class__ = Releasing
            return event

    @hookimpl
    def side_stream(device, priority):
        return Patient(sim.side_stream(device, priority))

    calls = []

    @hookimpl
    def record_device_event(device, timing):
        calls.append(device)
        if len(calls) in {complete}:
            sim.synchronize_device(device)
            event = sim.record_device_event(device, timing)
            assert event.wait(30)
            return event
        sim.default_stream().hold()
        return sim.record_device_event(device, timing)
"""


def test_three_rounds_are_enough_if_each_copy_was_queued_in_time(rounds_of):
    assert rounds_of(RECORDING.format(complete=())) == 3


def test_a_round_whose_copy_was_queued_too_late_does_not_count(rounds_of):
    assert rounds_of(RECORDING.format(complete=(1, 3))) == 5


def test_a_platform_that_waits_before_it_records_passes_and_the_log_says_so(rounds_of, caplog):
    caplog.set_level(logging.INFO, "sidestream")
    assert rounds_of(RECORDING.format(complete=tuple(range(1, 100)))) == 6
    assert "0 were queued before the work that they wait for was done" in caplog.text


# --- an event that never comes --------------------------------------------------------------------


def test_a_copy_whose_event_is_incomplete_on_an_idle_device_is_no_output(plugins):
    """Work can be lost without an error; synchronizing the device then proves nothing."""
    plugins.add_relay(
        "relay",
        also="""
        class Lost(sim.SimEvent):
            __slots__ = ()

            def query(self):
                return False

            def wait(self, timeout_s=None):
                return False

        @hookimpl
        def record_device_event(device, timing):
            event = sim.record_device_event(device, timing)
            event.__class__ = Lost
            return event
        """,
    )
    platform = load_platform("relay")
    device = platform.device()
    platform.set_device(device)
    lost = []
    with AsyncOutputThread(
        platform, HostSink(platform, device), device=device, on_device_lost=lost.append
    ) as thread:
        error = thread.submit("x", torch.ones(8, device=device)).exception(30)
    assert isinstance(error.__cause__, DeviceLostError)
    assert "incomplete although the device says that it is idle" in str(error.__cause__)
    assert lost == [error.__cause__]
    sim.reset()


def test_an_event_that_calls_itself_reached_too_early_is_waited_for_all_the_same(plugins):
    plugins.add_relay(
        "relay",
        also="""
        class Early(sim.SimEvent):
            __slots__ = ()

            def query(self):
                return True

        @hookimpl
        def record_device_event(device, timing):
            event = sim.record_device_event(device, timing)
            event.__class__ = Early
            return event
        """,
    )
    platform = load_platform("relay")
    device = platform.device()
    platform.set_device(device)
    stream = sim.default_stream(0)
    with AsyncOutputThread(platform, HostSink(platform, device), device=device) as thread:
        stream.hold()
        try:
            output = thread.submit("x", torch.ones(8, device=device) * 3, private=True)
            with pytest.raises(TimeoutError):
                output.result(0.2)
        finally:
            stream.release()
        assert (output.result(30) == 3).all()


# --- memory that can't be page-locked -------------------------------------------------------------


@pytest.mark.parametrize(
    ("also", "is_pinned"),
    [
        ("del pin_host_memory", True),
        pytest.param("del pin_host_memory, pinned_buffer", False, marks=pytest.mark.soak),
    ],
    ids=["arenas can't be", "nothing can be"],
)
def test_copies_go_through_a_page_locked_buffer_where_there_is_one(engine_of, also, is_pinned):
    engine = engine_of(also, "multiproc")
    engine.executor.collective_rpc("clear_copies")
    assert_right(engine)
    (copies,) = engine.executor.collective_rpc("copies")
    of_outputs = [(pinned, stream) for nbytes, pinned, stream in copies if nbytes >= 3 << 18]
    assert len(of_outputs) == 4
    assert {pinned for pinned, _ in of_outputs} == {is_pinned}
    assert all("default" not in stream for _, stream in of_outputs)


def test_the_buffer_grows_to_the_largest_output_and_stays():
    platform = load_platform("sim")
    device = platform.device()
    platform.set_device(device)
    staging = Staging(platform, device)
    small, large = torch.zeros(100, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    first = staging.place_before(large)
    assert first.numel() == 5000
    assert first is not large
    first.fill_(7)
    staging.empty_into(large)
    assert large.eq(7).all()
    assert staging.place_before(small).data_ptr() == first.data_ptr()
    sim.faults().refuse_page_locking = True
    huge = torch.zeros(1 << 16, dtype=torch.uint8)
    assert staging.place_before(huge) is huge
    sim.reset()
