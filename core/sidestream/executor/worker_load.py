"""What one worker has of an engine's requests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sidestream.executor.holding import holds_any
from sidestream.transport.abort_table import AbortTable

if TYPE_CHECKING:
    from sidestream.executor.flight import Flight
    from sidestream.executor.inflight import InflightTable
    from sidestream.transport.control_page import ControlPage


class WorkerLoad:
    """The forwards and requests of one worker, and which of them it was told to give up.

    The owner of flights, as the table of an engine names it. Any thread adds and gives up, whoever
    reads answers takes out.
    """

    def __init__(self, table: InflightTable, depth: int) -> None:
        """``depth``: how many forwards the worker may have that are not queued on its device."""
        self._table = table
        self._depth = depth
        # Guards the two sets and the aborts. Reentrant, since a signal handler may close the engine
        # while its thread is in here.
        self._lock = threading.RLock()
        self._executing: set[int] = set()
        # Of those, the ones that are at their last step.
        self._ending_soon: set[int] = set()
        # Not held: it would keep its output, and so its slot, until the next one.
        self._suspect: weakref.ref[Flight] | None = None
        # Who is marked on the page that the worker reads; None before there is one.
        self._aborts: AbortTable | None = None

    def adopt(self, page: ControlPage) -> None:
        """Take the control page of the worker."""
        self._aborts = AbortTable(page)

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return holds_any(self._lock)

    # --- forwards -----------------------------------------------------------------------------

    @property
    def executing(self) -> int:
        """Count the forwards that are with the worker and not queued on its device yet."""
        return len(self._executing)

    def has_room(self, *, bind_late: bool = False) -> bool:
        """Tell whether one more forward would be within the depth.

        ``bind_late``: only once what runs is at its last step, so that a batch does not close a
        whole forward before it can start.
        """
        with self._lock:
            if len(self._executing) >= self._depth:
                return False
            return not bind_late or self._executing <= self._ending_soon

    def is_executing(self, rpc_id: int) -> bool:
        """Tell whether a forward is with the worker and not queued on its device yet."""
        return rpc_id in self._executing

    def add(self, flights: Sequence[Flight]) -> int:
        """Register one forward over ``flights`` before it is sent; gives its ``rpc_id``."""
        if len(flights) > 1:
            self._table.name_batch(flights)
        if flights[0].is_suspect:
            self._suspect = weakref.ref(flights[0])
        rpc_id = self._table.add_forward(flights, self)
        with self._lock:
            self._executing.add(rpc_id)
        return rpc_id

    def ends_soon(self, rpc_id: int) -> None:
        """Hear that a forward is at its last step."""
        with self._lock:
            self._ending_soon.add(rpc_id)

    def take(self, rpc_id: int) -> tuple[Flight, ...]:
        """Take a forward out, which is queued on the device; gives what it ran over."""
        flights = self._table.take_forward(rpc_id)
        with self._lock:
            self._executing.discard(rpc_id)
            self._ending_soon.discard(rpc_id)
        return flights

    def take_failed(self, rpc_id: int) -> tuple[Flight, ...]:
        """Take a forward out of which nothing else will come."""
        flights = self.take(rpc_id)
        with self._lock:
            for flight in flights:
                flight.owner = None  # whoever aborts it from here on leaves no mark
                if self._aborts is not None:
                    self._aborts.discard(flight.number)
        return flights

    def clear(self) -> None:
        """Forget the forwards and the marks: the worker is gone. Its requests stay."""
        with self._lock:
            self._executing.clear()
            self._ending_soon.clear()
            if self._aborts is not None:
                self._aborts.clear()
        self._table.forget_forwards(self)

    # --- requests -----------------------------------------------------------------------------

    def flights(self) -> list[Flight]:
        """List the requests that the worker has and whose outputs are not out."""
        return self._table.flights_of(self)

    @property
    def has_suspect(self) -> bool:
        """Tell whether the worker has a request that must have it for itself."""
        suspect = None if self._suspect is None else self._suspect()
        # One that was given up is done for its caller before it is for the worker.
        return suspect is not None and (
            not suspect.output.done() or suspect.rpc_id in self._executing
        )

    def abort(self, flight: Flight) -> None:
        """Tell the worker to give a flight up, unless it has answered; its answer says how."""
        with self._lock:
            is_here = flight.owner is self and self._table.is_open(flight.key)
            if is_here and self._aborts is not None:
                # Where there is no place for the mark, the request just goes on.
                self._aborts.add(flight.number)

    def time_out(self, flight: Flight) -> bool:
        """Forget a flight, and tell the worker; False if it was out already."""
        with self._lock:
            if not self._table.drop_flight(flight):
                return False
            if flight.owner is self and self._aborts is not None:
                self._aborts.add(flight.number)
            return True

    def answered(self, number: int) -> None:
        """Hear that the worker is done with a request, which may be one that was given up."""
        with self._lock:
            if self._aborts is not None:
                self._aborts.discard(number)

    @property
    def aborting(self) -> int:
        """Count the requests that the worker was told to give up and has not answered for."""
        return 0 if self._aborts is None else len(self._aborts)
