"""What is special about torch_npu, and what the plugin makes of it."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import pytest
import torch

from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
from sidestream.errors import PlatformError
from sidestream.platforms.self_test import self_test
from sidestream.testing.contract import PlatformContract

NBYTES = 1 << 20
POISON = 0xEE
FOREVER = 1 << 40


def filled(device, value):
    """Bytes on the device, there when this returns."""
    made = torch.empty(NBYTES, dtype=torch.uint8, device=device)
    made.copy_(torch.full((NBYTES,), value, dtype=torch.uint8))
    return made


def pinned(value=POISON):
    return torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True).fill_(value)


# --- events ---------------------------------------------------------------------------------------


def race(simulator, device, side, enter, event, record, wait):
    """Copy from a forward's output by a side stream that shall wait; gives the byte that came."""
    output, result, received = filled(device, POISON), filled(device, 7), pinned()
    current = torch.npu.current_stream(device)
    with simulator.held(current):
        output.copy_(result)
        record(event, current)
        wait(side, event)
        with enter(side):
            received.copy_(output, non_blocking=True)
        overtook = side_is_idle_soon(side)
    torch.npu.synchronize(device)
    return int(received[0]), overtook


def side_is_idle_soon(side):
    """Whether the side stream runs through though the forward is held."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        if side.query():
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize(
    ("stream", "event", "is_ordered"),
    [
        (torch.Stream, "torch.npu.Event", False),
        (torch.Stream, "torch.Event", True),
        ("torch.npu.Stream", "torch.npu.Event", True),
    ],
)
def test_a_generic_stream_skips_the_wait_for_a_vendors_event(
    simulator, device, stream, event, is_ordered
):
    """Why a stream takes events of its own plugin only."""
    side = torch.npu.Stream(device) if stream == "torch.npu.Stream" else torch.Stream(device)
    made = torch.npu.Event() if event == "torch.npu.Event" else torch.Event(device)
    got, overtook = race(
        simulator,
        device,
        side,
        enter=torch.npu.stream,
        event=made,
        record=lambda event, current: event.record(current),
        wait=lambda side, event: side.wait_event(event),
    )
    assert overtook != is_ordered
    assert got == (7 if is_ordered else POISON)


def test_the_plugins_stream_waits_for_the_plugins_event(simulator, platform, device):
    output, result, received = filled(device, POISON), filled(device, 7), pinned()
    side = platform.side_stream(device)
    with simulator.held(torch.npu.current_stream(device)):
        output.copy_(result)
        side.wait_event(platform.record_device_event(device))
        with side:
            received.copy_(output, non_blocking=True)
        copied = side.record_event()
        assert not copied.wait(0.3)
        assert int(received[0]) == POISON
    assert copied.wait(30)
    assert int(received[0]) == 7


@pytest.mark.parametrize("kind", ["torch.npu.Event", "torch.Event"])
def test_a_raw_event_is_refused(platform, device, kind):
    raw = torch.npu.Event() if kind == "torch.npu.Event" else torch.Event(device)
    raw.record()
    with pytest.raises(PlatformError, match="no event of that platform"):
        platform.side_stream(device).wait_event(raw)


def test_by_default_recording_waits_for_the_stream(simulator, platform, device, monkeypatch):
    monkeypatch.delenv("SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD")
    output, result = filled(device, POISON), filled(device, 7)
    events = []

    def forward():
        platform.set_device(device)
        output.copy_(result)
        events.append(platform.record_device_event(device))

    thread = threading.Thread(target=forward)
    with simulator.held(torch.npu.current_stream(device)):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert events == []
    thread.join(30)
    assert events[0].wait(30)


def test_the_work_that_the_contract_queues_keeps_a_stream_busy(platform, device, monkeypatch):
    monkeypatch.setenv("ACLSIM_H2D_MIB_S", "512")
    PlatformContract().queue_work(device, 0.3)
    event = platform.record_device_event(device)
    assert not event.wait(0.1)
    assert event.wait(30)


# --- devices --------------------------------------------------------------------------------------


def test_a_new_thread_is_on_device_0_until_it_is_bound(platform, device):
    other = platform.device(1)
    seen = []

    def use():
        seen.append(torch.npu.current_device())
        platform.set_device(other)
        seen.append(torch.npu.current_device())
        event = platform.record_device_event(other)
        assert event.wait(30)
        with pytest.raises(PlatformError, match="of one device"):
            platform.side_stream(device).wait_event(event)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    assert seen == [0, 1]
    assert torch.npu.current_device() == 0


@pytest.mark.parametrize(
    "environment", [{"ACLSIM_DEVICES": 0}, *({"ACLSIM_COUNT_ERROR": n} for n in (507033, 107001))]
)
def test_without_a_device_nothing_is_recorded_and_the_process_lives(run_npu, environment):
    code, output = run_npu(
        """
        for use in (platform.set_device, platform.record_device_event, platform.side_stream):
            try:
                use(device)
            except Exception as error:
                print(type(error).__name__, error)
        print("alive")
        """,
        **environment,
    )
    assert code == 0, output
    assert output.rstrip().endswith("alive")
    assert output.count("PlatformError Hook") + output.count("PlatformError torch_npu") == 3
    assert "sees no device" in output


def test_recording_without_a_device_would_end_the_process(run_npu):
    """What the plugin's check spares: torch_npu aborts, past any ``except``."""
    code, output = run_npu(
        """
        import torch, torch_npu
        try:
            torch.Event("npu").record()
        except BaseException:
            pass
        print("alive")
        """,
        ACLSIM_DEVICES=0,
    )
    assert code != 0, output
    assert "alive" not in output


