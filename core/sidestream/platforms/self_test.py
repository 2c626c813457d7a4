"""The check of streams, events and copies that a worker makes before it says that it is ready."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from sidestream.errors import PlatformError, PluginContractError, PluginError, SidestreamError
from sidestream.platforms.device import DeviceEvent, JoiningStream, SideStream
from sidestream.platforms.platform import Platform

if TYPE_CHECKING:
    import torch

    #: Queues one stream's writing and another's copy; gives the events behind each.
    _Queue = Callable[
        ["_Rounds", Callable[[], None], torch.Tensor, torch.Tensor],
        tuple[DeviceEvent, DeviceEvent],
    ]

logger = logging.getLogger(__name__)

#: How often a side stream's copy has to be queued in time, and how often any is tried.
_ROUNDS: Final = 3
_TRIES: Final = 6
_CHECKED_BYTES: Final = 1 << 20
#: Takes a card 0.3 ms to fetch from the host: longer than queueing the copy that must wait for it.
#: Doubled each time that it was not, which a busy host or a fast card does.
_DELAY_BYTES: Final = 16 << 20
_LONGEST_DELAY_BYTES: Final = 64 << 20
_POISON: Final = 0xEE
_TIMEOUT_S: Final = 60.0


def self_test(platform: Platform, device: torch.device) -> None:
    """Copy fresh bytes off ``device`` by a side stream into poisoned memory and compare them all.

    Where the side stream can be joined, so too by the current stream what the side stream wrote. A
    wait that the platform skips shows as poison. A round counts only if the work that the copy has
    to wait for was incomplete once the copy was queued; else it would prove nothing. Needs
    ``platform.set_device(device)`` before, in this thread; takes milliseconds on a device and does
    nothing on the no-op base.

    Raises:
        PluginContractError: A hook answered something else than it promises.
        PlatformError: The device failed, or bytes arrived late or wrong.
    """
    if not platform.is_asynchronous:
        return
    try:
        side = _checked_stream(platform, device)
        _refuse_foreign_event(platform, side)
        _Rounds(platform, device, side, "a side stream", _ROUNDS).run(_copy_beside)
        if isinstance(side, JoiningStream):
            _test_joining(platform, device, side)
    except SidestreamError:
        raise
    except Exception as error:  # whatever the vendor's torch raises; it has no common class
        raise PlatformError(
            f"The self-test of plugin {platform.name!r} on {device} failed: "
            f"{type(error).__name__}: {error}",
            platform=platform.name,
        ) from error


def _test_joining(platform: Platform, device: torch.device, side: SideStream) -> None:
    try:
        # Once: it waits for an event of the same kind.
        _Rounds(platform, device, side, "the stream that joins one", 1).run(_copy_joined)
    except _NotJoinedError as error:
        # No output depends on it.
        logger.info("Side streams of %s can't be joined: %s", device, error.__cause__)


def trusted(
    platform: Platform, device: torch.device, on_fault: Literal["refuse", "synchronous"]
) -> Platform:
    """Give the platform if it passes the self-test, else what is to be used in its place.

    With ``on_fault="synchronous"`` that is :meth:`Platform.synchronous`, after one warning.

    Raises:
        PluginError: As :func:`self_test`, with ``on_fault="refuse"``.
        PlatformError: So too; or plain copies come out wrong as well.
    """
    try:
        self_test(platform, device)
    except (PlatformError, PluginError) as error:
        if on_fault == "refuse":
            raise
        _check_plain_copy(platform, device)
        logger.warning(
            "Platform %r failed its self-test on %s and runs synchronously: outputs are correct, "
            "and nothing overlaps. %s",
            platform.name,
            device,
            error,
        )
        return platform.synchronous()
    return platform


def _check_plain_copy(platform: Platform, device: torch.device) -> None:
    import torch

    sent = torch.frombuffer(bytearray(os.urandom(_CHECKED_BYTES)), dtype=torch.uint8)
    received = torch.full_like(sent, _POISON)
    try:
        there = torch.empty_like(sent, device=device)
        there.copy_(sent)
        platform.synchronize_device(device)
        received.copy_(there)
    except Exception as error:  # whatever the vendor's torch raises; it has no common class
        raise PlatformError(
            f"Plugin {platform.name!r}: {device} can't even copy synchronously: "
            f"{type(error).__name__}: {error}",
            platform=platform.name,
        ) from error
    if not received.equal(sent):
        raise PlatformError(
            f"Plugin {platform.name!r}: bytes that {device} copied synchronously are wrong too.",
            platform=platform.name,
        )


@dataclass(frozen=True)
class _Rounds:
    """Copies by one stream of what another writes, slowly."""

    platform: Platform
    device: torch.device
    side: SideStream
    #: Which stream copies.
    whose: str
    #: How often the copy has to be queued in time.
    wanted: int

    def run(self, queue: _Queue) -> None:
        """Copy until it has counted often enough, or was tried in vain."""
        counted, delay_bytes = 0, _DELAY_BYTES
        for _ in range(_TRIES):
            if self._round(queue, delay_bytes):
                counted += 1
            else:
                delay_bytes = min(2 * delay_bytes, _LONGEST_DELAY_BYTES)
            if counted == self.wanted:
                return
        logger.info(
            "Of %d copies of the self-test on %s by %s, %d were queued before the work that they "
            "wait for was done: the host waits when it records an event, or is busy.",
            _TRIES,
            self.device,
            self.whose,
            counted,
        )

    def _round(self, queue: _Queue, delay_bytes: int) -> bool:
        """Copy once, and tell whether it was queued before what it has to wait for was done."""
        import torch

        platform, device = self.platform, self.device
        sent = torch.frombuffer(bytearray(os.urandom(_CHECKED_BYTES)), dtype=torch.uint8)
        fresh = torch.empty_like(sent, device=device)
        fresh.copy_(sent)
        source = torch.empty_like(fresh)
        source.copy_(torch.full_like(sent, _POISON))
        ballast = _host_buffer(platform, device, delay_bytes)
        received = _host_buffer(platform, device, _CHECKED_BYTES)
        received.fill_(_POISON)

        def write() -> None:
            torch.empty_like(ballast, device=device).copy_(ballast, non_blocking=True)
            source.copy_(fresh)

        written, copied = queue(self, write, source, received)
        was_early = not written.query()
        if not copied.wait(_TIMEOUT_S):
            raise PlatformError(
                f"The self-test's copy from {device} did not end in {_TIMEOUT_S:g} s "
                f"(plugin {platform.name!r}).",
                platform=platform.name,
            )
        wrong = int((received != sent).sum())
        if wrong:
            raise PlatformError(
                f"Plugin {platform.name!r}: {wrong} of {_CHECKED_BYTES} bytes copied from {device} "
                f"by {self.whose} are wrong or late: either it does not wait for what the other "
                "stream had queued, by record_device_event and wait_event or by join_current, or "
                "the copy's event comes too early; outputs would be wrong.",
                platform=platform.name,
            )
        if not (copied.query() and written.query()):
            raise PluginContractError(
                f"Plugin {platform.name!r}: an event says that it is incomplete after a later one "
                f"of {device} was waited for.",
                plugin=platform.name,
                hook="record_device_event",
            )
        return was_early


def _copy_beside(
    test: _Rounds, write: Callable[[], None], source: torch.Tensor, received: torch.Tensor
) -> tuple[DeviceEvent, DeviceEvent]:
    """Write on the current stream, copy on the side stream; give the events of both."""
    write()
    written = _recorded_event(test.platform, test.device)
    test.side.wait_event(written)
    with test.side:
        received.copy_(source, non_blocking=True)
        return written, test.side.record_event()


def _copy_joined(
    test: _Rounds, write: Callable[[], None], source: torch.Tensor, received: torch.Tensor
) -> tuple[DeviceEvent, DeviceEvent]:
    """Write on the side stream, copy on the current stream; give the events of both."""
    assert isinstance(test.side, JoiningStream)
    with test.side:
        write()
        written = test.side.record_event()
    try:
        test.side.join_current([source])
    except Exception as error:  # whatever the vendor's torch raises; it has no common class
        raise _NotJoinedError from error
    received.copy_(source, non_blocking=True)
    return written, _recorded_event(test.platform, test.device)


def _checked_stream(platform: Platform, device: torch.device) -> SideStream:
    stream = platform.side_stream(device)
    if not isinstance(stream, SideStream):
        raise _wrong_type(platform, "side_stream", stream, "a SideStream")
    return stream


def _recorded_event(platform: Platform, device: torch.device) -> DeviceEvent:
    event = platform.record_device_event(device)
    if not isinstance(event, DeviceEvent):
        raise _wrong_type(platform, "record_device_event", event, "a DeviceEvent")
    return event


def _refuse_foreign_event(platform: Platform, stream: SideStream) -> None:
    try:
        stream.wait_event(_ForeignEvent())
    except PlatformError:
        return
    raise PluginContractError(
        f"A side stream of plugin {platform.name!r} accepts events that are not the plugin's. "
        "torch skips the wait for such an event without an error: wait_event has to raise "
        "PlatformError first.",
        plugin=platform.name,
        hook="side_stream",
    )


def _host_buffer(platform: Platform, device: torch.device, nbytes: int) -> torch.Tensor:
    import torch

    pinned = platform.pinned_buffer(device, nbytes)
    return torch.empty(nbytes, dtype=torch.uint8) if pinned is None else pinned


def _wrong_type(platform: Platform, hook: str, answer: object, wanted: str) -> PluginContractError:
    return PluginContractError(
        f"Hook {hook} of plugin {platform.name!r} answered {answer!r}, which is not {wanted}.",
        plugin=platform.name,
        hook=hook,
    )


class _NotJoinedError(Exception):
    """``join_current`` raised."""


class _ForeignEvent:
    """An event that no plugin made."""

    def query(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def elapsed_s(self, earlier: DeviceEvent) -> float | None:
        return None
