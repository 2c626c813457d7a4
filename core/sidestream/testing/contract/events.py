"""What a device event promises."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sidestream.platforms.device import DeviceEvent
from sidestream.platforms.platform import Platform
from sidestream.testing.contract.busy import BusyStreamContract
from sidestream.testing.contract.material import A_WHILE_S, LIVENESS_S, recorded

if TYPE_CHECKING:
    import torch


class EventContract(BusyStreamContract):
    """Events of ``record_device_event``."""

    def test_recording_returns_while_the_work_before_it_runs(
        self, platform: Platform, device: torch.device
    ) -> None:
        """An event is incomplete while work before it is queued, and complete after."""
        with self.busy_stream(device):
            event = platform.record_device_event(device)
            assert isinstance(event, DeviceEvent)
            assert not event.query(), "recording waited for the queued work"
            assert not event.wait(A_WHILE_S), "the event does not belong to the current stream"
        assert event.wait(LIVENESS_S)
        assert event.query()

    def test_a_wait_gives_up_when_its_time_is_over(
        self, platform: Platform, device: torch.device
    ) -> None:
        """``wait(timeout_s)`` answers False, and may be repeated."""
        with self.busy_stream(device):
            event = recorded(platform, device)
            assert event.wait(0) is False
            assert event.wait(A_WHILE_S) is False
        assert event.wait(LIVENESS_S) is True
        assert event.wait(0) is True

    def test_a_wait_without_a_timeout_ends_with_the_work(
        self, platform: Platform, device: torch.device
    ) -> None:
        """``wait()`` answers True once the device passed the event, in any thread."""

        def wait(event: DeviceEvent) -> bool:
            platform.set_device(device)
            return event.wait()

        with ThreadPoolExecutor(1) as threads:
            with self.busy_stream(device):
                event = recorded(platform, device)
                waiter = threads.submit(wait, event)
                assert not event.query()
            assert waiter.result(LIVENESS_S) is True

    def test_elapsed_time_is_device_time_in_seconds(
        self, platform: Platform, device: torch.device
    ) -> None:
        """The time between two events lies within what the host saw; None: no timing here."""
        before_s = time.perf_counter()
        start = recorded(platform, device, timing=True)
        assert start.wait(LIVENESS_S)
        with self.busy_stream(device):
            end = recorded(platform, device, timing=True)
            assert not end.wait(A_WHILE_S)
        assert end.wait(LIVENESS_S)
        seen_s = time.perf_counter() - before_s
        elapsed_s = end.elapsed_s(start)
        # Clocks of two makers: a hundredth apart is equal.
        assert elapsed_s is None or 0.99 * A_WHILE_S <= elapsed_s <= 1.01 * seen_s
