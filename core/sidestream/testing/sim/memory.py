"""Memory of the simulated accelerator: allocations full of poison, and page-locked host buffers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from sidestream.testing.sim.device import SimDevice
from sidestream.testing.sim.host import PAGE_LOCKS
from sidestream.testing.sim.lane import Kernel
from sidestream.testing.sim.stream import SimStream

_POISON: Final[dict[torch.dtype, float | int | bool]] = {torch.bool: True}
#: What exotic types are filled with, byte by byte; NaN in the float8 types that have one.
_POISON_BYTE: Final = 0xFF


class Allocation:
    """One allocation on a device, shared by the tensors that are views of it.

    When the last of them goes, the memory is its stream's again, as with a caching allocator: work
    of that stream that comes later may overwrite it, and here it does. So a stream that still
    reads it finds poison unless somebody kept a reference, or told the allocator with
    ``record_stream``, which is what a real device would do on a bad day.
    """

    __slots__ = ("_device", "_flat", "_nbytes", "_readers", "_stream", "is_shared")

    def __init__(self, device: SimDevice, flat: torch.Tensor, nbytes: int) -> None:
        self._device = device
        self._stream = device.current_stream
        self._flat = flat
        self._nbytes = nbytes
        # Streams whose work up to the end of this allocation keeps the memory from being reused.
        self._readers: tuple[SimStream, ...] = ()
        #: Whether another stream than the allocating one was given this memory.
        self.is_shared = False

    def used_by(self, stream: object) -> None:
        """Note that a kernel on ``stream`` uses this memory."""
        if stream is not self._stream:
            self.is_shared = True

    def record_stream(self, stream: SimStream) -> None:
        """Let the memory be reused only behind what ``stream`` has queued when it is freed."""
        self.used_by(stream)
        if stream is not self._stream and stream not in self._readers:
            self._readers += (stream,)

    def __del__(self) -> None:
        self._device.give_memory(self._nbytes)
        if self.is_shared:
            _reuse(self._flat, (*self._readers, self._stream))


def _reuse(flat: torch.Tensor, streams: tuple[SimStream, ...]) -> None:
    """Overwrite freed memory behind what is queued on ``streams``, without making any of them wait.

    Takes no lock: a finalizer calls it.
    """
    stream, *others = streams

    def kernel() -> None:
        if others:
            _reuse(flat, tuple(others))
        else:
            poison(flat)

    stream.put_unchecked(Kernel("reuse of freed memory", kernel))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with what nobody would mistake for a result.

    NaN, the greatest integer, or True.
    """
    value = _POISON.get(tensor.dtype)
    if value is None:
        value = _poison_of(tensor.dtype)
        if value is None:
            tensor.view(torch.uint8).fill_(_POISON_BYTE)
            return tensor
        _POISON[tensor.dtype] = value
    return tensor.fill_(value)


def _poison_of(dtype: torch.dtype) -> float | int | None:
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return float("nan")
    try:
        return torch.iinfo(dtype).max
    except TypeError:
        return None


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Count the elements from the first to the last of a layout, gaps included."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def allocate(
    device: SimDevice, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, Allocation]:
    """Allocate poisoned device memory of that layout.

    Raises:
        torch.OutOfMemoryError: The device has too little left.
    """
    count = extent(size, stride)
    nbytes = count * dtype.itemsize
    if not device.take_memory(nbytes):
        free, total = device.memory_info
        raise torch.OutOfMemoryError(
            f"{device.name} is out of memory: tried to allocate {nbytes} bytes, {free} of {total} "
            "are free."
        )
    flat = poison(torch.empty(count, dtype=dtype))
    return flat.as_strided(size, stride), Allocation(device, flat, nbytes)


def adopt(device: SimDevice, memory: torch.Tensor) -> Allocation:
    """Count memory that an operator made itself as an allocation."""
    nbytes = memory.untyped_storage().nbytes()
    device.take_memory(nbytes)
    return Allocation(device, memory, nbytes)


def page_locked_buffer(nbytes: int) -> torch.Tensor:
    """Allocate page-locked, poisoned host memory as a uint8 tensor."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = np.full(nbytes, _POISON_BYTE, dtype=np.uint8)
    # The tensor's storage holds the array, so the pin lasts as long as the last view.
    weakref.finalize(pages, PAGE_LOCKS.lock(pages.ctypes.data, nbytes).close)
    return torch.from_numpy(pages)


def page_locked_empty(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a page-locked host tensor of that layout, full of poison."""
    count = extent(size, stride)
    flat = page_locked_buffer(count * dtype.itemsize).view(dtype)
    return poison(flat).as_strided(size, stride)


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Tell whether all of a host tensor lies in page-locked memory."""
    nbytes = extent(tensor.size(), tensor.stride()) * tensor.element_size()
    return nbytes == 0 or PAGE_LOCKS.cover(tensor.data_ptr(), nbytes)
