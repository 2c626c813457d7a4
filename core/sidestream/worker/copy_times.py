"""When an output was computed and copied, and what ran beside its copy."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from sidestream.platforms.device import DeviceEvent, SideStream
from sidestream.request import OutputTimings
from sidestream.worker.device_clock import DeviceClock
from sidestream.worker.forwards import Forward, ForwardLog, shared_s
from sidestream.worker.output_job import Copy, OutputJob

logger = logging.getLogger(__name__)


class CopyTimes:
    """Tells the times of copies that just ended; used by the thread that waits for them."""

    def __init__(self, forwards: ForwardLog | None) -> None:
        self._forwards = forwards
        self._clock = DeviceClock()

    def start(self, stream: SideStream) -> None:
        """Set the device's clock by the host's."""
        try:
            self._clock.start(stream.record_event(timing=True))
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's stream; only times need it
            logger.debug("The device's clock could not be set: %s", error)

    def on_host(self, job: OutputJob, started_at: float) -> OutputTimings:
        """Give the times of a copy that the host made."""
        ended_at = time.monotonic()
        hidden_s = None
        if self._forwards is not None and job.forward is not None:
            later = self._forwards.after(job.forward)
            spans = ((forward.started_at, forward.ended_at) for forward in later)
            hidden_s = shared_s(started_at, ended_at, spans)
        return replace(
            job.timings,
            copy_started_at=started_at,
            copy_ended_at=ended_at,
            copy_hidden_s=hidden_s,
            nbytes=job.packed.leaf_nbytes,
        )

    def on_device(self, job: OutputJob, copy: Copy) -> OutputTimings:
        """Give the times of a copy that the device made: its own, where its events are timed."""
        # By the host, which can't tell when the copy began, and so not what ran beside it.
        times: dict[str, Any] = {
            "copy_started_at": copy.started_at,
            "copy_ended_at": time.monotonic(),
            "nbytes": job.packed.leaf_nbytes,
        }
        if copy.ended is not None:
            found = self._by_events(job, copy)
            times |= {name: at for name, at in found.items() if at is not None}
        return replace(job.timings, **times)

    def _by_events(self, job: OutputJob, copy: Copy) -> dict[str, float | None]:
        """Give times by the device's events; None for what it does not know."""
        assert copy.ended is not None
        own = job.forward
        later = None if self._forwards is None or own is None else self._forwards.after(own)
        edges = [_reached(event) for each in later or () for event in (each.started, each.ended)]
        known = (copy.began, job.event, None if own is None else own.started)
        ended_at, *edges_at, began_at, computed_at, started_at = self._clock.place(
            copy.ended, *edges, *known
        )
        hidden_s = None
        if later is not None and began_at is not None and ended_at is not None:
            spans = map(Forward.place, later, edges_at[::2], edges_at[1::2])
            hidden_s = shared_s(began_at, ended_at, spans)
        return {
            "copy_started_at": began_at,
            "copy_ended_at": ended_at,
            "forward_started_at": started_at,
            "forward_ended_at": computed_at,
            "copy_hidden_s": hidden_s,
        }


def _reached(event: DeviceEvent | None) -> DeviceEvent | None:
    """Give an event back if its device has passed it."""
    try:
        return event if event is not None and event.query() else None
    except Exception as error:  # noqa: BLE001 - boundary: a vendor's event; only times need it
        logger.debug("An event could not be asked: %s", error)
        return None
