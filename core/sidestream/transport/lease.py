"""The main process's half of the data plane: leases on slots, returned when the last view dies."""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from collections import deque
from typing import Final

from sidestream.errors import InternalError
from sidestream.transport.arena import RETIRED, TOKEN
from sidestream.transport.leaf import Bytes
from sidestream.transport.memory import HostMemoryError, Mapping, attach

#: Messages of returned tokens stay under this; a socket takes at least a dozen of them.
MAX_RELEASE_BYTES: Final = 8 << 10


class Lease:
    """The right to read one slot, until :meth:`array`'s result and all its views are gone.

    States: held, taken (the array has it), released.
    """

    __slots__ = ("_array", "_error")

    def __init__(self, array: Bytes | None, error: HostMemoryError | None = None) -> None:
        self._array = array
        self._error = error

    def array(self) -> Bytes:
        """Take the slot's bytes, once: 1-D uint8 that returns the slot when its last view dies.

        Raises:
            HostMemoryError: The slot could not be mapped; it was given back already.
        """
        if self._error is not None:
            raise self._error
        array, self._array = self._array, None
        if array is None:
            raise InternalError("A lease was taken twice, or after it was released.")
        return array

    def release(self) -> None:
        """Give the slot back unread; nothing after :meth:`array`. Idempotent."""
        self._array = None


