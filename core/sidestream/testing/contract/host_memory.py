"""What page-locked host memory promises."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest

from sidestream.errors import PlatformError
from sidestream.platforms.platform import Platform
from sidestream.testing.contract.busy import BusyStreamContract
from sidestream.testing.contract.material import (
    A_WHILE_S,
    LIVENESS_S,
    NBYTES,
    POISON,
    filled,
    random_bytes,
    recorded,
)

if TYPE_CHECKING:
    import torch


class HostMemoryContract(BusyStreamContract):
    """Buffers of ``pinned_buffer`` and pins of ``pin_host_memory``."""

    def test_a_copy_into_a_pinned_buffer_is_asynchronous(
        self, platform: Platform, device: torch.device
    ) -> None:
        """A pinned buffer is uint8, has the size asked for, and its copy returns at once."""
        import torch

        buffer = platform.pinned_buffer(device, NBYTES)
        if buffer is None:
            pytest.skip(f"{platform.name} has no pinned buffers")
        assert buffer.dtype == torch.uint8
        assert buffer.shape == (NBYTES,)
        assert buffer.device.type == "cpu"
        self._copy_lands_late_and_whole(platform, device, buffer)

    def test_a_copy_into_a_pinned_mapping_is_asynchronous(
        self, platform: Platform, device: torch.device
    ) -> None:
        """A mapping that exists already can be page-locked, which is verified by a copy."""
        import torch

        # torch keeps the mapping alive; it ends after the pin, with the last tensor.
        memory = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
        memory.fill_(POISON)
        pin = platform.pin_host_memory(device, memory.data_ptr(), NBYTES)
        if pin is None:
            pytest.skip(f"{platform.name} can't page-lock an existing mapping here")
        try:
            self._copy_lands_late_and_whole(platform, device, memory)
        finally:
            platform.synchronize_device(device)
            pin.close()
        pin.close()

    def test_a_mapping_can_be_pinned_again_after_it_was_unpinned(
        self, platform: Platform, device: torch.device
    ) -> None:
        """Closing a pin undoes it, and leaves no error for the next call."""
        import torch

        memory = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
        memory.fill_(POISON)
        for _ in range(2):
            pin = platform.pin_host_memory(device, memory.data_ptr(), NBYTES)
            if pin is None:
                pytest.skip(f"{platform.name} can't page-lock an existing mapping here")
            pin.close()
        assert platform.check_device(device) is None

    def test_pinning_a_range_twice_fails_and_leaves_no_trace(
        self, platform: Platform, device: torch.device
    ) -> None:
        """A failed call leaves no error for the next one to raise, and the first pin as it was."""
        import torch

        memory = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
        memory.fill_(POISON)
        pin = platform.pin_host_memory(device, memory.data_ptr(), NBYTES)
        if pin is None:
            pytest.skip(f"{platform.name} can't page-lock an existing mapping here")
        try:
            try:
                again = platform.pin_host_memory(device, memory.data_ptr(), NBYTES)
            except PlatformError:
                again = None
            assert again is None
            self._copy_lands_late_and_whole(platform, device, memory)
        finally:
            platform.synchronize_device(device)
            pin.close()

    def _copy_lands_late_and_whole(
        self, platform: Platform, device: torch.device, target: torch.Tensor
    ) -> None:
        sent = random_bytes()
        source = filled(device, sent)
        target.fill_(POISON)
        with self.busy_stream(device):
            target.copy_(source, non_blocking=True)
            copied = recorded(platform, device)
            assert not copied.wait(A_WHILE_S), "the copy blocked the host, or ran out of order"
        assert copied.wait(LIVENESS_S)
        assert target.equal(sent)
