"""HunyuanImage-3.0's architecture as a pipeline: one request at a time, in one go or in steps.

The network is of library parts with weights of its own. The released checkpoint has another
layout and other code; it goes through ``hunyuan_image3_released``.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from sidestream.errors import InvalidRequestError
from sidestream.models.diffusers_pipeline import load_pretrained, named_arguments
from sidestream.models.hunyuan_image3_transformer import Canvas, HunyuanImage3Transformer, Prefix
from sidestream.models.one_by_one import OneByOne
from sidestream.models.plain_networks import are_plain
from sidestream.models.post_process import decoded_nbytes
from sidestream.models.registry import read_defaults
from sidestream.models.seeds import check_seed, generators
from sidestream.models.sharding import load_shard
from sidestream.models.step import StepState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidestream.config import PipelineConfig
    from sidestream.request import DiffusionRequest, SamplingParams

#: What the released model's generation config is published to say.
_DEFAULTS: Final = {
    "height": 1024,
    "width": 1024,
    "num_inference_steps": 50,
    "guidance_scale": 5.0,
}


class HunyuanImage3Pipeline(DiffusionPipeline):  # type: ignore[misc]
    """The components, saved and loaded as a diffusers folder; :class:`HunyuanImage3` runs them."""

    model_cpu_offload_seq = "transformer->vae"

    def __init__(self, transformer: Any, vae: Any, tokenizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, vae=vae, tokenizer=tokenizer, scheduler=scheduler
        )


@dataclass(kw_only=True)
class HunyuanImage3State(StepState):
    """A request between two steps: its latents, and what all of its steps share."""

    params: SamplingParams
    #: (n, channels, h, w), float32.
    latents: Tensor
    scheduler: Any
    prefix: Prefix
    canvas: Canvas
    #: None: no guidance, and no rows without a prompt.
    guidance_scale: float | None


class HunyuanImage3(OneByOne):
    """Sample images; a payload is the raw decoder tensor (n,3,H,W), or latents (n,c,h,w).

    A request is one sequence of its own length, so requests don't share a forward. With more than
    one rank each holds a part of the transformer, see ``sharding``.
    """

    post_process = "HunyuanImage3Pipeline"

    def __init__(
        self, pipeline: HunyuanImage3Pipeline, defaults: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__({**_DEFAULTS, **(defaults or {})})
        self.pipeline = pipeline

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Load a folder as ``HunyuanImage3Pipeline.save_pretrained`` writes it."""
        shard = {}
        if config.world_size > 1 and config.model is not None:
            folder = config.model / "transformer"
            shard["transformer"] = load_shard(HunyuanImage3Transformer, folder, config)
        pipeline = load_pretrained(HunyuanImage3Pipeline, config, **shard)
        assert config.model is not None  # load_pretrained refused it
        return cls(pipeline, read_defaults(config.model))

    def _sample(self, request: DiffusionRequest) -> Tensor:
        state = self.prepare_encode(request)
        while not state.done:
            self.step_scheduler(state, self.denoise_step(state))
            if self.on_step is not None:
                self.on_step(state.step)
        return self.post_decode(state)

    def may_prepare_beside(self, request: DiffusionRequest) -> bool:
        """Let a request be prepared beside steps unless the trunk is offloaded or compiled."""
        return are_plain(self.pipeline.transformer)

    @torch.no_grad()
    def prepare_encode(self, request: DiffusionRequest) -> HunyuanImage3State:
        """Run the prompt, draw the noise, set the timesteps.

        Raises:
            InvalidRequestError: The request asks for something that the model doesn't take.
        """
        params = request.sampling_params.with_defaults(self.defaults)
        self._check(request, params)
        pipeline, transformer = self.pipeline, self.pipeline.transformer
        device, outputs = pipeline._execution_device, params.num_outputs_per_prompt or 1
        scale = params.guidance_scale
        guided = scale is not None and scale > 1
        prefix = transformer.encode(self._tokens(request.prompt, outputs, guided, device))
        latents = self._latents(params, **named_arguments(self._latents, request)).to(device)
        scheduler = copy.deepcopy(pipeline.scheduler)
        scheduler.set_timesteps(params.num_inference_steps, device=device)
        # Else the first step looks its timestep up on the device and waits for the answer.
        scheduler.set_begin_index(0)
        return HunyuanImage3State(
            request=request,
            num_steps=len(scheduler.timesteps),
            params=params,
            latents=latents,
            scheduler=scheduler,
            prefix=prefix,
            canvas=transformer.lay_out(prefix, *latents.shape[2:], device),
            guidance_scale=scale if guided else None,
        )

    @torch.no_grad()
    def denoise_step(self, state: StepState) -> Tensor:
        """Predict the flow of the next step, guided away from the answer to no prompt."""
        assert isinstance(state, HunyuanImage3State)
        transformer, rows = self.pipeline.transformer, state.latents.shape[0]
        latents = state.latents.to(transformer.dtype)
        if state.guidance_scale is not None:
            rows, latents = 2 * rows, latents.repeat(2, 1, 1, 1)
        time = state.scheduler.timesteps[state.step].expand(rows)
        flow: Tensor = transformer(latents, time, state.prefix, state.canvas).float()
        if state.guidance_scale is None:
            return flow
        prompted, unprompted = flow.chunk(2)
        return unprompted + state.guidance_scale * (prompted - unprompted)

    @torch.no_grad()
    def step_scheduler(self, state: StepState, noise_pred: Tensor) -> None:
        """Advance the latents by one step."""
        assert isinstance(state, HunyuanImage3State)
        scheduler = state.scheduler
        time = scheduler.timesteps[state.step]
        state.latents = scheduler.step(noise_pred, time, state.latents, return_dict=False)[0]
        state.step += 1

    @torch.no_grad()
    def post_decode(self, state: StepState) -> Tensor:
        """Decode the latents, or give them as they are if they are what was asked for."""
        assert isinstance(state, HunyuanImage3State)
        if state.params.output_type == "latent":
            return state.latents
        vae = self.pipeline.vae
        latents = (state.latents / vae.config.scaling_factor).to(vae.dtype)
        # Videos of one frame, one by one: the decoder's own mask doesn't fit a batch.
        videos = [vae.decode(one[None, :, None], return_dict=False)[0] for one in latents]
        return torch.cat([video[:, :, 0] for video in videos])

    def output_nbytes(self, params: SamplingParams) -> int | None:
        """Give the bytes of one output."""
        params = params.with_defaults(self.defaults)
        outputs, height, width = params.num_outputs_per_prompt or 1, params.height, params.width
        assert height is not None  # there is a default
        assert width is not None
        if params.output_type == "latent":
            values = outputs * math.prod(self._latent_shape(height, width))
            return values * torch.float32.itemsize
        dtype = self.pipeline.vae.dtype
        return decoded_nbytes(params, dtype, count=outputs, height=height, width=width)

    def _tokens(self, prompt: str, outputs: int, guided: bool, device: torch.device) -> Tensor:
        config = self.pipeline.transformer.config
        text = self.pipeline.tokenizer(prompt).input_ids
        rows = [[*text, config.image_token_id]] * outputs
        if guided:
            # As long as the others, so that all image tokens are at one place.
            rows += [[config.no_prompt_token_id] * len(text) + [config.image_token_id]] * outputs
        return torch.tensor(rows).to(device)

    def _latents(self, params: SamplingParams, *, latents: Tensor | None = None) -> Tensor:
        """Draw the noise on the host, or check what the request gives."""
        assert params.height is not None  # there is a default
        assert params.width is not None
        shape = self._latent_shape(params.height, params.width)
        drawn = generators(params)
        if latents is None:
            return torch.stack([torch.randn(shape, generator=one) for one in drawn])
        if tuple(latents.shape) != (len(drawn), *shape):
            raise InvalidRequestError(
                f"latents of shape {tuple(latents.shape)} don't fit: it has to be "
                f"{(len(drawn), *shape)}.",
                request_id=None,
            )
        return latents.float()

    def _latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        factor = self.pipeline.vae.config.spatial_compression_ratio
        channels: int = self.pipeline.transformer.config.latent_channels
        return channels, height // factor, width // factor

    def _check(self, request: DiffusionRequest, params: SamplingParams) -> None:
        multiple = self.pipeline.vae.config.spatial_compression_ratio
        why = None
        for name in ("height", "width"):
            size = getattr(params, name)
            if size % multiple:
                why = f"{name}={size} is not possible: it has to be a multiple of {multiple}"
        if params.num_frames not in (None, 1):
            why = f"num_frames={params.num_frames} is not possible: the model makes images"
        for name in ("negative_prompt", "true_cfg_scale"):
            if getattr(request.sampling_params, name) is not None:
                why = f"{name} is not possible: guidance is away from no prompt (guidance_scale)"
        if why is not None:
            raise InvalidRequestError(f"{why}.", request_id=request.request_id)
        check_seed(request)