class ArenaMap:
    """The arenas of one worker as this process sees them, and the leases on their slots.

    :meth:`lease`, :meth:`take_releases`, :meth:`drop` and :meth:`close` are for the thread that
    reads the worker's messages. Leases may die on any thread, inside a garbage collection, inside
    any lock. In a forked child they only let go of the child's own view.
    """

    def __init__(self, eventfd: int) -> None:
        """Make an empty map.

        Args:
            eventfd: Written to whenever tokens are there to be taken; non-blocking. The map keeps
                a duplicate, so the caller may close it while leases live.
        """
        self._returns: Final = _Returns(eventfd)
        self._forks: Final = _fork_count()
        self._mappings: dict[int, Mapping] = {}
        # Announced arenas that could not be mapped yet, with their descriptors.
        self._unmapped: dict[int, int] = {}

    def lease(
        self,
        *,
        arena_id: int,
        offset: int,
        nbytes: int,
        token: int,
        fd: int | None,
        arena_nbytes: int,
        is_one_shot: bool,
    ) -> Lease:
        """Lease the slot that a message named. Call it for every such message, wanted or not.

        The first message of an arena brings its descriptor, which this call closes.

        Raises:
            InternalError: The message and the memory don't fit each other.
        """
        if offset + nbytes > arena_nbytes:
            if fd is not None:
                os.close(fd)
            raise InternalError(
                f"A slot ends at byte {offset + nbytes} of a memfd of {arena_nbytes} bytes."
            )
        if is_one_shot:
            return self._lease_one_shot(nbytes, fd, arena_nbytes)
        mapping = self._mappings.get(arena_id)
        if mapping is not None and fd is None:
            array = mapping.array(offset, nbytes)
        else:
            try:
                array = self._array(arena_id, fd, arena_nbytes, offset, nbytes)
            except HostMemoryError as error:
                # Told to whoever wants this output: the thread that reads messages has to go on.
                self._returns.give(token)
                return Lease(None, error)
        # On the array and not on a tensor, which dies before its aliases do.
        self._returns.lend(array, token, self._forks)
        return Lease(array)

    def take_releases(self) -> list[bytes]:
        """Give the tokens of slots whose last view died, as messages for ``SlotPool``."""
        words = self._returns.take()
        per_message = MAX_RELEASE_BYTES // TOKEN.size
        return [
            b"".join(map(TOKEN.pack, words[start : start + per_message]))
            for start in range(0, len(words), per_message)
        ]

    def drop(self, arena_id: int) -> None:
        """Unmap an arena that the worker dropped, once its last lease is gone."""
        self._mappings.pop(arena_id, None)
        fd = self._unmapped.pop(arena_id, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Let go of the arenas; leases that live keep what they need. Idempotent.

        They give nothing back any more.
        """
        self._returns.forget()
        self._mappings.clear()
        while self._unmapped:
            os.close(self._unmapped.popitem()[1])

    def _lease_one_shot(self, nbytes: int, fd: int | None, arena_nbytes: int) -> Lease:
        """Map a memfd that is one output's alone: there is nothing to give back."""
        if fd is None:
            raise InternalError("A one-shot slot arrived without its descriptor.")
        try:
            return Lease(_attach(fd, arena_nbytes).array(0, nbytes))
        except HostMemoryError as error:
            return Lease(None, error)
        finally:
            os.close(fd)

    def _array(
        self, arena_id: int, fd: int | None, arena_nbytes: int, offset: int, nbytes: int
    ) -> Bytes:
        try:
            return self._mapping(arena_id, fd, arena_nbytes).array(offset, nbytes)
        except HostMemoryError:
            # One output that is too large must not take with it the small ones in its arena.
            start = offset - offset % mmap.PAGESIZE
            part = slice(start, offset + nbytes)
            mapping = _attach(self._unmapped[arena_id], arena_nbytes, part)
            return mapping.array(offset - start, nbytes)

    def _mapping(self, arena_id: int, fd: int | None, arena_nbytes: int) -> Mapping:
        mapping = self._mappings.get(arena_id)
        if mapping is not None:
            if fd is not None:
                os.close(fd)
            return mapping
        if fd is None:
            fd = self._unmapped.pop(arena_id, None)
        if fd is None:
            raise InternalError(f"A slot of arena {arena_id} arrived before the arena itself.")
        try:
            mapping = _attach(fd, arena_nbytes)
        except HostMemoryError:
            self._unmapped[arena_id] = fd  # its other slots may find more room
            raise
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        self._mappings[arena_id] = mapping
        return mapping


class _Loan(weakref.ref[Bytes]):
    """A slot that is to be given back when its array dies."""

    __slots__ = ("born", "forks", "pid", "returns", "token")

    returns: _Returns
    token: int
    #: The process and its count of forks when it was lent.
    pid: int
    forks: _ForkCount
    born: int


class _Returns:
    """Tokens on their way back; all that the death of an array may touch."""

    _eventfd = -1
    # Here and below: a module may be empty already when the last arrays of a process die.
    _getpid = staticmethod(os.getpid)
    _retired: Final = RETIRED

    def __init__(self, eventfd: int) -> None:
        self._tokens: Final[deque[int]] = deque()
        # A weak reference must be there to be told. By token.
        self._loans: Final[dict[int, _Loan]] = {}
        # Its own: the caller's number may belong to another file by the time the last lease dies.
        self._eventfd = os.dup(eventfd)
        self._wake: Final = functools.partial(os.eventfd_write, self._eventfd, 1)

    def __del__(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)

    def lend(self, array: Bytes, token: int, forks: _ForkCount) -> None:
        """Have ``token`` given back when ``array`` dies."""
        # Not weakref.finalize, which takes several times as long.
        loan = _Loan(array, _end)
        loan.returns, loan.token = self, token
        loan.pid, loan.forks, loan.born = os.getpid(), forks, forks.value
        self._loans[token] = loan

    def end(self, loan: _Loan) -> None:
        """Return a slot. Runs in whatever thread drops the last view, perhaps inside a lock."""
        self._loans.pop(loan.token, None)
        if self._getpid() != loan.pid:
            return  # a forked child dropped its copy; the parent may still read
        was_forked = loan.forks.value != loan.born
        self.give(loan.token | self._retired if was_forked else loan.token)

    def give(self, word: int) -> None:
        """Have a token taken; no lock and nothing that blocks, see :meth:`end`."""
        self._tokens.append(word)
        try:
            self._wake()
        except OSError:
            pass  # it is full, so the reader is awake

    def take(self) -> list[int]:
        """Give what came back since the last call."""
        words = []
        while self._tokens:
            words.append(self._tokens.popleft())
        return words

    def forget(self) -> None:
        """Expect nothing back any more."""
        self._loans.clear()


def _end(loan: _Loan) -> None:
    loan.returns.end(loan)


class _ForkCount:
    """Counts this process's forks, so that a lease can tell whether a child has its view."""

    def __init__(self) -> None:
        self.value = 0
        # Before and after: a lease made by another thread in between is in the child too.
        os.register_at_fork(before=self._count, after_in_parent=self._count)

    def _count(self) -> None:
        self.value += 1


@functools.cache
def _fork_count() -> _ForkCount:
    """Register once in a process: there is no way to take a fork handler back."""
    return _ForkCount()


def _attach(fd: int, nbytes: int, part: slice = slice(None)) -> Mapping:
    try:
        return attach(fd, nbytes, part=part)
    except ValueError as error:
        raise InternalError(str(error)) from error
