"""Bytes, events and threads that the contract's tests are made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import pytest

from sidestream.platforms.device import DeviceEvent
from sidestream.platforms.platform import Platform

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

NBYTES: Final = 1 << 20
POISON: Final = 0xEE
#: For what has to happen; a test that waits this long fails.
LIVENESS_S: Final = 30.0
#: How long an event is watched that must not complete; a wrong one is seen as soon as it does.
A_WHILE_S: Final = 0.2


def in_a_thread(call: Callable[[], _T]) -> _T:
    """Run ``call`` in a thread of its own and give its result."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result(LIVENESS_S)


def recorded(platform: Platform, device: torch.device, *, timing: bool = False) -> DeviceEvent:
    """Record an event on the current stream, and make sure that it is one."""
    event = platform.record_device_event(device, timing=timing)
    assert isinstance(event, DeviceEvent)
    return event


def random_bytes() -> torch.Tensor:
    """Make ``NBYTES`` bytes that no memory held before."""
    import torch

    return torch.frombuffer(bytearray(os.urandom(NBYTES)), dtype=torch.uint8)


def poison_like(host: torch.Tensor) -> torch.Tensor:
    """Make bytes that stand for memory that was not written."""
    import torch

    return torch.full_like(host, POISON)


def filled(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    """Copy ``host`` to a new tensor on ``device``."""
    import torch

    target = torch.empty_like(host, device=device)
    target.copy_(host)
    return target


def pinned(platform: Platform, device: torch.device) -> torch.Tensor:
    """Allocate poisoned page-locked memory, or skip the test."""
    buffer = platform.pinned_buffer(device, NBYTES)
    if buffer is None:
        pytest.skip(f"{platform.name} has no pinned buffers, so its copies block the host")
    buffer.fill_(POISON)
    return buffer
