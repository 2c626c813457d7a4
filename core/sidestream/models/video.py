"""Video pipelines of diffusers: one request, one video; whole, or step by step."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import torch
from diffusers import LTXPipeline, WanPipeline
from torch import Tensor

from sidestream.errors import InvalidRequestError
from sidestream.models.diffusers_pipeline import (
    load_pretrained,
    named_arguments,
    with_signature_defaults,
)
from sidestream.models.greenlet_steps import GreenletSteps
from sidestream.models.one_by_one import OneByOne
from sidestream.models.quiet_scheduler import quiet
from sidestream.models.raw_output import RAW, leave_raw
from sidestream.models.registry import read_defaults
from sidestream.models.seeds import check_seed, generators
from sidestream.models.video_size import VideoSize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidestream.config import PipelineConfig
    from sidestream.models.pipeline import StepHook
    from sidestream.request import DiffusionRequest, SamplingParams

#: Fields of ``SamplingParams`` that a call takes by the same names.
_FIELDS: Final = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")


class DiffusersVideo(OneByOne, GreenletSteps):
    """Sample videos; a payload is the raw decoder tensor (1,3,frames,H,W), -1 to 1, or latents.

    A video fills a device, so requests don't share a forward.
    """

    #: The pipeline's class.
    pipeline_class: ClassVar[Any]
    #: The library would round other sizes down.
    size_multiple: int
    #: Frames are one more than a multiple of it; 1: any number.
    frame_multiple: int = 1

    def __init__(self, pipeline: Any, defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(defaults)
        self.pipeline = pipeline
        leave_raw(pipeline)
        pipeline.scheduler = quiet(pipeline.scheduler)

    @property
    def post_process(self) -> str:
        """Name the pipeline's class, which is the key."""
        return str(self.pipeline_class.__name__)

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Load a checkpoint folder as the pipeline's ``save_pretrained`` writes it."""
        pipeline = load_pretrained(cls.pipeline_class, config)
        assert config.model is not None  # load_pretrained refused it
        return cls(pipeline, read_defaults(config.model))

    def output_nbytes(self, params: SamplingParams) -> int | None:
        """Give the bytes of one video, or of its latents; None: not possible, or not known."""
        params = params.with_defaults(self.defaults)
        if self._refused(params)[1] is not None or not self._is_size_known(params):
            return None
        call = {**self._fields(params), **params.extra}
        given = with_signature_defaults(self.pipeline.__call__, call)
        return self._size(given).nbytes(params, self.pipeline.vae.dtype)

    def _is_size_known(self, params: SamplingParams) -> bool:
        return "latents" not in params.extra

    def _size(self, given: Mapping[str, Any]) -> VideoSize:
        """Tell what a call with the arguments ``given`` makes."""
        raise NotImplementedError

    def _sample(self, request: DiffusionRequest) -> Tensor:
        params, call = self._call(request)
        if self.on_step is not None:
            call["callback_on_step_end"] = _StepCounter(self.on_step)
        return self._run(params, call)

    def _run(self, params: SamplingParams, call: Mapping[str, Any]) -> Tensor:
        """Call the library's pipeline."""
        output_type = "latent" if params.output_type == "latent" else RAW
        payload: Tensor = self.pipeline(**call, output_type=output_type, return_dict=False)[0]
        return payload

    def _call(self, request: DiffusionRequest) -> tuple[SamplingParams, dict[str, Any]]:
        """Say a request in arguments of the library's pipeline."""
        params = request.sampling_params.with_defaults(self.defaults)
        self._check(request, params)
        named = named_arguments(self.pipeline.__call__, request)
        call = self._fields(params)
        if "prompt_embeds" not in named:
            call["prompt"] = request.prompt
        if "negative_prompt_embeds" not in named and params.negative_prompt is not None:
            call["negative_prompt"] = params.negative_prompt
        return params, {**call, **named, "generator": generators(params)[0]}

    @staticmethod
    def _fields(params: SamplingParams) -> dict[str, Any]:
        values = {name: getattr(params, name) for name in _FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    def _check(self, request: DiffusionRequest, params: SamplingParams) -> None:
        name, why = self._refused(params)
        if why is not None:
            value = getattr(params, name)
            raise InvalidRequestError(
                f"{name}={value!r} is not possible: {why}.", request_id=request.request_id
            )
        check_seed(request)

    def _refused(self, params: SamplingParams) -> tuple[str, str | None]:
        """Name a field that can't be what it is, and say why; the reason is None if all can."""
        for name in ("height", "width"):
            if (getattr(params, name) or 0) % self.size_multiple:
                return name, f"it has to be a multiple of {self.size_multiple}"
        if params.num_frames is not None and (params.num_frames - 1) % self.frame_multiple:
            return "num_frames", f"it has to be 1 more than a multiple of {self.frame_multiple}"
        if params.num_outputs_per_prompt not in (None, 1):
            return "num_outputs_per_prompt", "a request makes one video; send several requests"
        taken = inspect.signature(self.pipeline.__call__).parameters
        if params.true_cfg_scale is not None and "true_cfg_scale" not in taken:
            name = type(self.pipeline).__name__
            return "true_cfg_scale", f"{name} knows guidance_scale only"
        return "", None


class Wan(DiffusersVideo):
    """Wan 2.1 and 2.2, text to video."""

    pipeline_class = WanPipeline

    def __init__(self, pipeline: Any, defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(pipeline, defaults)
        self._latents = LatentScale(pipeline)
        # Its second expert may be all that there is.
        self._config = (pipeline.transformer or pipeline.transformer_2).config
        # 16 or, where the VAE makes patches of its own, 32.
        self.size_multiple = pipeline.vae_scale_factor_spatial * self._config.patch_size[1]
        self.frame_multiple = pipeline.vae_scale_factor_temporal

    def _size(self, given: Mapping[str, Any]) -> VideoSize:
        return VideoSize.of(
            given,
            channels=self._config.in_channels,
            scale=self.pipeline.vae_scale_factor_spatial,
            factor=self.pipeline.vae_scale_factor_temporal,
        )

    def _run(self, params: SamplingParams, call: Mapping[str, Any]) -> Tensor:
        latents: Tensor = self.pipeline(**call, output_type="latent", return_dict=False)[0]
        # The library's own decoding waits for the device.
        return latents if params.output_type == "latent" else self._latents.decode(latents)


class LTX(DiffusersVideo):
    """LTX-Video, text to video."""

    pipeline_class = LTXPipeline
    size_multiple = 32
    frame_multiple = 8

    def _size(self, given: Mapping[str, Any]) -> VideoSize:
        return VideoSize.of(
            given,
            channels=self.pipeline.transformer.config.in_channels,
            scale=self.pipeline.vae_spatial_compression_ratio,
            factor=self.pipeline.vae_temporal_compression_ratio,
        )


class LatentScale:
    """The mean and deviation of a VAE's latents, moved to the device once.

    The library moves them in every call, and the host waits for the device each time.
    """

    def __init__(self, pipeline: Any) -> None:
        self._vae = vae = pipeline.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        place = {"device": pipeline._execution_device, "dtype": vae.dtype}
        self._mean = torch.tensor(vae.config.latents_mean).view(shape).to(**place)
        self._inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(**place)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (n,c,f,h,w) into frames (n,3,F,H,W), by the library's operations."""
        scaled = latents.to(self._vae.dtype) / self._inverse_std + self._mean
        frames: Tensor = self._vae.decode(scaled, return_dict=False)[0]
        return frames


class _StepCounter:
    """Tell a step hook the number of steps done, which a pipeline counts anew in each chunk."""

    def __init__(self, on_step: StepHook) -> None:
        self._on_step = on_step
        self._done = 0

    def __call__(
        self, _pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        self._done += 1
        self._on_step(self._done)
        return tensors
