"""Any pipeline that diffusers can load, as it is: text or an image to images or a video."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, DiffusionPipeline

from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.models.diffusers_pipeline import load_pretrained, named_arguments
from sidestream.models.greenlet_steps import GreenletSteps
from sidestream.models.post_process import decoded_nbytes
from sidestream.models.quiet_scheduler import quiet
from sidestream.models.raw_output import leave_raw, processors
from sidestream.models.registry import read_defaults
from sidestream.models.seeds import check_seed, generators
from sidestream.models.step_report import reporting_steps

if TYPE_CHECKING:
    from sidestream.config import PipelineConfig
    from sidestream.models.pipeline import StepHook
    from sidestream.request import DiffusionRequest, SamplingParams

#: Fields of ``SamplingParams`` that a call takes by the same names.
_FIELDS: Final = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
)
#: The output type that means the decoder's tensor: one that every pipeline knows.
_RAW: Final = "pt"
#: What a call of several outputs a prompt names their number.
_COUNTS: Final = ("num_images_per_prompt", "num_videos_per_prompt")
#: Classes of which a test has compared a batch with its members alone.
_BATCHING: Final = frozenset({"FluxPipeline", "StableDiffusion3Pipeline", "ZImagePipeline"})
#: Classes of which a test has compared the bytes of outputs: the height and width that they make
#: by default, and what they round others down to a multiple of.
_SIZES: Final[Mapping[str, Callable[[Any], tuple[int, int]]]] = {
    "FluxPipeline": lambda pipeline: (_sample_size(pipeline), 2 * pipeline.vae_scale_factor),
    "StableDiffusion3Pipeline": lambda pipeline: (_sample_size(pipeline), 1),
    "ZImagePipeline": lambda pipeline: (1024, 1),
}
#: Classes that fail with more than one output in a call, by the beginnings of their names:
#: HunyuanVideo-1.5's mask does not fit a batch, Helios draws too few latents.
_ONE_BY_ONE: Final = ("HunyuanVideo15", "Helios")
#: By the inputs that a request may have beside what its pipeline takes: the pipelines of the
#: same components that take them.
_SIBLINGS: Final = {
    "mask_image": AutoPipelineForInpainting,
    "image": AutoPipelineForImage2Image,
}


class AnyDiffusers(GreenletSteps):
    """Sample with a diffusers pipeline; a payload is its decoder's tensor, or its latents.

    Images are (n,3,H,W), videos (n,3,frames,H,W), both -1 to 1. A request whose ``inputs`` have
    an ``image``, or a ``mask_image`` too, goes to the image-to-image or inpainting pipeline of
    the same components, unless the loaded one takes them itself.
    """

    #: Every forward allocates its results anew, and decoders keep none of them.
    outputs_are_private = True

    def __init__(self, pipeline: Any, defaults: Mapping[str, Any] | None = None) -> None:
        self.pipeline = pipeline
        #: Sampling parameters where a request names none and the pipeline takes them.
        self.defaults = dict(defaults or {})
        #: Called after each denoising step with the number of steps done; may raise.
        self.on_step: StepHook | None = None
        self.supports_request_batch = type(pipeline).__name__ in _BATCHING
        self._siblings: dict[str, Any] = {}
        # That of the siblings: image to image begins somewhere in the middle.
        self._scheduler = getattr(pipeline, "scheduler", None)
        if self._scheduler and "image" not in inspect.signature(pipeline.__call__).parameters:
            pipeline.scheduler = quiet(copy.deepcopy(self._scheduler))
        if "prompt" not in inspect.signature(pipeline.__call__).parameters:
            allowed = "a pipeline that takes a prompt"
            raise ConfigError("model", type(pipeline).__name__, allowed)
        leave_raw(pipeline, _RAW)

    @property
    def post_process(self) -> str | None:
        """Name the key for images or videos; None if the pipeline makes something else."""
        if hasattr(self.pipeline, "video_processor"):
            return "DiffusionVideoPipeline"
        return "DiffusionPipeline" if processors(self.pipeline) else None

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Load a folder as a diffusers pipeline's ``save_pretrained`` writes it."""
        pipeline = load_pretrained(DiffusionPipeline, config)
        assert config.model is not None  # load_pretrained refused it
        return cls(pipeline, read_defaults(config.model))

    @torch.no_grad()
    def forward(self, requests: Sequence[DiffusionRequest]) -> list[Any]:
        """Sample requests that differ in prompts and seeds together, others one by one.

        Raises:
            InvalidRequestError: A request names what its pipeline doesn't take.
        """
        calls = [self._call(request) for request in requests]
        first = calls[0]
        if len(calls) > 1 and not all(first.may_share(call) for call in calls):
            return [self._sample([call])[0] for call in calls]
        return self._sample(calls)

    def output_nbytes(self, params: SamplingParams) -> int | None:
        """Give the bytes of one output; None for videos, latents, and classes not known."""
        params, pipeline = params.with_defaults(self.defaults), self.pipeline
        size_of = _SIZES.get(type(pipeline).__name__)
        if size_of is None or params.output_type == "latent" or "latents" in params.extra:
            return None
        default, multiple = size_of(pipeline)
        return decoded_nbytes(
            params,
            pipeline.vae.dtype,
            count=params.num_outputs_per_prompt or 1,
            height=(params.height or default) // multiple * multiple,
            width=(params.width or default) // multiple * multiple,
        )

    def _sample(self, calls: Sequence[_Call]) -> list[Any]:
        first, pipeline = calls[0], calls[0].pipeline
        arguments, accepted = dict(first.arguments), first.accepted
        for text in ("prompt", "negative_prompt"):
            if text in arguments:
                arguments[text] = [call.arguments[text] for call in calls]
        drawn = [one for call in calls for one in generators(call.params)]
        count = len(drawn) // len(calls)
        count_name = next((name for name in _COUNTS if name in accepted), None)
        if count > 1 and (count_name is None or _is_one_by_one(pipeline)):
            return [torch.cat([self._run(first, arguments, [one]) for one in drawn])]
        if count > 1:
            arguments[str(count_name)] = count
        payload = self._run(first, arguments, drawn)
        if len(calls) == 1:
            return [payload]
        return list(payload.split(count))

    def _run(self, call: _Call, arguments: Mapping[str, Any], drawn: Sequence[Any]) -> Any:
        optional: dict[str, Any] = {
            "generator": drawn[0] if len(drawn) == 1 else list(drawn),
            "output_type": call.output_type,
            "return_dict": False,
        }
        given = {name: value for name, value in optional.items() if name in call.accepted}
        with reporting_steps(call.pipeline, call.accepted, self.on_step) as callback:
            return call.pipeline(**arguments, **given, **callback)[0]

    def _call(self, request: DiffusionRequest) -> _Call:
        check_seed(request)
        pipeline = self._pipeline_for(request)
        params = request.sampling_params.with_defaults(self.defaults)
        call = _Call(pipeline, params)
        named = named_arguments(pipeline.__call__, request)
        values = {name: getattr(params, name) for name in (*_FIELDS, "negative_prompt")}
        for name, value in values.items():
            if value is None or f"{name}_embeds" in named:
                continue
            if name in call.accepted:
                call.arguments[name] = value
            elif getattr(request.sampling_params, name) is not None:
                why = f"{type(pipeline).__name__} does not take {name}={value!r}."
                raise InvalidRequestError(why, request_id=request.request_id)
        if (params.num_outputs_per_prompt or 1) > 1 and hasattr(pipeline, "video_processor"):
            why = "num_outputs_per_prompt: a request makes one video; send several requests."
            raise InvalidRequestError(why, request_id=request.request_id)
        if "prompt_embeds" not in named:
            call.arguments["prompt"] = request.prompt
        call.arguments.update(named)
        call.is_alone = bool(named) or not self.supports_request_batch
        return call

    def _pipeline_for(self, request: DiffusionRequest) -> Any:
        accepted = inspect.signature(self.pipeline.__call__).parameters
        for name, task in _SIBLINGS.items():
            if name in (request.inputs or {}) and name not in accepted:
                return self._sibling(name, task)
        return self.pipeline

    def _sibling(self, name: str, task: Any) -> Any:
        if name not in self._siblings:
            try:
                sibling = task.from_pipe(self.pipeline)
            except ValueError:  # it has none for this task
                return self.pipeline
            sibling.scheduler = self._scheduler
            sibling.set_progress_bar_config(disable=True)
            leave_raw(sibling, _RAW)
            self._siblings[name] = sibling
        return self._siblings[name]


class _Call:
    """One request in arguments of a pipeline."""

    def __init__(self, pipeline: Any, params: SamplingParams) -> None:
        self.pipeline = pipeline
        self.params = params
        self.accepted = inspect.signature(pipeline.__call__).parameters
        self.arguments: dict[str, Any] = {}
        #: Its arguments hold for a whole call.
        self.is_alone = False

    @property
    def output_type(self) -> str:
        return "latent" if self.params.output_type == "latent" else _RAW

    def may_share(self, other: _Call) -> bool:
        """Tell whether two requests fit into one call."""
        return not (self.is_alone or other.is_alone) and self._shared() == other._shared()

    def _shared(self) -> dict[str, Any]:
        texts = {"prompt", "negative_prompt"} & self.arguments.keys()
        return {
            **{name: self.arguments[name] for name in self.arguments if name not in texts},
            "texts": texts,
            "count": self.params.num_outputs_per_prompt or 1,
            "output_type": self.output_type,
        }


def _sample_size(pipeline: Any) -> int:
    return int(pipeline.default_sample_size * pipeline.vae_scale_factor)


def _is_one_by_one(pipeline: Any) -> bool:
    return type(pipeline).__name__.startswith(_ONE_BY_ONE)
