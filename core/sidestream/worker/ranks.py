"""How the workers that share one model keep in step: rank 0 decides, the others follow.

All ranks get the same commands in one order and run the same code, so a decision is one message at
one place of it, and whoever reads them one by one is at the same step. What is decided: which
requests of a command run, which are given up (once a denoising step), and how a forward ended. A
forward ends alike on all ranks, or the group is lost: sums over ranks that went different ways
would wait for each other, or be wrong.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import select
import socket
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import SidestreamError

if TYPE_CHECKING:
    import torch

#: How long the other ranks may take to fail where one did, before it counts as alone with that.
GRACE_S: Final = 2.0
_MAX_BYTES: Final = 1 << 17


class Outcome(enum.IntEnum):
    """How a forward ended on one rank."""

    DONE = 1
    #: Its requests were given up.
    STOPPED = 2
    FAILED = 3


class Settled(enum.Enum):
    """How a forward ended on all ranks together, seen from one of them."""

    #: Alike.
    ALIKE = enum.auto()
    #: This rank failed, and another one did not.
    ALONE = enum.auto()
    #: Another rank failed, or is gone; it will be known why.
    ELSEWHERE = enum.auto()


class LinkLost(SidestreamError):
    """A link's other end is gone, or says something that nobody should at this place."""


class Link:
    """One end of a pair of sockets between rank 0 and another rank; messages are small tuples."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, a ``SOCK_SEQPACKET``."""
        self._socket = socket.socket(fileno=fd)

    def tell(self, *message: Any) -> None:
        """Send a message.

        Raises:
            LinkLost: The other end is gone.
        """
        try:
            self._socket.send(pickle.dumps(message, protocol=5))
        except OSError as error:
            raise LinkLost(f"A rank of this group is gone: {error}") from error

    def hear(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        """Wait for a message; None if none came in time.

        Raises:
            LinkLost: The other end is gone.
        """
        if timeout_s is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(max(0.0, timeout_s) * 1000):
                return None
        try:
            data = self._socket.recv(_MAX_BYTES)
        except OSError as error:
            raise LinkLost(f"A rank of this group is gone: {error}") from error
        if not data:
            raise LinkLost("A rank of this group is gone.")
        message: tuple[Any, ...] = pickle.loads(data)
        return message

    def await_end(self, timeout_s: float) -> None:
        """Wait until the other end is gone; what it still says is passed over."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(LinkLost):
            while self.hear(deadline - time.monotonic()) is not None:
                pass


class Leader:
    """Rank 0's side; used by its main thread."""

    def __init__(self, links: Sequence[Link]) -> None:
        """``links``: to ranks 1, 2 and so on."""
        self._links = links

    def begin(self, rpc_id: int, output_ids: Sequence[str]) -> None:
        """Say which requests of a command run; none: it is passed over."""
        self._tell(rpc_id, tuple(output_ids))

    def share_aborts(self, aborted: Collection[int]) -> None:
        """Say which requests are given up at this place of the code."""
        self._tell(frozenset(aborted))

    def settle(self, outcome: Outcome) -> Settled:
        """Hear how the forward ended on the other ranks; waits for them, unless this one failed."""
        has_failed = outcome is Outcome.FAILED
        deadline = time.monotonic() + GRACE_S
        heard = []
        try:
            for link in self._links:
                left = max(0.0, deadline - time.monotonic()) if has_failed else None
                heard.append(link.hear(left))
        except LinkLost:
            return Settled.ELSEWHERE
        is_alike = all(message == (outcome,) for message in heard)
        if has_failed and not is_alike:
            return Settled.ALONE
        if has_failed or not is_alike:
            with contextlib.suppress(LinkLost):
                self._tell(is_alike)
        return Settled.ALIKE if is_alike else Settled.ELSEWHERE

    def await_end(self, timeout_s: float) -> None:
        """Wait for the end of another rank, which is why this one has to end, too."""
        for link in self._links:
            link.await_end(timeout_s / len(self._links))

    def _tell(self, *message: Any) -> None:
        for link in self._links:
            link.tell(*message)


class Follower:
    """Another rank's side; used by its main thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        # What rank 0 began next, heard while this rank was at a command that rank 0 passed over.
        self._ahead: tuple[int, tuple[str, ...]] | None = None

    def hear_begin(self, rpc_id: int) -> tuple[str, ...]:
        """Hear which requests of a command run.

        Raises:
            LinkLost: Rank 0 is gone.
        """
        if self._ahead is None:
            begun, output_ids = self._hear(2)
            self._ahead = begun, output_ids
        if self._ahead[0] != rpc_id:
            return ()  # rank 0 could not read that one
        (_, names), self._ahead = self._ahead, None
        return names

    def hear_aborts(self) -> frozenset[int]:
        """Hear which requests are given up at this place of the code.

        Raises:
            LinkLost: Rank 0 is gone, or at another place.
        """
        (aborted,) = self._hear(1)
        if not isinstance(aborted, frozenset):
            raise LinkLost("Rank 0 is at another place than this rank.")
        return aborted

    def settle(self, outcome: Outcome) -> Settled:
        """Say how the forward ended here; after a failure, hear whether it did so everywhere."""
        try:
            self._link.tell(outcome)
            if outcome is not Outcome.FAILED:
                return Settled.ALIKE  # else rank 0 ends, and all others with it
            verdict = self._link.hear(GRACE_S)
        except LinkLost:
            return Settled.ELSEWHERE
        return Settled.ALIKE if verdict == (True,) else Settled.ALONE

    def await_end(self, timeout_s: float) -> None:
        """Wait until rank 0 is gone."""
        self._link.await_end(timeout_s)

    def _hear(self, length: int) -> tuple[Any, ...]:
        message = self._link.hear()
        if message is None or len(message) != length:
            raise LinkLost("Rank 0 is at another place than this rank.")
        return message


def join_ranks(backend: str, device: torch.device, rank: int, size: int, store_fd: int) -> None:
    """Make torch.distributed's default group of the ranks that hold the file ``store_fd``.

    The file has no name, so no other group can meet there, and nothing is left of it.

    Raises:
        RuntimeError: torch could not connect the ranks.
    """
    import torch
    import torch.distributed

    # The ranks are on one machine, and its name need not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    path = f"/proc/self/fd/{store_fd}"
    store = torch.distributed.FileStore(path, size)  # type: ignore[attr-defined]
    torch.distributed.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=device if backend != "gloo" else None,
    )
