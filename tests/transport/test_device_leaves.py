"""Leaves in an accelerator's memory: one asynchronous copy each, straight into the slot."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.transport.arena import SlotPool
from sidestream.transport.packing import detach_copy, pack, pack_bytes, unpack, unpack_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture
def device(sim):
    device = sim.device()
    sim.set_device(device)
    return device


@pytest.fixture
def pool(sim, device):
    pool = SlotPool(
        16 << 20, pin=lambda address, nbytes: sim.pin_host_memory(device, address, nbytes)
    )
    yield pool
    pool.close()


@pytest.fixture
def side(sim, device):
    return sim.side_stream(device, 0)


def read(packed, slot):
    return unpack(packed.head, slot.buffer.numpy())


class Copies(TorchDispatchMode):
    """Sees what ``copy_`` is asked to copy."""

    def __init__(self):
        super().__init__()
        self.sources = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            source = args[1]
            self.sources.append((source.is_conj(), source.is_neg(), source.is_contiguous()))
        return func(*args, **(kwargs or {}))


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.T,
    "channels last": lambda tensor: tensor.view(1, 2, 6, 4).to(memory_format=torch.channels_last),
    "sliced": lambda tensor: tensor[:, ::2],
    "expanded": lambda tensor: tensor[:1].expand(5, 4),
    "scalar": lambda tensor: tensor[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_each_leaf_is_one_copy_of_its_own_size(sim, device, pool, side, dtype, layout):
    values = torch.arange(48).view(12, 4).to(dtype)
    source = layout(values.to(device))
    packed = pack({"image": source})
    assert packed.has_device_leaves
    slot = pool.acquire(packed.nbytes)
    side.wait_event(sim.record_device_event(device, False))
    sim.synchronize_device(device)
    sim.clear_copies()
    with side:
        packed.write(slot.buffer)
        copied = side.record_event()
    assert copied.wait(60)
    expected = layout(values)
    assert [copy.nbytes for copy in sim.copies()] == [expected.numel() * dtype.itemsize]
    assert [copy.pinned for copy in sim.copies()] == [True]
    got = read(packed, slot)["image"]
    assert got.dtype is dtype
    assert torch.equal(got, expected)


def test_writing_does_not_wait_for_the_device(sim, device, pool, side):
    sim.default_stream().hold()
    image = torch.full((3, 64, 64), 7.0, device=device) * 2
    computed = sim.record_device_event(device, False)
    packed = pack(image)
    slot = pool.acquire(packed.nbytes)
    slot.buffer.zero_()
    side.wait_event(computed)
    with side:
        packed.write(slot.buffer)
        copied = side.record_event()
    assert not copied.query()
    assert not slot.buffer.any()
    sim.default_stream().release()
    assert copied.wait(60)
    assert (read(packed, slot) == 14).all()


@pytest.mark.parametrize(
    "lazy", [torch.conj, lambda tensor: torch.conj(tensor).imag], ids=["conjugated", "negated"]
)
@pytest.mark.parametrize("is_private", [False, True])
def test_a_pending_sign_is_carried_out_on_the_device(sim, device, pool, side, lazy, is_private):
    values = torch.complex(torch.arange(8.0), torch.arange(8.0) + 1)
    packed = pack(lazy(values.to(device)))
    if is_private:
        packed.make_private(clone_device=False)
    slot = pool.acquire(packed.nbytes)
    side.wait_event(sim.record_device_event(device, False))
    side.hold()
    with side, Copies() as copies:
        packed.write(slot.buffer)
        copied = side.record_event()
    side.release()
    # torch would carry it out on the host, right after it queued a copy that has not run yet.
    assert copies.sources == [(False, False, True)]
    assert copied.wait(60)
    assert torch.equal(read(packed, slot), lazy(values).resolve_conj().resolve_neg())


def test_a_private_payload_does_not_see_the_next_forward(sim, device, pool):
    buffers = [torch.ones(100, device=device), torch.ones(10, 10, device=device).T[:, ::2]]
    packed = pack(buffers)
    packed.make_private(clone_device=True)
    for buffer in buffers:
        buffer.fill_(2)
    slot = pool.acquire(packed.nbytes)
    packed.write(slot.buffer, non_blocking=False)
    sim.synchronize_device(device)
    assert all((tensor == 1).all() for tensor in read(packed, slot))


def test_host_and_device_leaves_share_a_slot(sim, device, pool):
    tree = [torch.ones(5, device=device), torch.zeros(3), torch.full((2,), 2, device=device)]
    packed = pack(tree)
    slot = pool.acquire(packed.nbytes)
    packed.write(slot.buffer)
    sim.synchronize_device(device)
    got = read(packed, slot)
    assert [tensor.tolist() for tensor in got] == [[1] * 5, [0] * 3, [2] * 2]
    assert {tensor.device.type for tensor in got} == {"cpu"}


def test_an_empty_device_tensor_needs_no_device(device):
    packed = pack([torch.empty(0, 3, device=device)])
    assert (packed.has_device_leaves, packed.nbytes) == (False, 0)
    assert unpack(packed.head, None)[0].shape == (0, 3)


def test_a_parameter_on_a_device_arrives_as_a_parameter(device):
    sent = torch.nn.Parameter(torch.ones(3, device=device))
    got = unpack_bytes(pack_bytes(sent, root="result"))
    assert (type(got), got.requires_grad, got.device.type) == (torch.nn.Parameter, True, "cpu")


def test_a_byte_string_waits_for_the_device(device):
    sent = torch.arange(1000, device=device) * 3
    assert torch.equal(unpack_bytes(pack_bytes(sent, root="result")), torch.arange(1000) * 3)
    assert torch.equal(detach_copy(sent), torch.arange(1000) * 3)


def test_dropping_lets_go_of_device_memory(sim, device):
    before = sim.memory_info(device)[0]
    packed = pack(torch.ones(10_000, device=device).conj())
    packed.make_private(clone_device=True)
    sim.synchronize_device(device)
    assert sim.memory_info(device)[0] < before
    packed.drop()
    assert sim.memory_info(device)[0] == before
