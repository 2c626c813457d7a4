"""The device's times on the host's clock."""

from __future__ import annotations

import logging
import time
from typing import Final

from sidestream.platforms.device import DeviceEvent

logger = logging.getLogger(__name__)

#: A new reference is taken when the last is this old: devices give the time between two events as a
#: float of milliseconds, which holds microseconds only for seconds.
_REFERENCE_AGE_S: Final = 5.0
#: How long a start may watch its event; a device that is not idle sets the clocks later.
_START_S: Final = 0.05
#: The two clocks are set to each other again when they are this far apart.
_MAX_DRIFT_S: Final = 0.05


class DeviceClock:
    """Places timed events of one device on ``time.monotonic()``; used by one thread.

    Distances are the device's own, so that what overlapped on it overlaps here; only the whole axis
    is placed by the host, whose wake-ups are late by up to a millisecond.
    """

    def __init__(self) -> None:
        self._reference: DeviceEvent | None = None
        self._reference_at = 0.0

    def start(self, event: DeviceEvent) -> None:
        """Set the clocks by an event of an idle device, watched closely: no wake-up delays it."""
        deadline = time.monotonic() + _START_S
        while not event.query():
            if time.monotonic() > deadline:
                return
        self._reference, self._reference_at = event, time.monotonic()

    def place(self, just_seen: DeviceEvent, *events: DeviceEvent | None) -> list[float | None]:
        """Give the times of ``just_seen``, which the host saw complete just now, and of ``events``.

        None for what is None or can't be timed. The last of ``events`` should be the earliest: it
        may become the reference, and the events of later calls should come after it.
        """
        now = time.monotonic()
        try:
            if self._reference is None:
                self._reference, self._reference_at = just_seen, now
            seen_at = self._time_of(just_seen)
            if not -_MAX_DRIFT_S < seen_at - now <= 0.0:
                self._reference_at += now - seen_at
                seen_at = now
            times = [None if event is None else self._time_of(event) for event in events]
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's events
            # Times are for people who look at them: no output fails for one.
            logger.debug("Two events could not be timed: %s", error)
            self._reference = None
            return [None] * (len(events) + 1)
        if events and events[-1] is not None and times[-1] is not None:
            self._renew(events[-1], times[-1], now)
        return [seen_at, *times]

    def _time_of(self, event: DeviceEvent) -> float:
        assert self._reference is not None
        if event is self._reference:
            return self._reference_at
        elapsed_s = event.elapsed_s(self._reference)
        if elapsed_s is None:
            raise RuntimeError("the platform can't time events")
        return self._reference_at + elapsed_s

    def _renew(self, event: DeviceEvent, at: float, now: float) -> None:
        if now - self._reference_at > _REFERENCE_AGE_S:
            self._reference, self._reference_at = event, at
