"""Leaves: the parts of a payload whose bytes are worth moving by themselves.

A leaf is a tensor, an array or a long byte string. Its bytes travel as they are, in memory order
where the leaf covers its memory without gaps (a channels-last image is one straight copy and comes
back channels-last), else in logical order: a view moves its own bytes, not its storage.
"""

from __future__ import annotations

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


class Leaf:
    """One leaf's bytes and their place among the payload's.

    States: borrowed (aliases the caller's memory), private (does not).
    """

    __slots__ = ("_borrowed", "_device", "_host", "nbytes", "offset")

    def __init__(
        self, source: np.ndarray[Any, Any] | torch.Tensor, nbytes: int, *, is_borrowed: bool
    ) -> None:
        self._host = source if isinstance(source, np.ndarray) else None
        self._device = source if isinstance(source, torch.Tensor) else None
        self._borrowed = is_borrowed
        self.nbytes: Final = nbytes
        #: From the start of the payload's bytes; given when it is placed.
        self.offset = 0

    @property
    def room(self) -> int:
        """Give the bytes that it takes up among others."""
        return self.nbytes + padding(self.nbytes)

    @property
    def is_on_device(self) -> bool:
        """Tell whether the bytes are in an accelerator's memory."""
        return self._device is not None

    def make_private(self, *, clone_device: bool) -> None:
        """Stop aliasing memory that the caller may overwrite; a device clone is only queued."""
        if self._device is not None:
            resolved = _resolve(self._device)
            if clone_device and self._borrowed and resolved is self._device:
                resolved = resolved.clone(memory_format=torch.contiguous_format)
            self._device = resolved
        elif self._host is not None and self._borrowed:
            self._host = self._host.copy()
        self._borrowed = False

    def write(self, destination: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy the bytes into ``destination``, this leaf's own range: 1-D uint8, on the host."""
        if self._device is not None:
            # What is made here belongs to the current stream, so its memory may go when the call
            # ends. The leaf itself came from another stream and stays until drop().
            source = _resolve(self._device).contiguous()
            destination.view(source.dtype).view(source.shape).copy_(
                source, non_blocking=non_blocking
            )
        elif self._host is not None:
            source_array = self._host
            place = destination.numpy().view(source_array.dtype).reshape(source_array.shape)
            # Not torch.copy_: 2.2 times slower between host memories. Both release the GIL.
            np.copyto(place, source_array)

    def to_array(self) -> Bytes:
        """Give the bytes as a 1-D host array: an alias if they lie in one piece, else a copy."""
        if self._host is not None:
            return np.ascontiguousarray(self._host).reshape(-1).view(np.uint8)
        copy = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.write(copy, non_blocking=False)
        return copy.numpy()


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
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    if hasattr(cls, "__tensor_flatten__") or (
        tensor.device.type == "cpu"
        and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        return (
            f"{cls.__qualname__} wraps other tensors; send what it wraps (to_local(), dequantize())"
        )
    return None


def from_tensor(tensor: torch.Tensor) -> tuple[Leaf | None, tuple[Any, ...]]:
    """Take a tensor apart: its bytes, if it has any, and how to rebuild it around them.

    A subclass comes back as one, with its attributes, unless it only stands for memory of another
    device. Autograd's history stays behind; a ``Parameter`` keeps ``requires_grad``.
    """
    cls = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        keeps_class = (
            cls is not torch.Tensor and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        )
        if keeps_class:
            plain = plain.as_subclass(torch.Tensor)
    order = None
    if not plain.is_contiguous():
        order = _memory_order(plain.stride())
        in_order = plain.permute(order)
        if in_order.is_contiguous():
            plain = in_order
        else:
            order = None
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    kept_class = cls if keeps_class else torch.nn.Parameter if is_parameter else None
    rebuild = (
        str(plain.dtype).removeprefix("torch."),
        tuple(plain.shape),
        _inverse(order),
        kept_class,
        is_parameter and tensor.requires_grad,
        (vars(tensor) or None) if keeps_class and not is_parameter else None,
    )
    nbytes = plain.numel() * plain.element_size()
    if nbytes == 0:
        return None, rebuild
    if plain.device.type != "cpu":
        return Leaf(plain, nbytes, is_borrowed=True), rebuild
    resolved = _resolve(plain)
    carrier = resolved.view(_CARRIERS[resolved.element_size()]).numpy()
    return Leaf(_flat(carrier), nbytes, is_borrowed=resolved is plain), rebuild


def to_tensor(memory: Bytes, rebuild: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild a tensor around ``memory``, which it keeps alive and shares."""
    dtype_name, shape, order, cls, requires_grad, attributes = rebuild
    dtype: torch.dtype = getattr(torch, dtype_name)
    if memory.size:
        tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if order is not None:
        tensor = tensor.permute(order)
    if cls is not None:
        tensor = tensor.as_subclass(cls)
    if requires_grad:
        tensor.requires_grad_(True)
    if attributes:
        vars(tensor).update(attributes)
    return tensor


# --- arrays -----------------------------------------------------------------------------------


def from_array(array: np.ndarray[Any, Any]) -> tuple[Leaf | None, tuple[Any, ...]]:
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
    rebuild = (dtype.str if is_plain else dtype, plain.shape, _inverse(order))
    if plain.nbytes == 0:
        return None, rebuild
    if not is_plain:
        # As opaque items: a copy of a structured dtype goes field by field and skips the padding.
        plain = plain.view(np.dtype((np.void, dtype.itemsize)))
    return Leaf(_flat(plain), plain.nbytes, is_borrowed=True), rebuild


def to_array(memory: Bytes, rebuild: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Rebuild an array around ``memory``, which it keeps alive and shares."""
    description, shape, order = rebuild
    dtype = np.dtype(description)
    if memory.size:
        array: np.ndarray[Any, Any] = memory.view(dtype).reshape(shape)
    else:
        array = np.empty(shape, dtype=dtype)
    return array if order is None else array.transpose(order)


# --- byte strings -----------------------------------------------------------------------------


def from_bytes(data: bytes | bytearray) -> Leaf:
    """Take a byte string as it is."""
    return Leaf(
        np.frombuffer(data, dtype=np.uint8), len(data), is_borrowed=isinstance(data, bytearray)
    )


# --- memory order -----------------------------------------------------------------------------


def _memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Order dimensions from the widest stride to the narrowest."""
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def _inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if order is None:
        return None
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View an array that lies in one piece as plain bytes; others stay as they are."""
    return array.reshape(-1).view(np.uint8) if array.flags.c_contiguous else array