# --- host memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("driver", "is_locked"), [("25.2.0", False), ("25.5.0", True)])
def test_a_mapping_counts_as_locked_only_where_the_driver_locks_it(run_npu, driver, is_locked):
    code, output = run_npu(
        """
        import mmap, torch
        platform.set_device(device)
        memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
        code = torch.npu.npurt().npuHostRegister(memory.data_ptr(), 1 << 20, 2)
        print("the driver says", code, torch.npu.npurt().npuHostUnregister(memory.data_ptr()))
        pin = platform.pin_host_memory(device, memory.data_ptr(), 1 << 20)
        print("locked", pin is not None and memory.is_pinned())
        if pin is not None:
            pin.close()
        print("locked after", memory.is_pinned())
        """,
        ACLSIM_DRIVER=driver,
    )
    assert code == 0, output
    assert "the driver says 0 0" in output
    assert f"locked {is_locked}" in output
    assert "locked after False" in output


def test_a_torch_npu_without_the_call_locks_nothing(platform, device, monkeypatch):
    monkeypatch.delattr(torch.npu, "npurt")
    memory = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
    assert platform.pin_host_memory(device, memory.data_ptr(), NBYTES) is None


def test_a_pinned_buffer_that_finds_no_memory_is_none_or_an_error(simulator, platform, device):
    simulator.set("refuse_pinned", FOREVER)
    try:
        buffer = platform.pinned_buffer(device, 64 << 20)
    except PlatformError:
        buffer = None
    finally:
        simulator.set("refuse_pinned", 0)
    assert buffer is None
    assert platform.pinned_buffer(device, NBYTES).is_pinned()


# --- what is lost ---------------------------------------------------------------------------------


def test_a_copy_that_is_dropped_without_an_error_is_seen_by_the_check(simulator, platform, device):
    assert platform.check_device(device) is None
    simulator.set("drop_copies", FOREVER)
    try:
        fault = platform.check_device(device)
        with pytest.raises(PlatformError, match=r"bytes copied from .* are wrong"):
            self_test(platform, device)
    finally:
        simulator.set("drop_copies", 0)
    assert "returned" in fault.reason
    assert "without an error" in fault.reason
    assert platform.check_device(device) is None


def test_a_launch_that_fails_shows_at_the_check(run_npu):
    """torch_npu reports such a launch late or never; what is queued behind it may be dropped."""
    code, output = run_npu(
        """
        import ctypes, torch
        platform.set_device(device)
        print("before", platform.check_device(device))
        assert ctypes.CDLL("libascendcl.so").aclsim_set(b"refuse_copies", ctypes.c_int64(1))
        buffer = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        output = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        try:
            buffer.copy_(output, non_blocking=True)
            torch.npu.synchronize(device)
        except Exception as error:
            print("said", type(error).__name__)
        print("after", platform.check_device(device), flush=True)
        import os
        os._exit(0)
        """
    )
    assert code == 0, output
    assert "before None" in output
    assert "did not finish a copy" in output, output


# --- an engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronizes", ["1", "0"])
def test_an_engine_brings_outputs_out(simulator, monkeypatch, synchronizes):
    monkeypatch.setenv("SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD", synchronizes)
    requests = [
        DiffusionRequest("", SamplingParams(seed=number, height=512)) for number in range(8)
    ]
    config = EngineConfig(pipeline="npu_pipes:Copies", platform="npu", max_restarts=0)
    with DiffusionEngine(config) as engine:
        for number, output in enumerate(engine.imap(requests)):
            assert output.output.shape == (512, 512)
            assert bool((output.output == number).all())
        assert engine.health().ok
        assert engine.executor.collective_rpc("describe")[0]["output_thread"]


def test_a_library_of_that_name_is_the_simulator():
    assert ctypes.CDLL("libascendcl.so").aclsim_unimplemented_calls() == 0
