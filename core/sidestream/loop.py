"""The thread that decides what is sent to a worker, and when."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import EngineClosedError, RequestAbortedError, RequestTimeoutError
from sidestream.executor.bell import Bell, ReadyBytes
from sidestream.executor.futures import fresh
from sidestream.executor.holding import holds_any
from sidestream.request import AbortOutcome
from sidestream.scheduler.deadlines import Deadlines
from sidestream.scheduler.request import RequestScheduler

if TYPE_CHECKING:
    from sidestream.config import EngineConfig
    from sidestream.executor.flight import Flight
    from sidestream.executor.groups import WorkerGroups
    from sidestream.transport.envelope import Delivery


#: A wait this long is cut short: the operating system takes no time-out that ends in centuries.
_LONGEST_PAUSE_S: Final = 3600.0
#: How long closing waits for the thread, which has nothing to wait for itself by then.
_LONGEST_END_S: Final = 10.0


class EngineLoop:
    """Sends queued requests to the executor, a daemon thread.

    A request is sent when a worker has room (``dispatch_depth``) and the outputs that nobody has
    taken stay within ``host_buffer_bytes``; waiting for a request lifts that limit up to it, else
    waiting for the last of many would never end. States: new, running, stopping, stopped.
    """

    def __init__(self, config: EngineConfig, executor: WorkerGroups) -> None:
        self._limit = config.host_buffer_bytes
        self._executor = executor
        self._max_batch_size = config.max_batch_size
        self._scheduler: RequestScheduler[Flight] = RequestScheduler(
            config.max_queued_requests,
            max_batch_size=config.max_batch_size,
            max_batch_wait_s=config.max_batch_wait_s,
        )
        self._bell = Bell(executor.turn)
        self._ready = ReadyBytes(self._bell)
        self._deadlines = Deadlines()
        # Appends are atomic: any thread and any finalizer appends, the loop takes.
        self._unwanted: deque[Flight] = deque()
        # Guards the scheduler, the deadlines, the wanted ids, the refusal and the count of what
        # was given up here; notified when there is room.
        self._room = threading.Condition()
        self._wanted: set[str] = set()
        self._has_suspects = False
        self._refusal: BaseException | None = None
        self._is_stopping = False
        # How the thread is to end everything, once it is told to.
        self._end: tuple[EngineClosedError, float] | None = None
        self.submitted = 0
        self._given_up = 0
        # Guards the counts below: each worker group has a pump of its own.
        self._counting = threading.Lock()
        self.completed = 0
        self.failed = 0
        self.carriers: Counter[str] = Counter()
        listener = executor.listener
        listener.on_capacity = self.wake
        listener.on_ready = self._on_ready
        listener.on_chunk = self._count_ready
        listener.on_batch_failed = self._on_batch_failed
        listener.on_requeue = self._requeue
        listener.on_broken = self.refuse
        self._thread = threading.Thread(target=self._run, name="sidestream-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; the worker is up and has said what its pipeline can do."""
        self._batches = self._makes_batches()
        self._thread.start()

    # --- any thread ---------------------------------------------------------------------------

    def add(self, flight: Flight) -> None:
        """Queue a request.

        Raises:
            QueueFullError: ``max_queued_requests`` are waiting.
            EngineClosedError, WorkerDiedError: Nothing is taken any more.
        """
        with self._room:
            self.check_open()
            if not self._batches:
                flight.batch_key = None
            self._scheduler.add(flight)
            table = self._executor.table
            table.add_flight(flight)
            if flight.due_at is not None:
                self._deadlines.add(flight.key, flight.due_at)
                self._deadlines.prune(table.open_count(), table.is_open)
            self.submitted += 1
        self.wake()

    def wait_for_room(self) -> None:
        """Block until one more request may wait.

        Raises:
            RuntimeError: Called from a done-callback while there is no room.
        """
        with self._room:
            if self._refusal is None and not self._scheduler.has_room:
                self._executor.callbacks.refuse_to_block()
            while self._refusal is None and not self._scheduler.has_room:
                self._room.wait()

    def want(self, output_id: str) -> None:
        """Hear that somebody waits for a request: it must not wait for outputs to be taken."""
        with self._room:
            if output_id not in self._scheduler:
                return
            self._wanted.add(output_id)
        self.wake()

    def abort(self, flight: Flight) -> None:
        """Take a request back while it is queued, else have its worker give it up.

        Raises:
            EngineClosedError: In a forked child.
        """
        self._executor.check_process()
        with self._room:
            is_back = self._take_back(flight)
            if not is_back:
                # Both under the lock: what its worker lets go of must not be queued again.
                flight.is_aborted = True
                self._executor.abort(flight)
        if is_back:
            self._fail_aborted(flight, AbortOutcome.NEVER_STARTED)
            self.wake()

    def abort_later(self, flights: Iterable[Flight]) -> None:
        """Have the thread abort requests; never blocks, for finalizers."""
        self._unwanted.extend(flights)
        self._bell.ring()

    def wake(self) -> None:
        """Have the thread look again."""
        self._bell.ring()

    def check_open(self) -> None:
        """Raise what refuses new work, if anything does."""
        if self._refusal is not None:
            raise fresh(self._refusal)

    def refuse(self, error: BaseException) -> None:
        """Take nothing more, and fail what is queued, each with a copy of ``error``."""
        with self._room:
            if self._refusal is None:
                self._refusal = error
            waiting = self._scheduler.take_all()
            self._wanted.clear()
            self._room.notify_all()
        for flight in waiting:
            self._executor.table.drop_flight(flight)
            flight.fail(fresh(error))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or in flight; False if time ran out."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            flights = self.flights()
            if not flights:
                return True
            for flight in flights:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                try:
                    flight.output_ready.exception(left)
                except TimeoutError:
                    return False

    def flights(self) -> list[Flight]:
        """List what is queued or with the executor, in the order of submission."""
        return self._executor.table.flights()

    def counts(self) -> dict[str, Any]:
        """Count requests and bytes."""
        with self._room:
            return {
                "submitted": self.submitted,
                "completed": self.completed,
                "failed": self.failed + self._given_up,
                "aborting": self._executor.aborting,
                "queued": len(self._scheduler),
                "ready_bytes": self._ready.value(),
                "carriers": dict(self.carriers),
            }

    def why_waiting(self) -> str:
        """Say what the next request in the queue waits for."""
        with self._room:
            batch = self._scheduler.peek()
            ready_bytes = self._ready.value()
            ready_at = self._scheduler.ready_at()
        if not batch or ready_at is None:
            return "nothing is queued"
        if self._refusal is not None:
            return "nothing is taken any more"
        if batch[0].is_suspect and not self._executor.can_run_alone():
            return "a request that a worker may have died of waits for a worker of its own"
        if not self._executor.has_capacity(bind_late=self._batches):
            return "no worker has room: they compute, or are being restarted"
        if ready_bytes > self._limit and not self._wanted:
            return (
                f"{ready_bytes} bytes of outputs are ready and not taken "
                f"(host_buffer_bytes={self._limit})"
            )
        if ready_at > time.monotonic():
            return "the oldest request waits for company (max_batch_wait_s)"
        return "it is about to be sent"

    def stop(self, timeout_s: float = 0.0) -> None:
        """Fail what is queued and end the thread; what a worker has needs none to finish."""
        self.refuse(EngineClosedError("The engine is closed."))
        self._is_stopping = True
        self.wake()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            # Not for ever: in a signal handler it might wait for what that handler interrupted.
            self._thread.join(_LONGEST_END_S)

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return holds_any(self._room) or self._executor.is_held()

    def end_later(self, error: EngineClosedError, timeout_s: float = 0.0) -> None:
        """Have the thread close everything by itself.

        Never blocks: for finalizers, and for signal handlers that interrupted their thread here.
        """
        self._end = error, timeout_s
        self._bell.ring()

    # --- the pump -----------------------------------------------------------------------------

    def _on_ready(self, _flight: Flight, delivery: Delivery) -> None:
        with self._counting:
            if delivery.failed:
                self.failed += 1
            else:
                self.completed += 1
                self.carriers[delivery.carrier] += 1
        self._count_ready(delivery)
        if self._has_suspects:
            self.wake()  # a suspect waits for a worker that has nothing else

    def _count_ready(self, delivery: Delivery) -> None:
        self._ready.add(delivery.nbytes)
        delivery.count(self._ready.free)

    def _on_batch_failed(self, flights: Sequence[Flight], delivery: Delivery) -> None:
        """Run each member of a batch again alone: one of them may have failed all."""
        delivery.discard()
        for flight in flights:
            flight.requeue()
            flight.batch_key = None
        self._requeue(list(flights), AbortOutcome.DETACHED)

    def _requeue(self, flights: list[Flight], if_aborted: AbortOutcome | None = None) -> None:
        """Put flights that were sent before in front of the queue."""
        # Dispatching finds a group gone while it holds the lock, hence the reentrant one.
        with self._room:
            table = self._executor.table
            # What timed out meanwhile is in no table any more.
            aborted = [f for f in flights if f.is_aborted and table.drop_flight(f)]
            flights = [f for f in flights if table.is_open(f.key)]
            self._given_up += len(aborted)
            refusal = self._refusal
            if refusal is None:
                self._scheduler.put_back(flights)
                # They were sent within the limit, and who waits for one says so only once.
                self._wanted.update(flight.key for flight in flights)
                self._has_suspects |= any(flight.is_suspect for flight in flights)
        if refusal is not None:
            for flight in flights:
                if self._executor.table.drop_flight(flight):
                    flight.fail(fresh(refusal))
        for flight in aborted:
            has_begun = AbortOutcome.STOPPED if flight.is_suspect else AbortOutcome.NEVER_STARTED
            self._fail_aborted(flight, if_aborted or has_begun)
        self.wake()

    # --- giving up ----------------------------------------------------------------------------

    def _take_back(self, flight: Flight) -> bool:
        """Take a request out of the queue; False if it is not there. For the lock's holder."""
        if not self._scheduler.remove(flight.key):
            return False
        self._wanted.discard(flight.key)
        self._executor.table.drop_flight(flight)
        self._given_up += 1
        self._room.notify()
        return True

    def _fail_aborted(self, flight: Flight, outcome: AbortOutcome) -> None:
        flight.fail(RequestAbortedError(outcome=outcome, request_id=flight.request_id))

    def _time_out_due(self) -> None:
        """Fail what is due; a worker that has it is told, and what still comes is stale."""
        timed_out: list[tuple[Flight, str]] = []
        with self._room:
            for key in self._deadlines.take_due(time.monotonic()):
                flight = self._executor.table.find(key)
                if flight is None:
                    continue
                if self._take_back(flight):
                    timed_out.append((flight, "in the queue"))
                elif self._executor.time_out(flight):
                    self._given_up += 1
                    timed_out.append((flight, "with a worker"))
        for flight, where in timed_out:
            assert flight.timeout_s is not None
            flight.fail(
                RequestTimeoutError(
                    f"Request {flight.request_id!r} was not done within {flight.timeout_s:g} s: it "
                    f"was {where}. Raise timeout_s, or see describe() for what waits.",
                    timeout_s=flight.timeout_s,
                    request_id=flight.request_id,
                )
            )

    # --- the loop -----------------------------------------------------------------------------

    def _makes_batches(self) -> bool:
        return self._max_batch_size > 1 and bool(
            self._executor.worker.get("supports_request_batch")
        )

    def _run(self) -> None:
        self._bell.begin()
        try:
            self._work()
        finally:
            self._bell.end()
        if self._end is not None:
            error, timeout_s = self._end
            self.refuse(error)
            self._executor.shutdown(timeout_s)

    def _work(self) -> None:
        while not self._is_stopping:
            self._bell.wait(self._pause_s())
            if self._end is not None:
                return
            while self._unwanted:
                self.abort(self._unwanted.popleft())
            # Before anything is sent: what is due already never starts.
            self._time_out_due()
            while self._dispatch_next():
                pass

    def _pause_s(self) -> float | None:
        """Say how long nothing can become due by itself; ends workers that hang."""
        now = time.monotonic()
        look_at = self._executor.watch(now)
        with self._room:
            ready_at = self._scheduler.ready_at()
            due_at = self._deadlines.next_at()
        if ready_at is not None and (
            # What may be sent and was not waits for something that wakes the loop.
            ready_at <= now or not self._executor.has_capacity(bind_late=self._batches)
        ):
            ready_at = None
        nearest = min((at for at in (ready_at, due_at, look_at) if at is not None), default=None)
        return None if nearest is None else min(max(0.0, nearest - now), _LONGEST_PAUSE_S)

    def _dispatch_next(self) -> bool:
        if not self._executor.has_capacity(bind_late=self._batches):
            return False
        with self._room:
            ready_at = self._scheduler.ready_at()
            if ready_at is None or ready_at > time.monotonic():
                return False
            if self._scheduler.peek()[0].is_suspect and not self._executor.can_run_alone():
                return False
            if self._ready.value() > self._limit and not self._wanted:
                return False
            batch = self._scheduler.take()
            self._wanted.difference_update(flight.key for flight in batch)
            if self._has_suspects:
                self._has_suspects = any(f.is_suspect for f in self._scheduler.items())
            self._executor.dispatch(batch, bind_late=self._batches)
            self._room.notify(len(batch))
        return True
