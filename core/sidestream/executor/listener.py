"""Who hears what becomes of an engine's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sidestream.errors import InternalError
from sidestream.executor.futures import fresh

if TYPE_CHECKING:
    from sidestream.executor.flight import Flight
    from sidestream.transport.envelope import Delivery


class Listener:
    """What all executors of an engine call; set by whoever sends requests, before they start.

    Called on any thread, as a rule on a pump: nothing here may block or raise.
    """

    def __init__(self) -> None:
        #: There may be room for another forward.
        self.on_capacity: Callable[[], None] = lambda: None
        #: An output is ready; before its future resolves.
        self.on_ready: Callable[[Flight, Delivery], None] = lambda _flight, _delivery: None
        #: A part of an output is here; before it is given to its request.
        self.on_chunk: Callable[[Delivery], None] = lambda _delivery: None
        #: The forward of a batch failed: each of these may run again alone.
        self.on_batch_failed: Callable[[Sequence[Flight], Delivery], None] = _fail_batch
        #: A worker died: these are to be queued again, in the order of their submission.
        self.on_requeue: Callable[[list[Flight]], None] = lambda _flights: None
        #: No worker is left; once.
        self.on_broken: Callable[[BaseException], None] = lambda _error: None


def _fail_batch(flights: Sequence[Flight], delivery: Delivery) -> None:
    """Fail all of a batch with what its forward raised."""
    message, _ = delivery.open()
    for flight in flights:
        flight.fail(fresh(message.error or InternalError("A forward failed without an error.")))
