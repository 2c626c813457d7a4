"""The thread that runs users' done-callbacks, so that the pump never runs foreign code."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class CallbackThread:
    """Runs callables in order on one daemon thread, started when the first one comes.

    States: idle (no thread), running, closed. Closing lets what is queued run.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Guards the start of the thread: two futures may get their first callback at once.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def post(self, function: Callable[[], object]) -> None:
        """Queue ``function``; any thread."""
        self._queue.put(function)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="sidestream-callbacks", daemon=True
                    )
                    self._thread.start()

    def is_current(self) -> bool:
        """Tell whether the caller is one of these callbacks."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Let the thread end behind what is queued."""
        self._queue.put(None)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except BaseException:
                logger.exception("A done-callback raised.")
            del function
