"""Memfds that a worker writes to: whole, or divided into ranges."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from sidestream.transport.memory import allocate

if TYPE_CHECKING:
    from sidestream.platforms.device import HostPin

#: A block keeps this many tensors at most.
_MAX_VIEWS: Final = 64


class Block:
    """A mapped memfd, with its descriptor until the reader was told of it."""

    def __init__(self, block_id: int, nbytes: int) -> None:
        self.id: Final = block_id
        self.nbytes: Final = nbytes
        fd, self._mapping = allocate(nbytes)
        self.fd: int | None = fd
        self.buffer = torch.from_numpy(self._mapping.array(0, nbytes))
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._pin: HostPin | None = None

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """View a range; the same tensor again for the same range, since outputs are much alike."""
        view = self._views.get((offset, nbytes))
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[offset, nbytes] = self.buffer[offset : offset + nbytes]
        return view

    def lock(self, pin: Callable[[int, int], HostPin | None]) -> None:
        """Page-lock it, once: that costs more than many copies."""
        self._pin = pin(self._mapping.address, self.nbytes)

    @property
    def is_locked(self) -> bool:
        """Tell whether a device can copy into it while the host goes on."""
        return self._pin is not None

    def close_fd(self) -> None:
        """Close the descriptor: the reader has one of its own, or a mapping. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Unlock, then let go; it is unmapped with the last slot that still refers to it."""
        self.close_fd()
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.close()


class Arena(Block):
    """A block that holds many slots; keeps its free ranges sorted and merged."""

    def __init__(self, block_id: int, nbytes: int) -> None:
        super().__init__(block_id, nbytes)
        #: (offset, size), by offset; no two touch.
        self.free_ranges: list[tuple[int, int]] = [(0, nbytes)]
        self._in_use = 0
        self._retired_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Tell whether none of its slots is in use."""
        return not self._in_use

    @property
    def is_spent(self) -> bool:
        """Tell whether it is more useful as free memory."""
        return not self._in_use and 2 * self._retired_bytes >= self.nbytes

    def take(self, index: int, room: int) -> int:
        """Take ``room`` from a free range that has it; gives the offset."""
        offset, size = self.free_ranges[index]
        if size > room:
            self.free_ranges[index] = offset + room, size - room
        else:
            del self.free_ranges[index]
        self._in_use += 1
        return offset

    def give_back(self, offset: int, room: int) -> None:
        """Free a range and merge it with its neighbors."""
        self._in_use -= 1
        ranges = self.free_ranges
        index = bisect.bisect(ranges, (offset, room))
        if index < len(ranges) and ranges[index][0] == offset + room:
            room += ranges.pop(index)[1]
        if index and sum(ranges[index - 1]) == offset:
            offset, before = ranges.pop(index - 1)
            room += before
            index -= 1
        ranges.insert(index, (offset, room))

    def retire(self, room: int) -> None:
        """Never give a range out again."""
        self._in_use -= 1
        self._retired_bytes += room

    def drop(self) -> None:
        """Let go of an idle arena, whose memory is free at once if nobody can read it any more."""
        self.close()
        if not self._retired_bytes:
            self._mapping.free_pages()
