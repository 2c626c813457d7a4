"""A stream keeps its order, and nothing else does."""

import gc
import threading

import pytest
import torch

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceEvent, SideStream


def is_poison(tensor):
    return bool(torch.isnan(tensor).all())


def test_streams_and_events_satisfy_the_platform_protocols(sim, device, side):
    assert isinstance(side, SideStream)
    assert isinstance(side.record_event(), DeviceEvent)
    assert isinstance(sim.record_device_event(device, False), DeviceEvent)


def test_launching_returns_before_the_kernel_runs(device, default):
    ones = torch.ones(8, device=device)
    default.hold()
    doubled = ones * 2
    ready = default.record_event()
    assert doubled.shape == (8,)
    assert not ready.query()
    default.release()
    assert ready.wait(10)
    assert doubled.tolist() == [2.0] * 8


@pytest.mark.parametrize("_", range(50))
def test_a_copy_that_does_not_wait_for_the_forward_reads_poison(_, sim, device, default, side):
    host = sim.pinned_buffer(device, 32).view(torch.float32)
    ones = torch.ones(8, device=device)
    default.hold()
    result = ones * 3
    with side:
        host.copy_(result, non_blocking=True)
    side.synchronize()
    assert is_poison(host)


@pytest.mark.parametrize("_", range(50))
def test_a_copy_that_waits_for_the_forward_reads_its_result(_, sim, device, default, side):
    host = sim.pinned_buffer(device, 32).view(torch.float32)
    ones = torch.ones(8, device=device)
    default.hold()
    result = ones * 3
    side.wait_event(sim.record_device_event(device, False))
    with side:
        host.copy_(result, non_blocking=True)
    copied = side.record_event()
    assert not copied.query()
    default.release()
    assert copied.wait(10)
    assert host.tolist() == [3.0] * 8


def test_the_next_forward_finishes_while_a_copy_is_held(sim, device, default, side):
    host = sim.pinned_buffer(device, 32).view(torch.float32)
    first = torch.ones(8, device=device) * 3
    side.hold()
    side.wait_event(default.record_event())
    with side:
        host.copy_(first, non_blocking=True)
    second = (first * 2).cpu()
    assert second.tolist() == [6.0] * 8
    assert host.view(torch.uint8).tolist() == [255] * 32
    side.release()
    side.synchronize()
    assert host.tolist() == [3.0] * 8


def test_overwriting_a_tensor_before_its_copy_ran_is_caught(sim, device, default, side):
    host = sim.pinned_buffer(device, 32).view(torch.float32)
    result = torch.ones(8, device=device) * 3
    side.hold()
    side.wait_event(default.record_event())
    with side:
        host.copy_(result, non_blocking=True)
    result.zero_()
    default.synchronize()
    side.release()
    side.synchronize()
    assert host.tolist() == [0.0] * 8


def test_dropping_a_tensor_before_its_copy_ran_is_caught(sim, device, default, side):
    host = sim.pinned_buffer(device, 32).view(torch.float32)
    result = torch.ones(8, device=device) * 3
    side.hold()
    side.wait_event(default.record_event())
    with side:
        host.copy_(result, non_blocking=True)
    del result
    default.synchronize()
    side.release()
    side.synchronize()
    assert is_poison(host)


def test_dropping_a_tensor_after_its_copy_ran_is_harmless(sim, device, default, side):
    host = sim.pinned_buffer(device, 32).view(torch.float32)
    result = torch.ones(8, device=device) * 3
    side.wait_event(default.record_event())
    with side:
        host.copy_(result, non_blocking=True)
    assert side.record_event().wait(10)
    del result
    default.synchronize()
    assert host.tolist() == [3.0] * 8


@pytest.mark.parametrize("_", range(20))
def test_a_stream_that_joins_another_reads_what_that_made(_, device, default, side):
    side.hold()
    with side:
        ones = torch.ones(8, device=device)
    side.join_current([ones])
    doubled = ones * 2
    side.release()
    assert doubled.tolist() == [2.0] * 8


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_of_a_side_stream_that_is_dropped_early_is_kept_only_if_that_was_asked_for(
    is_recorded, device, default, side
):
    with side:
        ones = torch.ones(8, device=device)
    default.hold()
    side.join_current([ones] if is_recorded else [])
    doubled = ones * 2
    del ones
    side.synchronize()
    default.release()
    assert is_poison(doubled.cpu()) is not is_recorded


def test_memory_that_is_kept_for_a_stream_makes_no_stream_wait(device, default, side):
    with side:
        ones = torch.ones(8, device=device)
    default.hold()
    ones.view(2, 4).record_stream(default)  # as for the whole of its memory
    doubled = ones * 2
    del ones
    side.synchronize()
    default.release()
    default.synchronize()
    side.synchronize()
    assert doubled.tolist() == [2.0] * 8


def test_a_stream_lets_go_of_memory_before_its_next_event_is_reached(sim, device, default):
    free, total = sim.memory_info(device)
    tensor = torch.ones(1 << 20, device=device)
    default.synchronize()
    assert sim.memory_info(device) == (free - (4 << 20), total)
    del tensor
    assert sim.memory_info(device) == (free, total)


def test_holding_stops_a_stream_before_its_next_kernel(device, default):
    default.hold()
    before = default.record_event()
    assert not before.wait(0)
    default.release()
    assert before.wait(10)
    default.hold()
    after = default.record_event()
    assert before.query()
    assert not after.query()


def test_a_held_stream_stays_held_when_what_it_waits_for_happens(sim, device, default, side):
    default.hold()
    side.wait_event(default.record_event())
    side.hold()  # returns although the stream's thread is in the wait
    last = side.record_event()
    default.release()
    default.synchronize()
    assert not last.query()
    side.release()
    assert last.wait(10)


