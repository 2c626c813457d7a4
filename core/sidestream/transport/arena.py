"""The worker's half of the data plane: slots for outputs in a few large shared arenas."""

from __future__ import annotations

import mmap
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidestream.errors import InternalError
from sidestream.transport.block import Arena, Block
from sidestream.transport.memory import HostMemoryError

if TYPE_CHECKING:
    from sidestream.platforms.device import HostPin

#: Slots start at multiples of this, and so do the leaves in them (``leaf.LEAF_ALIGNMENT``).
SLOT_ALIGNMENT: Final = 256
#: A returned token on the wire.
TOKEN: Final = struct.Struct("<Q")
#: Set in a returned token whose memory a forked child of the reader may still read.
RETIRED: Final = 1 << 63

#: An arena holds at least this much, so that small outputs don't make an arena each.
_MIN_ARENA_BYTES: Final = 4 << 20
#: A new arena holds this many outputs of the size that asked for it, and at least as much as all
#: arenas before it, so that there are few of them...
_SLOTS_PER_ARENA: Final = 4
#: ...but no more than this, or one output: who waits for that one pays for every page of the arena
#: (0.2 ms/MB, without huge pages 0.4 to 1.4, and 0.05 to lock it).
_LARGE_ARENA_BYTES: Final = 64 << 20


class Slot:
    """Room for one output. The message that names it hands it over to the reader.

    States: held (the writer's), announced (the reader's), returned.
    """

    __slots__ = (
        "_block",
        "_room",
        "arena_id",
        "arena_nbytes",
        "buffer",
        "is_one_shot",
        "nbytes",
        "offset",
        "token",
    )

    def __init__(self, block: Block, offset: int, nbytes: int, room: int, token: int) -> None:
        self._block: Final = block
        self._room: Final = room
        #: Id and size of the memfd that it lies in.
        self.arena_id: Final = block.id
        self.arena_nbytes: Final = block.nbytes
        #: Whether the memfd is this slot's alone and dies with the reader's last view.
        self.is_one_shot: Final = not isinstance(block, Arena)
        self.offset: Final = offset
        self.nbytes: Final = nbytes
        #: Never used twice, so a late or repeated return can't free somebody else's slot.
        self.token: Final = token
        #: 1-D uint8 over exactly this range; page-locked where its arena is.
        self.buffer: Final = block.view(offset, nbytes)

    @property
    def is_page_locked(self) -> bool:
        """Tell whether a device can copy into it while the host goes on."""
        return self._block.is_locked

    @property
    def fd(self) -> int | None:
        """Give the descriptor to send along; None once the reader was told of the memfd."""
        return self._block.fd


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """What a pool holds."""

    arenas: int
    arena_bytes: int
    #: Slots that are the writer's or that the reader has not given back, one-shots left out once
    #: they are announced.
    slots_in_use: int
    #: One-shots made so far: outputs for which the arenas had no room.
    one_shots: int
    #: Slots retired so far, because the reader's process forked while it leased them.
    retired: int
    #: Arenas and one-shots made so far: each costs its page faults.
    made: int


