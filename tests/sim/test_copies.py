"""Copies to the host: asynchronous into page-locked memory only, and never before their turn."""

import ctypes
import gc
import mmap
import threading

import numpy as np
import pytest
import torch

from sidestream.errors import PlatformError
from sidestream.platforms.device import HostPin


@pytest.fixture
def mapping():
    """64 KiB of mapped memory, as an array."""
    return np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.uint8)


@pytest.fixture
def slot(sim, device, mapping):
    """A page-locked mapping as a tensor of bytes."""
    pin = sim.pin_host_memory(device, mapping.ctypes.data, mapping.nbytes)
    yield torch.from_numpy(mapping)
    pin.close()


def test_a_copy_into_a_page_locked_mapping_is_asynchronous(sim, device, default, slot):
    image = torch.arange(300, device=device).to(torch.uint8)
    default.synchronize()
    default.hold()
    slot[100:400].copy_(image, non_blocking=True)
    assert not slot.any()
    default.release()
    default.synchronize()
    assert torch.equal(slot[100:400], image.cpu())
    assert not slot[:100].any()
    assert not slot[400:].any()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_a_slot_may_be_viewed_as_another_type_and_shape(dtype, sim, device, default, slot):
    values = torch.tensor([[1, 0], [0, 1], [1, 1]], device=device).to(dtype)
    room = slot[256 : 256 + 6 * dtype.itemsize].view(dtype).view(3, 2)
    default.hold()
    room.copy_(values, non_blocking=True)
    default.release()
    default.synchronize()
    assert torch.equal(room.view(torch.uint8), values.cpu().view(torch.uint8))
    assert sim.copies()[0].pinned


def test_a_copy_into_pageable_memory_blocks_the_caller(sim, device, default):
    host = torch.zeros(4)
    ones = torch.ones(4, device=device)
    default.hold()
    done = threading.Event()

    def copy():
        host.copy_(ones, non_blocking=True)
        done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    assert not done.wait(0.05)
    default.release()
    assert done.wait(10)
    thread.join(10)
    assert host.tolist() == [1.0] * 4
    assert not sim.copies()[-1].pinned


def test_a_copy_that_may_block_has_its_bytes_when_it_returns(device, slot):
    room = slot[:16].view(torch.float32)
    room.copy_(torch.ones(4, device=device) * 5)
    assert room.tolist() == [5.0] * 4


def test_only_memory_that_lies_wholly_in_a_locked_range_counts(sim, device, mapping):
    half = mapping.nbytes // 2
    pin = sim.pin_host_memory(device, mapping.ctypes.data, half)
    ones = torch.ones(100, dtype=torch.uint8, device=device)
    host = torch.from_numpy(mapping)
    for start in (half - 100, half - 50, half):
        host[start : start + 100].copy_(ones)
    pin.close()
    assert [copy.pinned for copy in sim.copies()] == [True, False, False]


def test_unlocking_makes_copies_blocking_again(sim, device, mapping):
    pin = sim.pin_host_memory(device, mapping.ctypes.data, mapping.nbytes)
    pin.close()
    pin.close()
    torch.from_numpy(mapping)[:4].copy_(torch.ones(4, dtype=torch.uint8, device=device))
    assert not sim.copies()[-1].pinned
    sim.pin_host_memory(device, mapping.ctypes.data, mapping.nbytes).close()


def test_a_range_can_not_be_locked_twice(sim, device, mapping):
    pin = sim.pin_host_memory(device, mapping.ctypes.data, 4096)
    with pytest.raises(PlatformError, match="page-locked already"):
        sim.pin_host_memory(device, mapping.ctypes.data + 4095, 4096)
    pin.close()


def test_an_empty_range_can_not_be_locked(sim, device, mapping):
    with pytest.raises(PlatformError, match="at least one byte"):
        sim.pin_host_memory(device, mapping.ctypes.data, 0)


def test_a_pinned_buffer_is_poison_until_it_is_written(sim, device):
    buffer = sim.pinned_buffer(device, 64)
    assert buffer.dtype is torch.uint8
    assert buffer.tolist() == [255] * 64
    assert torch.isnan(buffer.view(torch.float32)).all()
    assert sim.pinned_buffer(device, 0).shape == (0,)


def test_a_pinned_buffer_is_unlocked_when_its_last_view_goes(sim, device):
    buffer = sim.pinned_buffer(device, 4096)
    address, view = buffer.data_ptr(), buffer[:16]
    del buffer
    with pytest.raises(PlatformError, match="page-locked already"):
        sim.pin_host_memory(device, address, 16)
    view.copy_(torch.ones(16, dtype=torch.uint8, device=device))
    assert sim.copies()[-1].pinned
    del view
    gc.collect()
    pin = sim.pin_host_memory(device, address, 16)
    assert hasattr(pin, "close")
    pin.close()


