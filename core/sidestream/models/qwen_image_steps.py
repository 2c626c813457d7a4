"""Qwen-Image one denoising step at a time; requests at different steps may share a forward."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from torch import Tensor

from sidestream.models.diffusers_pipeline import with_signature_defaults
from sidestream.models.step import StepState

if TYPE_CHECKING:
    from diffusers import QwenImagePipeline

    from sidestream.request import DiffusionRequest, SamplingParams

_CHECKED: Final = (
    "negative_prompt",
    "prompt_embeds",
    "prompt_embeds_mask",
    "negative_prompt_embeds",
    "negative_prompt_embeds_mask",
)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's embeddings (n, length, width), and their mask (n, length) if any is padding."""

    embeddings: Tensor
    mask: Tensor | None


@dataclass(kw_only=True, eq=False)
class QwenImageState(StepState):
    """One request between two steps; the tensors are on the device."""

    params: SamplingParams
    #: Packed (n, tokens, channels), n the request's number of outputs.
    latents: Tensor
    height: int
    width: int
    prompt: EncodedPrompt
    #: None: no classifier-free guidance.
    negative: EncodedPrompt | None
    true_cfg_scale: float
    #: For models distilled with guidance, (n,).
    guidance: Tensor | None
    attention_kwargs: Mapping[str, Any]
    #: This request's own: it counts steps.
    scheduler: Any
    #: One tensor without dimensions for each step.
    timesteps: Sequence[Tensor]
    #: Whether arguments of its own keep this request from sharing a forward.
    is_special: bool


