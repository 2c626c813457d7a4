"""What a side stream promises that may be given work ahead of time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from sidestream.platforms.device import DeviceEvent, SideStream
from sidestream.platforms.platform import Platform
from sidestream.testing.contract.busy import BusyStreamContract
from sidestream.testing.contract.material import (
    A_WHILE_S,
    LIVENESS_S,
    filled,
    pinned,
    poison_like,
    random_bytes,
    recorded,
)

if TYPE_CHECKING:
    import torch


class QueueingContract(BusyStreamContract):
    """Side streams whose ``queues_freely`` is True; others claim nothing."""

    @pytest.fixture
    def free(self, platform: Platform, side: SideStream) -> SideStream:
        """Give a side stream that makes the claim, or skip the test."""
        if getattr(side, "queues_freely", False) is not True:
            pytest.skip(f"{platform.name}'s streams do not say queues_freely")
        return side

    # Other threads queue and wait: one that waits for what is held fails its test, which then ends.

    def test_a_copy_is_queued_freely_while_the_device_is_busy(
        self, platform: Platform, device: torch.device, free: SideStream
    ) -> None:
        """No call and no recording of an event makes the host wait; events tell the truth."""
        sent, received = random_bytes(), pinned(platform, device)
        result, poison = filled(device, sent), poison_like(sent)
        output = filled(device, poison)

        def queue_copy(written: DeviceEvent) -> list[DeviceEvent]:
            platform.set_device(device)
            free.wait_event(written)
            with free:
                began = recorded(platform, device, timing=True)
                received.copy_(output, non_blocking=True)
                ended = recorded(platform, device, timing=True)
            return [began, ended, free.record_event()]

        with ThreadPoolExecutor(1) as threads, self.busy_stream(device):
            output.copy_(result)
            written = recorded(platform, device)
            events = threads.submit(queue_copy, written).result(LIVENESS_S)
            assert not written.query(), "the host waited for the device"
            assert not any(event.query() for event in events), "an event was reached too early"
            assert not events[-1].wait(A_WHILE_S), "an event was reached too early"
            assert received.equal(poison), "bytes arrived before the event"
        for event in events[1:]:
            assert event.wait(LIVENESS_S)
            assert received.equal(sent), "an event was reached before its copy was done"

    def test_a_wait_for_a_copy_that_was_queued_freely_is_not_for_what_is_behind_it(
        self, platform: Platform, device: torch.device, free: SideStream
    ) -> None:
        """The next output's copy is queued by then, and may have a whole forward to wait for."""
        sent, output = random_bytes(), pinned(platform, device)
        result, next_output = filled(device, sent), pinned(platform, device)

        def queue_copy(written: DeviceEvent, target: torch.Tensor) -> DeviceEvent:
            platform.set_device(device)
            free.wait_event(written)
            with free:
                target.copy_(result, non_blocking=True)
            return free.record_event()

        def wait(event: DeviceEvent) -> bool:
            platform.set_device(device)
            return event.wait()

        copied = queue_copy(recorded(platform, device), output)
        platform.synchronize_device(device)  # not by the event, which might remember that
        with ThreadPoolExecutor(1) as threads, self.busy_stream(device):
            written = recorded(platform, device)
            behind = threads.submit(queue_copy, written, next_output).result(LIVENESS_S)
            assert threads.submit(wait, copied).result(LIVENESS_S) is True
            assert output.equal(sent)
            assert not written.query(), "the wait was for what is behind the copy"
        assert behind.wait(LIVENESS_S)
        assert next_output.equal(sent)
