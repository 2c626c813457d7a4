"""When forwards ran: what was beside a copy, and whose a fault of the device is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sidestream.errors import DeviceLostError
from sidestream.platforms.device import DeviceEvent

#: How many forwards are remembered. Places bound how many make an output during a copy; those that
#: fail or are given up take none.
_KEPT: Final = 64


@dataclass(kw_only=True, eq=False)
class Forward:
    """One forward from its first kernel to its last.

    The thread that runs it writes, the one that copies reads. ``started`` and ``ended`` are events
    on its stream, None where there are none. ``started_at`` and ``ended_at`` are the host's times,
    the second from when its thread has nothing more to do for it.
    """

    number: int = 0
    started: DeviceEvent | None = None
    started_at: float
    ended: DeviceEvent | None = None
    ended_at: float | None = None
    #: Whether it makes several outputs, or ran beside the preparing of another request: nobody can
    #: tell then whose a fault is.
    is_shared: bool = False
    #: Answers for its request with a fault of the device, where that can be done.
    accuse: Callable[[DeviceLostError], None] | None = None

    def end(self) -> None:
        """Note that its thread is done with it."""
        self.ended_at = time.monotonic()

    def place(
        self, started_at: float | None, ended_at: float | None
    ) -> tuple[float | None, float | None]:
        """Give its span by what is known of its events' times, else by the host's."""
        return (
            self.started_at if self.started is None else started_at,
            self.ended_at if self.ended is None else ended_at,
        )


class ForwardLog:
    """The latest forwards of one worker; one thread begins them, any thread looks."""

    def __init__(self) -> None:
        # Replaced and never changed, so that nobody needs a lock to read it.
        self._latest: tuple[Forward, ...] = ()

    def begin(
        self,
        started: DeviceEvent | None,
        *,
        is_shared: bool = False,
        accuse: Callable[[DeviceLostError], None] | None = None,
    ) -> Forward:
        """Enter a forward that begins now."""
        forward = Forward(
            number=self._latest[-1].number + 1 if self._latest else 1,
            started=started,
            started_at=time.monotonic(),
            is_shared=is_shared,
            accuse=accuse,
        )
        self._latest = (*self._latest[1 - _KEPT :], forward)
        return forward

    def after(self, forward: Forward) -> list[Forward]:
        """List the forwards that began after one."""
        return [later for later in self._latest if later.number > forward.number]

    def blame(self, forward: Forward, *, is_computed: bool) -> Forward:
        """Say whose a fault is that showed at the copy of ``forward``'s output.

        Forwards run one after the other, but for those that are shared, so it is the first one's
        that is not known to be complete. Where all are, the copy itself failed.
        """
        later = self.after(forward) if is_computed else []
        return later[0] if later else forward


def shared_s(start: float, end: float, spans: Iterable[tuple[float | None, float | None]]) -> float:
    """Give the seconds between ``start`` and ``end`` that lie in one of ``spans``.

    Spans may overlap. One without a start has not begun, one without an end still runs.
    """
    begun = [(first, end if last is None else last) for first, last in spans if first is not None]
    shared, reached = 0.0, start
    for first, last in sorted(begun):
        shared += max(0.0, min(end, last) - max(reached, first))
        reached = max(reached, last)
    return min(shared, max(0.0, end - start))
