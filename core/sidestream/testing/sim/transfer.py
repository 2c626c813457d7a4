"""Copies to, from and between simulated devices."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from sidestream.testing.sim.device import SimDevice, device_at
from sidestream.testing.sim.host import COPIES, CopyRecord
from sidestream.testing.sim.lane import Kernel
from sidestream.testing.sim.memory import is_page_locked, page_locked_empty
from sidestream.testing.sim.stream import SimStream
from sidestream.testing.sim.tensor import SimTensor, empty

_TO_HOST: Final = "copy to the host"
_FROM_HOST: Final = "copy from the host"
_SENTINEL: Final = 0x5EA1
_SENTINEL_COUNT: Final = 64


def copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy ``src`` into ``dst``; either or both are on a device.

    To the host: asynchronous if ``non_blocking`` and the destination is page-locked and laid out
    so that no staging is needed, else the call returns when the bytes are there. From the host:
    what it holds at the time of the call; as on CUDA the call waits for the current stream with
    all that is queued there, unless it is ``non_blocking``.
    """
    if src.shape != dst.shape:
        src = src.expand(dst.shape)
    if not isinstance(dst, SimTensor):
        assert isinstance(src, SimTensor)
        _copy_to_host(dst, src, non_blocking)
    elif not isinstance(src, SimTensor):
        stream = dst.sim_device.current_stream
        _launch_copy(stream, _FROM_HOST, dst, src.detach().clone())
        if not non_blocking:
            stream.synchronize()
    elif src.sim_device is dst.sim_device:
        _launch_copy(dst.sim_device.current_stream, "copy", dst, src.memory)
        src.allocation.used_by(dst.sim_device.current_stream)
    else:
        _copy_across(dst, src)
    return dst


def _launch_copy(stream: SimStream, name: str, dst: SimTensor, memory: torch.Tensor) -> None:
    target = dst.memory
    dst.allocation.used_by(stream)
    stream.launch(Kernel(name, lambda: target.copy_(memory)))


def _copy_across(dst: SimTensor, src: SimTensor) -> None:
    # As CUDA does it: both devices' current streams see the copy as their own work.
    reader, writer = src.sim_device.current_stream, dst.sim_device.current_stream
    writer.await_event(reader.mark())
    _launch_copy(writer, "copy between devices", dst, src.memory)
    src.allocation.used_by(writer)
    reader.await_event(writer.mark())


def _copy_to_host(dst: torch.Tensor, src: SimTensor, non_blocking: bool) -> None:
    device, stream = src.sim_device, src.sim_device.current_stream
    target, memory, locked = dst.detach(), src.memory, is_page_locked(dst)
    needs_staging = not target.is_contiguous() and target.stride() != memory.stride()
    nbytes = target.numel() * target.element_size()

    def kernel() -> None:
        if device.faults.drop_copies:
            return
        started_at = time.monotonic()
        target.copy_(memory)
        COPIES.append(
            CopyRecord(
                nbytes=nbytes,
                pinned=locked,
                address=target.data_ptr(),
                stream=stream.name,
                started_at=started_at,
                ended_at=time.monotonic(),
            )
        )

    src.allocation.used_by(stream)
    stream.launch(Kernel(_TO_HOST, kernel))
    if needs_staging or not (non_blocking and locked):
        stream.synchronize()


def to_copy(
    src: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Copy a tensor of a device to another type or place.

    To the host with ``non_blocking`` the result is page-locked and the copy asynchronous, as on
    CUDA: the result is poison until the stream has run it.
    """
    shape_only = torch.empty_strided(src.size(), src.stride(), dtype=src.dtype, device="meta")
    model = torch.ops.aten._to_copy.default(
        shape_only, dtype=dtype, memory_format=memory_format or torch.preserve_format
    )
    size, stride = model.size(), model.stride()
    target = src.device if device is None else device
    result: torch.Tensor
    if target.type == "meta":
        return model  # type: ignore[no-any-return]
    if target.type == "cpu":
        make: Any = page_locked_empty if non_blocking else torch.empty_strided
        result = make(size, stride, dtype=model.dtype)
    else:
        result = empty(device_at(target.index), size, stride, model.dtype)
    return copy_(result, src, non_blocking)


def read(stream: SimStream, name: str, work: Any) -> Any:
    """Run ``work`` on a stream and wait for what it returns, as a call with a host result does."""
    answers: list[Any] = []
    stream.launch(Kernel(name, lambda: answers.append(work())))
    stream.synchronize()
    return answers[0]


def find_corruption(device: SimDevice, timeout_s: float) -> str | None:
    """Write a sentinel, copy it back and compare; say what is wrong, or None.

    On a stream of its own: what is queued elsewhere may take its time.

    Raises:
        SimDeviceError: The device is in error.
    """
    with device.side_stream(priority=0) as stream:
        written = empty(device, (_SENTINEL_COUNT,), (1,), torch.int64)
        written.fill_(_SENTINEL)
        back = page_locked_empty((_SENTINEL_COUNT,), (1,), torch.int64)
        back.copy_(written, non_blocking=True)
        if not stream.mark().wait(timeout_s):
            return f"{device.name} did not answer within {timeout_s} s"
    wrong = int((back != _SENTINEL).sum())
    if wrong:
        return f"{device.name} copied back {wrong} of {_SENTINEL_COUNT} sentinel values wrong"
    return None
