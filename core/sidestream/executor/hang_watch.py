"""Tells a worker that hangs from one that is slow or has nothing to do."""

from __future__ import annotations

import math
from typing import Final

#: A worker is looked at so often within the time that it may be silent: a sign is noticed at the
#: next look, so it can pass for later than it was by as much.
_LOOKS: Final = 4


class HangWatch:
    """Measures for how long a worker that has work gave no sign of getting on with it.

    Signs are its messages and its heartbeat, which counts denoising steps too. The clock is the
    caller's; ``look_at`` says when to look, None: nothing is with the worker. ``message`` may be
    called by another thread, all else by one at a time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.look_at: float | None = None
        self._timeout_s = timeout_s
        self._heartbeat = 0
        self._moved_at = -math.inf
        self._message_at = -math.inf

    def begin(self, heartbeat: int, now: float) -> None:
        """Hear that the worker was given work."""
        if self.look_at is None and self._timeout_s < math.inf:
            self._heartbeat = heartbeat
            self._moved_at = now
            self.look_at = now + self._timeout_s / _LOOKS

    def message(self, now: float) -> None:
        """Hear that the worker sent something."""
        self._message_at = now

    def look(self, heartbeat: int, busy_since: float | None, now: float) -> float | None:
        """Give for how long the worker was silent, if that is too long.

        ``busy_since``: from when on it has had what it has; None: nothing.
        """
        if busy_since is None:
            self.look_at = None
            return None
        if heartbeat != self._heartbeat:
            self._heartbeat = heartbeat
            self._moved_at = now
        silent_s = now - max(self._moved_at, self._message_at, busy_since)
        if silent_s >= self._timeout_s:
            return silent_s
        self.look_at = now + min(self._timeout_s / _LOOKS, self._timeout_s - silent_s)
        return None
