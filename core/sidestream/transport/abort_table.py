"""The requests that a worker is asked to give up, as its control page shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestream.transport.control_page import ABORT_PLACES

if TYPE_CHECKING:
    from sidestream.transport.control_page import ControlPage


class AbortTable:
    """The main process's side of one worker's table: it writes, the worker reads.

    A number stays until the worker has answered for its request, so that the worker finds it
    however late it looks. For one lock's holder; touches the page only while it holds numbers.
    """

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._places: dict[int, int] = {}
        # From the end, so that the first number comes to the first place.
        self._free = list(reversed(range(ABORT_PLACES)))

    def __len__(self) -> int:
        return len(self._places)

    def add(self, number: int) -> bool:
        """Mark a request as aborted; False if there is no place for it."""
        if number in self._places:
            return True
        if not self._free:
            return False
        place = self._places[number] = self._free.pop()
        self._page.set_abort(place, number)
        self._page.abort_count = len(self._places)
        return True

    def discard(self, number: int) -> None:
        """Take a mark away, if there is one: the worker has answered."""
        place = self._places.pop(number, None)
        if place is not None:
            self._page.set_abort(place, 0)
            self._page.abort_count = len(self._places)
            self._free.append(place)

    def clear(self) -> None:
        """Forget all marks and take no more: the worker is gone, and its page may be."""
        self._places.clear()
        self._free.clear()
