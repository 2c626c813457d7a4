"""The engine's loop in step mode: drives workers one denoising step at a time."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING

from sidestream.errors import EngineClosedError, SidestreamError, WorkerError
from sidestream.executor.futures import fresh
from sidestream.loop import EngineLoop
from sidestream.protocol import StepFate, StepStage
from sidestream.scheduler.step import StepCall, StepScheduler

if TYPE_CHECKING:
    from sidestream.config import EngineConfig
    from sidestream.executor.base import Executor
    from sidestream.executor.flight import Flight
    from sidestream.executor.groups import WorkerGroups
    from sidestream.executor.stepwise import StepAnswer, StepFuture

_Result = tuple[str, StepFate, Hashable | None]


class _Lane:
    """One worker group's requests, and the call that it has."""

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self.executor = executor
        self.scheduler: StepScheduler[Flight] = StepScheduler(
            config.max_resident, config.max_batch_size
        )
        self.call: tuple[StepCall[Flight], StepFuture] | None = None

    @property
    def has_suspect(self) -> bool:
        """Tell whether it has a request that must have it for itself."""
        return any(flight.is_suspect for flight in self.scheduler.items())


class StepLoop(EngineLoop):
    """Sends each worker its next step when it has answered the last one.

    Requests wait in the queue of :class:`EngineLoop` until a worker has room for their state; from
    then on its :class:`StepScheduler` decides. Where no pump is started, this thread reads the
    answers, while it waits for them or for work. ``host_buffer_bytes`` holds new requests back,
    parts of outputs that nobody has taken included; who has begun goes on.
    """

    def __init__(self, config: EngineConfig, executor: WorkerGroups) -> None:
        super().__init__(config, executor)
        self._config = config
        # Used by the thread alone; others look at it for a description.
        self._lanes: dict[Executor, _Lane] = {}

    def stop(self, timeout_s: float = 0.0) -> None:
        """Fail what is queued, let what has begun finish within ``timeout_s``, end the thread."""
        self.refuse(EngineClosedError("The engine is closed."))
        is_waiter = threading.current_thread() is not self._thread
        try:
            if timeout_s > 0 and is_waiter and not self._executor.callbacks.is_current():
                self.drain(timeout_s)
        finally:
            super().stop()

    def why_waiting(self) -> str:
        """Say what the next request in the queue waits for."""
        said = super().why_waiting()
        with self._room:
            has_queue = bool(self._scheduler.peek())
        lanes = list(self._lanes.values())
        if has_queue and lanes and not any(lane.scheduler.has_room for lane in lanes):
            return (
                f"the workers hold as many requests as they may ({self._config.max_resident} each: "
                "max_pending_outputs times max_batch_size)"
            )
        return said

    # --- the thread ---------------------------------------------------------------------------

    def _makes_batches(self) -> bool:
        return False  # who shares a step is decided at each step

    def _dispatch_next(self) -> bool:
        self._find_lanes()
        for lane in self._lanes.values():
            self._settle(lane)
        for lane in sorted(self._lanes.values(), key=lambda lane: len(lane.scheduler)):
            if lane.call is None:
                self._advance(lane)
        return False

    def _find_lanes(self) -> None:
        usable = self._executor.usable()
        # What was with one that is gone was queued again, or has failed.
        self._lanes = {
            executor: self._lanes.get(executor) or _Lane(executor, self._config)
            for executor in usable
        }

    def _settle(self, lane: _Lane) -> None:
        """Take in what a worker has said."""
        for key in lane.executor.steps.take_left():
            lane.scheduler.leave(key)
        if lane.call is None or not lane.call[1].done():
            return
        (call, future), lane.call = lane.call, None
        error = future.exception()
        if error is not None:
            lane.scheduler.answer(self._refused(call, error))
            return
        answer: StepAnswer = future.result()
        if answer.failure is not None:
            message, _ = answer.failure.open()
            refusal = message.error or SidestreamError("A step failed without an error.")
            lane.scheduler.answer(self._refused(call, refusal))
            return
        keys = {flight.number: flight.key for flight in call.items}
        lane.scheduler.answer(
            (keys[result.number], StepFate(result.fate), result.share) for result in answer.results
        )

    def _refused(self, call: StepCall[Flight], error: BaseException) -> list[_Result]:
        """Fail the requests of a call that the worker did not get, or could not read."""
        if isinstance(error, WorkerError | EngineClosedError):
            # Its requests are dealt with by whoever deals with that.
            return [(flight.key, StepFate.GONE, None) for flight in call.items]
        for flight in call.items:
            if self._executor.table.drop_flight(flight):
                flight.fail(fresh(error))
        # States that are there all the same are dropped next, for nobody wants them any more.
        fate = StepFate.GONE if call.stage is StepStage.PREPARE else StepFate.KEPT
        return [(flight.key, fate, None) for flight in call.items]

    def _advance(self, lane: _Lane) -> None:
        for flight in lane.scheduler.items():
            if flight.is_aborted or flight.output.done():
                lane.scheduler.give_up(flight.key)
        call = lane.scheduler.next(partial(self._newcomer, lane))
        if call is None:
            return
        try:
            lane.call = call, lane.executor.execute_stepwise(call.stage, call.items)
        except (WorkerError, EngineClosedError):
            # It died since it was looked at.
            if call.stage is StepStage.PREPARE:
                for flight in call.items:
                    flight.requeue()
                self._requeue(list(call.items))
            del self._lanes[lane.executor]

    def _newcomer(self, lane: _Lane) -> Flight | None:
        """Take the next request out of the queue, if this worker may have it now."""
        with self._room:
            waiting = self._scheduler.peek()
            if not waiting or lane.has_suspect:
                return None
            if waiting[0].is_suspect and len(lane.scheduler):
                return None  # nobody beside it
            if self._ready.value() > self._limit and not self._wanted:
                return None
            (flight,) = self._scheduler.take()
            self._wanted.discard(flight.key)
            self._room.notify()
            return flight
