"""Leaves: the parts of a payload whose bytes are worth moving by themselves.

A leaf is a tensor, an array or a long byte string. Its bytes travel as they are, in memory order
where the leaf covers its memory without gaps (a channels-last image is one straight copy and comes
back channels-last), else in logical order: a view moves its own bytes, not its storage.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Leaves start at multiples of this: whole cache lines, and enough for any device's copy engine.
LEAF_ALIGNMENT: Final = 256
#: Shorter byte strings cost more as leaves than inside the head.
MIN_LEAF_BYTES: Final = 16 << 10

# numpy knows no bfloat16 and no float8: a type of the same size carries their bits.
_CARRIERS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
#: Kinds of dtypes that their ``str`` describes completely.
_PLAIN_KINDS: Final = "biufcmMSU"


#: What a head keeps of a tensor or array: its dtype, its shape and the order of its dimensions in
#: memory. Plain values, which are pickled at once and mean the same for equal tensors.
Layout = tuple[Any, ...]


class Leaf:
    """One leaf's bytes and their place among the payload's.

    States: borrowed (aliases the caller's memory), private (does not).
    """

    __slots__ = ("_address", "_borrowed", "_source", "nbytes", "offset")

    def __init__(
        self, source: Any, nbytes: int, *, address: int | None = None, is_borrowed: bool
    ) -> None:
        """Make a leaf.

        Args:
            source: What keeps the bytes at ``address``, where they lie on the host in one piece;
                else the array or the device's tensor that they are to be read from.
        """
        self._source = source
        self._address = address
        self._borrowed = is_borrowed
        self.nbytes: Final = nbytes
        #: From the start of the payload's bytes; given when it is placed.
        self.offset = 0

    @property
    def is_on_device(self) -> bool:
        """Tell whether the bytes are in an accelerator's memory."""
        return self._address is None and isinstance(self._source, torch.Tensor)

    def make_private(self, *, clone_device: bool) -> None:
        """Stop aliasing memory that the caller may overwrite; a device clone is only queued."""
        if self.is_on_device:
            resolved = _resolve(self._source)
            if clone_device and self._borrowed and resolved is self._source:
                resolved = resolved.clone(memory_format=torch.contiguous_format)
            self._source = resolved
        elif self._borrowed:
            self._source = self.to_private_array()
            self._address = self._source.ctypes.data
        self._borrowed = False

    def write(self, destination: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy the bytes to ``offset`` in ``destination``: 1-D uint8 on the host, in one piece.

        The caller has seen to it that there is room.
        """
        if self._address is not None:
            # What numpy or torch do before they copy takes longer than a small copy, and torch is
            # 2.2 times slower at a large one. They all release the GIL.
            ctypes.memmove(destination.data_ptr() + self.offset, self._address, self.nbytes)
        else:
            place = destination
            if self.nbytes != destination.numel():
                place = destination[self.offset : self.offset + self.nbytes]
            self._gather(place, non_blocking=non_blocking)

    def to_array(self) -> Bytes:
        """Give the bytes as a 1-D host array: an alias if they lie in one piece, else a copy.

        An alias is for as long as this leaf is there and not dropped.
        """
        if self._address is not None:
            memory = (ctypes.c_char * self.nbytes).from_address(self._address)
            return np.frombuffer(memoryview(memory), dtype=np.uint8)
        copy = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self._gather(copy, non_blocking=False)
        return copy.numpy()

    def to_private_array(self) -> Bytes:
        """Give a copy of the bytes as a 1-D host array."""
        array = self.to_array()
        return array if self._address is None else array.copy()

    def _gather(self, place: torch.Tensor, *, non_blocking: bool) -> None:
        source = self._source
        if isinstance(source, torch.Tensor):
            # What is made here belongs to the current stream, so its memory may go when the call
            # ends. The leaf itself came from another stream and stays until drop().
            source = _resolve(source).contiguous()
            if source.dtype is not torch.uint8:
                place = place.view(source.dtype)
            place.view(source.shape).copy_(source, non_blocking=non_blocking)
        else:
            np.copyto(place.numpy().view(source.dtype).reshape(source.shape), source)


def padding(nbytes: int) -> int:
    """Give the bytes to the next place where a leaf may start."""
    return -nbytes % LEAF_ALIGNMENT


def _resolve(tensor: torch.Tensor) -> torch.Tensor:
    """Carry out a pending conjugation or negation, where the tensor is.

    ``copy_`` would do it on the host, after a non-blocking copy that has not happened yet.
    """
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor


# --- tensors ----------------------------------------------------------------------------------


def refusal(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no bytes that could be moved, and what to send instead."""
    cls = type(tensor)
    if tensor.is_nested:
        return "it is a nested tensor; send a list of its components (unbind())"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; send a dense tensor (to_dense())"
    if tensor.is_quantized:
        return "it is quantized; send dequantize(), or int_repr() with its scale"
    if tensor.is_meta:
        return "it is on the meta device and has no data"
    if cls is not torch.Tensor and (
        hasattr(cls, "__tensor_flatten__")
        or (tensor.is_cpu and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
    ):
        return (
            f"{cls.__qualname__} wraps other tensors; send what it wraps (to_local(), dequantize())"
        )
    return None


def from_tensor(tensor: torch.Tensor) -> tuple[Leaf | None, Layout]:
    """Take a plain tensor apart: its bytes, if it has any, and how to rebuild it around them."""
    is_on_host = tensor.is_cpu
    plain = tensor.detach() if tensor.requires_grad or not is_on_host else tensor
    order = None
    is_in_one_piece = plain.is_contiguous()
    if not is_in_one_piece:
        order = _memory_order(plain.stride())
        in_order = plain.permute(order)
        is_in_one_piece = in_order.is_contiguous()
        if is_in_one_piece:
            plain = in_order
        else:
            order = None
    dtype = plain.dtype
    layout = _dtype_name(dtype), tuple(plain.shape), None if order is None else _inverse(order)
    nbytes = plain.nbytes
    if nbytes == 0:
        return None, layout
    if not is_on_host:
        return Leaf(plain, nbytes, is_borrowed=True), layout
    resolved = _resolve(plain)
    is_borrowed = resolved is plain
    if not is_borrowed:
        is_in_one_piece = resolved.is_contiguous()
    if not is_in_one_piece:
        carrier = resolved.view(_CARRIERS[dtype.itemsize]).numpy()
        return Leaf(carrier, nbytes, is_borrowed=is_borrowed), layout
    address = resolved.data_ptr()
    if not address:
        raise ValueError("a tensor without memory")
    # The storage and not the tensor, which its owner may give another one meanwhile.
    storage = resolved.untyped_storage()
    return Leaf(storage, nbytes, address=address, is_borrowed=is_borrowed), layout


def to_tensor(memory: Bytes, layout: Layout) -> torch.Tensor:
    """Rebuild a tensor around ``memory``, which it keeps alive and shares."""
    dtype_name, shape, order = layout
    if memory.size:
        # By numpy, in one of torch's calls: each of them takes as long as all the rest.
        carrier, dtype = _carrier(dtype_name)
        tensor = torch.from_numpy(memory.view(carrier).reshape(shape))
        if dtype is not None:
            tensor = tensor.view(dtype)
    else:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype_name), device="cpu")
    return tensor if order is None else tensor.permute(order)


def without_class(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    """Give a subclass's tensor as a plain one, and what :func:`with_class` needs.

    A subclass comes back as one, with its attributes, unless it only stands for memory of another
    device. Autograd's history stays behind; a ``Parameter`` keeps ``requires_grad``.
    """
    cls = type(tensor)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    keeps_class = cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        if keeps_class:
            plain = plain.as_subclass(torch.Tensor)
    if not keeps_class and not is_parameter:
        return plain, None
    kept = cls if keeps_class else torch.nn.Parameter
    attributes = (vars(tensor) or None) if keeps_class and not is_parameter else None
    return plain, (kept, is_parameter and tensor.requires_grad, attributes)


def with_class(tensor: torch.Tensor, kept: tuple[Any, ...]) -> torch.Tensor:
    """Make a plain tensor what it was."""
    cls, requires_grad, attributes = kept
    tensor = tensor.as_subclass(cls)
    if requires_grad:
        tensor.requires_grad_(True)
    if attributes:
        vars(tensor).update(attributes)
    return tensor


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _carrier(dtype_name: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Give numpy's dtype for the bits of one of torch's, and that, unless they are the same."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    none = torch.empty(0, dtype=dtype, device="cpu")
    try:
        return none.numpy().dtype, None
    except TypeError:
        return none.view(_CARRIERS[dtype.itemsize]).numpy().dtype, dtype


# --- arrays -----------------------------------------------------------------------------------


def from_array(array: np.ndarray[Any, Any]) -> tuple[Leaf | None, Layout]:
    """Take an array without objects apart; as :func:`from_tensor`. A memmap becomes an ndarray."""
    plain: np.ndarray[Any, Any] = np.asarray(array)
    order = None
    if not plain.flags.c_contiguous:
        order = _memory_order(plain.strides)
        in_order = plain.transpose(order)
        if in_order.flags.c_contiguous:
            plain = in_order
        else:
            order = None
    dtype = plain.dtype
    is_plain = dtype.kind in _PLAIN_KINDS and dtype.isbuiltin != 2 and dtype.metadata is None
    order = None if order is None else _inverse(order)
    layout = (dtype.str if is_plain else dtype, plain.shape, order)
    nbytes = plain.nbytes
    if nbytes == 0:
        return None, layout
    if plain.flags.c_contiguous:
        return Leaf(plain, nbytes, address=plain.ctypes.data, is_borrowed=True), layout
    if not is_plain:
        # As opaque items: a copy of a structured dtype goes field by field and skips the padding.
        plain = plain.view(np.dtype((np.void, dtype.itemsize)))
    return Leaf(plain, nbytes, is_borrowed=True), layout


def to_array(memory: Bytes, layout: Layout) -> np.ndarray[Any, Any]:
    """Rebuild an array around ``memory``, which it keeps alive and shares."""
    description, shape, order = layout
    dtype = np.dtype(description)
    if memory.size:
        array: np.ndarray[Any, Any] = memory.view(dtype).reshape(shape)
    else:
        array = np.empty(shape, dtype=dtype)
    return array if order is None else array.transpose(order)


# --- byte strings -----------------------------------------------------------------------------


def from_bytes(data: bytes | bytearray) -> Leaf:
    """Take a byte string as it is."""
    array = np.frombuffer(data, dtype=np.uint8)
    is_borrowed = isinstance(data, bytearray)
    return Leaf(array, len(data), address=array.ctypes.data, is_borrowed=is_borrowed)


# --- memory order -----------------------------------------------------------------------------


def _memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Order dimensions from the widest stride to the narrowest."""
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
