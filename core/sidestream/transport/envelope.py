"""Commands and envelopes as frames, and back.

The receiving side of an envelope is a :class:`Delivery`: the pump reads a fixed header and takes
the lease, the tree is decoded by :meth:`Delivery.open` in the thread that wants it.
"""

from __future__ import annotations

import dataclasses
import operator
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from sidestream.errors import InternalError
from sidestream.protocol import (
    AsyncDiffusionOutput,
    AsyncOutputKind,
    Call,
    Command,
    Execute,
    ExecuteStep,
    Shutdown,
    StepStage,
)
from sidestream.request import OutputTimings
from sidestream.transport.arena import Slot
from sidestream.transport.channel import Frame
from sidestream.transport.failure import FAILED, decode_error, error_body
from sidestream.transport.lease import ArenaMap, Lease
from sidestream.transport.packing import pack_bytes, unpack, unpack_bytes

#: Kind of a frame that only says that the worker let go of an arena.
ARENA_DROPPED: Final = 32

_EXECUTE: Final = 16
_CALL: Final = 17
_SHUTDOWN: Final = 18
_STEP: Final = 19

# Calling the enumeration takes ten times as long as this.
_KINDS: Final = {int(kind): kind for kind in AsyncOutputKind}

# Times travel as a plain tuple: to pickle a dataclass takes 2 us longer, of a thread that keeps a
# forward from its launches.
_TIMES: Final = tuple(
    field.name for field in dataclasses.fields(OutputTimings) if field.name != "carrier"
)
_times_of: Final = operator.attrgetter(*_TIMES)

# --- commands: main process to worker ---------------------------------------------------------


def encode_command(command: Command) -> Frame:
    """Make a frame of a command; large bodies travel beside the socket, see ``channel``."""
    match command:
        case Execute():
            parts = (command.output_ids, command.attempts, command.requests)
            body = pickle.dumps(parts, protocol=5)
            return Frame(kind=_EXECUTE, rpc_id=command.rpc_id, body=body)
        case ExecuteStep():
            fields = (int(command.stage), command.output_ids, command.attempts, command.requests)
            body = pickle.dumps(fields, protocol=5)
            return Frame(kind=_STEP, rpc_id=command.rpc_id, body=body)
        case Call():
            body = pickle.dumps((command.method, command.arguments), protocol=5)
            return Frame(kind=_CALL, rpc_id=command.rpc_id, body=body)
        case Shutdown():
            return Frame(kind=_SHUTDOWN)


def decode_command(frame: Frame) -> Command:
    """Rebuild a command; the requests and arguments in it stay packed."""
    if frame.kind == _EXECUTE:
        output_ids, attempts, requests = pickle.loads(frame.body)
        return Execute(
            rpc_id=frame.rpc_id, output_ids=output_ids, attempts=attempts, requests=requests
        )
    if frame.kind == _STEP:
        stage, output_ids, attempts, requests = pickle.loads(frame.body)
        return ExecuteStep(
            rpc_id=frame.rpc_id,
            stage=StepStage(stage),
            output_ids=output_ids,
            attempts=attempts,
            requests=requests,
        )
    if frame.kind == _CALL:
        method, arguments = pickle.loads(frame.body)
        return Call(rpc_id=frame.rpc_id, method=method, arguments=arguments)
    if frame.kind == _SHUTDOWN:
        return Shutdown()
    raise InternalError(f"A worker received a frame of kind {frame.kind}, which is no command.")


# --- envelopes: worker to main process --------------------------------------------------------


def encode_message(message: AsyncDiffusionOutput) -> Frame:
    """Make a frame of an envelope that carries no output tree.

    Raises:
        PackingError: A call's result holds something that can't travel.
    """
    kind = int(message.kind)
    if message.error is not None:
        kind |= FAILED
        body = error_body(message.error, message.timings)
    elif message.kind is AsyncOutputKind.RPC_RESULT:
        # Wrapped in a tuple: None is a fair result, but no payload.
        body = pack_bytes((message.result,), root="result")
    elif message.kind is AsyncOutputKind.PROGRESS:
        body = str(message.result).encode()
    else:
        body = b""
    return Frame(
        kind=kind,
        rpc_id=message.rpc_id,
        attempt=message.attempt,
        output_id=message.async_output_id or "",
        body=body,
    )


def encode_output(
    *,
    output_id: str,
    rpc_id: int,
    attempt: int,
    head: bytes,
    timings: OutputTimings,
    post_process: str | None,
    slot: Slot | None,
    kind: AsyncOutputKind = AsyncOutputKind.OUTPUT_READY,
) -> Frame:
    """Make the frame of a packed output, or of a part; the frame is what commits its slot.

    ``slot`` None: ``head`` holds the leaves too (``pack_bytes``).
    """
    body = pickle.dumps((_times_of(timings), post_process, head), protocol=5)
    if slot is None:
        return Frame(kind, rpc_id, attempt, output_id, body=body)
    return Frame(
        kind,
        rpc_id,
        attempt,
        output_id,
        slot.arena_id,
        slot.offset,
        slot.nbytes,
        slot.token,
        slot.arena_nbytes,
        slot.is_one_shot,
        body,
        slot.fd,
    )


