"""Frames: the messages of a channel, and their bytes."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from sidestream.transport.memory import HostMemoryError, attach, share

#: Larger bodies travel as a memfd with the message: a socket takes no message over its send buffer
#: (212,992 bytes by default), and one large one would keep the small ones waiting.
MAX_INLINE_BYTES: Final = 64 << 10
MAX_OUTPUT_ID_BYTES: Final = 1 << 10

_VERSION: Final = 1
#: Version, kind, flags, bytes of the output id; rpc id, attempt; arena id, offset, nbytes, token,
#: arena_nbytes; bytes of the body.
_HEADER: Final = struct.Struct("<BBHIQQQQQQQQ")
MAX_MESSAGE_BYTES: Final = _HEADER.size + MAX_OUTPUT_ID_BYTES + MAX_INLINE_BYTES

_ONE_SHOT, _SLOT_FD, _BODY_FD = 1, 2, 4
#: How many descriptors come along, by these flags.
_DESCRIPTORS: Final = {0: 0, _SLOT_FD: 1, _BODY_FD: 1, _SLOT_FD | _BODY_FD: 2}


class Frame(NamedTuple):
    """One message.

    The slot fields are meant if ``token`` is not 0; they are those of ``arena.Slot`` and of
    ``ArenaMap.lease``. Who sends a frame keeps ``slot_fd``, who receives one owns it.
    """

    kind: int
    rpc_id: int = 0
    attempt: int = 0
    output_id: str = ""
    arena_id: int = 0
    offset: int = 0
    nbytes: int = 0
    token: int = 0
    arena_nbytes: int = 0
    is_one_shot: bool = False
    #: Any bytes; a received body of more than ``MAX_INLINE_BYTES`` is a writable mapping.
    body: bytes | memoryview = b""
    slot_fd: int | None = None
    #: Why ``body`` is empty though one was sent: this process could not map it.
    body_error: HostMemoryError | None = None


def body_fd(frame: Frame) -> int | None:
    """Put a large body into a memfd, which is the caller's to close."""
    return share(frame.body) if len(frame.body) > MAX_INLINE_BYTES else None


def descriptors(frame: Frame, body: int | None) -> list[int]:
    """Give the descriptors to send along, in their order."""
    if frame.slot_fd is None:
        return [] if body is None else [body]
    return [frame.slot_fd] if body is None else [frame.slot_fd, body]


def encode(frame: Frame, body: int | None) -> list[bytes | memoryview]:
    """Give the parts of the message; ``body`` is the descriptor of a body that is not in it."""
    output_id = frame.output_id.encode()
    if len(output_id) > MAX_OUTPUT_ID_BYTES:
        raise ValueError(
            f"An output id of {len(output_id)} bytes is too long; allowed: {MAX_OUTPUT_ID_BYTES}."
        )
    flags = 0
    if frame.is_one_shot:
        flags = _ONE_SHOT
    if frame.slot_fd is not None:
        flags |= _SLOT_FD
    if body is not None:
        flags |= _BODY_FD
    header = _HEADER.pack(
        _VERSION,
        frame.kind,
        flags,
        len(output_id),
        frame.rpc_id,
        frame.attempt,
        frame.arena_id,
        frame.offset,
        frame.nbytes,
        frame.token,
        frame.arena_nbytes,
        len(frame.body),
    )
    return [header, output_id] if body is not None else [header, output_id, frame.body]


def decode(data: bytes, fds: list[int]) -> Frame:
    """Make a frame of a message; takes the slot's descriptor out of ``fds``.

    Raises:
        ValueError: It is none.
    """
    if len(data) < _HEADER.size or data[0] != _VERSION:
        raise ValueError(
            f"A message of {len(data)} bytes and version {data[0]} arrived where version "
            f"{_VERSION} is spoken: the other end runs another version of sidestream."
        )
    _, kind, flags, id_nbytes, *numbers, body_nbytes = _HEADER.unpack_from(data)
    rpc_id, attempt, arena_id, offset, nbytes, token, arena_nbytes = numbers
    expected = _DESCRIPTORS[flags & (_SLOT_FD | _BODY_FD)]
    start = _HEADER.size + id_nbytes
    if len(fds) != expected or (not flags & _BODY_FD and len(data) != start + body_nbytes):
        raise ValueError(
            f"A message of {len(data)} bytes with {len(fds)} descriptors arrived where its header "
            f"announces {start + body_nbytes} and {expected}."
        )
    body: bytes | memoryview = data[start:]
    body_error = None
    if flags & _BODY_FD:
        try:
            # Private: its receiver may change it, what it shares with the sender is sealed.
            body = attach(fds[-1], body_nbytes, is_private=True).view()
        except HostMemoryError as error:
            body_error = error  # the header says whose it is, and who waits has to be told
    return Frame(
        kind,
        rpc_id,
        attempt,
        data[_HEADER.size : start].decode(),
        arena_id,
        offset,
        nbytes,
        token,
        arena_nbytes,
        bool(flags & _ONE_SHOT),
        body,
        fds.pop(0) if flags & _SLOT_FD else None,
        body_error,
    )
