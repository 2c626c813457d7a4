"""Device memory for outputs, in shares of one forward each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Places:
    """How many forwards may have outputs on the device at a time.

    An output needs a place from before its forward until its copy is done. Places are tokens in a C
    queue: no Python-level lock is taken while a forward runs.
    """

    def __init__(self, count: int) -> None:
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(count):
            self._tokens.put(None)

    def take(self, timeout_s: float) -> bool:
        """Wait for a free place and take it; False if none came free."""
        try:
            self._tokens.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def give_back(self) -> None:
        """Free a place."""
        self._tokens.put(None)

    def free(self) -> int:
        """Count the free ones."""
        return self._tokens.qsize()


class Place:
    """One forward's place, free when the last of its outputs is out.

    ``on_output`` is called for each output that is, on the thread that it ended on.
    """

    def __init__(self, outputs: int, places: Places, on_output: Callable[[], None]) -> None:
        self._places = places
        self._left = outputs
        self._on_output = on_output
        # Guards _left: outputs end on the output thread, failed ones on the main thread.
        self._lock = threading.Lock()

    def output_done(self) -> None:
        """Count one output as out."""
        with self._lock:
            self._left -= 1
            is_free = self._left == 0
        if is_free:
            self._places.give_back()
        self._on_output()

    def give_back(self) -> None:
        """Free the place of a forward that made no output."""
        self._places.give_back()
