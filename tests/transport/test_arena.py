"""Slots: none overlaps another, none is lost, and the budget holds."""

from __future__ import annotations

import mmap
import os
import resource
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidestream.errors import InternalError
from sidestream.transport.arena import RETIRED, TOKEN, SlotPool
from sidestream.transport.lease import ArenaMap
from sidestream.transport.memory import HostMemoryError, attach

MIB = 1 << 20


@pytest.fixture
def make_pool():
    pools = []

    def make(budget_bytes=64 * MIB, **options):
        pools.append(SlotPool(budget_bytes, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def place(slot) -> tuple[int, int, int]:
    return slot.arena_id, slot.offset, slot.offset + slot.nbytes


@dataclass
class Reading:
    """What the reader has of one slot."""

    array: object
    fill: int
    place: tuple[int, int, int]
    is_one_shot: bool
    was_forked: bool = False


class WorkerAndReader(RuleBasedStateMachine):
    """A pool and a map under any order of events, returns on their way included."""

    BUDGET = 6 * MIB
    some = st.integers(0, 1000)

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(self.BUDGET)
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.arenas = ArenaMap(self.eventfd)
        self.held = {}  # token: (slot, fill), the writer's
        self.reading = {}  # token: Reading
        self.graves = []  # ranges that a forked child may read at any time
        self.spent = []  # tokens that mean nothing any more
        self.on_the_way = []  # tokens whose arrays died since the last pass
        self.count = 0

    @rule(nbytes=st.sampled_from([0, 1, 255, 257, 5000, 70_000, 1_500_000, 3_000_000]))
    def acquire(self, nbytes):
        slot = self.pool.acquire(nbytes)
        self.count += 1
        slot.buffer.fill_(self.count % 251)
        assert slot.buffer.numel() == slot.nbytes == nbytes
        arena, start, end = place(slot)
        taken = [place(other) for other, _ in self.held.values()]
        taken += [reading.place for reading in self.reading.values()]
        for other, first, last in taken + self.graves:
            assert arena != other or end <= first or last <= start
        assert slot.token not in self.held
        self.held[slot.token] = slot, self.count % 251

    @precondition(lambda self: self.held)
    @rule(which=some)
    def announce(self, which):
        token = list(self.held)[which % len(self.held)]
        slot, fill = self.held.pop(token)
        lease = self.arenas.lease(
            arena_id=slot.arena_id,
            offset=slot.offset,
            nbytes=slot.nbytes,
            token=token,
            fd=None if slot.fd is None else os.dup(slot.fd),
            arena_nbytes=slot.arena_nbytes,
            is_one_shot=slot.is_one_shot,
        )
        self.pool.announced(slot)
        self.reading[token] = Reading(lease.array(), fill, place(slot), slot.is_one_shot)

    @precondition(lambda self: self.held)
    @rule(which=some)
    def fail_before_it_is_announced(self, which):
        token = list(self.held)[which % len(self.held)]
        del self.held[token]
        assert self.pool.release(token)
        self.spent.append(token)

    @precondition(lambda self: self.reading)
    @rule(which=some)
    def drop(self, which):
        token = list(self.reading)[which % len(self.reading)]
        reading = self.reading.pop(token)
        if reading.is_one_shot:
            self.spent.append(token)
            return
        self.on_the_way.append(token)
        if reading.was_forked:
            self.graves.append(reading.place)

    @rule()
    def pass_returns_on(self):
        messages = self.arenas.take_releases()
        assert sum(map(self.pool.take_releases, messages)) == len(self.on_the_way)
        for message in messages:
            assert self.pool.take_releases(message) == 0
        self.spent += self.on_the_way
        self.on_the_way = []
        for arena_id in self.pool.take_dropped():
            self.arenas.drop(arena_id)
            self.graves = [grave for grave in self.graves if grave[0] != arena_id]

    @precondition(lambda self: self.reading)
    @rule()
    def fork(self):
        with warnings.catch_warnings(action="ignore"):  # from 3.12 on, of threads there are
            pid = os.fork()
        if pid == 0:
            self.reading.clear()  # the child lets go of its copies
            os._exit(0)
        os.waitpid(pid, 0)
        for reading in self.reading.values():
            reading.was_forked = True

    @precondition(lambda self: self.spent)
    @rule(which=some)
    def return_once_more(self, which):
        token = self.spent[which % len(self.spent)]
        assert not self.pool.release(token)
        assert not self.pool.retire(token)

    @invariant()
    def what_is_read_is_what_was_written(self):
        for reading in self.reading.values():
            assert (reading.array[::1009] == reading.fill).all()
            assert (reading.array[-1:] == reading.fill).all()

    @invariant()
    def the_budget_holds(self):
        assert self.pool.stats.arena_bytes <= self.BUDGET

    def teardown(self):
        while self.reading:
            self.drop(0)
        while self.held:
            self.fail_before_it_is_announced(0)
        self.pass_returns_on()
        assert self.pool.stats.slots_in_use == 0
        self.pool.close()
        self.arenas.close()
        os.close(self.eventfd)


WorkerAndReader.TestCase.settings = settings(max_examples=20, stateful_step_count=40)
TestWorkerAndReader = WorkerAndReader.TestCase


def test_slots_are_aligned_and_hold_exactly_what_was_asked(make_pool):
    slots = [make_pool().acquire(100) for _ in range(3)]
    assert all(slot.offset % 256 == 0 for slot in slots)
    assert all(slot.buffer.numel() == 100 for slot in slots)


def test_the_smallest_range_that_fits_is_taken(make_pool):
    pool = make_pool(4 * MIB)
    slots = [pool.acquire(nbytes) for nbytes in (300_000, 256, 100_000, 256)]
    for slot in slots[::2]:
        pool.release(slot.token)
    assert pool.acquire(90_000).offset == slots[2].offset
    assert pool.acquire(90_000).offset == slots[0].offset


def test_neighbors_merge_when_they_come_back_in_any_order(make_pool):
    pool = make_pool(4 * MIB)
    slots = [pool.acquire(MIB) for _ in range(4)]
    for index in (2, 0, 3, 1):
        pool.release(slots[index].token)
    assert pool.acquire(4 * MIB).is_one_shot is False
    assert pool.stats.arenas == 1


def test_arenas_grow_with_demand_up_to_the_budget(make_pool):
    pool = make_pool(30 * MIB)
    sizes = []
    for _ in range(40):
        pool.acquire(MIB)
        sizes.append(pool.stats.arena_bytes // MIB)
    assert sorted(set(sizes)) == [4, 8, 16, 30]
    assert (pool.stats.one_shots, pool.stats.arena_bytes) == (10, 30 * MIB)


def test_an_arena_for_large_outputs_holds_one(make_pool):
    pool = make_pool(1000 * MIB)
    pool.acquire(20 * MIB)
    assert pool.stats.arena_bytes == 64 * MIB
    pool.acquire(100 * MIB)
    assert pool.stats.arena_bytes == 164 * MIB


def test_idle_arenas_make_room_for_a_larger_output(make_pool):
    pool = make_pool(16 * MIB)
    small = [pool.acquire(MIB) for _ in range(16)]
    idle = [slot.arena_id for slot in small if slot.arena_id != small[-1].arena_id]
    for slot in small[:8]:
        pool.release(slot.token)
    assert pool.acquire(9 * MIB).is_one_shot  # the last arena is in use: nothing would be won
    assert pool.take_dropped() == []
    large = pool.acquire(6 * MIB)
    assert not large.is_one_shot
    assert pool.take_dropped() == sorted(set(idle))
    assert (pool.stats.arenas, pool.stats.arena_bytes) == (2, 16 * MIB)
    assert pool.acquire(6 * MIB).is_one_shot


def test_an_arena_in_use_is_never_dropped(make_pool):
    pool = make_pool(4 * MIB)
    slot = pool.acquire(10)
    slot.buffer.fill_(7)
    assert pool.acquire(4 * MIB).is_one_shot
    assert (pool.take_dropped(), slot.buffer.unique().tolist()) == ([], [7])


def test_a_dropped_arena_is_free_memory_at_once_though_the_reader_has_it_mapped(make_pool):
    pool = make_pool(16 * MIB)
    slot = pool.acquire(MIB)
    fd = os.dup(slot.fd)
    try:
        reader = attach(fd, slot.arena_nbytes)
        pool.announced(slot)
        assert os.fstat(fd).st_blocks > 0
        pool.release(slot.token)
        assert not pool.acquire(16 * MIB).is_one_shot
        assert pool.take_dropped() == [slot.arena_id]
        assert os.fstat(fd).st_blocks == 0
        del reader
    finally:
        os.close(fd)


def test_what_a_forked_child_may_read_is_not_freed_with_its_arena(make_pool):
    pool = make_pool(4 * MIB)
    slots = [pool.acquire(MIB) for _ in range(4)]
    slots[0].buffer.fill_(7)
    pool.retire(slots[0].token)
    for slot in slots[1:]:
        pool.release(slot.token)
    pool.acquire(4 * MIB)
    assert pool.take_dropped() == [slots[0].arena_id]
    assert slots[0].buffer.unique().tolist() == [7]


def test_without_memory_for_a_large_output_idle_arenas_are_given_up(fork):
    def starve():
        pool = SlotPool(64 * MIB)
        idle = [pool.acquire(8 * MIB) for _ in range(8)]
        for slot in idle:
            pool.release(slot.token)
        del idle, slot
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 60 * MIB, -1))
        slot = pool.acquire(100 * MIB)
        return slot.is_one_shot, pool.stats.arenas

    assert fork(starve).result() == (True, 0)


def test_an_output_larger_than_the_budget_gets_memory_of_exactly_its_size(make_pool):
    pool = make_pool(MIB)
    slot = pool.acquire(MIB + 1)
    assert (slot.is_one_shot, slot.arena_nbytes, os.fstat(slot.fd).st_size) == (
        True,
        MIB + 1,
        MIB + 1,
    )


def test_without_a_budget_everything_is_a_one_shot(make_pool):
    pool = make_pool(0)
    assert pool.acquire(1).is_one_shot
    assert pool.stats.arenas == 0


def test_an_announced_one_shot_is_the_readers_alone(make_pool, holdings):
    before = holdings()
    pool = make_pool(0)
    slot = pool.acquire(1000)
    pool.announced(slot)
    assert (pool.stats.slots_in_use, pool.release(slot.token)) == (0, False)
    del slot
    assert holdings() == before


def test_an_arenas_descriptor_is_there_until_it_was_announced(make_pool, holdings):
    before = holdings()[0]
    pool = make_pool()
    first, second = pool.acquire(100), pool.acquire(100)
    assert first.fd == second.fd is not None
    pool.announced(second)
    assert (first.fd, pool.acquire(100).fd, holdings()[0]) == (None, None, before)


def test_tokens_of_another_pool_are_ignored(make_pool):
    one, other = make_pool(), make_pool()
    slot = one.acquire(10)
    other.acquire(10)
    assert not other.release(slot.token)
    assert (one.stats.slots_in_use, other.stats.slots_in_use) == (1, 1)


def test_retired_ranges_are_never_reused_and_a_spent_arena_is_dropped(make_pool):
    pool = make_pool(4 * MIB)
    slots = [pool.acquire(MIB) for _ in range(4)]
    arena_id = slots[0].arena_id
    assert pool.take_releases(TOKEN.pack(slots[0].token | RETIRED)) == 1
    assert pool.acquire(MIB).is_one_shot
    pool.retire(slots[1].token)
    pool.release(slots[2].token)
    assert pool.take_dropped() == []
    pool.release(slots[3].token)
    assert (pool.take_dropped(), pool.take_dropped()) == ([arena_id], [])
    assert (pool.stats.arenas, pool.stats.retired) == (0, 2)
    assert pool.acquire(MIB).arena_id != arena_id


def test_reserving_makes_the_room_that_later_outputs_take(make_pool):
    pool = make_pool(64 * MIB)
    pool.reserve(3 * MIB, 4)
    reserved = pool.stats
    assert (reserved.arenas, reserved.arena_bytes) == (1, 12 * MIB)
    pool.reserve(3 * MIB, 4)
    assert pool.stats == reserved
    slots = [pool.acquire(3 * MIB) for _ in range(4)]
    assert pool.stats.arena_bytes == 12 * MIB
    assert not any(slot.is_one_shot for slot in slots)


def test_reserving_makes_room_for_as_many_outputs_as_the_budget_holds_and_for_no_part_of_one(
    make_pool,
):
    pool = make_pool(8 * MIB)
    pool.reserve(3 * MIB, 100)
    assert pool.stats.arena_bytes == 6 * MIB
    assert not pool.acquire(2 * MIB).is_one_shot
    pool.reserve(4 * MIB, 1)
    assert pool.stats.arena_bytes == 6 * MIB


class Pins:
    """Page-locks nothing, and sees what it was asked."""

    def __init__(self):
        self.locked = []

    def __call__(self, address, nbytes):
        self.locked.append((address, nbytes))
        return self.Pin(self.locked, (address, nbytes))

    @dataclass
    class Pin:
        locked: list
        range: tuple

        def close(self):
            # Whoever unlocks memory that is unmapped already gets another's memory next time.
            lines = Path("/proc/self/maps").read_text().splitlines()
            starts = [int(line.split("-")[0], 16) for line in lines if "memfd:sidestream" in line]
            assert self.range[0] in starts
            self.locked.remove(self.range)


def test_arenas_are_locked_once_and_one_shots_never(make_pool):
    pins = Pins()
    pool = make_pool(4 * MIB, pin=pins)
    slots = [pool.acquire(MIB) for _ in range(6)]
    assert [nbytes for _, nbytes in pins.locked] == [4 * MIB]
    assert pins.locked[0][0] == slots[0].buffer.data_ptr()
    pool.close()
    assert pins.locked == []


def test_a_dropped_arena_is_unlocked(make_pool):
    pins = Pins()
    pool = make_pool(4 * MIB, pin=pins)
    pool.retire(pool.acquire(4 * MIB).token)
    assert pins.locked == []


def test_an_arena_that_cannot_be_locked_leaves_nothing(make_pool, holdings):
    def refuse(address, nbytes):
        raise RuntimeError("the driver is gone")

    before = holdings()
    pool = make_pool(pin=refuse)
    with pytest.raises(RuntimeError, match="driver is gone"):
        pool.acquire(10)
    assert holdings() == before
    assert pool.stats.arenas == 0


def test_a_pool_without_memory_says_so_and_works_on(fork, holdings):
    def starve():
        pool = SlotPool(1 << 40)
        slot = pool.acquire(1000)
        pool.announced(slot)
        before, stats = holdings(), pool.stats
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, -1))
        for _ in range(3):
            with pytest.raises(HostMemoryError):
                pool.acquire(9 * MIB)
        assert (holdings(), pool.stats) == (before, stats)
        # There is no room for an arena of four of them, but for one of one.
        assert not pool.acquire(6 * MIB).is_one_shot
        assert pool.release(slot.token)
        return pool.stats.arena_bytes

    assert fork(starve).result() == 10 * MIB


def test_closing_gives_everything_back_and_refuses_more(make_pool, holdings):
    before = holdings()
    pool = make_pool(4 * MIB)
    for _ in range(6):
        pool.acquire(MIB)
    pool.close()
    assert holdings() == before
    with pytest.raises(InternalError, match="closed"):
        pool.acquire(1)
