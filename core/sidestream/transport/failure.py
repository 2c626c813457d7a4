"""Exceptions on their way to another process.

The chain of causes travels with the exception; at its end stands the sender's traceback as text. A
link that can't be pickled, can't be rebuilt, or is too large travels as text in its place, so that
reporting a failure never fails itself and never moves tensors.
"""

from __future__ import annotations

import io
import pickle
import traceback
from typing import Any, Final

from sidestream.errors import RemoteTraceback
from sidestream.request import OutputTimings

#: An exception that drags more than this along travels as text.
MAX_ERROR_BYTES: Final = 1 << 20
#: Set in a frame's kind when its body is an error, see :func:`error_body`.
FAILED: Final = 0x80
_MAX_LINKS: Final = 16
_MAX_TEXT: Final = 1 << 16


class RemoteError(Exception):
    """Stands for an exception that could not travel: its type's name and its message."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type_name, self.message)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        # A tensor would be copied whole, or rebuilt on the receiver's accelerator. Recognized by
        # its class's name, since this module needs no torch.
        for cls in type(obj).__mro__:
            if cls.__module__ == "torch" and cls.__name__ == "Tensor":
                return f"<tensor {tuple(obj.shape)} {obj.dtype} on {obj.device}>"
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid


def encode_error(error: BaseException) -> bytes:
    """Encode ``error``, its causes and its traceback; never raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - boundary: a user's __str__ may raise anything
        text = f"{_name(error)} (its traceback can't be shown: {_name(broken)})\n"
    links: list[tuple[bytes | None, str, str]] = []
    link: BaseException | None = error
    while link is not None and len(links) < _MAX_LINKS:
        links.append(_encode_link(link))
        hidden = link.__suppress_context__
        link = link.__cause__ or (None if hidden else link.__context__)
    return pickle.dumps((links, text[-_MAX_TEXT:]), protocol=5)


def error_body(error: BaseException, timings: OutputTimings | None = None) -> bytes:
    """Make the body of a frame that reports ``error``."""
    return pickle.dumps((timings or OutputTimings(), encode_error(error)), protocol=5)


def decode_error(data: bytes | memoryview) -> BaseException:
    """Rebuild what :func:`encode_error` made, chained down to a ``RemoteTraceback``."""
    links, text = pickle.loads(data)
    below: BaseException = RemoteTraceback(text)
    for payload, type_name, message in reversed(links):
        error = _load(payload) if payload is not None else None
        if error is None:
            error = RemoteError(type_name, message)
        error.__cause__ = below
        below = error
    return below


def _encode_link(error: BaseException) -> tuple[bytes | None, str, str]:
    payload: bytes | None = None
    try:
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(error)
        payload = buffer.getvalue()
        if len(payload) > MAX_ERROR_BYTES or _load(payload) is None:
            payload = None
    except BaseException:  # noqa: BLE001 - boundary: a user's __reduce__ may raise anything
        payload = None
    return payload, _name(error), _text(error)


def _load(payload: bytes) -> BaseException | None:
    try:
        loaded = _Unpickler(io.BytesIO(payload)).load()
    except BaseException:  # noqa: BLE001 - boundary: a user's __setstate__ may raise anything
        return None
    return loaded if isinstance(loaded, BaseException) else None


def _name(error: BaseException) -> str:
    cls = type(error)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_TEXT]
    except Exception:  # noqa: BLE001 - boundary: a user's __str__ may raise anything
        return ""
