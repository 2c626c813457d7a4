"""The payload codec: any tree of tensors, arrays, images and plain objects, in both directions.

::

    packed = pack(tree)                        # nothing is copied yet
    packed.write(slot.buffer)                  # the leaves' bytes, one copy each
    ...                                        # packed.head travels in the message
    tree = unpack(head, lease.array())         # tensors that alias the slot

The head is a pickle of the tree in which each leaf is a number, and of what these numbers mean:
its place and how to rebuild it. Types, dtypes and bits are kept. Rebuilding runs the pickle: only
for what one's own processes sent.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sidestream.errors import InternalError
from sidestream.transport import tree as trees
from sidestream.transport.leaf import Bytes, Leaf, padding
from sidestream.transport.tree import PackingError, UnpackingError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "Packed",
    "PackingError",
    "UnpackingError",
    "detach_copy",
    "pack",
    "pack_bytes",
    "unpack",
    "unpack_bytes",
]

_PREFIX: Final = struct.Struct("<QQ")  # bytes of the head, bytes of the leaves
#: Enough for any dtype that torch or numpy loads with aligned instructions.
_MIN_ALIGNMENT: Final = 16


class Packed:
    """A payload taken apart, until its bytes are written.

    Keeps every leaf's memory referenced until :meth:`drop`. Used by one thread at a time.
    """

    __slots__ = (
        "_leaves",
        "has_device_leaves",
        "head",
        "is_on_device",
        "leaf_nbytes",
        "nbytes",
    )

    def __init__(self, head: bytes, leaves: list[Leaf]) -> None:
        #: Everything but the leaves' bytes.
        self.head: Final = head
        self._leaves = leaves
        end, own, on_device = 0, 0, 0
        for leaf in leaves:
            end = leaf.offset + leaf.nbytes
            own += leaf.nbytes
            on_device += leaf.is_on_device
        #: Room that the leaves need, each at a multiple of ``LEAF_ALIGNMENT``; 0: none.
        self.nbytes: Final = end + padding(end)
        #: Sum of the leaves' own bytes.
        self.leaf_nbytes: Final = own
        #: Whether any byte has to come from an accelerator's memory.
        self.has_device_leaves: Final = on_device > 0
        #: Whether all of them have to, and there are any.
        self.is_on_device: Final = 0 < on_device == len(leaves)

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
        if (
            destination.dtype is not torch.uint8
            or destination.numel() < self.nbytes
            or not destination.is_contiguous()
            or not destination.is_cpu
        ):
            raise InternalError(
                f"A payload of {self.nbytes} bytes was to be written to {destination.numel()} "
                f"elements of {destination.dtype} on {destination.device}."
            )
        for leaf in self._leaves:
            leaf.write(destination, non_blocking=non_blocking)

    def to_bytes(self) -> bytes:
        """Make one byte string of it all, for :func:`unpack_bytes`; waits for device leaves."""
        parts: list[ReadableBuffer] = [_PREFIX.pack(len(self.head), self.nbytes), self.head]
        parts.append(bytes(padding(_PREFIX.size + len(self.head))))
        for leaf in self._leaves:
            parts.append(leaf.to_array().data)
            parts.append(bytes(padding(leaf.nbytes)))
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
    return Packed(*trees.dump(tree, root))


def unpack(head: bytes | memoryview, leaves: Bytes | None) -> Any:
    """Rebuild a payload whose leaves' bytes lie in ``leaves``.

    Tensors and arrays alias ``leaves`` and keep that very object alive; where it is read-only they
    are copies, since torch knows no read-only tensors.

    Raises:
        UnpackingError: A class can't be imported here, or refuses its own state.
    """
    if leaves is None:
        leaves = np.empty(0, dtype=np.uint8)
    memory, is_writable = leaves, leaves.flags.writeable

    def find(offset: int, nbytes: int) -> Bytes:
        place = memory if nbytes == memory.size else memory[offset : offset + nbytes]
        return place if is_writable else place.copy()

    return trees.load(head, find)


def pack_bytes(tree: Any, *, root: str) -> bytes:
    """Pack into one self-contained byte string; device tensors are copied, and waited for.

    Unlike an output, the tree may be None.

    Raises:
        PackingError: As :func:`pack`.
    """
    return Packed(*trees.dump(tree, root)).to_bytes()


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
    memory = np.frombuffer(view, dtype=np.uint8, count=nbytes, offset=start + padding(start))
    if not memory.flags.writeable or memory.ctypes.data % _MIN_ALIGNMENT:
        memory = memory.copy()
    return unpack(head, memory)


def detach_copy(tree: Any) -> Any:
    """Copy a tree with all its tensors and arrays, each into memory of its own; same types.

    Raises:
        PackingError: As :func:`pack`.
    """
    packed = Packed(*trees.dump(tree, "output"))
    copies = {leaf.offset: leaf for leaf in packed._leaves}

    return trees.load(packed.head, lambda offset, _: copies[offset].to_private_array())
