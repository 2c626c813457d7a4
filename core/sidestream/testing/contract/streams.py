"""What a side stream promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceEvent, JoiningStream, SideStream
from sidestream.platforms.platform import Platform
from sidestream.testing.contract.busy import BusyStreamContract
from sidestream.testing.contract.material import (
    A_WHILE_S,
    LIVENESS_S,
    filled,
    in_a_thread,
    pinned,
    poison_like,
    random_bytes,
    recorded,
)

if TYPE_CHECKING:
    import torch


class StreamContract(BusyStreamContract):
    """Side streams of ``side_stream``, and the device they run on."""

    def test_a_side_stream_runs_beside_the_current_one(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """What is queued on a side stream does not wait for the current stream."""
        with self.busy_stream(device):
            current = recorded(platform, device)
            assert side.record_event().wait(LIVENESS_S)
            side.synchronize()
            assert not current.wait(A_WHILE_S), "the side stream waited for the current one"

    def test_a_side_stream_is_current_only_inside_its_block(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """``with stream:`` redirects this thread's work, also nested, and then ends."""
        with self.busy_stream(device):
            with side:
                with side:
                    pass
                assert recorded(platform, device).wait(LIVENESS_S), "not redirected"
            assert not recorded(platform, device).wait(A_WHILE_S), "still redirected"

    def test_entering_a_side_stream_changes_no_other_thread(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """Two threads are inside at once, and each gets its own stream back."""

        def use_other() -> bool:
            platform.set_device(device)
            outside = recorded(platform, device)
            with side:
                inside = recorded(platform, device)
            again = recorded(platform, device)
            return inside.wait(LIVENESS_S) and not outside.query() and not again.query()

        with self.busy_stream(device), side:
            assert in_a_thread(use_other)
            assert recorded(platform, device).wait(LIVENESS_S)

    def test_two_side_streams_are_independent(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """A side stream that is busy does not delay another, whatever its priority."""
        urgent = platform.side_stream(device, priority=-1)
        assert urgent is not None
        with side, self.busy_stream(device):
            late = side.record_event()
            assert urgent.record_event().wait(LIVENESS_S)
            assert not late.wait(A_WHILE_S)

    def test_waiting_for_an_event_orders_a_copy_after_the_work(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """The whole point: the copy reads what the forward wrote, and the host does not wait."""
        sent, received = random_bytes(), pinned(platform, device)
        result, poison = filled(device, sent), poison_like(sent)
        output = filled(device, poison)
        with self.busy_stream(device):
            output.copy_(result)
            side.wait_event(recorded(platform, device))
            with side:
                received.copy_(output, non_blocking=True)
            copied = side.record_event()
            assert not copied.wait(A_WHILE_S), "the copy did not wait for the event"
            assert received.equal(poison), "bytes arrived before the event"
        assert copied.wait(LIVENESS_S)
        assert received.equal(sent)

    def test_another_thread_copies_what_this_one_computes(
        self, platform: Platform, device: torch.device
    ) -> None:
        """The event crosses threads, as it does from a worker's main to its output thread."""
        sent, received = random_bytes(), pinned(platform, device)
        result, output = filled(device, sent), filled(device, poison_like(sent))

        def start_copy(written: DeviceEvent) -> DeviceEvent:
            platform.set_device(device)
            side = platform.side_stream(device)
            assert side is not None
            side.wait_event(written)
            with side:
                received.copy_(output, non_blocking=True)
            return side.record_event()

        with self.busy_stream(device):
            output.copy_(result)
            written = recorded(platform, device)
            copied = in_a_thread(lambda: start_copy(written))
            assert not copied.wait(A_WHILE_S), "the copy did not wait for the event"
        assert copied.wait(LIVENESS_S)
        assert received.equal(sent)

    def test_joining_orders_the_current_stream_after_a_side_stream(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """What a side stream makes is read behind it, and the host does not wait."""
        import torch

        sent, received = random_bytes(), pinned(platform, device)
        poison = poison_like(sent)
        result = filled(device, sent)
        joining = _joining(platform, side)

        def go_on(made: torch.Tensor) -> DeviceEvent:
            platform.set_device(device)
            joining.join_current([made])
            received.copy_(made, non_blocking=True)
            return recorded(platform, device)

        # Another thread's current stream is not the side stream.
        with side, self.busy_stream(device):
            made = torch.empty_like(result)
            made.copy_(result)
            copied = in_a_thread(lambda: go_on(made))
            assert not copied.wait(A_WHILE_S), "the current stream did not wait"
            assert received.equal(poison), "bytes arrived before they were made"
        assert copied.wait(LIVENESS_S)
        assert received.equal(sent)

    def test_what_a_joined_stream_made_stays_whole_until_it_was_read(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """Nobody is given the memory of a tensor that died before the current stream read it."""
        import torch

        sent, received = random_bytes(), pinned(platform, device)
        joining, poison = _joining(platform, side), filled(device, poison_like(sent))
        with side:
            made = filled(device, sent)
        with self.busy_stream(device):
            joining.join_current([made])
            received.copy_(made, non_blocking=True)
            copied = recorded(platform, device)
            del made
            with side:
                torch.empty_like(poison).copy_(poison)  # where it was, if that may be
            assert side.record_event().wait(LIVENESS_S)
            assert not copied.query(), "the current stream is not busy: this proves nothing"
        assert copied.wait(LIVENESS_S)
        assert received.equal(sent)

    def test_a_thread_is_bound_to_a_device_of_its_own(
        self, platform: Platform, device: torch.device
    ) -> None:
        """A thread that is bound to another device works there, and leaves this one where it is."""
        import torch

        if torch.get_device_module(device).device_count() < 2:
            pytest.skip(f"{platform.name} has one device here")
        other = platform.device(1 if device.index == 0 else 0)

        def use_other() -> tuple[int, bool]:
            platform.set_device(other)
            made = torch.empty(1, device=other.type)
            return made.device.index, recorded(platform, other).wait(LIVENESS_S)

        with self.busy_stream(device):
            assert in_a_thread(use_other) == (other.index, True)
            assert torch.empty(1, device=device.type).device.index == device.index
            assert not recorded(platform, device).wait(A_WHILE_S), "this thread was bound anew"

    @pytest.mark.parametrize("kind", ["another platform's", "torch.Event", "object", "None"])
    def test_a_foreign_event_is_refused_before_torch_sees_it(
        self, kind: str, device: torch.device, side: SideStream
    ) -> None:
        """torch would skip the wait without an error, or crash."""
        import torch

        foreign: Any = {
            "another platform's": _ForeignEvent(),
            "torch.Event": torch.Event("cpu"),
            "object": object(),
            "None": None,
        }[kind]
        with pytest.raises(PlatformError):
            side.wait_event(foreign)

    def test_the_stream_still_works_after_it_refused_an_event(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """Refusing queues nothing and leaves no error pending."""
        with pytest.raises(PlatformError):
            side.wait_event(_ForeignEvent())
        side.wait_event(recorded(platform, device))
        assert side.record_event().wait(LIVENESS_S)

    def test_synchronizing_drains_the_device(
        self, platform: Platform, device: torch.device, side: SideStream
    ) -> None:
        """``synchronize_device`` covers all streams; a stream's own ``synchronize`` that stream."""
        with self.busy_stream(device):
            current = recorded(platform, device)
            side.wait_event(current)
            beside = side.record_event()
        platform.synchronize_device(device)
        assert current.query()
        assert beside.query()


def _joining(platform: Platform, stream: SideStream) -> JoiningStream:
    if not isinstance(stream, JoiningStream):
        pytest.skip(f"{platform.name}'s streams have no join_current()")
    return stream


class _ForeignEvent:
    """Fits the protocol, and was made by no plugin."""

    def query(self) -> bool:
        raise AssertionError("a foreign event was used")

    def wait(self, timeout_s: float | None = None) -> bool:
        raise AssertionError("a foreign event was used")

    def elapsed_s(self, earlier: DeviceEvent) -> float | None:
        raise AssertionError("a foreign event was used")
