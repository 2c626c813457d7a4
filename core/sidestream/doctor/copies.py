"""Copies from a device into each kind of host memory: how fast, and whether the host may go on.

Runs in a child only.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sidestream.platforms.platform import Platform

if TYPE_CHECKING:
    import torch

#: For the bandwidth: long enough that the start of a copy does not count.
_BULK_BYTES: Final = 64 << 20
_ROUNDS: Final = 3


def measure(platform: Platform, device: torch.device, output_bytes: int) -> list[dict[str, Any]]:
    """Measure each route; the fields are those of ``report.Route``."""
    import torch

    bulk = max(_BULK_BYTES, output_bytes)
    source = torch.empty(bulk, dtype=torch.uint8, device=device)
    source.copy_(torch.zeros(bulk, dtype=torch.uint8))
    platform.synchronize_device(device)
    routes = []
    with _mapping(platform, device, bulk) as mapping:
        memories = {
            "pageable": torch.zeros(bulk, dtype=torch.uint8),
            "page-locked buffer": platform.pinned_buffer(device, bulk),
            "page-locked mapping": mapping,
        }
        for memory, target in memories.items():
            if target is None:
                continue
            goes_on = _goes_on(platform, device, source, target)
            bulk_s = _copy_s(platform, device, source, target, goes_on)
            output = source[:output_bytes], target[:output_bytes]
            output_s = _copy_s(platform, device, *output, goes_on)
            routes.append(
                {
                    "memory": memory,
                    "bytes_per_s": bulk / bulk_s,
                    "output_s": output_s,
                    "is_asynchronous": goes_on,
                }
            )
    return routes


def _goes_on(
    platform: Platform, device: torch.device, source: torch.Tensor, target: torch.Tensor
) -> bool:
    """Tell whether the host goes on while a copy runs: it then has two queued before one is done.

    By the order of both and no time: one that blocks never looks like one that does not, however
    late this process comes to run, and one that does not has some tries.
    """
    side = platform.side_stream(device)
    assert side is not None  # only platforms with streams are measured
    for _ in range(_ROUNDS):
        with side:
            target.copy_(source, non_blocking=True)
            first = side.record_event()
            target.copy_(source, non_blocking=True)
            second = side.record_event()
        is_running = not first.query()
        # Without a timeout, which some platforms can only poll for; this process has one.
        second.wait()
        if is_running:
            return True
    return False


def _copy_s(
    platform: Platform,
    device: torch.device,
    source: torch.Tensor,
    target: torch.Tensor,
    goes_on: bool,
) -> float:
    """Copy some times by a side stream; give the shortest time, of the device if it tells it."""
    side = platform.side_stream(device)
    assert side is not None
    took_s = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        start = side.record_event(timing=True)
        with side:
            target.copy_(source, non_blocking=True)
            copied = side.record_event(timing=True)
        copied.wait()
        waited_s = time.perf_counter() - began
        device_s = copied.elapsed_s(start) if goes_on else None
        took_s.append(device_s or waited_s)
    return min(took_s[1:])


@contextmanager
def _mapping(
    platform: Platform, device: torch.device, nbytes: int
) -> Iterator[torch.Tensor | None]:
    """Map memory and page-lock it, as the arenas that outputs travel in; None: not possible."""
    import torch

    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    memory.zero_()  # the pages have to be there
    pin = platform.pin_host_memory(device, memory.data_ptr(), nbytes)
    if pin is None:
        yield None
        return
    try:
        yield memory
    finally:
        platform.synchronize_device(device)
        pin.close()
