"""What is done with each message of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestream.executor.inflight import key_of
from sidestream.executor.listener import Listener
from sidestream.protocol import AsyncOutputKind, number_of

if TYPE_CHECKING:
    from sidestream.executor.flight import Flight
    from sidestream.executor.inflight import InflightTable
    from sidestream.executor.stepwise import StepCalls
    from sidestream.executor.worker_load import WorkerLoad
    from sidestream.transport.envelope import Delivery


class AnswerRouter:
    """Brings what one worker answers to whoever waits for it; for whoever reads messages.

    What nobody waits for any more is let go of undecoded, and counted.
    """

    def __init__(
        self, table: InflightTable, load: WorkerLoad, steps: StepCalls, *, is_stepwise: bool
    ) -> None:
        self.listener = Listener()
        self._table = table
        self._load = load
        self._steps = steps
        self._is_stepwise = is_stepwise

    def route(self, delivery: Delivery) -> None:
        """Do what a message asks for: anything but the progress of a start."""
        match delivery.kind:
            case AsyncOutputKind.COMPUTE_DONE:
                flights = self._load.take(delivery.rpc_id)
                self.listener.on_capacity()
                for flight in flights:
                    flight.computed()
            case AsyncOutputKind.OUTPUT_READY:
                self._on_output(delivery)
            case AsyncOutputKind.CHUNK_READY:
                self._on_chunk(delivery)
            case AsyncOutputKind.RPC_RESULT:
                self._on_result(delivery)
            case AsyncOutputKind.PROGRESS:
                self._load.ends_soon(delivery.rpc_id)
                self.listener.on_capacity()

    def fail_forward(self, rpc_id: int, error: BaseException) -> None:
        """Fail a forward that has no answer, and will have none."""
        flights = self._load.take_failed(rpc_id)
        self.listener.on_capacity()
        self._table.fail(flights, error)

    def _on_output(self, delivery: Delivery) -> None:
        flight = self._table.take_flight(delivery.async_output_id, delivery.attempt)
        # A late one too: its request was given up.
        self._load.answered(number_of(delivery.async_output_id))
        if flight is None:
            delivery.discard()
        else:
            if not delivery.failed:
                self._steps.before_output(flight, delivery.rpc_id)
            self._deliver(flight, delivery)
        if self._is_stepwise:
            self._steps.output_left(key_of(delivery.async_output_id))
            self.listener.on_capacity()

    def _on_chunk(self, delivery: Delivery) -> None:
        flight = self._table.running_flight(delivery.async_output_id, delivery.attempt)
        if flight is None:
            delivery.discard()
            return
        self._steps.before_output(flight, delivery.rpc_id)
        self.listener.on_chunk(delivery)
        flight.add_chunk(delivery)

    def _on_result(self, delivery: Delivery) -> None:
        call = self._table.take_call(delivery.rpc_id)
        if call is not None:
            call.set_result(delivery)
            return
        # A forward answers so only if it failed as a whole.
        flights = self._load.take_failed(delivery.rpc_id)
        self.listener.on_capacity()
        if len(flights) > 1:
            # Of a batch, some may have been answered for before it ran.
            still_open = [flight for flight in flights if self._table.is_open(flight.key)]
            self.listener.on_batch_failed(still_open, delivery)
        elif flights and self._table.take_flight(flights[0].key, flights[0].attempt) is not None:
            self._deliver(flights[0], delivery)
        else:
            self._table.count_stale()
            delivery.discard()

    def _deliver(self, flight: Flight, delivery: Delivery) -> None:
        self.listener.on_ready(flight, delivery)
        flight.deliver(delivery)
        if flight.is_suspect:
            self.listener.on_capacity()  # others had to wait for it
