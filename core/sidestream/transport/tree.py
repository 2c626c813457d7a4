"""Trees of any objects as a pickle with holes, in which the leaves were.

A head is two pickles in one: the tree's, in which each leaf is a number (and its class, where that
is to be kept), and the list of what these numbers mean: a leaf's kind, its place among the leaves'
bytes, how to rebuild it there. A tree that is nothing but a leaf has no pickle of its own.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final

import numpy as np
import torch

from sidestream.errors import SidestreamError
from sidestream.transport import leaf as leaves
from sidestream.transport.failure import describe_error
from sidestream.transport.leaf import MIN_LEAF_BYTES, Bytes, Leaf, padding

_TENSOR, _ARRAY, _BYTES, _BYTEARRAY = range(4)
#: Types that are never leaves, by far the most of a tree's nodes.
_COMMON: Final = frozenset({str, int, float, bool, type(None), dict, list, tuple})
_EMPTY: Final[Bytes] = np.empty(0, dtype=np.uint8)


class PackingError(SidestreamError, ValueError):
    """A payload holds something that can't travel; nothing is left behind."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        #: Where it is in the tree, such as ``output['frames'][3]``.
        self.path = path
        self.reason = reason


class UnpackingError(SidestreamError, ValueError):
    """A payload arrived but can't be rebuilt in this process; ``__cause__`` says why."""


class _Refused(Exception):
    """Something in the tree has no bytes that could travel."""


#: What a head says of a leaf: kind, offset, bytes, layout.
_Entry = tuple[int, int, int, tuple[Any, ...]]