class Delivery:
    """An envelope that arrived and is not decoded yet.

    States: held, then opened or discarded; one that nobody holds any more discards itself.
    """

    def __init__(
        self,
        kind: AsyncOutputKind,
        *,
        rpc_id: int,
        attempt: int,
        async_output_id: str,
        failed: bool,
        nbytes: int,
        carrier: str,
    ) -> None:
        self.kind = kind
        self.rpc_id = rpc_id
        self.attempt = attempt
        self.async_output_id = async_output_id
        #: Whether it carries an error.
        self.failed = failed
        #: Bytes of memory that it keeps.
        self.nbytes = nbytes
        #: How an output travelled, see ``OutputTimings.carrier``.
        self.carrier = carrier
        #: ``time.monotonic()`` of its arrival.
        self.received_at = time.monotonic()
        self._on_settled: Callable[[int], None] | None = None

    def count(self, on_settled: Callable[[int], None]) -> None:
        """Have ``on_settled(nbytes)`` called once this is opened or discarded.

        It may run inside a finalizer, hence inside any lock: it must take none.
        """
        self._on_settled = on_settled

    def open(self) -> tuple[AsyncDiffusionOutput, str | None]:
        """Decode it, once, in the calling thread; gives the key of its post-processing too.

        Raises:
            InternalError: It was opened or discarded before.
            HostMemoryError: This process could not map what came with it.
            Whatever a user's class raises while it is rebuilt.
        """
        try:
            return self._open()
        finally:
            self._settle()

    def discard(self) -> None:
        """Give its memory back undecoded; idempotent, and nothing after :meth:`open`."""
        self._discard()
        self._settle()

    def __del__(self) -> None:
        self.discard()

    def _open(self) -> tuple[AsyncDiffusionOutput, str | None]:
        raise NotImplementedError

    def _discard(self) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        on_settled, self._on_settled = self._on_settled, None
        if on_settled is not None:
            on_settled(self.nbytes)


class LocalDelivery(Delivery):
    """An envelope from a worker of the same process: nothing to decode."""

    def __init__(
        self, message: AsyncDiffusionOutput, *, nbytes: int = 0, post_process: str | None = None
    ) -> None:
        self._message: AsyncDiffusionOutput | None = message
        self._post_process = post_process
        super().__init__(
            message.kind,
            rpc_id=message.rpc_id,
            attempt=message.attempt,
            async_output_id=message.async_output_id or "",
            failed=message.error is not None,
            nbytes=nbytes,
            carrier="host",
        )

    def _open(self) -> tuple[AsyncDiffusionOutput, str | None]:
        message, self._message = self._message, None
        if message is None:
            raise InternalError(f"Output {self.async_output_id!r} was opened twice.")
        timings = replace(message.timings, carrier=self.carrier)
        return replace(message, timings=timings), self._post_process

    def _discard(self) -> None:
        self._message = None


class FrameDelivery(Delivery):
    """An envelope from a worker process, with the lease on its slot."""

    def __init__(self, frame: Frame, arenas: ArenaMap) -> None:
        self._frame: Frame | None = frame
        self._lease: Lease | None = None
        carrier = "inline"
        nbytes = len(frame.body)
        if frame.token:
            carrier = "one-shot" if frame.is_one_shot else "slot"
            nbytes += frame.nbytes
            self._lease = arenas.lease(
                arena_id=frame.arena_id,
                offset=frame.offset,
                nbytes=frame.nbytes,
                token=frame.token,
                fd=frame.slot_fd,
                arena_nbytes=frame.arena_nbytes,
                is_one_shot=frame.is_one_shot,
            )
        super().__init__(
            _KINDS[frame.kind & ~FAILED],
            rpc_id=frame.rpc_id,
            attempt=frame.attempt,
            async_output_id=frame.output_id,
            failed=bool(frame.kind & FAILED),
            nbytes=nbytes,
            carrier=carrier,
        )

    def _open(self) -> tuple[AsyncDiffusionOutput, str | None]:
        frame, self._frame = self._frame, None
        lease, self._lease = self._lease, None
        if frame is None:
            raise InternalError(f"Output {self.async_output_id!r} was opened twice.")
        if frame.body_error is not None:
            lease = None  # back with the slot, whoever keeps the error and this frame with it
            raise frame.body_error
        post_process: str | None = None
        result, output, error, timings = None, None, None, None
        if self.failed:
            timings, data = pickle.loads(frame.body)
            error = decode_error(data)
        elif self.kind in (AsyncOutputKind.OUTPUT_READY, AsyncOutputKind.CHUNK_READY):
            times, post_process, head = pickle.loads(frame.body)
            output = unpack_bytes(head) if lease is None else unpack(head, lease.array())
            timings = _timings_of(times, self.carrier)
        elif self.kind is AsyncOutputKind.RPC_RESULT:
            (result,) = unpack_bytes(frame.body)
        elif self.kind is AsyncOutputKind.PROGRESS:
            result = bytes(frame.body).decode()
        message = AsyncDiffusionOutput(
            kind=self.kind,
            rpc_id=self.rpc_id,
            async_output_id=self.async_output_id or None,
            attempt=self.attempt,
            result=result,
            output=output,
            error=error,
            timings=timings or OutputTimings(),
        )
        return message, post_process

    def _discard(self) -> None:
        lease, self._lease = self._lease, None
        self._frame = None
        if lease is not None:
            lease.release()


def _timings_of(times: tuple[Any, ...], carrier: str) -> OutputTimings:
    return OutputTimings(**dict(zip(_TIMES, times, strict=True)), carrier=carrier)
