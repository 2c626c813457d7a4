"""Leases: a slot comes back when its last view dies, wherever that is, and not before."""

from __future__ import annotations

import gc
import os
import resource
import select
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from sidestream.errors import InternalError
from sidestream.transport.lease import MAX_RELEASE_BYTES
from sidestream.transport.memory import HostMemoryError
from sidestream.transport.packing import detach_copy, unpack

MIB = 1 << 20


def image(value: int = 1) -> torch.Tensor:
    return torch.full((3, 100, 100), value, dtype=torch.uint8)


ALIASES = {
    "tensor": lambda got: got["image"],
    "view": lambda got: got["image"][1, 5:7].T,
    "numpy": lambda got: got["image"].numpy(),
    "parameter": lambda got: torch.nn.Parameter(got["image"], requires_grad=False),
    "detached": lambda got: got["image"].detach(),
    "storage": lambda got: got["image"].untyped_storage(),
    "array": lambda got: got["array"],
    "array view": lambda got: got["array"][3:].view(np.uint32),
    "tensor of an array": lambda got: torch.from_numpy(got["array"]),
    "memoryview": lambda got: memoryview(got["array"]),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_any_alias_keeps_the_slot(link, alias):
    got = link.deliver({"image": image(), "array": np.arange(1024, dtype=np.float64)})
    kept = alias(got)
    del got
    assert link.return_slots() == 0
    del kept
    assert link.return_slots() == 1
    assert link.pool.stats.slots_in_use == 0


def test_tensors_share_the_slots_memory(link):
    frame = link.send(image())
    _, lease = link.receive()
    array = lease.array()
    got = unpack(frame.body, array)
    got.fill_(9)
    assert (array[:10] == 9).all()


def test_a_slot_that_is_read_is_not_written_again(link, pattern):
    kept = [link.deliver(pattern(3 * MIB, seed)) for seed in range(8)]
    for seed, array in enumerate(kept):
        np.testing.assert_array_equal(array, pattern(3 * MIB, seed))
    assert link.pool.stats.one_shots > 0


def test_a_slot_that_came_back_is_used_again(link):
    addresses = set()
    for _ in range(20):
        addresses.add(link.deliver(image()).data_ptr())
        link.return_slots()
    assert len(addresses) == 1


def test_a_detached_copy_frees_the_slot(link):
    copy = detach_copy(link.deliver({"image": image(5)}))
    assert link.return_slots() == 1
    link.deliver({"image": image(6)})
    assert (copy["image"] == 5).all()


def test_a_copy_in_a_cycle_comes_back_with_the_garbage(link):
    cycle = [link.deliver(image())]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert link.return_slots() == 1


def test_the_last_view_may_die_on_another_thread(link):
    box = [link.deliver(image())]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert link.return_slots() == 1


def test_collections_may_strike_anywhere_in_the_readers_own_calls(link):
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1_000_000, 1_000_000)  # at almost every allocation, the young only
    try:
        returned = 0
        for _ in range(50):
            cycle = [link.deliver(image())]
            cycle.append(cycle)
            del cycle
            returned += link.return_slots()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert returned + link.return_slots() == 50
    assert link.pool.stats.slots_in_use == 0


def test_a_death_wakes_the_reader(link):
    got = link.deliver(image())
    assert select.select([link.eventfd], [], [], 0)[0] == []
    del got
    assert select.select([link.eventfd], [], [], 0)[0] == [link.eventfd]


def test_a_full_eventfd_does_not_stop_a_return(link):
    os.eventfd_write(link.eventfd, (1 << 64) - 2)
    link.deliver(image())
    assert link.return_slots() == 1


def test_an_output_may_outlive_its_connection(make_link, holdings):
    before = holdings()
    link = make_link(16 * MIB)
    got = link.deliver(image(7))
    link.close()
    # Its number may be the eventfd's old one: whoever writes there hits somebody else's file.
    victim = os.eventfd(0, os.EFD_NONBLOCK)
    assert (got == 7).all()
    del got
    with pytest.raises(BlockingIOError):
        os.eventfd_read(victim)
    os.close(victim)
    link.arenas = None
    assert holdings() == before


def test_a_lease_is_released_undecoded(link):
    link.send(image())
    _, lease = link.receive()
    lease.release()
    lease.release()
    assert link.return_slots() == 1
    with pytest.raises(InternalError, match="after it was released"):
        lease.array()


def test_a_lease_is_taken_once(link):
    link.send(image())
    _, lease = link.receive()
    array = lease.array()
    with pytest.raises(InternalError, match="taken twice"):
        lease.array()
    lease.release()
    assert link.return_slots() == 0
    del array
    assert link.return_slots() == 1


