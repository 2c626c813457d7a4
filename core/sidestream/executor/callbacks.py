"""The thread that runs users' done-callbacks, so that the pump never runs foreign code."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from sidestream.executor.holding import holds_any

logger = logging.getLogger(__name__)


class CallbackThread:
    """Runs callables in order on one daemon thread, started when the first one is expected.

    States: open, closed. Closing lets what is queued run and then ends the thread; a callable that
    comes later, such as one for an output that was ready long before, gets a thread for as long.
    """

    def __init__(self) -> None:
        # Guards all below; notified when there is work or the closing.
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def expect(self) -> None:
        """Have the thread ready: a Python 3.12 that ends starts none for what comes of that."""
        if self._thread is not None:
            return  # without the lock: in a forked child it may be held for ever
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._start()

    def post(self, function: Callable[[], object]) -> None:
        """Queue ``function``; any thread."""
        with self._changed:
            self._queue.append(function)
            if self._thread is not None:
                self._changed.notify()
            else:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="sidestream-callbacks", daemon=True)
        thread.start()
        self._thread = thread

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return holds_any(self._changed)

    def is_current(self) -> bool:
        """Tell whether the caller is one of these callbacks."""
        return threading.current_thread() is self._thread

    def refuse_to_block(self) -> None:
        """Raise, if the caller is one of these callbacks, in place of a wait.

        Raises:
            RuntimeError: It is: what it waits for might need this very thread.
        """
        if self.is_current():
            raise RuntimeError(
                "A done-callback may not wait for another result: it would block the thread that "
                "runs all callbacks. Hand the work to a thread of your own."
            )

    def close(self) -> None:
        """Let the thread end behind what is queued."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            try:
                function()
            except BaseException:
                logger.exception("A done-callback raised.")
            del function

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._queue:
                if self._is_closed:
                    self._thread = None
                    return None
                self._changed.wait()
            return self._queue.popleft()
