"""Reading without a thread of its own: whoever waits for a worker reads for all who do.

Step mode starts no pump. Its engine loop reads, since it always waits; while there is none (at a
start, at an end, for an executor without an engine) the turn is taken by who waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sidestream.executor.pump import ResultPump

if TYPE_CHECKING:
    from sidestream.executor.result_channel import ResultChannel
    from sidestream.transport.channel import Frame
    from sidestream.transport.envelope import Delivery

#: How often those who wait look by themselves: who reads may be held up by a signal handler.
_LOOK_S: Final = 0.5


class ReadingTurn:
    """Lets one of the threads that wait read, for all pumps of an engine and all that wait.

    A message resolves the future that is registered for it, whoever reads it; the others wait until
    theirs is or the turn is free. A resident, while there is one, leaves it to nobody: what it
    reads can't be cut short by a signal handler, as in a main thread. States: open, closed.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._pumps: dict[int, CallerPump] = {}
        # Guards the turn and the pumps; notified after each reading. Reentrant, since a signal
        # handler may wait while its thread is in here.
        self._changed = threading.Condition()
        self._reader: int | None = None
        self._resident: int | None = None
        # Guards _wake_fd, whose number may be another file's as soon as it is closed; reentrant for
        # the same reason, and since a finalizer may wake.
        self._waking = threading.RLock()

    def wake(self) -> None:
        """Have all who wait look again; any thread, also inside a finalizer."""
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``is_done``, reading if nobody else does; False if time ran out."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_first = True
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            with self._changed:
                if is_done():
                    return True
                # Once in any case: what is there already has not been waited for.
                if self._epoll.closed or (left is not None and left <= 0 and not is_first):
                    return False
                is_first = False
                left = None if left is None else max(0.0, left)
                if self._is_taken() or self._resident not in (None, threading.get_ident()):
                    self._changed.wait(_LOOK_S if left is None else min(left, _LOOK_S))
                    continue
            self._take_turn(left)

    def take_residence(self) -> None:
        """Have the calling thread read whenever it waits, and nobody else."""
        self._resident = threading.get_ident()

    def end_residence(self) -> None:
        """Leave the turn to whoever waits; by the resident."""
        with self._changed:
            self._resident = None
            self._changed.notify_all()

    def is_reader(self) -> bool:
        """Tell whether the caller has the turn."""
        return self._reader == threading.get_ident()

    def add(self, pump: CallerPump) -> None:
        """Read for ``pump`` from now on."""
        with self._changed:
            self._pumps[pump.fileno()] = pump
            self._epoll.register(pump.fileno(), select.EPOLLIN)
        self.wake()

    def remove(self, pump: CallerPump) -> None:
        """Read for ``pump`` no longer; before it is closed."""
        with self._changed:
            if self._pumps.pop(pump.fileno(), None) is not None and not self._epoll.closed:
                self._epoll.unregister(pump.fileno())

    def close(self) -> None:
        """Close the descriptors, once nobody waits here any more. Idempotent."""
        with self._waking:
            if self._wake_fd >= 0:
                self._epoll.close()
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _is_taken(self) -> bool:
        # Not by the caller itself: a signal handler may wait in the middle of a wait.
        return self._reader is not None and not self.is_reader()

    def _take_turn(self, timeout_s: float | None) -> None:
        is_mine = False
        try:
            with self._changed:
                if self._is_taken() or self._epoll.closed:
                    return
                is_mine = self._reader is None
                self._reader = threading.get_ident()
            self._read(timeout_s)
        finally:
            with self._changed:
                if is_mine:
                    self._reader = None
                self._changed.notify_all()

    def _read(self, timeout_s: float | None) -> None:
        ready = self._epoll.poll(timeout_s)
        with _interrupts_held():
            for fd, _ in ready:
                if fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                elif fd in self._pumps:
                    self._pumps[fd].read()


class CallerPump(ResultPump):
    """A pump that is moved by those who wait, see :class:`ReadingTurn`."""

    def __init__(
        self,
        turn: ReadingTurn,
        channels: Iterable[ResultChannel],
        on_message: Callable[[ResultChannel, Delivery], None],
        *,
        on_closed: Callable[[ResultChannel, Exception], None] | None = None,
        on_unsent: Callable[[ResultChannel, Frame, Exception], None] | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Make a pump as :class:`ResultPump` says, which has its turn in ``turn``."""
        super().__init__(
            channels, on_message, on_closed=on_closed, on_unsent=on_unsent, on_failed=on_failed
        )
        self._turn = turn
        self._is_started = False
        self._is_closed = False

    def start(self) -> CallerPump:
        """Have it read by those who wait."""
        self._is_started = True
        self._turn.add(self)
        return self

    def is_current(self) -> bool:
        """Tell whether the caller reads."""
        return self._turn.is_reader()

    def is_alive(self) -> bool:
        """Tell whether it is read."""
        return self._is_started and not self._is_closed

    def attend(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for ``is_done``, and read meanwhile unless somebody does."""
        self._turn.wait(is_done, timeout_s)
        return True

    def stop(self, timeout_s: float | None = None) -> bool:
        """Send and hear what was posted, then read no more; False if time ran out."""
        self._is_stopping = True
        if not self._is_started:
            self._close()
        elif not self._is_closed:
            self._wake()
            if not self.is_current():
                self._turn.wait(lambda: self._is_closed, timeout_s)
        return self._is_closed

    def fileno(self) -> int:
        """Give the descriptor that is readable when there is something to do."""
        return self._selector.fileno()

    def read(self) -> None:
        """Do what there is to do; for the holder of the turn."""
        try:
            self._round(0)
        except BaseException as error:  # noqa: BLE001 - boundary: one worker's messages
            self._fail(error)
            self._close()
        if self._is_over:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._turn.remove(self)
            super()._close()
            self._is_closed = True


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait: in the middle of a message it would take it away from who waits for it."""
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    caught: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[-1])
