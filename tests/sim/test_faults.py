"""What goes wrong on a device, by itself or because a test asks for it."""

import gc
import threading

import pytest
import torch

CALLS = {
    "launch": lambda sim, device, tensor, stream, event: tensor + 1,
    "allocate": lambda sim, device, tensor, stream, event: torch.empty(3, device=device),
    "copy to the host": lambda sim, device, tensor, stream, event: tensor.cpu(),
    "copy from the host": lambda sim, device, tensor, stream, event: torch.ones(2).to(device),
    "item": lambda sim, device, tensor, stream, event: tensor[0].item(),
    "record": lambda sim, device, tensor, stream, event: stream.record_event(),
    "record by hook": lambda sim, device, tensor, stream, event: sim.record_device_event(
        device, False
    ),
    "wait": lambda sim, device, tensor, stream, event: stream.wait_event(event),
    "query": lambda sim, device, tensor, stream, event: event.query(),
    "wait on the host": lambda sim, device, tensor, stream, event: event.wait(10),
    "synchronize": lambda sim, device, tensor, stream, event: stream.synchronize(),
    "synchronize the device": lambda sim, device, tensor, stream, event: sim.synchronize_device(
        device
    ),
    "side stream": lambda sim, device, tensor, stream, event: sim.side_stream(device, 0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_after_a_failing_kernel_every_call_names_the_first_failure(call, sim, device, default):
    tensor, event = torch.ones(4, device=device), default.record_event()
    default.synchronize()
    sim.fault(reason="an illegal memory access")
    with pytest.raises(sim.SimDeviceError, match="illegal memory access"):
        default.synchronize()
    for _ in range(2):
        with pytest.raises(sim.SimDeviceError, match="sim:0 is in error since kernel 'fault'"):
            call(sim, device, tensor, default, event)


def test_the_first_failure_stays_the_one_that_is_named(sim, device, default, side):
    default.hold()
    sim.fault(reason="first")
    side.wait_event(default.record_event())
    sim.fault(reason="second", stream=side)
    default.release()
    for _ in range(2):
        with pytest.raises(sim.SimDeviceError, match="first"):
            side.synchronize()


def test_a_fault_happens_when_its_kernel_runs_and_not_before(sim, device, default):
    default.hold()
    sim.fault()
    assert (torch.ones(2, device=device) + 1).shape == (2,)
    assert not default.record_event().query()
    default.release()
    with pytest.raises(sim.SimDeviceError):
        default.synchronize()


def test_an_index_out_of_range_faults_the_device_as_an_assertion_there(sim, device):
    table, rows = torch.zeros(4, 2, device=device), torch.tensor([1, 9], device=device)
    picked = torch.nn.functional.embedding(rows, table)
    with pytest.raises(sim.SimDeviceError, match=r"aten\.embedding.*out of range"):
        picked.cpu()


def test_a_fault_on_one_stream_wakes_who_waits_for_another(sim, device, default, side):
    default.hold()
    event = default.record_event()
    errors = []

    def wait():
        try:
            event.wait()
        except sim.SimDeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    sim.fault(reason="elsewhere", stream=side)
    thread.join(10)
    assert "elsewhere" in str(errors[0])


def test_a_device_in_error_leaves_the_others_alone(sim, device):
    sim.fault(0)
    with pytest.raises(sim.SimDeviceError):
        sim.default_stream(0).synchronize()
    assert torch.ones(2, device="sim:1").tolist() == [1.0, 1.0]
    assert sim.check_device(sim.device(1)) is None


def test_waiting_for_a_device_in_error_faults_the_one_that_waits(sim, device):
    sim.default_stream(0).hold()
    sim.fault(0, reason="far away")
    sim.default_stream(1).wait_event(sim.default_stream(0).record_event())
    sim.default_stream(0).release()
    with pytest.raises(sim.SimDeviceError, match="far away"):
        sim.default_stream(1).synchronize()


def test_kernels_after_a_fault_do_not_run(sim, device, default):
    host = sim.pinned_buffer(device, 16).view(torch.float32)
    ones = torch.ones(4, device=device)
    default.hold()
    sim.fault()
    host.copy_(ones, non_blocking=True)
    default.release()
    with pytest.raises(sim.SimDeviceError):
        default.synchronize()
    sim.reset()
    assert torch.isnan(host).all()
    assert sim.copies() == ()


def test_a_well_device_passes_its_check_while_its_streams_are_held(sim, device, default):
    assert sim.check_device(device) is None
    default.hold()
    assert sim.check_device(device) is None


def test_the_check_of_a_device_in_error_reports_the_failure(sim, device, default):
    sim.fault(reason="a bus error")
    with pytest.raises(sim.SimDeviceError):
        default.synchronize()
    assert "a bus error" in sim.check_device(device).reason


def test_copies_can_be_lost_without_an_error_and_the_check_finds_out(sim, device, default):
    sim.faults().drop_copies = True
    host = sim.pinned_buffer(device, 16).view(torch.float32)
    host.copy_(torch.ones(4, device=device), non_blocking=True)
    assert default.record_event().wait(10)
    assert torch.isnan(host).all()
    assert "64 of 64 sentinel values wrong" in sim.check_device(device).reason


def test_records_fail_as_often_as_asked(sim, device, default, side):
    sim.faults().fail_next_records = 2
    with pytest.raises(sim.SimDeviceError, match="fail_next_records"):
        sim.record_device_event(device, False)
    with pytest.raises(sim.SimDeviceError, match="fail_next_records"):
        side.record_event()
    assert default.record_event().wait(10)
    assert sim.check_device(device) is None


def test_waits_fail_as_often_as_asked(sim, device, default, side):
    sim.faults().fail_next_waits = 1
    event = default.record_event()
    with pytest.raises(sim.SimDeviceError, match="fail_next_waits"):
        side.wait_event(event)
    side.wait_event(event)
    side.synchronize()


def test_an_event_can_be_kept_from_firing(sim, device, default, side):
    sim.faults().next_event_never_fires = True
    lost, next_one = default.record_event(), default.record_event()
    assert next_one.wait(10)
    assert not lost.query()
    assert not lost.wait(0.01)
    side.wait_event(lost)
    assert not side.record_event().wait(0.01)


def test_page_locking_can_be_refused(sim, device):
    sim.faults().refuse_page_locking = True
    assert sim.pinned_buffer(device, 64) is None
    assert sim.pin_host_memory(device, 4096, 64) is None


def test_memory_can_be_made_scarce(sim, device):
    free, total = sim.memory_info(device)
    sim.faults().memory_bytes = total - free + (1 << 20)
    kept = torch.empty(1 << 19, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 is out of memory.* 1048576 bytes"):
        torch.empty(1 << 20, dtype=torch.uint8, device=device)
    del kept
    gc.collect()
    assert torch.empty(1 << 20, dtype=torch.uint8, device=device).shape == (1 << 20,)


def test_a_reset_undoes_everything(sim, device, default, side):
    faults = sim.faults()
    faults.drop_copies = True
    faults.next_event_never_fires = True
    lost = default.record_event()
    side.wait_event(lost)
    side.hold()
    sim.fault()
    sim.reset()
    assert lost.query()
    side.synchronize()
    assert sim.faults().drop_copies is False
    assert (torch.ones(2, device=device) * 2).tolist() == [2.0, 2.0]
