"""A stream that is kept busy, so that order shows without comparing durations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from sidestream.platforms.device import SideStream
from sidestream.platforms.platform import Platform
from sidestream.testing.contract.plugin import PluginContract

if TYPE_CHECKING:
    import torch

_BUSY_S: Final = 1.0
_BALLAST_BYTES: Final = 128 << 20
#: Device queues hold about a thousand entries; a launch into a full one blocks.
_MOST_LAUNCHES: Final = 900


class BusyStreamContract(PluginContract):
    """What the tests of a platform with streams share."""

    def queue_work(self, device: torch.device, seconds: float) -> None:
        """Queue about ``seconds`` of work on the calling thread's current stream of ``device``.

        Copies from page-locked memory. Override it where there is none, or where the platform has
        something that does so with fewer launches, such as a kernel that sleeps.
        """
        import torch

        ballast = torch.empty(_BALLAST_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(ballast, device=device)

        def copy_once() -> None:
            target.copy_(ballast, non_blocking=True)

        copy_once()
        target[:1].cpu()
        started = time.perf_counter()
        copy_once()
        target[:1].cpu()
        once_s = time.perf_counter() - started
        for _ in range(min(math.ceil(seconds / once_s), _MOST_LAUNCHES)):
            copy_once()

    @contextmanager
    def busy_stream(self, device: torch.device) -> Iterator[None]:
        """Keep the calling thread's current stream of ``device`` busy through the block.

        By work for about a second, which runs on past the block. Override it where a stream can be
        held and released.
        """
        self.queue_work(device, _BUSY_S)
        yield

    @pytest.fixture
    def side(self, platform: Platform, device: torch.device) -> SideStream:
        """Make a side stream."""
        stream = platform.side_stream(device)
        assert isinstance(stream, SideStream)
        return stream
