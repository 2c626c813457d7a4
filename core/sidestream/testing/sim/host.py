"""What the device knows of host memory: which ranges are page-locked, and the copies into them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from sidestream.errors import PlatformError
from sidestream.testing.sim.event import PLATFORM

_LOGGED_COPIES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRecord:
    """One finished copy from a device to the host; times are of ``time.monotonic()``."""

    nbytes: int
    #: Whether the destination was page-locked.
    pinned: bool
    #: Of the destination's first element.
    address: int
    #: The name of the stream that ran it.
    stream: str
    started_at: float
    ended_at: float


#: The latest copies of this process, oldest first.
COPIES: Final[deque[CopyRecord]] = deque(maxlen=_LOGGED_COPIES)


class PageLocks:
    """The page-locked ranges of this process's memory."""

    def __init__(self) -> None:
        # Changed by single operations only: finalizers do it too, and may take no lock.
        self._ranges: Final[dict[int, int]] = {}

    def lock(self, address: int, nbytes: int) -> SimHostPin:
        """Page-lock a range.

        Raises:
            PlatformError: It is empty, or overlaps one that is page-locked.
        """
        if nbytes <= 0:
            raise PlatformError(
                f"Can't page-lock {nbytes} bytes at {address:#x}: a range has at least one byte.",
                platform=PLATFORM,
            )
        for start, length in list(self._ranges.items()):
            if address < start + length and start < address + nbytes:
                raise PlatformError(
                    f"Can't page-lock {nbytes} bytes at {address:#x}: {length} bytes at "
                    f"{start:#x} are page-locked already. Close that pin first; a range has to "
                    "be unlocked before it is unmapped.",
                    platform=PLATFORM,
                )
        self._ranges[address] = nbytes
        return SimHostPin(self, address)

    def unlock(self, address: int) -> None:
        """Forget the range that starts there."""
        self._ranges.pop(address, None)

    def cover(self, address: int, nbytes: int) -> bool:
        """Tell whether all of a range lies within one page-locked range."""
        return any(
            start <= address and address + nbytes <= start + length
            for start, length in list(self._ranges.items())
        )


class SimHostPin:
    """A page-locked range of an existing mapping."""

    def __init__(self, locks: PageLocks, address: int) -> None:
        self._locks: Final = locks
        self._address: Final = address
        self._is_closed = False

    def close(self) -> None:
        """Unlock the pages; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._locks.unlock(self._address)


#: The pages of this process.
PAGE_LOCKS: Final = PageLocks()