class _Leaves:
    """The leaves of a tree, and what its head says of them."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.entries: list[_Entry] = []
        self._nbytes = 0

    def add(self, kind: int, obj: Any) -> None:
        leaf: Leaf | None
        layout: tuple[Any, ...] = ()
        if kind == _TENSOR:
            leaf, layout = leaves.from_tensor(obj)
        elif kind == _ARRAY:
            leaf, layout = leaves.from_array(obj)
        else:
            leaf = leaves.from_bytes(obj)
        if leaf is None:
            self.entries.append((kind, 0, 0, layout))
            return
        leaf.offset = self._nbytes
        self._nbytes += leaf.nbytes + padding(leaf.nbytes)
        self.leaves.append(leaf)
        self.entries.append((kind, leaf.offset, leaf.nbytes, layout))

    def head(self, tree: bytes) -> bytes:
        return pickle.dumps((tree, self.entries), protocol=5)


class _Pickler(pickle.Pickler):
    """Pickles a tree and pulls its leaves out; the same leaf twice is pulled out once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.leaves = _Leaves()
        # By identity, with the object itself, which must outlive its id.
        self._known: dict[int, tuple[Any, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        cls = type(obj)
        if cls in _COMMON:
            return None
        kind = _TENSOR if cls is torch.Tensor else _kind(obj)
        if kind is None:
            return None
        known = self._known.get(id(obj))
        if known is None:
            self._known[id(obj)] = known = obj, self._pull_out(kind, obj)
        return known[1]

    def _pull_out(self, kind: int, obj: Any) -> Any:
        number, kept = len(self.leaves.entries), None
        if kind == _TENSOR:
            reason = leaves.refusal(obj)
            if reason is not None:
                raise _Refused(f"this tensor can't travel: {reason}.")
            if type(obj) is not torch.Tensor:
                obj, kept = leaves.without_class(obj)
        self.leaves.add(kind, obj)
        # A number alone costs least: pickle asks for the id of everything in an id, too.
        return number if kept is None else (number, kept)

    def reducer_override(self, obj: Any) -> Any:
        # Without it there is no image, nor while another thread still imports it.
        kind = getattr(sys.modules.get("PIL.Image"), "Image", None)
        if kind is None or not isinstance(obj, kind):
            return NotImplemented
        palette = obj.palette
        if palette is None or palette.mode == "RGB":
            return NotImplemented
        # Pillow pickles the colors of a palette without their transparency.
        make, arguments, state = obj.__reduce_ex__(5)[:3]
        colors = palette.mode, bytes(obj.getpalette(palette.mode))
        return make, arguments, (state, colors), None, None, _restore_image


def _kind(obj: Any) -> int | None:
    """Tell what kind of leaf an object is; None: none."""
    cls = type(obj)
    if isinstance(obj, torch.Tensor):
        return _TENSOR
    if cls is np.ndarray or cls is np.memmap:
        return None if obj.dtype.hasobject else _ARRAY  # pickle walks its elements
    if (cls is bytes or cls is bytearray) and len(obj) >= MIN_LEAF_BYTES:
        return _BYTES if cls is bytes else _BYTEARRAY
    return None


def _restore_image(image: Any, state: tuple[Any, tuple[str, bytes]]) -> None:
    own, (mode, colors) = state
    image.__setstate__(own)
    image.putpalette(colors, mode)


def dump(tree: Any, root: str) -> tuple[bytes, list[Leaf]]:
    """Pickle everything but the leaves.

    Raises:
        PackingError: Something can't travel; names where it is.
    """
    try:
        if type(tree) is torch.Tensor and leaves.refusal(tree) is None:
            taken = _Leaves()  # by far the most payloads
            taken.add(_TENSOR, tree)
            return taken.head(b""), taken.leaves
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(tree)
        return pickler.leaves.head(buffer.getvalue()), pickler.leaves.leaves
    except Exception as error:  # noqa: BLE001 - boundary: classes of the payload run code here
        path, cause = _find_culprit(tree, root, error)
        raise PackingError(path, _explain(cause)) from cause


def _explain(cause: Exception) -> str:
    if isinstance(cause, _Refused):
        return str(cause)
    if isinstance(cause, RecursionError):
        return "this is nested too deeply to be pickled."
    return (
        f"this can't be sent to another process ({type(cause).__name__}: {cause}). "
        "Send tensors, arrays, images and plain objects of importable classes."
    )


def _find_culprit(tree: Any, path: str, error: Exception) -> tuple[str, Exception]:
    """Walk a tree that failed to pickle down to the part that fails by itself."""
    seen = {id(tree)}
    # Of a tree that is too deep every part is, for thousands of levels: its root says enough.
    while not isinstance(error, RecursionError):
        for step, child in _children(tree):
            if id(child) not in seen and (failure := _failure(child)) is not None:
                seen.add(id(child))
                tree, path, error = child, path + step, failure
                break
        else:
            break
    return path, error


def _failure(tree: Any) -> Exception | None:
    try:
        _Pickler(io.BytesIO()).dump(tree)
    except Exception as error:  # noqa: BLE001 - boundary: as in dump
        return error
    return None


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        return
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield f"[{reprlib.repr(key)}]", value
            yield f" key {reprlib.repr(key)}", key
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(tree._fields, tree, strict=True))
    elif isinstance(tree, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(tree))
    elif isinstance(tree, Set):
        yield from ((f"{{{reprlib.repr(value)}}}", value) for value in tree)
    elif isinstance(tree, np.ndarray):
        if tree.dtype.hasobject:
            yield from (
                (f"[{', '.join(map(str, place))}]", value) for place, value in np.ndenumerate(tree)
            )
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                yield f".{field.name}", getattr(tree, field.name)
    elif not isinstance(tree, type):
        yield from ((f".{name}", value) for name, value in getattr(tree, "__dict__", {}).items())


# --- rebuilding -------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, tree: bytes, made: list[Any]) -> None:
        super().__init__(io.BytesIO(tree))
        self._made = made
        self._classed: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is int:
            return self._made[pid]
        number, kept = pid
        if number not in self._classed:
            self._classed[number] = leaves.with_class(self._made[number], kept)
        return self._classed[number]


def _put_together(entry: _Entry, find: Callable[[int, int], Bytes]) -> Any:
    kind, offset, nbytes, layout = entry
    memory = find(offset, nbytes) if nbytes else _EMPTY
    if kind == _TENSOR:
        return leaves.to_tensor(memory, layout)
    if kind == _ARRAY:
        return leaves.to_array(memory, layout)
    return memory.tobytes() if kind == _BYTES else bytearray(memory.data)


def load(head: bytes | memoryview, find: Callable[[int, int], Bytes]) -> Any:
    """Rebuild a tree; ``find(offset, nbytes)`` gives the memory of each leaf.

    Raises:
        UnpackingError: A class can't be imported here, or refuses its own state.
    """
    try:
        tree, entries = pickle.loads(head)
        made = [_put_together(entry, find) for entry in entries]
        return _Unpickler(tree, made).load() if tree else made[0]
    except MemoryError:
        raise
    except Exception as error:  # boundary: classes of the payload run their own code here
        raise UnpackingError(
            f"A payload can't be rebuilt in this process ({describe_error(error)}). Its "
            "classes have to be importable on both sides: not from a script's __main__."
        ) from error
