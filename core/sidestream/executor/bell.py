"""What wakes the engine's loop, and the count of bytes that it waits for."""

from __future__ import annotations

import queue
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidestream.executor.caller_pump import ReadingTurn


class Bell:
    """Any thread rings, one waits.

    ``turn``: the thread that waits reads its workers' answers meanwhile, where no other does.
    """

    def __init__(self, turn: ReadingTurn | None = None) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._turn = turn

    def begin(self) -> None:
        """Say that the calling thread is the one that waits, from now on."""
        if self._turn is not None:
            self._turn.take_residence()

    def end(self) -> None:
        """Say that it waits no more."""
        if self._turn is not None:
            self._turn.end_residence()

    def ring(self) -> None:
        """Have the thread look; also inside a finalizer, hence inside any lock."""
        # SimpleQueue.put is reentrant, made to be called from finalizers.
        self._rings.put(None)
        if self._turn is not None:
            self._turn.wake()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until somebody has rung since the last wait."""
        if self._turn is not None:
            self._turn.wait(lambda: not self._rings.empty(), timeout_s)
            timeout_s = 0.0
        try:
            self._rings.get(timeout=timeout_s)
            while True:
                self._rings.get_nowait()
        except queue.Empty:
            pass


class ReadyBytes:
    """Bytes of outputs that are ready and not taken.

    ``free`` may run inside a finalizer, hence inside any lock; so it only appends and wakes.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._sum = 0
        # What is to be added to the sum: any thread appends, the lock's holder takes.
        self._changes: deque[int] = deque()

    def add(self, nbytes: int) -> None:
        """Count an output as ready; any thread."""
        self._changes.append(nbytes)

    def free(self, nbytes: int) -> None:
        """Count an output as taken or dropped; any thread."""
        self._changes.append(-nbytes)
        self._bell.ring()

    def value(self) -> int:
        """Give the bytes now; one thread at a time."""
        while self._changes:
            self._sum += self._changes.popleft()
        return self._sum
