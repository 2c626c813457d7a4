"""The two ends of one worker's connection."""

from __future__ import annotations

import contextlib
import os
from collections import deque

from sidestream.transport.channel import Channel, Frame, channel_pair
from sidestream.transport.lease import ArenaMap


class WorkerEnds:
    """A worker's ends of its two channels; picklable by ``multiprocessing`` while it spawns."""

    def __init__(self, messages: Channel, releases: Channel) -> None:
        self.messages = messages
        self.releases = releases

    def close(self) -> None:
        """Close them in this process, once the worker has them."""
        self.messages.close()
        self.releases.close()


class ResultChannel:
    """This process's ends: envelopes in, commands and lease releases out, and its mapped arenas."""

    def __init__(self, messages: Channel, releases: Channel) -> None:
        self.messages = messages
        self.releases = releases
        self.released_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self.arenas = ArenaMap(self.released_fd)
        except BaseException:
            os.close(self.released_fd)
            raise
        self.outbox: deque[Frame] = deque()
        self.release_outbox: deque[bytes] = deque()
        self.is_open = True

    @classmethod
    def pair(cls) -> tuple[ResultChannel, WorkerEnds]:
        """Make both sides of one worker's connection."""
        with contextlib.ExitStack() as undo:
            messages, worker_messages = channel_pair()
            undo.callback(messages.close)
            undo.callback(worker_messages.close)
            releases, worker_releases = channel_pair()
            undo.callback(releases.close)
            undo.callback(worker_releases.close)
            messages.set_blocking(False)
            releases.set_blocking(False)
            worker_releases.set_blocking(False)
            pair = cls(messages, releases), WorkerEnds(worker_messages, worker_releases)
            undo.pop_all()
            return pair

    def close(self) -> None:
        """Close the sockets; outputs that were delivered stay valid."""
        if self.is_open:
            self.is_open = False
            self.messages.close()
            self.releases.close()
            self.arenas.close()
            # It keeps a duplicate of released_fd, which only leases that live still need.
            del self.arenas
            os.close(self.released_fd)
