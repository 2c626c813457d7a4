"""What a pipeline has to offer to run one denoising step at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sidestream.models.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from sidestream.request import DiffusionRequest


@dataclass
class StepState:
    """One request between two steps; a pipeline derives its own with its tensors in it.

    Made by ``prepare_encode``, kept in the worker, dropped when the request is out or aborted.
    """

    request: DiffusionRequest
    #: Steps of the whole request, those of all chunks together.
    num_steps: int
    #: Steps done; ``step_scheduler`` raises it by one.
    step: int = 0
    #: A part of the output that ``step_scheduler`` finished (frames of a video, a tree on the
    #: device); the worker takes it and puts None in its place.
    chunk: Any = None

    @property
    def done(self) -> bool:
        """Whether only ``post_decode`` is left."""
        return self.step >= self.num_steps


class StepPipeline(Pipeline, Protocol):
    """Turn a request into a payload in four stages, with other requests between them.

    All run in the worker's main thread with the device bound and without gradients, and none
    waits for the device. The result equals that of ``forward`` bit for bit, whatever other
    requests were stepped in between. Besides these a class may have:

    ``share_key(state) -> Hashable | None`` (None)
        States of one key may be given to ``denoise_steps`` together, at whatever step each is;
        None: this state is stepped alone.
    ``denoise_steps(states) -> Sequence[Tensor]`` (absent: one ``denoise_step`` each)
        One forward for several states, one noise prediction each. It leaves the states as they
        are: if it raises, each is stepped alone.
    ``may_prepare_beside(request) -> bool`` (absent: False)
        Whether ``prepare_encode`` may run on a stream of its own while steps of other requests
        are queued, so that it waits for none of them. For that it reads on the device only what
        ``load`` or a called method made, or what it made itself; changes nothing that other stages
        read; and all that it makes for them is in the state: in collections or attributes, not in
        a closure or a generator. Weights that hooks move or cast as they run rule it out.
    """

    def prepare_encode(self, request: DiffusionRequest) -> StepState:
        """Encode the prompt, draw the noise, set the timesteps."""
        ...

    def denoise_step(self, state: StepState) -> Tensor:
        """Predict the noise of the state's next step."""
        ...

    def step_scheduler(self, state: StepState, noise_pred: Tensor) -> None:
        """Advance the latents by one step; at the end of a chunk put it into ``state.chunk``."""
        ...

    def post_decode(self, state: StepState) -> Any:
        """Decode what is done into the payload that ``forward`` would give."""
        ...


class PreparedBeside(Protocol):
    """The optional method by which requests are prepared beside the steps of others."""

    def may_prepare_beside(self, request: DiffusionRequest) -> bool:
        """Say whether this request's ``prepare_encode`` may run on a stream of its own."""
        ...


class SharedSteps(Protocol):
    """The two optional methods by which requests at different steps share a forward."""

    def share_key(self, state: StepState) -> Hashable | None:
        """Say with which states this one may share a forward."""
        ...

    def denoise_steps(self, states: Sequence[StepState]) -> Sequence[Tensor]:
        """Predict the noise of each state's next step in one forward."""
        ...
