"""Who waits for what: the requests and calls in flight.

One table, filled before a command is sent, so that no message can name an id that was never issued.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sidestream.executor.flight import Flight
from sidestream.executor.futures import OutputFuture, fresh
from sidestream.executor.holding import holds_any
from sidestream.executor.stepwise import StepFuture

if TYPE_CHECKING:
    from sidestream.executor.worker_load import WorkerLoad


class InflightTable:
    """Who waits for what: forwards and calls by ``rpc_id``, outputs by ``async_output_id``."""

    def __init__(self) -> None:
        # Guards the tables and the counter. Futures are resolved outside it: their waiters wake up
        # and may ask for the lock at once. Reentrant, since a signal handler may ask while its
        # thread is in here.
        self._lock = threading.RLock()
        self._last_rpc_id = 0
        self._last_output = 0
        self._last_batch = 0
        self._rpc_futures: dict[int, tuple[Future[Any], object]] = {}
        self._forwards: dict[int, tuple[tuple[Flight, ...], object]] = {}
        self._output_futures: dict[str, Flight] = {}
        #: Resolved outputs, as long as somebody holds them.
        self._delivered: weakref.WeakValueDictionary[str, OutputFuture] = (
            weakref.WeakValueDictionary()
        )
        #: Messages for an id or attempt that is gone.
        self.stale_messages = 0

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return holds_any(self._lock)

    # --- registering, before anything is sent -------------------------------------------------

    def new_output_id(self) -> str:
        """Make an id that no other output of this engine has."""
        with self._lock:
            self._last_output += 1
            return f"out-{self._last_output}"

    def name_batch(self, flights: Sequence[Flight]) -> None:
        """Give the outputs of a batch their names, ``{batch_id}/{key}``; once for each output."""
        with self._lock:
            self._last_batch += 1
            for flight in flights:
                if flight.output_id == flight.key:
                    flight.output_id = f"batch-{self._last_batch}/{flight.key}"

    def add_flight(self, flight: Flight) -> None:
        """Register an output by its id, from submit until it is out."""
        with self._lock:
            self._output_futures[flight.key] = flight

    def add_forward(self, flights: Iterable[Flight], owner: WorkerLoad) -> int:
        """Register one forward of ``owner`` over ``flights``; gives its ``rpc_id``."""
        now = time.monotonic()
        with self._lock:
            self._last_rpc_id += 1
            members = tuple(flights)
            self._forwards[self._last_rpc_id] = members, owner
            for flight in members:
                flight.owner = owner
                flight.rpc_id = self._last_rpc_id
                flight.dispatched_at = now
            return self._last_rpc_id

    def assign(self, flights: Iterable[Flight], rpc_id: int, owner: WorkerLoad) -> None:
        """Note that ``owner`` has flights from now on, by the command ``rpc_id``."""
        now = time.monotonic()
        with self._lock:
            for flight in flights:
                flight.owner = owner
                flight.rpc_id = rpc_id
                flight.dispatched_at = now

    def add_call(self, future: Future[Any], owner: object) -> int:
        """Register a call to ``owner``; gives its ``rpc_id``."""
        with self._lock:
            self._last_rpc_id += 1
            self._rpc_futures[self._last_rpc_id] = future, owner
            return self._last_rpc_id

    # --- resolving ----------------------------------------------------------------------------

    def take_forward(self, rpc_id: int) -> tuple[Flight, ...]:
        """Take a forward out: it is computed, or failed; empty if it is gone."""
        with self._lock:
            return self._forwards.pop(rpc_id, ((), None))[0]

    def take_call(self, rpc_id: int) -> Future[Any] | None:
        """Take a call out: its answer is here."""
        with self._lock:
            future, _ = self._rpc_futures.pop(rpc_id, (None, None))
            return future

    def forget_call(self, rpc_id: int) -> None:
        """Stop waiting for a call; its answer, if one comes, is a stale message."""
        with self._lock:
            self._rpc_futures.pop(rpc_id, None)

    def count_stale(self) -> None:
        """Count a message that nobody waits for."""
        with self._lock:
            self.stale_messages += 1

    def take_flight(self, output_id: str, attempt: int) -> Flight | None:
        """Take an output out, unless the id is gone or the attempt is an earlier one."""
        with self._lock:
            key = key_of(output_id)
            flight = self._output_futures.get(key)
            if flight is None or flight.attempt != attempt:
                self.stale_messages += 1
                return None
            del self._output_futures[key]
            self._delivered[key] = flight.output
            return flight

    def running_flight(self, output_id: str, attempt: int) -> Flight | None:
        """Find an output of which a part is here, unless the id is gone or the attempt past."""
        with self._lock:
            flight = self._output_futures.get(key_of(output_id))
            if flight is None or flight.attempt != attempt:
                self.stale_messages += 1
                return None
            return flight

    def drop_flight(self, flight: Flight) -> bool:
        """Forget an output; False if it was out already."""
        with self._lock:
            return self._output_futures.pop(flight.key, None) is not None

    def fail(self, flights: Iterable[Flight], error: BaseException) -> None:
        """Forget outputs, and fail those that were not out, each with a copy of ``error``."""
        for flight in flights:
            if self.drop_flight(flight):
                flight.fail(fresh(error))

    def take_calls(self, owner: object) -> list[Future[Any]]:
        """Take out the calls to ``owner``, which will not answer any more."""
        with self._lock:
            mine = [i for i, (_, callee) in self._rpc_futures.items() if callee is owner]
            return [self._rpc_futures.pop(i)[0] for i in mine]

    def forget_forwards(self, owner: object) -> None:
        """Forget the forwards of ``owner``; their outputs stay registered."""
        with self._lock:
            for rpc_id in [i for i, (_, runner) in self._forwards.items() if runner is owner]:
                del self._forwards[rpc_id]

    def flights_of(self, owner: object) -> list[Flight]:
        """List the open outputs that ``owner`` has."""
        with self._lock:
            return [f for f in self._output_futures.values() if f.owner is owner]

    # --- asking -------------------------------------------------------------------------------

    def is_open(self, key: str) -> bool:
        """Tell whether an output is queued or with a worker."""
        return key in self._output_futures

    def open_count(self) -> int:
        """Count the outputs that are."""
        return len(self._output_futures)

    def find(self, key: str) -> Flight | None:
        """Find an output that is open."""
        with self._lock:
            return self._output_futures.get(key)

    def busy_since(self, owner: object) -> float | None:
        """Say since when ``owner`` has had the oldest of what it has; None: it has nothing."""
        with self._lock:
            # Also those that nobody waits for any more: their forwards run all the same.
            running = [
                m for members, runner in self._forwards.values() if runner is owner for m in members
            ]
            mine = [f for f in self._output_futures.values() if f.owner is owner]
        return min(
            (f.dispatched_at for f in [*running, *mine] if f.dispatched_at is not None),
            default=None,
        )

    def has_calls(self, owner: object) -> bool:
        """Tell whether somebody waits for a call to ``owner``."""
        with self._lock:
            return any(callee is owner for _, callee in self._rpc_futures.values())

    def output_future(self, output_id: str) -> OutputFuture | None:
        """Find the future of an output that is open, or resolved and still held."""
        with self._lock:
            flight = self._output_futures.get(key_of(output_id))
            if flight is None:
                return self._delivered.get(key_of(output_id))
        flight.output.want()
        return flight.output

    def flights(self) -> list[Flight]:
        """List the open outputs."""
        with self._lock:
            return list(self._output_futures.values())

    def counts(self) -> dict[str, int]:
        """Count what is open."""
        with self._lock:
            steps = sum(isinstance(future, StepFuture) for future, _ in self._rpc_futures.values())
            return {
                "outputs": len(self._output_futures),
                "forwards": len(self._forwards) + steps,
                "calls": len(self._rpc_futures) - steps,
                "stale_messages": self.stale_messages,
            }


def key_of(output_id: str) -> str:
    """Give the part of an output's id that it has from submit on; keys hold no slash."""
    return output_id.rpartition("/")[2]