def test_synchronizing_a_held_stream_blocks_until_it_is_released(device, default):
    default.hold()
    order = []

    def synchronize():
        default.synchronize()
        order.append("synchronized")

    thread = threading.Thread(target=synchronize)
    thread.start()
    thread.join(0.05)
    order.append("released")
    default.release()
    thread.join(10)
    assert order == ["released", "synchronized"]


def test_waiting_gives_up_at_its_time_limit(device, default):
    default.hold()
    event = default.record_event()
    assert event.wait(0.01) is False
    default.release()
    assert event.wait() is True


def test_synchronizing_a_device_waits_for_all_its_streams(sim, device, default, side):
    side.hold()
    event = side.record_event()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (sim.synchronize_device(device), done.set()))
    thread.start()
    assert not done.wait(0.05)
    side.release()
    assert done.wait(10)
    thread.join(10)
    assert event.query()


@pytest.mark.parametrize("foreign", [object(), torch.Event("cpu"), None, threading.Event()])
def test_a_foreign_event_is_refused_before_anything_is_queued(foreign, device, side):
    with pytest.raises(PlatformError, match="not an event of platform 'sim'"):
        side.wait_event(foreign)
    side.synchronize()


def test_events_tell_the_time_between_them(device, default):
    default.hold()
    start = default.record_event(timing=True)
    end = default.record_event(timing=True)
    default.release()
    assert end.wait(10)
    assert end.elapsed_s(start) >= 0
    assert start.elapsed_s(end) == -end.elapsed_s(start)


def test_events_do_not_tell_the_time_before_they_are_reached(device, default):
    start = default.record_event(timing=True)
    default.synchronize()
    default.hold()
    with pytest.raises(PlatformError, match="before the device reached both"):
        default.record_event(timing=True).elapsed_s(start)


def test_events_without_timing_do_not_tell_the_time(device, default):
    start, end = default.record_event(), default.record_event(timing=True)
    default.synchronize()
    with pytest.raises(PlatformError, match="timing=True"):
        end.elapsed_s(start)


def test_the_current_stream_belongs_to_a_thread(sim, device, default, side):
    seen = []
    with side:
        assert torch.sim.current_stream() is side
        thread = threading.Thread(target=lambda: seen.append(torch.sim.current_stream()))
        thread.start()
        thread.join(10)
    assert seen == [default]
    assert torch.sim.current_stream() is default


def test_stream_contexts_nest_and_end_with_an_error(sim, device, default, side):
    inner = sim.side_stream(sim.device(1), 0)

    def fail_inside():
        with side, inner:
            assert torch.sim.current_device() == 1
            assert torch.sim.current_stream(0) is side
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert torch.sim.current_device() == 0
    assert torch.sim.current_stream() is default


def test_each_device_has_a_default_stream_of_its_own(sim, device):
    sim.default_stream(0).hold()
    on_zero = torch.ones(2, device="sim:0")
    on_one = torch.ones(2, device="sim:1")
    assert on_one.tolist() == [1.0, 1.0]
    assert not sim.default_stream(0).record_event().query()
    sim.default_stream(0).release()
    assert on_zero.tolist() == [1.0, 1.0]


def test_a_stream_may_wait_for_another_devices_event(sim, device):
    sim.default_stream(0).hold()
    sim.default_stream(1).wait_event(sim.default_stream(0).record_event())
    last = sim.default_stream(1).record_event()
    assert not last.wait(0)
    sim.default_stream(0).release()
    assert last.wait(10)


def test_setting_a_device_binds_the_calling_thread_only(sim, device):
    seen = []

    def bind():
        sim.set_device(sim.device(2))
        seen.append(torch.empty(1, device="sim").device.index)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join(10)
    assert seen == [2]
    assert torch.empty(1, device="sim").device.index == 0


def test_there_are_four_devices(sim, device):
    with pytest.raises(PlatformError, match="sim:0 to sim:3"):
        sim.device(4)
    assert torch.sim.device_count() == sim.probe().device_count == 4


def test_side_streams_are_found_while_somebody_holds_them(sim, device, side):
    other = sim.side_stream(device, -1)
    gc.collect()  # those of earlier tests
    # An engine in this process may hold streams of its own.
    held = {stream.name for stream in sim.side_streams()}
    assert {side.name, other.name} <= held
    assert other.priority == -1
    assert sim.side_streams(1) == ()
    gone = other.name
    del other
    gc.collect()
    assert {stream.name for stream in sim.side_streams()} == held - {gone}


def test_a_dropped_stream_finishes_its_work_and_ends_its_thread(sim, device, default):
    stream = sim.side_stream(device, 0)
    name = stream.name
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    default.hold()
    stream.wait_event(default.record_event())
    event = stream.record_event()
    del stream
    default.release()
    assert event.wait(10)
    thread.join(10)
    assert not thread.is_alive()


def test_synchronizing_a_device_waits_for_streams_that_were_dropped(sim, device):
    sim.default_stream(1).hold()
    stream = sim.side_stream(device, 0)
    stream.wait_event(sim.default_stream(1).record_event())
    last = stream.record_event()
    del stream
    done = threading.Event()
    thread = threading.Thread(target=lambda: (sim.synchronize_device(device), done.set()))
    thread.start()
    assert not done.wait(0.05)
    sim.default_stream(1).release()
    assert done.wait(10)
    thread.join(10)
    assert last.query()


def test_streams_come_and_go_while_the_device_is_synchronized(sim, device, no_leaks):
    def come_and_go():
        for _ in range(100):
            sim.side_stream(device, 0).record_event()

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sim.synchronize_device(device)
    sim.synchronize_device(device)
