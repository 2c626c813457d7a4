"""Step mode's half of a worker: keeps the states of requests and advances them call by call."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestream.errors import EngineClosedError, RequestError
from sidestream.protocol import (
    AsyncDiffusionOutput,
    AsyncOutputKind,
    ExecuteStep,
    StepFate,
    StepResult,
    StepStage,
    number_of,
)
from sidestream.request import AbortOutcome, DiffusionRequest, OutputTimings
from sidestream.transport.control_page import ControlPage
from sidestream.transport.failure import describe_error
from sidestream.worker.forwards import Forward
from sidestream.worker.handover import HandOver
from sidestream.worker.pipeline import Payload
from sidestream.worker.place import Places
from sidestream.worker.prepare_stream import PrepareStream
from sidestream.worker.sink import OutputLabel
from sidestream.worker.stages import Stages

if TYPE_CHECKING:
    from torch import Tensor

    from sidestream.models.step import StepState

#: How often a wait for a place looks whether the engine closes.
_PLACE_POLL_S: Final = 0.05


@dataclass(eq=False)
class _Resident:
    """A request between two steps."""

    state: StepState
    #: From its first kernel on, for the times of its output.
    forward: Forward
    #: What the main process calls the class of states that it may share a forward with.
    share: int | None = None


class Stepper:
    """Runs the calls of step mode on the worker's main thread.

    A request has a place from its first call until its output is out or its state is dropped. One
    that was given up is stopped at the first of: the start of a call that names it, the end of its
    denoising, the end of its last step.
    """

    def __init__(
        self,
        stages: Stages,
        outputs: HandOver,
        control: ControlPage,
        places: Places,
        preparing: PrepareStream,
        *,
        send: Callable[[AsyncDiffusionOutput], None],
        decode_request: Callable[[bytes], DiffusionRequest],
        post_process: str | None,
        sends_chunks: bool,
    ) -> None:
        self._stages = stages
        self._outputs = outputs
        self._control = control
        self._places = places
        self._preparing = preparing
        self._send = send
        self._decode_request = decode_request
        self._post_process = post_process
        self._sends_chunks = sends_chunks
        self._residents: dict[int, _Resident] = {}
        # Of outputs that are not out yet.
        self._handed_over: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._last_share = 0
        self._share_keys: dict[object, int] = {}

    def __len__(self) -> int:
        """Count the states."""
        return len(self._residents)

    def close(self) -> None:
        """Let go of the states."""
        self._residents.clear()

    def note_call(self) -> None:
        """Note that a method was called, which may have changed the pipeline."""
        self._preparing.note_changed()

    def execute(self, command: ExecuteStep) -> None:
        """Run one call and answer it, once all of it is queued on the device."""
        self._control.running = command.rpc_id
        labels = [
            OutputLabel(
                output_id=output_id,
                rpc_id=command.rpc_id,
                attempt=attempt,
                post_process=self._post_process,
            )
            for output_id, attempt in zip(command.output_ids, command.attempts, strict=True)
        ]
        match command.stage:
            case StepStage.PREPARE:
                results = [
                    self._prepare(label, packed)
                    for label, packed in zip(labels, command.requests, strict=True)
                ]
            case StepStage.DENOISE:
                results = self._denoise(labels)
            case StepStage.DROP:
                results = [self._drop(label) for label in labels]
        self._send(
            AsyncDiffusionOutput(
                kind=AsyncOutputKind.RPC_RESULT,
                rpc_id=command.rpc_id,
                result=tuple(tuple(result) for result in results),
            )
        )
        self._control.forwards += 1

    # --- stages -------------------------------------------------------------------------------

    def _prepare(self, label: OutputLabel, packed: bytes) -> StepResult:
        number = number_of(label.output_id)
        if not self._take_place():
            self._refuse(label, EngineClosedError("The engine closed before this ran."))
            return _gone(number)
        if self._is_aborted(number):
            self._places.give_back()
            self._outputs.aborts.answer(label, AbortOutcome.NEVER_STARTED)
            return _gone(number)
        try:
            self._residents[number] = self._make_resident(self._decode_request(packed))
        except BaseException as error:  # noqa: BLE001 - boundary: the pipeline; the loop goes on
            self._places.give_back()
            self._report(error, label)
            return _gone(number)
        return self._kept(number)

    def _make_resident(self, request: DiffusionRequest) -> _Resident:
        may_be_beside = self._stages.may_prepare_beside(request)
        with self._preparing.block(may_be_beside=may_be_beside) as preparation:
            if preparation.is_beside:
                self._share_blame()
            forward = self._outputs.begin_forward(is_shared=preparation.is_beside)
            try:
                state = self._stages.prepare(request)
                preparation.made.append(state)
            finally:
                self._outputs.end_step(forward)
        return _Resident(state, forward, self._share_of(state))

    def _denoise(self, labels: list[OutputLabel]) -> list[StepResult]:
        results, members = [], []
        for label in labels:
            number = number_of(label.output_id)
            if number not in self._residents or self._is_aborted(number):
                results.append(self._drop(label))
            else:
                members.append((label, number))
        if not members:
            return results
        forward = self._outputs.begin_step()
        predictions = self._predict([number for _, number in members])
        for label, number in members:
            results.append(self._advance(label, number, predictions.pop(number), forward))
        self._outputs.end_step(forward)
        self._preparing.note_queued(forward.ended)
        return results

    def _predict(self, numbers: list[int]) -> dict[int, Tensor | RequestError | None]:
        # One that had no step to take, or fewer than it had announced, is only decoded.
        undone = [number for number in numbers if not self._residents[number].state.done]
        states = [self._residents[number].state for number in undone]
        predictions = self._stages.denoise(states) if states else []
        return dict.fromkeys(numbers) | dict(zip(undone, predictions, strict=True))

    def _advance(
        self,
        label: OutputLabel,
        number: int,
        prediction: Tensor | RequestError | None,
        forward: Forward,
    ) -> StepResult:
        """Take a member of a forward one step on, and bring out what that finished."""
        if isinstance(prediction, RequestError):
            return self._fail(label, prediction)
        try:
            if prediction is not None and not self._is_aborted(number):
                # Elsewhere, so that nothing here keeps what is to be gone when it is said to be.
                self._step(label, self._residents[number], prediction, forward)
            del prediction
            if self._is_aborted(number):
                return self._drop(label)
            if self._residents[number].state.done:
                return self._bring_out(label, number, forward)
            return self._kept(number)
        except BaseException as error:  # noqa: BLE001 - boundary: the pipeline; the loop goes on
            return self._fail(label, error)

    def _step(
        self, label: OutputLabel, resident: _Resident, prediction: Tensor, forward: Forward
    ) -> None:
        chunk = self._stages.advance(resident.state, prediction)
        self._control.steps += 1
        if chunk is not None and self._sends_chunks:
            label = replace(label, is_chunk=True)
            self._hand_over(label, chunk, resident.forward, forward, self._outputs.count_output)
        resident.share = self._share_of(resident.state)

    def _bring_out(self, label: OutputLabel, number: int, forward: Forward) -> StepResult:
        payload = self._stages.decode(self._residents[number].state)
        resident = self._residents.pop(number)
        result = StepResult(number, StepFate.OUT, resident.state.step, resident.state.num_steps)
        first = resident.forward
        del resident
        self._hand_over(label, payload, first, forward, self._output_done)
        return result

    def _kept(self, number: int) -> StepResult:
        resident = self._residents[number]
        state = resident.state
        return StepResult(number, StepFate.KEPT, state.step, state.num_steps, resident.share)

    def _drop(self, label: OutputLabel) -> StepResult:
        """Let go of a state that nobody wants, and say at which step."""
        number = number_of(label.output_id)
        resident = self._residents.pop(number, None)
        if resident is not None:
            step = resident.state.step
            del resident
            self._places.give_back()
            self._outputs.aborts.answer(label, AbortOutcome.STOPPED, step)
        return _gone(number)

    # --- what comes out -----------------------------------------------------------------------

    def _hand_over(
        self,
        label: OutputLabel,
        payload: Payload,
        first: Forward,
        last: Forward,
        on_done: Callable[[], None],
    ) -> None:
        # Of a request's own forwards none is later than its output.
        whole = Forward(
            number=last.number,
            started=first.started,
            started_at=first.started_at,
            is_shared=first.is_shared,
        )
        self._handed_over.add(whole)
        timings = OutputTimings(
            forward_started_at=first.started_at, forward_ended_at=time.monotonic()
        )
        self._outputs.hand_over(label, payload, whole, timings, on_done)

    def _output_done(self) -> None:
        self._places.give_back()
        self._outputs.count_output()

    def _fail(self, label: OutputLabel, error: BaseException) -> StepResult:
        number = number_of(label.output_id)
        del self._residents[number]
        self._places.give_back()
        self._report(error, label)
        return _gone(number)

    def _report(self, error: BaseException, label: OutputLabel) -> None:
        """Answer for a request that is no longer here, unless the device may be lost by another."""
        beside = Forward(started_at=time.monotonic(), is_shared=bool(self._residents))
        self._outputs.fail(error, partial(self._refuse, label), beside)

    def _share_blame(self) -> None:
        """Note that a fault of the device may from now on be that of a request prepared beside."""
        for forward in (*self._handed_over, *(one.forward for one in self._residents.values())):
            forward.is_shared = True

    def _refuse(self, label: OutputLabel, error: BaseException) -> None:
        if not isinstance(error, RequestError):
            reason = RequestError(f"A step failed: {describe_error(error)}")
            reason.__cause__ = error
            error = reason
        self._outputs.transfer.publish_error(label, error)
        self._outputs.count_output()

    # --- places and marks ---------------------------------------------------------------------

    def _take_place(self) -> bool:
        # There is one, or is about to be: the main process prepares no more requests than there
        # are places, but hears of an output before its place is free.
        while not self._control.shutdown:
            if self._places.take(_PLACE_POLL_S):
                return True
        return False

    def _is_aborted(self, number: int) -> bool:
        return number in self._control.aborts()

    def _share_of(self, state: StepState) -> int | None:
        key = self._stages.share_key(state)
        if key is None:
            return None
        if key not in self._share_keys:
            self._last_share += 1
            used = {resident.share for resident in self._residents.values()}
            kept = {k: share for k, share in self._share_keys.items() if share in used}
            self._share_keys = {**kept, key: self._last_share}
        return self._share_keys[key]


def _gone(number: int) -> StepResult:
    return StepResult(number, StepFate.GONE, 0, 0)