def test_returns_travel_in_messages_of_bounded_size(link):
    frames = [link.send(torch.ones(64)) and link.receive() for _ in range(1500)]
    frames.clear()
    gc.collect()
    messages = link.arenas.take_releases()
    assert max(map(len, messages)) <= MAX_RELEASE_BYTES
    assert sum(map(link.pool.take_releases, messages)) == 1500


def test_a_slot_before_its_arena_is_a_bug(link):
    link.send(image())
    frame = link.main.receive()
    os.close(frame.slot_fd)
    stray = link.frame(link.pool.acquire(10))
    with pytest.raises(InternalError, match="before the arena itself"):
        link.lease(stray)


def test_a_slot_outside_its_arena_is_a_bug_and_closes_its_descriptor(link, holdings):
    slot = link.pool.acquire(100)
    before = holdings()
    for claim in ({"arena_nbytes": slot.arena_nbytes * 2}, {"offset": slot.arena_nbytes}):
        fields = {
            "arena_id": slot.arena_id,
            "offset": slot.offset,
            "nbytes": slot.nbytes,
            "token": slot.token,
            "arena_nbytes": slot.arena_nbytes,
            "is_one_shot": False,
            "fd": os.dup(slot.fd),
        }
        with pytest.raises(InternalError):
            link.arenas.lease(**(fields | claim))
    assert holdings() == before


def test_a_reader_without_address_space_fails_that_output_and_reads_the_next(fork, make_link):
    def starve():
        link = make_link(64 * MIB)
        link.send(torch.zeros(8 * MIB, dtype=torch.uint8))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + MIB, unlimited[1]))
        _, lease = link.receive()
        with pytest.raises(HostMemoryError):
            lease.array()
        assert link.return_slots() == 1
        # It goes to the arena that could not be mapped as a whole.
        small = link.deliver(torch.full((100_000,), 3, dtype=torch.uint8))
        assert link.pool.stats.arenas == 1
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        large = link.deliver(torch.full((8 * MIB,), 5, dtype=torch.uint8))
        del lease
        sums = int(small.sum()), int(large.sum())
        del small, large
        return *sums, link.return_slots()

    assert fork(starve).result() == (300_000, 5 * 8 * MIB, 2)


# --- forks ------------------------------------------------------------------------------------


def test_a_forked_child_keeps_reading_what_it_had(link, fork):
    reading, writing = os.pipe()
    box = [link.deliver(image(1))]

    def read_later():
        os.read(reading, 1)
        return int(box[0].min()), int(box[0].max())

    child = fork(read_later)
    box.clear()
    assert link.return_slots() == 1
    for value in range(2, 40):  # more than the arena holds
        assert (link.deliver(image(value)) == value).all()
        link.return_slots()
    os.write(writing, b"x")
    assert child.result() == (1, 1)
    assert link.pool.stats.retired == 1
    os.close(reading)
    os.close(writing)


def test_a_child_that_drops_its_copy_does_not_free_the_parents_slot(link, fork):
    got = link.deliver(image(1))
    box = [got]
    del got

    def drop():
        box.clear()
        gc.collect()
        return len(link.arenas.take_releases())

    assert fork(drop).result() == 0
    assert select.select([link.eventfd], [], [], 0)[0] == []
    assert link.return_slots() == 0
    assert (box[0] == 1).all()


def test_a_lease_made_after_a_fork_comes_back_for_use(link, fork):
    fork(int).result()
    link.deliver(image())
    assert link.return_slots() == 1
    assert link.pool.stats.retired == 0


def test_a_subprocess_is_no_fork_that_sees_the_slot(link):
    got = link.deliver(image())
    subprocess.run(["true"], check=True)
    del got
    link.return_slots()
    assert link.pool.stats.retired == 0


def test_a_dropped_arena_is_unmapped_on_both_sides(link, fork, holdings):
    before = holdings()
    outputs = [link.deliver(torch.zeros(MIB, dtype=torch.uint8)) for _ in range(4)]
    fork(int).result()
    outputs.clear()
    assert link.return_slots() == 4
    for arena_id in link.pool.take_dropped():
        link.arenas.drop(arena_id)
    assert holdings() == before


# --- many -------------------------------------------------------------------------------------


def test_descriptors_and_mappings_stay_flat(link, holdings):
    def cycle(count):
        for index in range(count):
            size = (index * 7919) % 200_000 + 20_000
            got = link.deliver(torch.full((size,), index % 256, dtype=torch.uint8))
            assert got[-1] == index % 256
            del got
            if index % 5 == 0:
                link.return_slots()

    cycle(200)
    before = holdings()
    cycle(2000)
    assert holdings() == before


def test_a_thousand_held_outputs_do_not_need_a_thousand_descriptors(fork, make_link):
    def hold():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, hard), hard))
        link = make_link(0)
        kept = [link.deliver(image(index % 256)) for index in range(1000)]
        assert all((got == index % 256).all() for index, got in enumerate(kept))
        return link.pool.stats.one_shots

    assert fork(hold).result() == 1000
