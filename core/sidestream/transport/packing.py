"""The payload codec: any tree of tensors, arrays, images and plain objects, in both directions.

::

    packed = pack(tree)                        # nothing is copied yet
    packed.write(slot.buffer)                  # the leaves' bytes, one copy each
    ...                                        # packed.head travels in the message
    tree = unpack(head, lease.array())         # tensors that alias the slot

The head is a pickle of the tree in which each leaf is a persistent id: its place and how to rebuild
it. Types, dtypes and bits are kept. Rebuilding runs the pickle: only for what one's own processes
sent.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sidestream.errors import InternalError, SidestreamError
from sidestream.transport import leaf as leaves
from sidestream.transport.leaf import MIN_LEAF_BYTES, Bytes, Leaf

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: Leaves start at multiples of this: whole cache lines, and enough for any device's copy engine.
LEAF_ALIGNMENT: Final = 256

_PREFIX: Final = struct.Struct("<QQ")  # bytes of the head, bytes of the leaves
#: Enough for any dtype that torch or numpy loads with aligned instructions.
_MIN_ALIGNMENT: Final = 16

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


class Packed:
    """A payload taken apart, until its bytes are written.

    Keeps every leaf's memory referenced until :meth:`drop`. Used by one thread at a time.
    """

    def __init__(self, head: bytes, leaves: list[Leaf]) -> None:
        #: Everything but the leaves' bytes.
        self.head: Final = head
        self._leaves = leaves
        #: Room that the leaves need, each at a multiple of ``LEAF_ALIGNMENT``; 0: none.
        self.nbytes: Final = sum(map(_room, leaves))
        #: Sum of the leaves' own bytes.
        self.leaf_nbytes: Final = sum(leaf.nbytes for leaf in leaves)
        #: Whether any byte has to come from an accelerator's memory.
        self.has_device_leaves: Final = any(leaf.is_on_device for leaf in leaves)

    def make_private(self, *, clone_device: bool) -> None:
        """Copy what the caller may overwrite: host leaves now, device leaves on its stream.

        Args:
            clone_device: False where nobody writes to the device tensors again; pending
                conjugations and negations are carried out all the same.
        """
        for leaf in self._leaves:
            leaf.make_private(clone_device=clone_device)

    def write(self, destination: torch.Tensor, *, non_blocking: bool = True) -> None:
        """Copy the leaves into ``destination``; host leaves are there when it returns.

        Device leaves are one ``copy_`` each on the current stream: their bytes are there when an
        event recorded after this call is complete, and the stream must have been told to wait for
        whoever computes them.

        Args:
            destination: 1-D uint8 host tensor of at least ``nbytes``.
        """
        if destination.dtype is not torch.uint8 or destination.numel() < self.nbytes:
            raise InternalError(
                f"A payload of {self.nbytes} bytes was to be written to {destination.numel()} "
                f"elements of {destination.dtype}."
            )
        for leaf in self._leaves:
            place = destination[leaf.offset : leaf.offset + leaf.nbytes]
            leaf.write(place, non_blocking=non_blocking)

    def to_bytes(self) -> bytes:
        """Make one byte string of it all, for :func:`unpack_bytes`; waits for device leaves."""
        parts: list[ReadableBuffer] = [_PREFIX.pack(len(self.head), self.nbytes), self.head]
        parts.append(bytes(_padding(_PREFIX.size + len(self.head))))
        for leaf in self._leaves:
            parts.append(leaf.to_array().data)
            parts.append(bytes(_padding(leaf.nbytes)))
        return b"".join(parts)

    def drop(self) -> None:
        """Let go of every tensor and array at once."""
        self._leaves = []


def pack(tree: Any, *, root: str = "output") -> Packed:
    """Take a payload apart without copying a byte of its leaves.

    Args:
        root: What error messages call the tree.

    Raises:
        PackingError: The tree is None, or something in it can't travel; names where it is.
    """
    if tree is None:
        raise PackingError(root, "None is no payload; return an empty list to say 'nothing'.")
    return _take_apart(tree, root)


def unpack(head: bytes | memoryview, leaves: Bytes | None) -> Any:
    """Rebuild a payload whose leaves' bytes lie in ``leaves``.

    Tensors and arrays alias ``leaves`` and keep that very object alive; where it is read-only they
    are copies, since torch knows no read-only tensors.

    Raises:
        UnpackingError: A class can't be imported here, or refuses its own state.
    """
    memory = _EMPTY if leaves is None else leaves

    def find(offset: int, nbytes: int) -> Bytes:
        place = memory[offset : offset + nbytes]
        return place if place.flags.writeable else place.copy()

    return _rebuild(head, find)


def pack_bytes(tree: Any, *, root: str) -> bytes:
    """Pack into one self-contained byte string; device tensors are copied, and waited for.

    Unlike an output, the tree may be None.

    Raises:
        PackingError: As :func:`pack`.
    """
    return _take_apart(tree, root).to_bytes()


def unpack_bytes(data: ReadableBuffer) -> Any:
    """Rebuild what :func:`pack_bytes` made.

    Tensors and arrays are writable: they alias ``data`` and keep it alive if it can be written to,
    else they are copies.

    Raises:
        UnpackingError: As :func:`unpack`.
    """
    view = memoryview(data).cast("B")
    head_nbytes, nbytes = _PREFIX.unpack_from(view)
    start = _PREFIX.size + head_nbytes
    head = view[_PREFIX.size : start]
    if nbytes == 0:
        return unpack(head, None)
    # A view by numpy and not a slice of one: an array's views refer to it only if it isn't a view
    # of another array itself.
    memory = np.frombuffer(view, dtype=np.uint8, count=nbytes, offset=start + _padding(start))
    if not memory.flags.writeable or memory.ctypes.data % _MIN_ALIGNMENT:
        memory = memory.copy()
    return unpack(head, memory)


def detach_copy(tree: Any) -> Any:
    """Copy a tree with all its tensors and arrays, each into memory of its own; same types.

    Raises:
        PackingError: As :func:`pack`.
    """
    packed = _take_apart(tree, "output")
    copies = {leaf.offset: leaf for leaf in packed._leaves}

    def find(offset: int, nbytes: int) -> Bytes:
        place = np.empty(nbytes, dtype=np.uint8)
        copies[offset].write(torch.from_numpy(place), non_blocking=False)
        return place

    return _rebuild(packed.head, find)


def _room(leaf: Leaf) -> int:
    return leaf.nbytes + _padding(leaf.nbytes)


def _padding(nbytes: int) -> int:
    return -nbytes % LEAF_ALIGNMENT


# --- taking apart -----------------------------------------------------------------------------


class _Refused(Exception):
    """Something in the tree has no bytes that could travel."""


class _Pickler(pickle.Pickler):
    """Pickles a tree and pulls its leaves out; the same leaf twice is pulled out once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.leaves: list[Leaf] = []
        self._nbytes = 0
        # By identity, with the object itself, which must outlive its id.
        self._known: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        cls = type(obj)
        if cls in _COMMON:
            return None
        if isinstance(obj, torch.Tensor):
            kind = _TENSOR
        elif cls is np.ndarray or cls is np.memmap:
            if obj.dtype.hasobject:
                return None  # pickle walks its elements
            kind = _ARRAY
        elif (cls is bytes or cls is bytearray) and len(obj) >= MIN_LEAF_BYTES:
            kind = _BYTES if cls is bytes else _BYTEARRAY
        else:
            return None
        known = self._known.get(id(obj))
        if known is None:
            pid = self._pull_out(kind, obj)
            self._known[id(obj)] = known = obj, pid
        return known[1]

    def _pull_out(self, kind: int, obj: Any) -> tuple[Any, ...]:
        leaf: Leaf | None
        rebuild: tuple[Any, ...] = ()
        if kind == _TENSOR:
            reason = leaves.refusal(obj)
            if reason is not None:
                raise _Refused(f"this tensor can't travel: {reason}.")
            leaf, rebuild = leaves.from_tensor(obj)
        elif kind == _ARRAY:
            leaf, rebuild = leaves.from_array(obj)
        else:
            leaf = leaves.from_bytes(obj)
        number = len(self._known)
        if leaf is None:
            return number, kind, 0, 0, rebuild
        leaf.offset = self._nbytes
        self._nbytes += _room(leaf)
        self.leaves.append(leaf)
        return number, kind, leaf.offset, leaf.nbytes, rebuild


