"""Messages between two processes: frames with a fixed header over a sequenced-packet socket.

A message arrives whole or not at all, from any number of sending threads, and carries descriptors.
The socket has no name, so nobody else can connect to it.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from sidestream.errors import SidestreamError
from sidestream.transport import frame as frames
from sidestream.transport.frame import Frame

__all__ = ["Channel", "ChannelClosed", "Frame", "channel_pair"]

_MAX_FDS: Final = 2
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)

# As plain numbers: combining two members of the enumeration takes longer than asking the kernel.
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CUT_SHORT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)

#: How long a sender waits when too many descriptors are on their way: nothing tells of arrivals.
_DESCRIPTORS_RETRY_S: Final = 0.001


class ChannelClosed(SidestreamError, ConnectionError):
    """The other end is gone, or the connection can't be trusted any more."""


class Channel:
    """One end of a connection. Any threads may send; one at a time receives.

    States: open, closed. The other end's death shows as :class:`ChannelClosed`, from
    :meth:`receive` only after everything that was sent before.
    """

    def __init__(self, connection: socket.socket, *, is_blocking: bool = True) -> None:
        """Take over a connected ``SOCK_SEQPACKET`` socket."""
        connection.setblocking(True)
        self._socket: Final = connection
        self._is_blocking = is_blocking
        # A large frame that the socket did not take yet, with its body's descriptor.
        self._waiting: tuple[Frame, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # For multiprocessing, which knows how to pass a socket to a process that it spawns.
        return _attach_channel, (self._socket, self._is_blocking)

    def fileno(self) -> int:
        """Give the descriptor, to poll or to pass on; -1 when closed."""
        return self._socket.fileno()

    def set_blocking(self, is_blocking: bool) -> None:
        """Choose whether :meth:`receive` waits; a property of this end and this process."""
        self._is_blocking = is_blocking

    def poll(self, timeout_s: float | None = None) -> bool:
        """Wait until something can be received, or the other end is gone; False: neither."""
        if self.fileno() < 0:
            raise ChannelClosed("This end of the channel is closed.")
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Close this end; what was sent can still be received. Idempotent."""
        self._forget_waiting()
        self._socket.close()

    # --- frames -------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Send a frame; waits while the socket is full.

        Raises:
            ChannelClosed: The other end is gone.
            HostMemoryError: There is no memory for a large body; nothing was sent.
        """
        body_fd = frames.body_fd(frame)
        try:
            self._send(frames.encode(frame, body_fd), frames.descriptors(frame, body_fd))
        finally:
            if body_fd is not None:
                os.close(body_fd)

    def try_send(self, frame: Frame) -> bool:
        """Send a frame if the socket takes it now; False: try the same frame again later.

        A large body is copied at the first attempt and kept while it is that frame's turn.

        Raises:
            ChannelClosed: The other end is gone; there may still be something to receive.
            HostMemoryError: As :meth:`send`.
        """
        body_fd = self._take_waiting(frame)
        if body_fd is None:
            body_fd = frames.body_fd(frame)
        is_sent = False
        try:
            is_sent = self._try_send(
                frames.encode(frame, body_fd), frames.descriptors(frame, body_fd)
            )
        except BaseException:
            if body_fd is not None:
                os.close(body_fd)
            raise
        if body_fd is not None:
            if is_sent:
                os.close(body_fd)
            else:
                self._waiting = frame, body_fd
        return is_sent

    def receive(self) -> Frame | None:
        """Receive a frame; None: the channel doesn't block and nothing is there.

        Raises:
            ChannelClosed: The other end is gone and all it sent was received, or what came is no
                frame; descriptors that came along are closed.
        """
        fds: list[int] = []
        try:
            data = self._receive(fds)
            return None if data is None else frames.decode(data, fds)
        except ValueError as error:
            raise ChannelClosed(f"{error} The connection can't be trusted any more.") from error
        finally:
            for fd in fds:
                os.close(fd)

    # --- plain messages -----------------------------------------------------------------------

    def send_bytes(self, data: bytes) -> None:
        """Send a short message as it is; waits while the socket is full."""
        self._send([data], [])

    def try_send_bytes(self, data: bytes) -> bool:
        """Send a short message if the socket takes it now."""
        return self._try_send([data], [])

    def receive_bytes(self) -> bytes | None:
        """Receive what :meth:`send_bytes` sent; otherwise as :meth:`receive`."""
        fds: list[int] = []
        try:
            return self._receive(fds)
        finally:
            for fd in fds:
                os.close(fd)

    # --- the socket ---------------------------------------------------------------------------

    def _send(self, parts: Sequence[bytes | memoryview], fds: Sequence[int]) -> None:
        while not self._sendmsg(parts, fds, 0):
            time.sleep(_DESCRIPTORS_RETRY_S)

    def _try_send(self, parts: Sequence[bytes | memoryview], fds: Sequence[int]) -> bool:
        return self._sendmsg(parts, fds, _DONT_WAIT)

    def _sendmsg(self, parts: Sequence[bytes | memoryview], fds: Sequence[int], flags: int) -> bool:
        flags |= _NO_SIGNAL
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self._socket.sendmsg(parts, [rights], flags)
            else:
                self._socket.send(b"".join(parts), flags)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise ChannelClosed(f"The other end of a channel is gone ({error}).") from error
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False  # as many descriptors as this user may have open are on their way
            if error.errno == errno.EBADF:
                raise ChannelClosed("This end of the channel is closed.") from error
            raise
        return True

    def _receive(self, fds: list[int]) -> bytes | None:
        """Receive a message; its descriptors are appended to ``fds`` whatever happens."""
        flags = _CLOSE_ON_EXEC if self._is_blocking else _CLOSE_ON_EXEC | _DONT_WAIT
        while True:
            try:
                data, ancillary, state, _ = self._socket.recvmsg(
                    frames.MAX_MESSAGE_BYTES + 1, _ANCILLARY_BYTES, flags
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end died with messages of ours unread. This is said once, and before
                # what it had still sent to us.
                continue
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise ChannelClosed("This end of the channel is closed.") from error
                raise
            break
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) // received.itemsize * received.itemsize])
                fds.extend(received)
        if state & _CUT_SHORT:
            raise ChannelClosed(
                "A message arrived cut short: this process has no free file descriptor "
                "(ulimit -n), or the other end runs another version of sidestream."
            )
        if not data:
            raise ChannelClosed("The other end of a channel is gone.")
        return data

    def _take_waiting(self, frame: Frame) -> int | None:
        if self._waiting is None:
            return None
        if self._waiting[0] is not frame:
            self._forget_waiting()
            return None
        body_fd = self._waiting[1]
        self._waiting = None
        return body_fd

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            os.close(self._waiting[1])
            self._waiting = None


def channel_pair() -> tuple[Channel, Channel]:
    """Make two connected ends; both block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)


def _attach_channel(connection: socket.socket, is_blocking: bool) -> Channel:
    return Channel(connection, is_blocking=is_blocking)