class SlotPool:
    """Gives slots to outputs; used by one thread, the one that writes them.

    Arenas grow on demand up to the budget, are page-locked once, and stay while they are of use:
    unlocking one while a device is busy stalls it. Idle ones that are too small for an output make
    room for a larger one. When they are leased out an output gets a memfd of its own, so that a
    reader that keeps results neither blocks the writer nor loses finished work.
    """

    def __init__(
        self, budget_bytes: int, *, pin: Callable[[int, int], HostPin | None] | None = None
    ) -> None:
        """Make an empty pool.

        Args:
            budget_bytes: Bound of all arenas together; 0: one-shots only.
            pin: Page-locks ``(address, nbytes)``, or gives None where it can't.
        """
        self._budget_bytes = budget_bytes
        self._pin = pin
        self._arenas: dict[int, Arena] = {}
        self._slots: dict[int, Slot] = {}
        self._dropped: list[int] = []
        self._blocks_numbered = 0
        self._made = 0
        # The upper half tells pools apart: what a reader returns to the worker that came after its
        # own is ignored.
        self._next_token = (secrets.randbits(30) + 1) << 32
        self._one_shots = 0
        self._retired = 0
        self._is_closed = False

    @property
    def stats(self) -> PoolStats:
        """Count what there is; any thread."""
        return PoolStats(
            arenas=len(self._arenas),
            arena_bytes=self._arena_bytes(),
            slots_in_use=len(self._slots),
            one_shots=self._one_shots,
            retired=self._retired,
            made=self._made,
        )

    def has_room(self, nbytes: int) -> bool:
        """Tell whether a slot of ``nbytes`` is free."""
        return self._best_fit(_room(nbytes)) is not None

    def acquire(self, nbytes: int) -> Slot:
        """Take a slot of ``nbytes``; never blocks.

        Raises:
            HostMemoryError: Not even a one-shot could be made; the pool is as it was.
        """
        if self._is_closed:
            raise InternalError("A slot was asked of a pool that is closed.")
        room = _room(nbytes)
        fit = self._best_fit(room)
        if fit is not None:
            arena, index = fit
            return self._register(arena, arena.take(index, room), nbytes, room)
        grown = self._grow(room)
        if grown is not None:
            return self._register(grown, grown.take(0, room), nbytes, room)
        block = self._one_shot(max(nbytes, 1))
        self._one_shots += 1
        self._made += 1
        return self._register(block, 0, nbytes, block.nbytes)

    def take_free(self, nbytes: int) -> Slot | None:
        """Take a slot of page-locked memory that is there; None: nothing was made or dropped."""
        room = _room(nbytes)
        fit = self._best_fit(room)
        if fit is None or not fit[0].is_locked:
            return None
        arena, index = fit
        return self._register(arena, arena.take(index, room), nbytes, room)

    def announced(self, slot: Slot) -> None:
        """Note that the message with this slot was sent: the reader owns it now.

        Closes the memfd's descriptor. A one-shot is forgotten, its last reader frees it.
        """
        slot._block.close_fd()
        if slot.is_one_shot:
            self._slots.pop(slot.token, None)

    def release(self, token: int) -> bool:
        """Free a slot that was given back, or never announced; False: stale, ignored."""
        slot = self._slots.pop(token, None)
        if slot is None:
            return False
        block = slot._block
        if isinstance(block, Arena):
            block.give_back(slot.offset, slot._room)
            if block.is_spent:
                self._drop(block)
        else:
            block.close()
        return True

    def retire(self, token: int) -> bool:
        """Give a slot up for good: a forked child may read its bytes at any later time.

        Its arena is dropped once nothing in it is in use and at least half of it is retired.
        """
        slot = self._slots.pop(token, None)
        if slot is None:
            return False
        self._retired += 1
        block = slot._block
        if isinstance(block, Arena):
            block.retire(slot._room)
            if block.is_spent:
                self._drop(block)
        else:
            block.close()
        return True

    def take_releases(self, message: bytes) -> int:
        """Take in tokens that the reader sent; gives how many were not stale."""
        taken = 0
        for (word,) in TOKEN.iter_unpack(message):
            taken += self.retire(word & ~RETIRED) if word & RETIRED else self.release(word)
        return taken

    def take_dropped(self) -> list[int]:
        """Give the arenas dropped since the last call, for the reader to unmap them too.

        Taking in releases drops arenas, and so does a slot for which there was no room.
        """
        dropped, self._dropped = self._dropped, []
        return dropped

    def reserve(self, nbytes: int, count: int) -> None:
        """Make room for ``count`` outputs of ``nbytes`` now, as far as the budget allows.

        The first output of a size otherwise pays for its arena: 0.2 ms/MB and more, and
        page-locking.

        Raises:
            HostMemoryError: The host has too little memory.
        """
        room = _room(nbytes)
        there = sum(
            size // room for arena in self._arenas.values() for _, size in arena.free_ranges
        )
        # Whole outputs only: what is left of the budget is better kept for another size.
        missing = min(count - there, self._budget_left() // room)
        if missing > 0:
            self._add_arena(_round_up(missing * room, mmap.PAGESIZE))

    def close(self) -> None:
        """Unlock and let go of everything; the reader's mappings stay valid. Idempotent."""
        self._is_closed = True
        blocks = {*self._arenas.values(), *(slot._block for slot in self._slots.values())}
        self._arenas.clear()
        self._slots.clear()
        for block in blocks:
            block.close()

    def _register(self, block: Block, offset: int, nbytes: int, room: int) -> Slot:
        self._next_token += 1
        slot = Slot(block, offset, nbytes, room, self._next_token)
        self._slots[slot.token] = slot
        return slot

    def _best_fit(self, room: int) -> tuple[Arena, int] | None:
        """Find the smallest free range of at least ``room``, by its arena and index there."""
        fit, least = None, 0
        for arena in self._arenas.values():
            for index, (_, size) in enumerate(arena.free_ranges):
                if size >= room and (fit is None or size < least):
                    fit, least = (arena, index), size
        return fit

    def _grow(self, room: int) -> Arena | None:
        """Add an arena, a small one if there is no memory for a large one, or none."""
        least = _round_up(room, mmap.PAGESIZE)
        self._make_room(least)
        left = self._budget_left()
        if least > left:
            return None
        for nbytes in sorted({min(self._step(least), left), least}, reverse=True):
            try:
                return self._add_arena(nbytes)
            except HostMemoryError:
                continue
        return None

    def _step(self, least: int) -> int:
        """Choose the size of a new arena for outputs of ``least``."""
        wanted = max(_SLOTS_PER_ARENA * least, self._arena_bytes(), _MIN_ARENA_BYTES)
        return max(least, min(wanted, _LARGE_ARENA_BYTES))

    def _make_room(self, least: int) -> None:
        """Drop idle arenas if the budget then has room."""
        idle_bytes = sum(arena.nbytes for arena in self._arenas.values() if arena.is_idle)
        if self._budget_left() + idle_bytes >= least:
            while self._budget_left() < least:
                self._drop_idle()

    def _one_shot(self, nbytes: int) -> Block:
        while True:
            try:
                return Block(self._next_block_id(), nbytes)
            except HostMemoryError:
                # Idle arenas keep memory from others and have no room for this: better none.
                if not self._drop_idle():
                    raise

    def _drop_idle(self) -> bool:
        """Drop the oldest and so, as a rule, the smallest arena of which nothing is in use."""
        arena = next((arena for arena in self._arenas.values() if arena.is_idle), None)
        if arena is not None:
            self._drop(arena)
        return arena is not None

    def _add_arena(self, nbytes: int) -> Arena:
        arena = Arena(self._next_block_id(), nbytes)
        if self._pin is not None:
            try:
                arena.lock(self._pin)
            except BaseException:
                arena.close()
                raise
        self._arenas[arena.id] = arena
        self._made += 1
        return arena

    def _drop(self, arena: Arena) -> None:
        del self._arenas[arena.id]
        self._dropped.append(arena.id)
        arena.drop()

    def _next_block_id(self) -> int:
        self._blocks_numbered += 1
        return self._blocks_numbered

    def _arena_bytes(self) -> int:
        # Of a copy, which is made in one go: other threads may ask for statistics.
        return sum(arena.nbytes for arena in list(self._arenas.values()))

    def _budget_left(self) -> int:
        left = self._budget_bytes - self._arena_bytes()
        return max(0, left // mmap.PAGESIZE * mmap.PAGESIZE)


def _room(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT or SLOT_ALIGNMENT


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