def _take_apart(tree: Any, root: str) -> Packed:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(tree)
    except Exception as error:  # noqa: BLE001 - boundary: classes of the payload run code here
        path, cause = _find_culprit(tree, root, error)
        raise PackingError(path, _explain(cause)) from cause
    return Packed(buffer.getvalue(), pickler.leaves)


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
    except Exception as error:  # noqa: BLE001 - boundary: as in _take_apart
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
    def __init__(self, head: bytes | memoryview, find: Callable[[int, int], Bytes]) -> None:
        super().__init__(io.BytesIO(head))
        self._find = find
        self._known: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, kind, offset, nbytes, rebuild = pid
        if number not in self._known:
            memory = self._find(offset, nbytes) if nbytes else _EMPTY
            self._known[number] = self._put_together(kind, memory, rebuild)
        return self._known[number]

    @staticmethod
    def _put_together(kind: int, memory: Bytes, rebuild: tuple[Any, ...]) -> Any:
        if kind == _TENSOR:
            return leaves.to_tensor(memory, rebuild)
        if kind == _ARRAY:
            return leaves.to_array(memory, rebuild)
        return memory.tobytes() if kind == _BYTES else bytearray(memory.data)


def _rebuild(head: bytes | memoryview, find: Callable[[int, int], Bytes]) -> Any:
    try:
        return _Unpickler(head, find).load()
    except MemoryError:
        raise
    except Exception as error:  # boundary: classes of the payload run their own code here
        raise UnpackingError(
            f"A payload can't be rebuilt in this process ({type(error).__name__}: {error}). Its "
            "classes have to be importable on both sides: not from a script's __main__."
        ) from error
