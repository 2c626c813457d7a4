from __future__ import annotations

import gc
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sidestream.transport.arena import SlotPool
from sidestream.transport.channel import Channel, Frame, channel_pair
from sidestream.transport.lease import ArenaMap
from sidestream.transport.packing import pack, unpack

torch.set_num_threads(1)


class Child:
    """A forked child that runs one function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        reading, writing = os.pipe()
        self.pid = _fork()
        if self.pid == 0:
            os.close(reading)
            try:
                answer = pickle.dumps((function(), None))
            except BaseException:
                answer = pickle.dumps((None, traceback.format_exc()))
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
            os._exit(0)
        os.close(writing)
        self._pipe = os.fdopen(reading, "rb")

    def result(self) -> Any:
        """Wait for what the function returned; what it raised fails the test."""
        with self._pipe:
            answer = self._pipe.read()
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, f"the child ended with wait status {status}"
        result, failure = pickle.loads(answer)
        assert failure is None, failure
        return result

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pipe.close()


@dataclass
class Link:
    """Both halves of the data plane in one process, with a real channel between them."""

    pool: SlotPool
    arenas: ArenaMap
    worker: Channel
    main: Channel
    eventfd: int

    def send(self, tree: Any) -> Frame:
        """Pack, write and send, as a worker does."""
        packed = pack(tree)
        slot = self.pool.acquire(packed.nbytes)
        packed.write(slot.buffer)
        frame = self.frame(slot, packed.head)
        self.worker.send(frame)
        self.pool.announced(slot)
        packed.drop()
        return frame

    @staticmethod
    def frame(slot, head: bytes = b"") -> Frame:
        return Frame(
            kind=2,
            output_id="output",
            arena_id=slot.arena_id,
            offset=slot.offset,
            nbytes=slot.nbytes,
            token=slot.token,
            arena_nbytes=slot.arena_nbytes,
            is_one_shot=slot.is_one_shot,
            slot_fd=slot.fd,
            body=head,
        )

    def lease(self, frame: Frame):
        return self.arenas.lease(
            arena_id=frame.arena_id,
            offset=frame.offset,
            nbytes=frame.nbytes,
            token=frame.token,
            fd=frame.slot_fd,
            arena_nbytes=frame.arena_nbytes,
            is_one_shot=frame.is_one_shot,
        )

    def receive(self):
        """Read a frame and take its lease, as a pump does."""
        frame = self.main.receive()
        return frame, self.lease(frame)

    def deliver(self, tree: Any) -> Any:
        """Bring a tree to the reader, who decodes it."""
        self.send(tree)
        frame, lease = self.receive()
        return unpack(frame.body, lease.array())

    def return_slots(self) -> int:
        """Pass on what the reader gave back; gives how many slots that were."""
        return sum(self.pool.take_releases(message) for message in self.arenas.take_releases())

    def close(self) -> None:
        if self.main.fileno() >= 0:
            self.pool.close()
            self.arenas.close()
            self.worker.close()
            self.main.close()
            os.close(self.eventfd)


def _fork() -> int:
    with warnings.catch_warnings(action="ignore"):  # from 3.12 on, of threads that were started
        return os.fork()


@pytest.fixture
def fork():
    """Run a function in a forked child."""
    return Child


@pytest.fixture
def make_link():
    """Make links by the budget of their arenas; closed at the end."""
    links = []

    def make(budget_bytes: int) -> Link:
        main, worker = channel_pair()
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        link = Link(SlotPool(budget_bytes), ArenaMap(eventfd), worker, main, eventfd)
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()


@pytest.fixture
def link(make_link):
    return make_link(16 << 20)


@pytest.fixture
def holdings():
    """Count this process's descriptors and mapped memfds."""

    def count() -> tuple[int, int]:
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("/memfd:sidestream")
        return len(os.listdir("/proc/self/fd")), mapped

    return count


@pytest.fixture
def pattern():
    """Make bytes that tell one output from another."""

    def make(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.resize((np.arange(251) * (2 * seed + 1) + seed).astype(np.uint8), nbytes)

    return make
