"""A released HunyuanImage-3.0 checkpoint, run by the code that is in its folder.

Written by what is published of that code, and tested on a folder of the same shape. The released
weights were never loaded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.models.diffusers_pipeline import named_arguments, quiet_progress_bars
from sidestream.models.one_by_one import OneByOne
from sidestream.models.registry import read_defaults
from sidestream.models.seeds import check_seed
from sidestream.models.step_report import reporting_steps

if TYPE_CHECKING:
    from sidestream.config import PipelineConfig
    from sidestream.request import DiffusionRequest, SamplingParams

_OPTIONS: Final = ("trust_remote_code", "model_arguments")
#: Arguments of ``generate_image`` that are set from the request's own fields.
_OWN: Final = frozenset({"seed", "image_size", "diff_infer_steps", "diff_guidance_scale"})
_REFUSED: Final = ("num_frames", "true_cfg_scale", "negative_prompt")


class HunyuanImage3Released(OneByOne):
    """Sample images; a payload is the raw decoder tensor (n,3,H,W), left on the device.

    The checkpoint's ``generate_image`` is stopped when its VAE has decoded: what would follow, PIL
    images made in the forward, waits for the device and is post-processing's work. That code
    draws its noise on the device, so a seed gives other noise on another kind of device.
    """

    post_process = "HunyuanImage3ForCausalMM"

    def __init__(self, model: Any, defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(defaults)
        self.model = model

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Load a folder by the code in it; ``model_arguments`` go to ``from_pretrained``.

        Raises:
            ConfigError: There is no folder, an option is unknown, or ``trust_remote_code`` is not
                True: code is never run without being asked for.
        """
        folder, options = config.model, config.options
        if folder is None:
            raise ConfigError("model", None, "a checkpoint folder for HunyuanImage3ForCausalMM")
        unknown = {name: value for name, value in options.items() if name not in _OPTIONS}
        if unknown:
            raise ConfigError("pipeline_options", unknown, ", ".join(_OPTIONS))
        if options.get("trust_remote_code") is not True:
            raise ConfigError(
                "pipeline_options: trust_remote_code",
                options.get("trust_remote_code"),
                f"True: this model is loaded by Python code in {folder}, which then runs with all "
                "rights of this user. Read it, or trust where it came from",
            )
        if config.world_size > 1:
            allowed = "1: the code of this checkpoint does not divide it (device_map may)"
            raise ConfigError("tensor_parallel_size", config.world_size, allowed)
        arguments = dict(options.get("model_arguments", {}))
        with quiet_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                trust_remote_code=True,
                local_files_only=True,
                dtype=config.dtype,
                **arguments,
            )
        if "device_map" not in arguments:
            model.to(config.device)
        if hasattr(model, "load_tokenizer"):
            model.load_tokenizer(str(folder))
        return cls(model.eval(), read_defaults(folder))

    def _sample(self, request: DiffusionRequest) -> Tensor:
        params = request.sampling_params.with_defaults(self.defaults)
        self._check(request, params)
        named = named_arguments(self.model.generate_image, request)
        call = {
            "image_size": f"{params.height}x{params.width}" if params.height else "auto",
            "diff_infer_steps": params.num_inference_steps,
            "diff_guidance_scale": params.guidance_scale,
        }
        given = {name: value for name, value in call.items() if value is not None}
        images = []
        for j in range(params.num_outputs_per_prompt or 1):
            seed = None if params.seed is None else params.seed + j
            images.append(self._decoded(prompt=request.prompt, seed=seed, **given, **named))
        return torch.cat(images)

    def _decoded(self, **call: Any) -> Tensor:
        pipeline = getattr(self.model, "pipeline", None)
        on_step = self.on_step if hasattr(pipeline, "scheduler") else None
        with _stopped_by_decoding(self.model.vae), reporting_steps(pipeline, {}, on_step):
            try:
                self.model.generate_image(**call)
            except _Decoded as decoded:
                image = decoded.image
                return image[:, :, 0] if image.ndim == 5 else image
        raise RuntimeError(
            f"{type(self.model).__name__}.generate_image ended without vae.decode: it is not the "
            "code that this adapter was written for"
        )

    def _check(self, request: DiffusionRequest, params: SamplingParams) -> None:
        why = None
        for name in _REFUSED:
            if getattr(request.sampling_params, name) is not None:
                why = f"{name} is not possible: the model does not take it"
        if (params.height is None) != (params.width is None):
            why = "height and width have to be given together, or neither"
        if params.output_type == "latent":
            why = "output_type='latent' is not possible: the model's code decodes"
        for name in _OWN & {*(request.inputs or {}), *request.sampling_params.extra}:
            why = f"{name!r} can't be given by name; use the fields of SamplingParams"
        if why is not None:
            raise InvalidRequestError(f"{why}.", request_id=request.request_id)
        check_seed(request)


class _Decoded(BaseException):
    """Ends a call with what its VAE decoded; no ``except Exception`` on the way takes it."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.image = image


@contextmanager
def _stopped_by_decoding(vae: Any) -> Iterator[None]:
    decode = vae.decode

    def decode_and_stop(*args: Any, **kwargs: Any) -> NoReturn:
        decoded = decode(*args, **kwargs)
        raise _Decoded(decoded[0] if isinstance(decoded, tuple) else decoded.sample)

    vae.decode = decode_and_stop
    try:
        yield
    finally:
        del vae.decode
