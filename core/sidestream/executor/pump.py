"""What moves messages between this process and its workers, and the thread that does it.

The pump is the sole reader of the result channels and the only one that writes to workers: one
selector over sockets, process descriptors and an eventfd. It never blocks, decodes no trees, and
runs no user's code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from sidestream.errors import InternalError
from sidestream.executor.result_channel import ResultChannel
from sidestream.transport.channel import ChannelClosed, Frame
from sidestream.transport.envelope import ARENA_DROPPED, Delivery, FrameDelivery

logger = logging.getLogger(__name__)

_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE


class ResultPump(ABC):
    """Reads envelopes from workers and writes commands and releases to them.

    ``on_message(channel, delivery)``, ``on_closed(channel, reason)`` and
    ``on_unsent(channel, frame, error)`` (no memory for a large body) run on the thread that reads
    and must neither block nor raise; ``on_failed(error)`` is the last act if one does. ``reason``
    is a ``ChannelClosed``, or why a message could not be handled. States: new, running, stopped.
    """

    def __init__(
        self,
        channels: Iterable[ResultChannel],
        on_message: Callable[[ResultChannel, Delivery], None],
        *,
        on_closed: Callable[[ResultChannel, Exception], None] | None = None,
        on_unsent: Callable[[ResultChannel, Frame, Exception], None] | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_unsent = on_unsent
        self._on_failed = on_failed
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, _READ, self._on_wake)
        # Guards _wake_fd, whose number may be another file's as soon as it is closed. Reentrant,
        # since a signal handler may send while its thread is in here.
        self._waking = threading.RLock()
        # deque appends are atomic: any thread posts, the pump takes.
        self._posted: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        for channel in channels:
            self._add(channel)

    # --- any thread ---------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> ResultPump:
        """Begin to read."""

    @abstractmethod
    def is_current(self) -> bool:
        """Tell whether the caller is the one that reads."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Tell whether it was started and not stopped."""

    @abstractmethod
    def attend(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Read until ``is_done`` or time is out, where those who wait have to; tells whether so."""

    @abstractmethod
    def stop(self, timeout_s: float | None = None) -> bool:
        """End it after what was posted; False if it is not over then. Idempotent."""

    def send(self, channel: ResultChannel, frame: Frame) -> None:
        """Queue a frame for a worker; never blocks. A closed channel drops it."""
        self._post(lambda: self._enqueue(channel, frame))

    def add(self, channel: ResultChannel) -> None:
        """Read another worker's channel from now on."""
        self._post(lambda: self._add(channel))

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the pump, once, when ``fd`` becomes readable."""
        self._post(lambda: self._watch(fd, callback))

    # --- the pump -----------------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self._wake()

    def _wake(self) -> None:
        # BlockingIOError: it is awake already.
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _round(self, timeout_s: float | None) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)

    @property
    def _is_over(self) -> bool:
        return self._is_stopping and not self._posted

    def _fail(self, error: BaseException) -> None:
        # The boundary of whoever reads: those who wait for messages have to hear of it.
        logger.critical("The result pump ended by an error.", exc_info=error)
        if self._on_failed is not None:
            self._on_failed(error)

    def _close(self) -> None:
        with self._waking:
            if self._wake_fd < 0:
                return
            self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _on_wake(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._posted:
            self._posted.popleft()()

    def _add(self, channel: ResultChannel) -> None:
        self._selector.register(
            channel.messages.fileno(), _READ, lambda mask: self._on_ready(channel, mask)
        )
        self._selector.register(
            channel.released_fd, _READ, lambda _mask: self._on_released(channel)
        )

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        def ready(_mask: int) -> None:
            self._selector.unregister(fd)
            callback()

        self._selector.register(fd, _READ, ready)

    def remove(self, channel: ResultChannel) -> None:
        """Read what is left of a channel, then let go of it; only on the pump itself."""
        if not self.is_current() and self.is_alive():
            raise InternalError("A channel was removed outside the pump.")
        self._read(channel)
        if channel.is_open:
            self._forget(channel)

    # --- one channel --------------------------------------------------------------------------

    # The selector reports several descriptors at a time, and what one of them tells may have closed
    # the channel of the next one. So each of these looks first.

    def _on_ready(self, channel: ResultChannel, mask: int) -> None:
        if mask & _WRITE and channel.is_open:
            self._flush(channel)
        if mask & _READ:
            self._read(channel)

    def _read(self, channel: ResultChannel) -> None:
        while channel.is_open:
            try:
                frame = channel.messages.receive()
                if frame is None:
                    return
                if frame.kind == ARENA_DROPPED:
                    channel.arenas.drop(frame.arena_id)
                else:
                    self._on_message(channel, FrameDelivery(frame, channel.arenas))
            except Exception as reason:
                # The boundary of one worker's messages: whoever waits for what was lost hears of
                # it with the end of the connection.
                if not isinstance(reason, ChannelClosed):
                    logger.exception("A worker's message can't be handled.")
                self._forget(channel)
                if self._on_closed is not None:
                    self._on_closed(channel, reason)
                return

    def _enqueue(self, channel: ResultChannel, frame: Frame) -> None:
        if channel.is_open:
            channel.outbox.append(frame)
            self._flush(channel)

    def _flush(self, channel: ResultChannel) -> None:
        try:
            while channel.outbox:
                try:
                    if not channel.messages.try_send(channel.outbox[0]):
                        break
                except (MemoryError, OSError) as error:
                    if isinstance(error, ChannelClosed):
                        raise
                    if self._on_unsent is not None:
                        self._on_unsent(channel, channel.outbox[0], error)
                channel.outbox.popleft()
        except ChannelClosed:
            # The reading side tells of it, after what the worker had still sent.
            channel.outbox.clear()
        wanted = _READ | (_WRITE if channel.outbox else 0)
        key = self._selector.get_key(channel.messages.fileno())
        if key.events != wanted:
            self._selector.modify(channel.messages.fileno(), wanted, key.data)

    def _on_released(self, channel: ResultChannel) -> None:
        if not channel.is_open:
            return
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(channel.released_fd)
        channel.release_outbox.extend(channel.arenas.take_releases())
        self._flush_releases(channel)

    def _flush_releases(self, channel: ResultChannel) -> None:
        if not channel.is_open:
            return
        try:
            while channel.release_outbox and channel.releases.try_send_bytes(
                channel.release_outbox[0]
            ):
                channel.release_outbox.popleft()
        except ChannelClosed:
            channel.release_outbox.clear()
        self._wait_to_release(channel, bool(channel.release_outbox))

    def _wait_to_release(self, channel: ResultChannel, is_full: bool) -> None:
        fd = channel.releases.fileno()
        is_waiting = fd in self._selector.get_map()
        if is_full and not is_waiting:
            self._selector.register(fd, _WRITE, lambda _mask: self._flush_releases(channel))
        elif is_waiting and not is_full:
            self._selector.unregister(fd)

    def _forget(self, channel: ResultChannel) -> None:
        for fd in (channel.messages.fileno(), channel.released_fd, channel.releases.fileno()):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        channel.close()


class ResultPumpThread(ResultPump):
    """A pump on a daemon thread of its own."""

    @functools.cached_property
    def _thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="sidestream-pump", daemon=True)

    def start(self) -> ResultPumpThread:
        """Start the thread."""
        self._thread.start()
        return self

    def is_current(self) -> bool:
        """Tell whether the caller is the pump."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread.is_alive()

    def attend(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Leave the reading to the thread."""
        return False

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after what was posted; False if it still runs then. Idempotent."""
        if self._thread.ident is None:
            self._close()
            return True
        if self._thread.is_alive():
            self._is_stopping = True
            self._wake()
            if not self.is_current():
                self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._round(None)
        except BaseException as error:  # noqa: BLE001 - boundary: this thread
            self._fail(error)
        finally:
            self._close()
