"""The four stages of a pipeline that is stepped, run as a worker runs them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from sidestream.errors import ConfigError, RequestError
from sidestream.transport.failure import detach_frames
from sidestream.worker.pipeline import LoadedPipeline, Payload, execution_error

if TYPE_CHECKING:
    from torch import Tensor

    from sidestream.models.step import StepState
    from sidestream.request import DiffusionRequest

_STAGES: Final = ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")


class Stages:
    """A pipeline's stages without gradients; what they raise comes as ``RequestError``.

    Raises:
        ConfigError: The pipeline lacks a stage.
    """

    def __init__(self, loaded: LoadedPipeline) -> None:
        self._loaded = loaded
        self._pipeline = pipeline = loaded.pipeline
        missing = [name for name in _STAGES if not callable(getattr(pipeline, name, None))]
        if missing:
            raise ConfigError(
                "pipeline",
                type(pipeline).__name__,
                f"a class with the stages {', '.join(_STAGES)} in step mode (missing: "
                f"{', '.join(missing)}); else step_execution=False",
            )
        self._denoise_steps: Callable[[Sequence[StepState]], Sequence[Tensor]] | None = getattr(
            pipeline, "denoise_steps", None
        )
        share_key = getattr(pipeline, "share_key", None)
        #: Says with which states one may share a forward; None where none may.
        self.share_key: Callable[[StepState], Hashable | None] = (
            share_key
            if callable(share_key) and self._denoise_steps is not None
            else lambda _state: None
        )

    def may_prepare_beside(self, request: DiffusionRequest) -> bool:
        """Tell whether :meth:`prepare` may run on a stream of its own for this request."""
        ask = getattr(self._pipeline, "may_prepare_beside", None)
        if not callable(ask):
            return False
        with _as_request_error(request):
            return bool(ask(request))

    def prepare(self, request: DiffusionRequest) -> StepState:
        """Make the state of a request."""
        with _as_request_error(request):
            return cast("StepState", self._pipeline.prepare_encode(request))

    def denoise(self, states: Sequence[StepState]) -> list[Tensor | RequestError]:
        """Predict the noise of each state's next step, in one forward if there are several.

        Where that fails each is tried alone, since one of them may have failed all; what still
        fails has its error in its place.
        """
        if len(states) > 1 and self._denoise_steps is not None:
            try:
                with _as_request_error(None):
                    predictions = list(self._denoise_steps(states))
                if len(predictions) == len(states):
                    return cast("list[Tensor | RequestError]", predictions)
            except RequestError as error:
                detach_frames(error)  # theirs hold the forward's tensors
        return [self._denoise_alone(state) for state in states]

    def _denoise_alone(self, state: StepState) -> Tensor | RequestError:
        try:
            with _as_request_error(state.request):
                return cast("Tensor", self._pipeline.denoise_step(state))
        except RequestError as error:
            return error

    def advance(self, state: StepState, prediction: Tensor) -> Payload | None:
        """Advance a state by one step; gives the part of its output that this finished, if any."""
        with _as_request_error(state.request):
            self._pipeline.step_scheduler(state, prediction)
            chunk, state.chunk = state.chunk, None
            return None if chunk is None else self._loaded.finished(chunk, state.request)

    def decode(self, state: StepState) -> Payload:
        """Make the payload of a state that is done."""
        with _as_request_error(state.request):
            tree: Any = self._pipeline.post_decode(state)
            return self._loaded.finished(tree, state.request)


@contextmanager
def _as_request_error(request: DiffusionRequest | None) -> Iterator[None]:
    import torch

    try:
        with torch.no_grad():
            yield
    except RequestError:
        raise
    except BaseException as error:
        raise execution_error(error, None if request is None else request.request_id) from error
