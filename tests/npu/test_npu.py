"""What is special about torch_npu, and what the plugin makes of it."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import pytest
import torch

from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
from sidestream.errors import PlatformError, RequestError, WorkerError
from sidestream.platforms.self_test import self_test
from sidestream.testing.contract import PlatformContract

PIPELINES = str(Path(__file__).parents[1] / "pipelines")
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


def race(simulator, device, side, enter, event, record, wait, is_ordered):
    """Copy from a forward's output by a side stream that shall wait; gives the byte that came."""
    output, result, received = filled(device, POISON), filled(device, 7), pinned()
    current = torch.npu.current_stream(device)
    with simulator.held(current):
        output.copy_(result)
        record(event, current)
        wait(side, event)
        with enter(side):
            received.copy_(output, non_blocking=True)
        # One that waits will not be idle; one that does not may need longer on a busy machine.
        overtook = side_is_idle(side, within_s=0.3 if is_ordered else 30)
    torch.npu.synchronize(device)
    return int(received[0]), overtook


def side_is_idle(side, within_s):
    """Whether the side stream runs through though the forward is held."""
    until = time.monotonic() + within_s
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
        is_ordered=is_ordered,
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
    PlatformContract().queue_work(device, 1.0)
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


@pytest.mark.parametrize("environment", [{"ACLSIM_DEVICES": 0}, {"ACLSIM_COUNT_ERROR": 507033}])
def test_without_a_device_nothing_is_recorded_and_the_process_lives(run_npu, environment):
    """It would not without the plugin's check: torch_npu aborts, past any ``except``."""
    code, output = run_npu(
        """
        for use in (platform.set_device, platform.record_device_event, platform.side_stream):
            try:
                use(device)
            except Exception as error:
                print(type(error).__name__, error)
        print("alive", flush=True)
        import torch
        try:
            torch.Event("npu").record()
        except BaseException:
            pass
        print("and still", flush=True)
        """,
        **environment,
    )
    assert output.count("PlatformError torch_npu.npu sees no device") >= 2, output
    assert output.count("sees no device") == 3
    assert "alive" in output
    assert "and still" not in output
    assert code < 0


# --- host memory ----------------------------------------------------------------------------------


def test_a_mapping_is_locked_and_torch_npu_knows(platform, device):
    memory = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
    pin = platform.pin_host_memory(device, memory.data_ptr(), NBYTES)
    assert memory.is_pinned()
    pin.close()
    assert not memory.is_pinned()


def test_a_driver_that_says_so_and_locks_nothing_is_not_believed(run_npu):
    code, output = run_npu(
        """
        import mmap, torch
        platform.set_device(device)
        memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
        runtime = torch.npu.npurt()
        print("the driver says", runtime.npuHostRegister(memory.data_ptr(), 1 << 20, 2))
        runtime.npuHostUnregister(memory.data_ptr())
        print("locked:", platform.pin_host_memory(device, memory.data_ptr(), 1 << 20))
        # Not left registered either.
        print("again", runtime.npuHostRegister(memory.data_ptr(), 1 << 20, 2))
        """,
        ACLSIM_DRIVER="25.2.0",
    )
    assert code == 0, output
    assert "the driver says 0" in output
    assert "locked: None" in output
    assert "again 0" in output


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


# --- an engine ------------------------------------------------------------------------------------


def square(seed):
    return DiffusionRequest("", SamplingParams(seed=seed, height=512))


@pytest.mark.parametrize(("driver", "synchronizes"), [("25.2.0", "1"), ("25.5.0", "0")])
def test_an_engine_brings_outputs_out(simulator, monkeypatch, driver, synchronizes):
    """Both ways to record, and with the older driver by a staging buffer."""
    monkeypatch.setenv("ACLSIM_DRIVER", driver)
    monkeypatch.setenv("SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD", synchronizes)
    requests = [square(number) for number in range(8)]
    config = EngineConfig(pipeline="npu_pipes:Copies", platform="npu", max_restarts=0)
    with DiffusionEngine(config) as engine:
        for number, output in enumerate(engine.imap(requests)):
            assert output.output.shape == (512, 512)
            assert bool((output.output == number).all())
        assert engine.health().ok
        assert engine.executor.collective_rpc("describe")[0]["output_thread"]


def test_an_engine_notices_that_the_device_loses_its_work(simulator, monkeypatch):
    """torch_npu reports a launch that failed late or never; no output may come of it."""
    monkeypatch.setenv("SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD", "0")
    config = EngineConfig(pipeline="npu_pipes:Copies", platform="npu", max_restarts=0)
    with DiffusionEngine(config) as engine:
        assert engine.submit(square(1)).result(60).output.eq(1).all()
        assert engine.executor.collective_rpc("simulate", ("refuse_copies", FOREVER)) == [True]
        error = engine.submit(square(2)).exception(60)
        assert isinstance(error, RequestError | WorkerError), error
        deadline = time.monotonic() + 60
        while engine.health().ok and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "lost" in engine.health().reason


def test_without_cann_import_torch_breaks_and_cpu_and_sim_serve(run_npu):
    code, output = run_npu(
        """
        import subprocess, sys
        from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
        from sidestream.platforms.registry import PlatformRegistry

        command = [sys.executable, "-c", "import torch"]
        plain = subprocess.run(command, capture_output=True, text=True)
        print("import torch:", plain.returncode, "libhccl.so" in plain.stderr)
        print(PlatformRegistry.discover().select("npu").reason)
        for name in ("cpu", "sim"):
            config = EngineConfig(pipeline="sidestream_pipes:Gradient", platform=name)
            with DiffusionEngine(config) as engine:
                output = engine.submit(DiffusionRequest("", SamplingParams(seed=5))).result(60)
                print(name, "serves:", bool((output.output == 5).all()))
        """,
        LD_LIBRARY_PATH="",
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        PYTHONPATH=PIPELINES,
    )
    assert code == 0, output
    assert "import torch: 1 True" in output
    assert "libascendcl.so, libhccl.so can't be found; install CANN" in output
    assert "cpu serves: True" in output
    assert "sim serves: True" in output


def test_what_the_simulator_can_not_do_fails_and_is_counted(simulator, tmp_path, monkeypatch):
    """Else a test could take what a call left undone for a result."""
    report = tmp_path / "of this test"
    monkeypatch.setenv("ACLSIM_REPORT", str(report))
    before = simulator.unimplemented_calls()
    assert simulator.call("rtKernelLaunch") != 0
    assert simulator.call("aclopCreateAttr") == 0  # a handle: none
    assert simulator.unimplemented_calls() == before + 2
    assert report.read_text().split() == ["rtKernelLaunch", "aclopCreateAttr"]