def test_moving_to_the_host_without_blocking_gives_poison_until_it_is_done(device, default):
    ones = torch.ones(4, device=device)
    default.synchronize()
    default.hold()
    host = ones.to("cpu", non_blocking=True)
    assert torch.isnan(host).all()
    default.release()
    default.synchronize()
    assert host.tolist() == [1.0] * 4


def test_a_copy_to_a_device_takes_what_the_host_holds_at_the_call(device, default):
    host = torch.ones(4)
    default.hold()
    tensor = host.to(device, non_blocking=True)
    host.fill_(7)
    default.release()
    assert tensor.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "copy",
    [
        lambda device: torch.ones(4).to(device),
        lambda device: torch.empty(4, device=device).copy_(torch.ones(4)),
        lambda device: torch.tensor([1.0] * 4, device=device),
    ],
    ids=["to", "copy_", "tensor"],
)
def test_a_copy_to_a_device_that_may_block_waits_for_its_stream_and_no_other(
    copy, sim, device, default, side
):
    default.hold()
    with side:
        beside = copy(device)
    copied = []
    thread = threading.Thread(target=lambda: copied.append(copy(device)))
    thread.start()
    thread.join(0.05)
    assert copied == []
    default.release()
    thread.join(10)
    assert copied[0].tolist() == beside.tolist() == [1.0] * 4


def test_what_a_device_makes_itself_waits_for_nothing(device, default):
    default.hold()
    made = [
        torch.arange(3, device=device),
        torch.full((3,), 2.0, device=device),
        torch.linspace(0, 1, 3, device=device),
        torch.ones(3, device=device) * torch.tensor(2.0),
    ]
    default.release()
    assert [tensor.shape for tensor in made] == [(3,)] * 4


def test_reading_a_value_waits_for_the_current_stream_and_no_other(device, default, side):
    default.hold()
    with side:
        ones = torch.ones(4, device=device)
        assert ones.sum().item() == 4
        assert len(ones[ones > 0]) == 4
    default.release()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t.expand(3, 4, 6),
        lambda t: t.permute(1, 0).unsqueeze(0),
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.to(torch.complex64).conj(),
        lambda t: (t * 1j).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "permuted", "scalar", "empty", "conj", "neg"],
)
def test_a_view_of_any_kind_reaches_the_host_as_it_is(view, sim, device, default):
    source = torch.arange(24.0).view(4, 6)
    want, there = view(source), view(source.to(device))
    assert there.is_conj() == want.is_conj()
    assert there.is_neg() == want.is_neg()
    buffer = sim.pinned_buffer(device, want.numel() * want.element_size())
    room = buffer.view(want.dtype).view(want.shape)
    room.copy_(there, non_blocking=True)
    default.synchronize()
    assert torch.equal(room, want.resolve_conj().resolve_neg())
    assert torch.equal(there.cpu(), want)


def test_a_destination_with_gaps_is_written_before_the_call_returns(sim, device):
    buffer = sim.pinned_buffer(device, 64).view(torch.float32)
    buffer[::2].copy_(torch.ones(8, device=device), non_blocking=True)
    assert buffer[::2].tolist() == [1.0] * 8
    assert torch.isnan(buffer[1::2]).all()


def test_a_copy_converts_to_the_destinations_type(sim, device, default, slot):
    room = slot[:16].view(torch.float32)
    room.copy_(torch.ones(4, dtype=torch.bfloat16, device=device) / 3, non_blocking=True)
    default.synchronize()
    assert torch.equal(room, (torch.ones(4, dtype=torch.bfloat16) / 3).float())


def test_a_copy_between_devices_is_ordered_on_both(sim, device):
    sim.default_stream(0).hold()
    first = torch.ones(4, device="sim:0") * 3
    second = first.to("sim:1")
    first.zero_()
    after = sim.default_stream(1).record_event()
    assert not after.query()
    sim.default_stream(0).release()
    assert second.tolist() == [3.0] * 4
    assert first.tolist() == [0.0] * 4


def test_copies_are_logged_once_they_are_done(sim, device, default, side, slot):
    ones = torch.ones(8, device=device)
    side.wait_event(default.record_event())
    side.hold()
    with side:
        slot[64:96].view(torch.float32).copy_(ones, non_blocking=True)
    assert sim.copies() == ()
    side.release()
    side.synchronize()
    (copy,) = sim.copies()
    assert (copy.nbytes, copy.pinned, copy.stream) == (32, True, side.name)
    assert copy.address == slot.data_ptr() + 64
    assert copy.started_at <= copy.ended_at
    sim.clear_copies()
    assert sim.copies() == ()


def test_pins_are_what_the_platform_protocol_asks_for(sim, device):
    memory = ctypes.create_string_buffer(64)
    pin: HostPin = sim.pin_host_memory(device, ctypes.addressof(memory), 64)
    pin.close()
