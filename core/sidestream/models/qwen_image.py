"""Qwen-Image: diffusers' ``QwenImagePipeline``, up to the decoder's tensor on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor

from sidestream.errors import InvalidRequestError
from sidestream.models.diffusers_pipeline import load_pretrained, named_arguments
from sidestream.models.plain_networks import are_plain
from sidestream.models.post_process import decoded_nbytes
from sidestream.models.qwen_image_steps import QwenImageState, QwenImageSteps
from sidestream.models.registry import read_defaults
from sidestream.models.seeds import check_seed, generators
from sidestream.models.sharding import load_shard

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from sidestream.config import PipelineConfig
    from sidestream.models.pipeline import StepHook
    from sidestream.request import DiffusionRequest, SamplingParams

#: What the requests of one forward have in common, with its name in a call of the pipeline.
_SHARED: Final = {
    "height": "height",
    "width": "width",
    "num_inference_steps": "num_inference_steps",
    "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "num_outputs_per_prompt": "num_images_per_prompt",
}


class QwenImage:
    """Sample images; a payload is the raw decoder tensor (n,3,H,W), -1 to 1, or packed latents.

    Requests of one size, step count and guidance share a forward; prompts, negative prompts and
    seeds may differ. A request with ``inputs`` or ``extra`` is sampled alone, also in a batch,
    because its arguments hold for a whole call of the library's pipeline.
    """

    supports_request_batch = True
    #: Every forward allocates its results anew, and the decoder keeps none of them.
    outputs_are_private = True
    post_process = "QwenImagePipeline"

    def __init__(
        self, pipeline: QwenImagePipeline, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.pipeline = pipeline
        #: Sampling parameters where a request names none.
        self.defaults = dict(defaults or {})
        #: Called after each denoising step with the number of steps done; may raise.
        self.on_step: StepHook | None = None
        self._steps = QwenImageSteps(pipeline)
        # The library moves these two to the device after the loop of every call: two waits for
        # the device, of which each would end the run-ahead.
        vae = pipeline.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        place = {"device": pipeline._execution_device, "dtype": vae.dtype}
        self._latents_mean = torch.tensor(vae.config.latents_mean).view(shape).to(**place)
        self._latents_inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(
            **place
        )

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Load a checkpoint folder as ``QwenImagePipeline.save_pretrained`` writes it.

        With more than one rank each loads its part of the transformer, see ``sharding``.
        """
        shard = {}
        if config.world_size > 1 and config.model is not None:
            folder = config.model / "transformer"
            shard["transformer"] = load_shard(QwenImageTransformer2DModel, folder, config)
        pipeline = load_pretrained(QwenImagePipeline, config, **shard)
        assert config.model is not None  # load_pretrained refused it
        return cls(pipeline, read_defaults(config.model))

    @torch.no_grad()
    def forward(self, requests: Sequence[DiffusionRequest]) -> list[Tensor]:
        """Sample ``requests`` together; give one tensor each.

        Raises:
            InvalidRequestError: Requests can't share a forward, or one names an argument that
                the pipeline doesn't take.
        """
        params = [r.sampling_params.with_defaults(self.defaults) for r in requests]
        self._check(requests, params)
        arguments = [named_arguments(self.pipeline.__call__, r) for r in requests]
        if len(requests) > 1 and any(arguments):
            return [
                self._sample([request], [own], named)[0]
                for request, own, named in zip(requests, params, arguments, strict=True)
            ]
        return self._sample(requests, params, arguments[0])

    @torch.no_grad()
    def prepare_encode(self, request: DiffusionRequest) -> QwenImageState:
        """Encode the prompt, draw the noise, set the timesteps.

        Raises:
            InvalidRequestError: As :meth:`forward`.
        """
        params = request.sampling_params.with_defaults(self.defaults)
        self._check([request], [params])
        named = named_arguments(self.pipeline.__call__, request)
        call = self._call([request], [params], named)
        return self._steps.prepare(request, params, call, is_special=bool(named))

    def may_prepare_beside(self, request: DiffusionRequest) -> bool:
        """Let a request be prepared beside steps unless its prompt's encoder is offloaded."""
        return are_plain(self.pipeline.text_encoder)

    def share_key(self, state: QwenImageState) -> Hashable | None:
        """Let states of one size, guided or not, share a forward at whatever step each is."""
        return self._steps.share_key(state)

    def denoise_step(self, state: QwenImageState) -> Tensor:
        """Predict the noise of the state's next step."""
        return self.denoise_steps([state])[0]

    @torch.no_grad()
    def denoise_steps(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        """Predict the noise of each state's next step, in one forward."""
        return self._steps.denoise(states)

    @torch.no_grad()
    def step_scheduler(self, state: QwenImageState, noise_pred: Tensor) -> None:
        """Advance the latents by one step."""
        self._steps.advance(state, noise_pred)

    @torch.no_grad()
    def post_decode(self, state: QwenImageState) -> Tensor:
        """Decode the latents, or give them as they are if they were asked for."""
        return self._finish(state.latents, state.params)

    def _sample(
        self,
        requests: Sequence[DiffusionRequest],
        params: Sequence[SamplingParams],
        named: Mapping[str, Any],
    ) -> list[Tensor]:
        call = self._call(requests, params, named)
        if self.on_step is not None:
            call["callback_on_step_end"] = self._step_ended
        latents = self.pipeline(
            **call,
            # The library's own decoding waits for the device; ours follows.
            output_type="latent",
            return_dict=False,
        )[0]
        outputs = self._finish(latents, params[0])
        return list(torch.split(outputs, params[0].num_outputs_per_prompt or 1))

    def _call(
        self,
        requests: Sequence[DiffusionRequest],
        params: Sequence[SamplingParams],
        named: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Say the requests in arguments of the library's pipeline."""
        first = params[0]
        call: dict[str, Any] = {
            argument: getattr(first, name)
            for name, argument in _SHARED.items()
            if getattr(first, name) is not None
        }
        call.update(named)
        if "prompt_embeds" not in named:
            call["prompt"] = [request.prompt for request in requests]
        if first.negative_prompt is not None and "negative_prompt_embeds" not in named:
            call["negative_prompt"] = [own.negative_prompt for own in params]
        call["generator"] = [generator for own in params for generator in generators(own)]
        return call

    def output_nbytes(self, params: SamplingParams) -> int | None:
        """Give the bytes of one output; None for latents."""
        params = params.with_defaults(self.defaults)
        if params.output_type == "latent":
            return None
        default = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return decoded_nbytes(
            params,
            self.pipeline.vae.dtype,
            count=params.num_outputs_per_prompt or 1,
            height=params.height or default,
            width=params.width or default,
        )

    def _finish(self, latents: Tensor, params: SamplingParams) -> Tensor:
        return latents if params.output_type == "latent" else self._decode(latents, params)

    def _decode(self, latents: Tensor, params: SamplingParams) -> Tensor:
        # The end of QwenImagePipeline.__call__, with the two tensors that are there already.
        pipeline = self.pipeline
        default = pipeline.default_sample_size * pipeline.vae_scale_factor
        unpacked = pipeline._unpack_latents(
            latents, params.height or default, params.width or default, pipeline.vae_scale_factor
        ).to(pipeline.vae.dtype)
        unpacked = unpacked / self._latents_inverse_std + self._latents_mean
        frames: Tensor = pipeline.vae.decode(unpacked, return_dict=False)[0]
        return frames[:, :, 0]

    def _step_ended(
        self, _pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        if self.on_step is not None:
            self.on_step(step + 1)
        return tensors

    def _check(
        self, requests: Sequence[DiffusionRequest], params: Sequence[SamplingParams]
    ) -> None:
        multiple = self.pipeline.vae_scale_factor * 2
        for request, own in zip(requests, params, strict=True):
            why = _difference(params[0], own)
            for name in ("height", "width"):
                size = getattr(own, name)
                if size is not None and size % multiple:
                    why = f"{name}={size} is not possible: it has to be a multiple of {multiple}"
            if own.num_frames not in (None, 1):
                why = f"num_frames={own.num_frames} is not possible: Qwen-Image makes images"
            if why is not None:
                raise InvalidRequestError(f"{why}.", request_id=request.request_id)
            check_seed(request)


def _difference(one: SamplingParams, other: SamplingParams) -> str | None:
    """Say why two requests can't share a forward; None if they can."""
    a, b = _shared(one), _shared(other)
    for name, value in a.items():
        if b[name] != value:
            return f"Requests with {name}={value!r} and {name}={b[name]!r} can't share a forward"
    return None


def _shared(params: SamplingParams) -> dict[str, Any]:
    """List what the requests of one forward have in common."""
    return {
        **{name: getattr(params, name) for name in _SHARED},
        "num_outputs_per_prompt": params.num_outputs_per_prompt or 1,
        # uint8 and float part only after the decoder.
        "output_type": "latent" if params.output_type == "latent" else "decoded",
        "negative_prompt": "none" if params.negative_prompt is None else "some",
    }
