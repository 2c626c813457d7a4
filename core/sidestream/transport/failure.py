"""Exceptions on their way to another process or thread.

The chain of causes travels with the exception; at its end stands the sender's traceback as text. A
link that can't be pickled, can't be rebuilt, or is too large travels as text in its place, so that
reporting a failure never fails itself and never moves tensors.
"""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import RemoteTraceback, SidestreamError
from sidestream.request import OutputTimings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: An exception that drags more than this along travels as text.
MAX_ERROR_BYTES: Final = 1 << 20
#: Set in a frame's kind when its body is an error, see :func:`error_body`.
FAILED: Final = 0x80
_MAX_LINKS: Final = 16
_MAX_TEXT: Final = 1 << 15
#: Of a message inside a traceback, or inside another message; all of it is in the exception.
_MAX_LINE: Final = 2000


class RemoteError(Exception):
    """Stands for an exception that could not travel: its type's name and its message."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type_name, self.message)


def describe_error(error: BaseException) -> str:
    """Give a type's name and message, shortened, to quote in another message; never raises."""
    name, text = type(error).__name__, _shorten(_text(error), _MAX_LINE)
    return f"{name}: {text}" if text else name


def without_causes(error: BaseException) -> BaseException:
    """Copy an error in few words, for when there is no memory to send all that hangs on it."""
    if isinstance(error, SidestreamError):
        return copy.copy(error)
    return RemoteError(_name(error), _shorten(_text(error), _MAX_LINE))


def detach_frames(error: BaseException) -> None:
    """Put the traceback's text at the end of the chain of causes, in place of all its frames.

    A frame keeps what was local to it: tensors, arrays, the leases of slots.
    """
    text = _traceback_text(error)
    links = _chain(error)
    last = links[-1]
    if len(links) > 1 and isinstance(last, RemoteTraceback):
        last = links[-2]  # an exception that is raised anew each time: its old text is in the new
    _set_cause(last, RemoteTraceback(text))
    for relative in _relatives(error):
        relative.with_traceback(None)


def encode_error(error: BaseException) -> bytes:
    """Encode ``error``, its causes and its traceback; never raises."""
    *links, last = _chain(error)
    if links and isinstance(last, RemoteTraceback):
        text = last.text
    else:
        links.append(last)
        text = _traceback_text(error)
    return pickle.dumps(([_encode_link(link) for link in links[:_MAX_LINKS]], text), protocol=5)


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
        _set_cause(error, below)
        below = error
    return below


# --- chains -----------------------------------------------------------------------------------


def _chain(error: BaseException) -> list[BaseException]:
    """List what a traceback would show of ``error`` and its causes; a cycle is cut."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not known for known in links):
        links.append(link)
        # Not by "or": an exception may be false.
        if link.__cause__ is not None or link.__suppress_context__:
            link = link.__cause__
        else:
            link = link.__context__
    return links


def _relatives(error: BaseException) -> Iterator[BaseException]:
    """Find everything that ``error`` keeps alive as an exception, what it hides included."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        pending += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions
        yield link


def _set_cause(error: BaseException, cause: BaseException) -> None:
    # A frozen dataclass may be an exception too, and refuses a plain assignment.
    object.__setattr__(error, "__cause__", cause)


# --- one exception ----------------------------------------------------------------------------


class _TooLarge(Exception):
    """A pickle grew past what an exception may drag along."""


class _BoundedFile(io.BytesIO):
    def write(self, data: ReadableBuffer, /) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_ERROR_BYTES:
            raise _TooLarge
        return super().write(data)


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


def _encode_link(error: BaseException) -> tuple[bytes | None, str, str]:
    payload: bytes | None = None
    try:
        file = _BoundedFile()
        _Pickler(file, protocol=5).dump(error)
        payload = file.getvalue()
        if _load(payload) is None:
            payload = None
    except BaseException:  # noqa: BLE001 - boundary: a user's __reduce__ may raise anything
        payload = None
    return payload, _name(error), _shorten(_text(error), _MAX_TEXT)


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
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - boundary: a user's __str__ may raise anything
        return f"(its message can't be shown: __str__ raised {type(broken).__name__})"


def _traceback_text(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001 - boundary: as in _text
        text = f"{_name(error)} (its traceback can't be shown: {_name(broken)})\n"
    return _shorten("\n".join(_shorten(line, _MAX_LINE) for line in text.split("\n")), _MAX_TEXT)


def _shorten(text: str, limit: int) -> str:
    """Cut the middle out: both ends of a traceback say more."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} [{len(text) - limit} characters] {text[-(limit // 2) :]}"