class QwenImageSteps:
    """The loop of ``QwenImagePipeline.__call__``, taken apart; the same operations in its order."""

    def __init__(self, pipeline: QwenImagePipeline) -> None:
        self._pipeline = pipeline

    def prepare(
        self,
        request: DiffusionRequest,
        params: SamplingParams,
        call: Mapping[str, Any],
        *,
        is_special: bool,
    ) -> QwenImageState:
        """Do what a call of the pipeline with the arguments ``call`` does before its loop."""
        pipeline = self._pipeline
        given = with_signature_defaults(pipeline.__call__, call)
        default = pipeline.default_sample_size * pipeline.vae_scale_factor
        height, width = given["height"] or default, given["width"] or default
        pipeline.check_inputs(
            given["prompt"],
            height,
            width,
            max_sequence_length=given["max_sequence_length"],
            **{name: given[name] for name in _CHECKED},
        )
        prompt = self._encode(given, "")
        wants_guidance = given["true_cfg_scale"] > 1 and not (
            given["negative_prompt"] is None and given["negative_prompt_embeds"] is None
        )
        latents = pipeline.prepare_latents(
            len(prompt.embeddings),
            pipeline.transformer.config.in_channels // 4,
            height,
            width,
            prompt.embeddings.dtype,
            pipeline._execution_device,
            given["generator"],
            given["latents"],
        )
        scheduler, timesteps = self._schedule(latents, given)
        return QwenImageState(
            request,
            len(timesteps),
            params=params,
            latents=latents,
            height=height,
            width=width,
            prompt=prompt,
            negative=self._encode(given, "negative_") if wants_guidance else None,
            true_cfg_scale=given["true_cfg_scale"],
            guidance=self._embedded_guidance(given["guidance_scale"], latents),
            attention_kwargs=given["attention_kwargs"] or {},
            scheduler=scheduler,
            timesteps=timesteps,
            is_special=is_special,
        )

    def _encode(self, given: Mapping[str, Any], which: str) -> EncodedPrompt:
        embeddings, mask = self._pipeline.encode_prompt(
            prompt=given[f"{which}prompt"],
            prompt_embeds=given[f"{which}prompt_embeds"],
            prompt_embeds_mask=given[f"{which}prompt_embeds_mask"],
            device=self._pipeline._execution_device,
            num_images_per_prompt=given["num_images_per_prompt"],
            max_sequence_length=given["max_sequence_length"],
        )
        return EncodedPrompt(embeddings, mask)

    def _schedule(self, latents: Tensor, given: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
        steps, sigmas = given["num_inference_steps"], given["sigmas"]
        scheduler = copy.deepcopy(self._pipeline.scheduler)
        config = scheduler.config
        timesteps, _ = retrieve_timesteps(
            scheduler,
            steps,
            self._pipeline._execution_device,
            sigmas=np.linspace(1.0, 1 / steps, steps) if sigmas is None else sigmas,
            mu=calculate_shift(
                latents.shape[1],
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.15),
            ),
        )
        scheduler.set_begin_index(0)
        return scheduler, list(timesteps)

    def _embedded_guidance(self, scale: float | None, latents: Tensor) -> Tensor | None:
        if not self._pipeline.transformer.config.guidance_embeds:
            return None
        if scale is None:
            raise ValueError("guidance_scale is required for guidance-distilled model.")
        full = torch.full([1], scale, device=latents.device, dtype=torch.float32)
        return full.expand(latents.shape[0])

    @staticmethod
    def share_key(state: QwenImageState) -> Hashable | None:
        """Give what states have in common that share a forward."""
        if state.is_special:
            return None
        return state.height, state.width, state.negative is None

    def denoise(self, states: Sequence[QwenImageState]) -> list[Tensor]:
        """Predict the noise of each state's next step; one forward, two with guidance."""
        counts = [len(state.latents) for state in states]
        inputs = {
            "hidden_states": torch.cat([state.latents for state in states]),
            "timestep": torch.cat([_next_timestep(state) for state in states]),
            "guidance": None
            if states[0].guidance is None
            else torch.cat([state.guidance for state in states if state.guidance is not None]),
            "img_shapes": [[self._grid(states[0])]] * sum(counts),
            "attention_kwargs": states[0].attention_kwargs,
        }
        predicted = self._forward("cond", [s.prompt for s in states], inputs)
        negatives = [s.negative for s in states if s.negative is not None]
        if not negatives:
            return list(torch.split(predicted, counts))
        against = self._forward("uncond", negatives, inputs)
        return [
            _guide(one, other, state.true_cfg_scale)
            for one, other, state in zip(
                torch.split(predicted, counts), torch.split(against, counts), states, strict=True
            )
        ]

    def _grid(self, state: QwenImageState) -> tuple[int, int, int]:
        pixels = self._pipeline.vae_scale_factor * 2
        return 1, state.height // pixels, state.width // pixels

    def _forward(
        self, context: str, prompts: Sequence[EncodedPrompt], inputs: Mapping[str, Any]
    ) -> Tensor:
        transformer = self._pipeline.transformer
        prompt = _concatenate(prompts)
        with transformer.cache_context(context):
            prediction: Tensor = transformer(
                **inputs,
                encoder_hidden_states=prompt.embeddings,
                encoder_hidden_states_mask=prompt.mask,
                return_dict=False,
            )[0]
        return prediction

    @staticmethod
    def advance(state: QwenImageState, noise_pred: Tensor) -> None:
        """Take the latents of one state one step further."""
        state.latents = state.scheduler.step(
            noise_pred, state.timesteps[state.step], state.latents, return_dict=False
        )[0]
        state.step += 1


def _next_timestep(state: QwenImageState) -> Tensor:
    timestep = state.timesteps[state.step].expand(state.latents.shape[0])
    return timestep.to(state.latents.dtype) / 1000


def _guide(predicted: Tensor, against: Tensor, scale: float) -> Tensor:
    combined = against + scale * (predicted - against)
    wanted = torch.norm(predicted, dim=-1, keepdim=True)
    rescaled: Tensor = combined * (wanted / torch.norm(combined, dim=-1, keepdim=True))
    return rescaled


def _concatenate(prompts: Sequence[EncodedPrompt]) -> EncodedPrompt:
    """Pad prompts to the longest, as the library does with the prompts of one call."""
    if len(prompts) == 1:
        return prompts[0]
    length = max(prompt.embeddings.shape[1] for prompt in prompts)
    embeddings = torch.cat([_padded(prompt.embeddings, length) for prompt in prompts])
    if all(p.mask is None and p.embeddings.shape[1] == length for p in prompts):
        return EncodedPrompt(embeddings, None)
    masks = [
        p.embeddings.new_ones(p.embeddings.shape[:2], dtype=torch.long)
        if p.mask is None
        else p.mask
        for p in prompts
    ]
    return EncodedPrompt(embeddings, torch.cat([_padded(mask, length) for mask in masks]))


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Append zeros to dimension 1."""
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
