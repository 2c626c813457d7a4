"""Step any diffusers pipeline: its own call, suspended at every denoising step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sidestream.errors import MissingDependencyError
from sidestream.models.step import StepState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidestream.models.suspended_call import SuspendedCall
    from sidestream.request import DiffusionRequest


@dataclass(kw_only=True, eq=False)
class SuspendedState(StepState):
    """A request whose call is suspended; dropping it ends the call without decoding."""

    call: SuspendedCall
    #: What the call has predicted and not been given back yet.
    predicted: Tensor | None = None


class GreenletSteps:
    """Four stages for an adapter with ``forward`` and a diffusers pipeline in ``pipeline``.

    An adapter inherits from this class to be steppable. The stages stop ``forward``: the first
    before the pipeline's first call of its transformer (or unet), the next two around
    ``scheduler.step``. They run in the thread that called the first of them. A pipeline that
    sets its timesteps more than once, as one that makes a video in parts does, is stepped through
    the first part, and the last stage does the rest. No request is prepared beside the steps of
    others: what a suspended call holds on the device is in its frames, where nobody finds it, and
    what a library keeps in a pipeline beside that is not known.
    """

    #: A ``diffusers.DiffusionPipeline``.
    pipeline: Any

    def forward(self, requests: Sequence[DiffusionRequest]) -> Sequence[Any]:
        """Sample by a call of the pipeline."""
        raise NotImplementedError

    def prepare_encode(self, request: DiffusionRequest) -> StepState:
        """Run the call to its first denoising step.

        Raises:
            MissingDependencyError: greenlet is not installed.
        """

        def sample() -> Any:
            (payload,) = self.forward([request])
            if isinstance(payload, BaseException):
                raise payload
            return payload

        pipeline = self._pipeline_for(request)
        call = _suspended_call(pipeline, sample)
        predicted = call.resume_to_first_step()
        steps = 0 if call.finished else call.count_steps()
        return SuspendedState(request, steps, call=call, predicted=predicted)

    def _pipeline_for(self, request: DiffusionRequest) -> Any:
        """Give the pipeline that ``forward`` calls for ``request``."""
        return self.pipeline

    def denoise_step(self, state: StepState) -> Tensor:
        """Run the call to where it gives its prediction to the scheduler."""
        assert isinstance(state, SuspendedState)
        if state.predicted is None:
            state.predicted = state.call.resume()
        if state.call.finished:  # after fewer steps than it had announced
            return torch.empty(0)
        assert state.predicted is not None
        return state.predicted

    def step_scheduler(self, state: StepState, noise_pred: Tensor) -> None:
        """Run the scheduler's step."""
        assert isinstance(state, SuspendedState)
        if state.call.finished:
            state.num_steps = state.step
            return
        state.predicted = None
        state.call.resume(noise_pred)
        state.step += 1

    def post_decode(self, state: StepState) -> Any:
        """Run the call to its end."""
        assert isinstance(state, SuspendedState)
        stopped_with = state.predicted
        while not state.call.finished:
            stopped_with = state.call.resume(stopped_with)
        return state.call.payload


def _suspended_call(pipeline: Any, sample: Callable[[], Any]) -> SuspendedCall:
    try:
        from sidestream.models.suspended_call import SuspendedCall
    except ImportError as error:
        if error.name != "greenlet":
            raise
        raise MissingDependencyError(
            "greenlet",
            f"running {type(pipeline).__name__} step by step",
            'pip install "sidestream[diffusers]"',
        ) from error
    return SuspendedCall(pipeline, sample)
