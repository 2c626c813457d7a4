"""The call of step mode that a worker has: sent, awaited, and what it says of each request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidestream.executor.futures import EngineFuture, fresh
from sidestream.protocol import ExecuteStep, StepFate, StepResult, StepStage

if TYPE_CHECKING:
    from sidestream.executor.callbacks import CallbackThread
    from sidestream.executor.flight import Flight
    from sidestream.executor.inflight import InflightTable
    from sidestream.transport.envelope import Delivery


@dataclass(frozen=True)
class StepAnswer:
    """What a worker answered; ``failure`` in place of results if it could not read the call."""

    results: tuple[StepResult, ...] = ()
    failure: Delivery | None = None


class StepFuture(EngineFuture[Any]):
    """One call's answer. Its requests hear of their steps before whoever waits for the answer.

    Resolved with the envelope by whoever reads it, or failed; then ``on_done`` is called.
    """

    def __init__(
        self,
        callbacks: CallbackThread,
        flights: Sequence[Flight],
        on_done: Callable[[], None],
    ) -> None:
        super().__init__(callbacks)
        self.flights = tuple(flights)
        self.sent_at = time.monotonic()
        self._on_done = on_done
        # Guards the two below: an output may come on another thread than the answer.
        self._telling = threading.Lock()
        self._is_told = False
        self._told_early: set[str] = set()

    def set_result(self, result: Delivery) -> None:
        """Take the envelope apart; it holds numbers only."""
        if result.failed:
            super().set_result(StepAnswer(failure=result))
        else:
            message, _ = result.open()
            answer = StepAnswer(tuple(StepResult(*fields) for fields in message.result))
            self._tell(answer.results)
            super().set_result(answer)
        self._on_done()

    def set_exception(self, exception: BaseException | None) -> None:
        """Say that no answer will come."""
        super().set_exception(exception)
        self._on_done()

    def tell_early(self, flight: Flight) -> None:
        """Tell of the step that finished a part or an output which is here before the answer."""
        with self._telling:
            if not self._is_told and flight.key not in self._told_early:
                self._told_early.add(flight.key)
                flight.events.finish_step()

    def _tell(self, results: Iterable[StepResult]) -> None:
        flights = {flight.number: flight for flight in self.flights}
        with self._telling:
            self._is_told = True
            for result in results:
                flight = flights[result.number]
                if result.fate != StepFate.GONE:
                    flight.events.advance(result.step, result.num_steps)
                if result.fate == StepFate.OUT:
                    flight.computed()


class StepCalls:
    """The calls of step mode to one worker: one at a time, and the outputs that have left it."""

    def __init__(self, table: InflightTable) -> None:
        self._table = table
        self._call: tuple[int, StepFuture] | None = None
        # Appends are atomic: whoever reads messages appends, the engine's loop takes.
        self._left: deque[str] = deque()

    def register(self, future: StepFuture) -> int:
        """Register a call before it is sent; gives its ``rpc_id``."""
        # Not the executor's own: who has a call of a method may take as long as it likes.
        rpc_id = self._table.add_call(future, self)
        self._call = rpc_id, future
        return rpc_id

    def fail(self, error: BaseException) -> None:
        """Fail what is open with a copy of ``error``: the worker will not answer."""
        for call in self._table.take_calls(self):
            call.set_exception(fresh(error))

    def busy_since(self, flights: Iterable[Flight]) -> float | None:
        """Say since when the worker has what it has of ``flights``; None: it has nothing to do.

        States that wait for their turn are nothing that it could do.
        """
        times = [flight.dispatched_at for flight in flights if flight.is_computed]
        if self._call is not None and not self._call[1].done():
            times.append(self._call[1].sent_at)
        return min((at for at in times if at is not None), default=None)

    def before_output(self, flight: Flight, rpc_id: int) -> None:
        """Have a flight's step told before what it finished, which may come before the answer."""
        call = self._call
        if call is not None and call[0] == rpc_id:
            call[1].tell_early(flight)

    def output_left(self, key: str) -> None:
        """Hear that a request's output is out, or will not come."""
        self._left.append(key)

    def take_left(self) -> list[str]:
        """Take the keys of requests whose outputs are out since the last look."""
        keys = []
        while self._left:
            keys.append(self._left.popleft())
        return keys


def make_command(rpc_id: int, stage: StepStage, flights: Sequence[Flight]) -> ExecuteStep:
    """Make the command of one call."""
    return ExecuteStep(
        rpc_id=rpc_id,
        stage=stage,
        output_ids=tuple(flight.output_id for flight in flights),
        attempts=tuple(flight.attempt for flight in flights),
        requests=(tuple(flight.packed for flight in flights) if stage is StepStage.PREPARE else ()),
    )
