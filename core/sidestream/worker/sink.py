"""Where finished outputs go: page-locked memory of this process, or shared slots of another.

A sink is used by one thread, the one that waits for copies; only ``take_free`` is for another, the
one that queues forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sidestream.platforms.platform import Platform
from sidestream.protocol import AsyncDiffusionOutput, AsyncOutputKind
from sidestream.request import OutputTimings
from sidestream.transport.arena import PoolStats, Slot, SlotPool
from sidestream.transport.channel import Channel, Frame
from sidestream.transport.envelope import ARENA_DROPPED, encode_message, encode_output
from sidestream.transport.packing import Packed, unpack

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OutputLabel:
    """What an output is called on its way."""

    output_id: str
    rpc_id: int = 0
    attempt: int = 0
    #: Key of the host half of post-processing.
    post_process: str | None = None
    #: Whether it is a part of an output, with more to come.
    is_chunk: bool = False

    @property
    def kind(self) -> AsyncOutputKind:
        """Give the kind of the envelope that carries it."""
        return AsyncOutputKind.CHUNK_READY if self.is_chunk else AsyncOutputKind.OUTPUT_READY


class Destination(Protocol):
    """Memory for one output's leaves."""

    @property
    def buffer(self) -> torch.Tensor:
        """Give it as a 1-D uint8 host tensor."""
        ...

    @property
    def is_page_locked(self) -> bool:
        """Tell whether a device can copy into it while the host goes on."""
        ...


D = TypeVar("D", bound=Destination)


class OutputSink(Protocol[D]):
    """Gives memory to outputs and hands them over when their bytes are there."""

    #: Outputs without device tensors up to this size need no memory of their own.
    inline_bytes: int

    @property
    def stats(self) -> PoolStats | None:
        """Count the memory that the sink keeps; None if it keeps none."""
        ...

    def reserve(self, nbytes: int, count: int) -> None:
        """Make memory for ``count`` outputs now, before the first one has to wait for it.

        Raises:
            MemoryError: There is none.
        """
        ...

    def allocate(self, nbytes: int) -> D:
        """Give memory of at least ``nbytes``; never blocks.

        Raises:
            MemoryError: There is none.
        """
        ...

    def take_free(self, nbytes: int) -> D | None:
        """Give page-locked memory that was made before, at once; None: there is none.

        For the thread that queues forwards, beside any other method. None is always right: then
        :meth:`allocate` is called in its turn.
        """
        ...

    def publish(
        self,
        label: OutputLabel,
        packed: Packed,
        destination: D | None,
        timings: OutputTimings,
    ) -> Any:
        """Hand a finished output over; what it returns is the result of its future."""
        ...

    def publish_error(self, label: OutputLabel, error: BaseException) -> None:
        """Say that an output failed on its way."""
        ...

    def discard(self, destination: D) -> None:
        """Take back memory that was allocated and not published."""
        ...

    def close(self) -> None:
        """Give up the memory that the sink owns; published outputs stay valid."""
        ...


@dataclass(frozen=True)
class HostBuffer:
    """Memory of this process."""

    buffer: torch.Tensor
    is_page_locked: bool


class HostSink:
    """Outputs for this process, in page-locked memory where the platform has it.

    The result of an output's future is its tree; ``deliver(label, tree, timings)`` gets it too, and
    ``fail(label, error)`` what went wrong.
    """

    inline_bytes = 0

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        *,
        deliver: Callable[[OutputLabel, Any, OutputTimings, int], None] | None = None,
        fail: Callable[[OutputLabel, BaseException], None] | None = None,
    ) -> None:
        self._platform = platform
        self._device = device
        self._deliver = deliver
        self._fail = fail

    @property
    def stats(self) -> None:
        """Give None: the sink keeps no memory."""

    def reserve(self, nbytes: int, count: int) -> None:
        """Allocate and let go: of use where the platform keeps what is freed, as CUDA does."""
        buffers = [self.allocate(nbytes) for _ in range(count)]
        buffers.clear()

    def allocate(self, nbytes: int) -> HostBuffer:
        """Allocate from the platform's page-locked allocator, else from pageable memory."""
        import torch

        buffer = self._platform.pinned_buffer(self._device, nbytes)
        if buffer is None:
            return HostBuffer(torch.empty(nbytes, dtype=torch.uint8), is_page_locked=False)
        return HostBuffer(buffer, is_page_locked=True)

    def take_free(self, nbytes: int) -> None:
        """Give None: what the platform's allocator keeps is unknown, and new memory takes long."""

    def publish(
        self,
        label: OutputLabel,
        packed: Packed,
        destination: HostBuffer | None,
        timings: OutputTimings,
    ) -> Any:
        """Rebuild the tree around the buffer."""
        leaves = None if destination is None else destination.buffer.numpy()
        tree = unpack(packed.head, leaves)
        if self._deliver is not None:
            self._deliver(label, tree, timings, packed.nbytes + len(packed.head))
        return tree

    def publish_error(self, label: OutputLabel, error: BaseException) -> None:
        """Pass the error on."""
        if self._fail is not None:
            self._fail(label, error)

    def discard(self, destination: HostBuffer) -> None:
        """Do nothing: the buffer dies with its last reference."""

    def close(self) -> None:
        """Do nothing: the sink owns no memory."""


