"""Flags and heartbeats that two processes share, for what can't wait for a message."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Final

#: Bytes of a word. Aligned, so one store and one load each on every machine torch runs on.
_WORD: Final = 8
#: The words of the table of aborted requests; its places are numbered from 0.
_ABORTS: Final = range(65, 512)
#: How many requests can be marked as aborted at a time.
ABORT_PLACES: Final = len(_ABORTS)


class _Word:
    """A 64-bit number of the page. One side writes it, both may read it."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: ControlPage, owner: type[ControlPage]) -> int:
        return page._words[self._index]

    def __set__(self, page: ControlPage, value: int) -> None:
        page._words[self._index] = value


class _Flag:
    """A word that is set or not."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: ControlPage, owner: type[ControlPage]) -> bool:
        return page._words[self._index] != 0

    def __set__(self, page: ControlPage, value: bool) -> None:
        page._words[self._index] = int(value)


class ControlPage:
    """One page that the main process and one worker map.

    Each word has a single writer, so ``+= 1`` needs no lock; nothing is promised about the order in
    which the other side sees two words change. The main process's words and the worker's are on
    cache lines of their own.
    """

    #: Main process: end as soon as possible.
    shutdown = _Flag(0)
    #: Main process: finish what was taken, then report.
    drain = _Flag(1)

    #: Worker: denoising steps done.
    steps = _Word(16)
    #: Worker: forwards queued on the device.
    forwards = _Word(17)
    #: Worker: outputs sent.
    outputs = _Word(18)
    #: Worker: signs of progress while it starts, of any kind.
    progress = _Word(19)

    #: Worker: the ``rpc_id`` of the latest forward that it has begun.
    running = _Word(20)

    #: Main process: how many numbers the table of aborted requests holds, see ``AbortTable``.
    abort_count = _Word(64)

    def __init__(self, fd: int) -> None:
        """Map the page behind ``fd``, which belongs to this object from now on."""
        self._fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> ControlPage:
        """Make a page of zeros."""
        fd = _anonymous_file()
        try:
            # Written and not only sized: a store to a page that doesn't exist yet may be a SIGBUS.
            os.pwrite(fd, bytes(mmap.PAGESIZE), 0)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> ControlPage:
        """Map a page that another process made; ``fd`` belongs to this object from now on."""
        return cls(fd)

    @property
    def heartbeat(self) -> int:
        """Give a number that grows whenever the worker gets on with anything."""
        return self.steps + self.forwards + self.outputs + self.progress

    @property
    def forward_heartbeat(self) -> int:
        """Give a number that grows with the worker's forwards and their steps."""
        return self.steps + self.forwards

    def set_abort(self, place: int, number: int) -> None:
        """Write a request's number, or 0, into a place of the table of aborted requests."""
        self._words[_ABORTS[place]] = number

    def aborts(self) -> frozenset[int]:
        """Give the numbers of the requests that are aborted.

        Reads one word while there are none. A number may show later than the count does, to who
        asks again: nothing keeps the two in order.
        """
        if self.abort_count == 0:
            return frozenset()
        return frozenset(self._words[_ABORTS.start : _ABORTS.stop]) - {0}

    def fileno(self) -> int:
        """Give the descriptor to pass to the worker."""
        return self._fd

    def close(self) -> None:
        """Unmap it; flags and counters raise from now on. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._words.release()
            self._memory.close()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sidestream-control", os.MFD_CLOEXEC)
    # Not Linux, where only the in-process executor runs.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
