"""One output on its way from the forward to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sidestream.platforms.device import DeviceEvent
from sidestream.request import OutputTimings
from sidestream.transport.packing import Packed
from sidestream.worker.forwards import Forward
from sidestream.worker.sink import Destination, OutputLabel

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Copy:
    """An output's copy to its place on the host.

    States: to be queued, queued (its events are there, but for those in whose place the device was
    synchronized).
    """

    destination: Destination
    #: When the host began with it, of ``time.monotonic()``.
    started_at: float
    is_queued: bool = False
    began: DeviceEvent | None = None
    ended: DeviceEvent | None = None


@dataclass(kw_only=True, eq=False)
class OutputJob:
    """One output between the forward and the host.

    States: prepared, copying (``copy`` is set), finished.
    """

    label: OutputLabel
    packed: Packed
    #: The forward's end on its stream; None: the device was synchronized instead.
    event: DeviceEvent | None = None
    #: Which forward made it, where that is known.
    forward: Forward | None = None
    #: Whether the device was seen to be done with that forward.
    is_computed: bool = False
    copy: Copy | None = None
    #: Why its copy could not be queued by the thread that queues the forwards.
    error: Exception | None = None
    #: Whether its copy was left to the thread that waits for copies, which has not queued it yet.
    is_left: bool = False
    timings: OutputTimings = field(default_factory=OutputTimings)
    #: Called once, when the device memory is free again, whatever happened.
    on_done: Callable[[], None] | None = None
    future: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        # From here on cancel() answers False: the copy may run already.
        self.future.set_running_or_notify_cancel()

    def finish(self) -> None:
        """Let go of the device memory and say so; idempotent."""
        self.packed.drop()
        on_done, self.on_done = self.on_done, None
        if on_done is None:
            return
        try:
            on_done()
        except BaseException:
            # Boundary: a callback of whoever embeds this; the output has done nothing wrong.
            logger.exception("What follows output %r raised.", self.label.output_id)