class SlotSink:
    """Outputs for the process at the other end of ``messages``, in shared memory slots.

    ``releases`` brings back the slots that the reader no longer uses; it is read only when a slot
    is needed, since each wake-up here costs the forward. ``budget_bytes`` bounds the arenas; when
    they are leased out, an output gets a one-shot mapping of its own.
    """

    inline_bytes = 8 << 10

    def __init__(
        self,
        messages: Channel,
        releases: Channel,
        platform: Platform,
        device: torch.device,
        *,
        budget_bytes: int = 512 << 20,
    ) -> None:
        self._messages = messages
        self._releases = releases
        pin = None
        if platform.is_asynchronous:

            def pin(address: int, nbytes: int) -> Any:
                return platform.pin_host_memory(device, address, nbytes)

        self._pool = SlotPool(budget_bytes, pin=pin)
        # Guards _pool and the reading of _releases: two threads take slots.
        self._lock = threading.Lock()

    @property
    def stats(self) -> PoolStats:
        """Count arenas and slots; any thread."""
        return self._pool.stats

    def reserve(self, nbytes: int, count: int) -> None:
        """Make arenas for ``count`` outputs, prefaulted and page-locked, within the budget."""
        with self._lock:
            self._pool.reserve(nbytes, count)

    def allocate(self, nbytes: int) -> Slot:
        """Take a free slot, after taking in what came back."""
        with self._lock:
            self._take_in(nbytes)
            try:
                return self._pool.acquire(nbytes)
            finally:
                self._tell_of_dropped()

    def take_free(self, nbytes: int) -> Slot | None:
        """Take a slot of an arena that is there and page-locked."""
        # Not waited for: whoever has it may be making an arena, which takes long. Nor tried: Ctrl-C
        # right behind that would leave it locked.
        if self._lock.locked():
            return None
        with self._lock:
            self._take_in(nbytes)
            self._tell_of_dropped()
            return self._pool.take_free(nbytes)

    def _take_in(self, nbytes: int) -> None:
        """Take in slots that came back: one message of them, and more if there is no room yet."""
        # One message for each output, as a rule: to look for more takes longer than to read one.
        while (chunk := self._releases.receive_bytes()) is not None:
            self._pool.take_releases(chunk)
            if self._pool.has_room(nbytes):
                break

    def _tell_of_dropped(self) -> None:
        for arena_id in self._pool.take_dropped():
            self._messages.send(Frame(kind=ARENA_DROPPED, arena_id=arena_id))

    def publish(
        self,
        label: OutputLabel,
        packed: Packed,
        destination: Slot | None,
        timings: OutputTimings,
    ) -> None:
        """Send OUTPUT_READY, or the part's; from then on the reader owns the slot."""
        frame = encode_output(
            output_id=label.output_id,
            rpc_id=label.rpc_id,
            attempt=label.attempt,
            head=packed.to_bytes() if destination is None else packed.head,
            timings=timings,
            post_process=label.post_process,
            slot=destination,
            kind=label.kind,
        )
        self._messages.send(frame)
        if destination is not None:
            with self._lock:
                self._pool.announced(destination)

    def publish_error(self, label: OutputLabel, error: BaseException) -> None:
        """Send OUTPUT_READY with an error in it."""
        self.send(
            AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY,
                rpc_id=label.rpc_id,
                attempt=label.attempt,
                async_output_id=label.output_id,
                error=error,
            )
        )

    def send(self, message: AsyncDiffusionOutput) -> None:
        """Send an envelope that carries no output; any thread."""
        self._messages.send(encode_message(message))

    def discard(self, destination: Slot) -> None:
        """Free a slot that was never announced."""
        with self._lock:
            self._pool.release(destination.token)

    def close(self) -> None:
        """Unlock and unmap the arenas."""
        with self._lock:
            self._pool.close()
