"""Helios: long videos in chunks, each denoised from noise and from what came before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import HeliosPipeline
from torch import Tensor

from sidestream.models.diffusers_pipeline import named_arguments, with_signature_defaults
from sidestream.models.helios_steps import HeliosState, HeliosSteps
from sidestream.models.plain_networks import are_plain
from sidestream.models.video import DiffusersVideo, LatentScale
from sidestream.models.video_size import VideoSize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidestream.models.step import StepState
    from sidestream.request import DiffusionRequest, SamplingParams

#: Arguments that the stages know; with others, such as an image, the library's call is suspended.
_STEPPED: Final = frozenset(
    {
        "prompt_embeds",
        "negative_prompt_embeds",
        "sigmas",
        "attention_kwargs",
        "max_sequence_length",
        "history_sizes",
        "num_latent_frames_per_chunk",
    }
)
_INDICES: Final = (
    "indices_hidden_states",
    "indices_latents_history_short",
    "indices_latents_history_mid",
    "indices_latents_history_long",
)
_KEPT_INDICES: Final = 64


class Helios(DiffusersVideo):
    """Sample videos in chunks; step by step each chunk is there as soon as it is decoded.

    The library makes whole chunks: a video may have more frames than were asked for.
    """

    pipeline_class = HeliosPipeline
    size_multiple = 16

    def __init__(self, pipeline: Any, defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(pipeline, defaults)
        self._steps = HeliosSteps(pipeline, LatentScale(pipeline))
        self._moved: dict[tuple[int, ...], Tensor] = {}
        pipeline.transformer.register_forward_pre_hook(self._keep_indices, with_kwargs=True)

    def _keep_indices(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # The library makes these on the host and moves them in each forward: four waits for the
        # device, eight with guidance.
        return args, {**kwargs, **{name: self._on_device(kwargs[name]) for name in _INDICES}}

    def _on_device(self, indices: Tensor) -> Tensor:
        device = self.pipeline._execution_device
        if indices.device == device:
            return indices
        numbers = tuple(indices[0].tolist())
        if numbers not in self._moved:
            if len(self._moved) >= _KEPT_INDICES:
                self._moved.clear()
            self._moved[numbers] = indices.to(device)
        return self._moved[numbers]

    def _is_size_known(self, params: SamplingParams) -> bool:
        # An image or a video to go on from adds frames.
        return params.extra.keys() <= _STEPPED

    def _size(self, given: Mapping[str, Any]) -> VideoSize:
        return self._steps.size(given)

    def may_prepare_beside(self, request: DiffusionRequest) -> bool:
        """Let a request be prepared beside steps, unless by suspending the library's call."""
        named = named_arguments(self.pipeline.__call__, request)
        return named.keys() <= _STEPPED and are_plain(self.pipeline.text_encoder)

    @torch.no_grad()
    def prepare_encode(self, request: DiffusionRequest) -> StepState:
        """Encode the prompt; the noise is drawn at the beginning of each chunk.

        Raises:
            InvalidRequestError: As :meth:`forward`.
        """
        params, call = self._call(request)
        given = with_signature_defaults(self.pipeline.__call__, call)
        if named_arguments(self.pipeline.__call__, request).keys() <= _STEPPED:
            return self._steps.prepare(request, params, given)
        state = super().prepare_encode(request)
        state.num_steps *= self._steps.count_chunks(given)
        return state

    @torch.no_grad()
    def denoise_step(self, state: StepState) -> Tensor:
        """Predict the noise of the next step, of the next chunk where one is complete."""
        if isinstance(state, HeliosState):
            return self._steps.denoise(state)
        return super().denoise_step(state)

    @torch.no_grad()
    def step_scheduler(self, state: StepState, noise_pred: Tensor) -> None:
        """Advance the latents; at the end of a chunk decode it into ``state.chunk``."""
        if isinstance(state, HeliosState):
            self._steps.advance(state, noise_pred)
        else:
            super().step_scheduler(state, noise_pred)

    @torch.no_grad()
    def post_decode(self, state: StepState) -> Any:
        """Put the chunks together."""
        if isinstance(state, HeliosState):
            return self._steps.join(state)
        return super().post_decode(state)
