"""The loops of ``HeliosPipeline.__call__`` taken apart: chunks, and the steps of each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers.pipelines.helios.pipeline_helios import calculate_shift
from torch import Tensor

from sidestream.models.helios_plan import ChunkPlan, time_indices
from sidestream.models.step import StepState
from sidestream.models.video_size import VideoSize

if TYPE_CHECKING:
    from diffusers import HeliosPipeline

    from sidestream.models.video import LatentScale
    from sidestream.request import DiffusionRequest, SamplingParams


@dataclass(kw_only=True, eq=False)
class HeliosState(StepState):
    """One request between two steps; the tensors are on the device."""

    plan: ChunkPlan
    wants_latents: bool
    prompt: Tensor
    #: None: no guidance.
    negative: Tensor | None
    guidance_scale: float
    attention_kwargs: Mapping[str, Any] | None
    generator: torch.Generator
    #: This request's own: it counts steps and keeps the last predictions.
    scheduler: Any
    #: (1,c,f,h,w), float32: zeros before the first chunk, then the latents of all chunks.
    history: Tensor
    #: Of the chunk being made; None between two chunks.
    latents: Tensor | None = None
    #: What the chunk sees of the past, as the transformer's arguments.
    past: Mapping[str, Tensor] = field(default_factory=dict)
    #: The first latent of the video, which every later chunk sees.
    first: Tensor | None = None
    #: Decoded frames (1,3,f,H,W) of each chunk that is complete.
    frames: list[Tensor] = field(default_factory=list)


class HeliosSteps:
    """Text to video by the operations of the library's call, in its order."""

    def __init__(self, pipeline: HeliosPipeline, latents: LatentScale) -> None:
        self._pipeline = pipeline
        self._latents = latents
        self._frames_per_latent = int(pipeline.vae_scale_factor_temporal)

    def count_chunks(self, given: Mapping[str, Any]) -> int:
        """Tell how many chunks a call with the arguments ``given`` makes."""
        wanted: int = given["num_frames"]
        return max(1, -(-wanted // self._frames_of_a_chunk(given)))

    def _frames_of_a_chunk(self, given: Mapping[str, Any]) -> int:
        return (int(given["num_latent_frames_per_chunk"]) - 1) * self._frames_per_latent + 1

    def size(self, given: Mapping[str, Any]) -> VideoSize:
        """Tell how large a video of such a call is: a few frames at its end are cut off."""
        pipeline, factor = self._pipeline, self._frames_per_latent
        chunks, (rows, columns) = self.count_chunks(given), _grid(pipeline, given)
        return VideoSize(
            channels=pipeline.transformer.config.in_channels,
            latents=chunks * given["num_latent_frames_per_chunk"],
            frames=(chunks * self._frames_of_a_chunk(given) - 1) // factor * factor + 1,
            rows=rows,
            columns=columns,
            scale=pipeline.vae_scale_factor_spatial,
        )

    def prepare(
        self, request: DiffusionRequest, params: SamplingParams, given: Mapping[str, Any]
    ) -> HeliosState:
        """Do what a call with the arguments ``given`` does before its loops."""
        pipeline = self._pipeline
        names = ("negative_prompt", "prompt_embeds", "negative_prompt_embeds")
        prompts = {name: given[name] for name in names}
        pipeline.check_inputs(
            given["prompt"], height=given["height"], width=given["width"], **prompts
        )
        guided = given["guidance_scale"] > 1
        prompt, negative = pipeline.encode_prompt(
            prompt=given["prompt"],
            do_classifier_free_guidance=guided,
            max_sequence_length=given["max_sequence_length"],
            device=pipeline._execution_device,
            **prompts,
        )
        scheduler = copy.deepcopy(pipeline.scheduler)
        plan = self._plan(given, scheduler)
        dtype = pipeline.transformer.dtype
        return HeliosState(
            request,
            plan.num_chunks * plan.steps,
            plan=plan,
            wants_latents=params.output_type == "latent",
            prompt=prompt.to(dtype),
            negative=negative.to(dtype) if guided else None,
            guidance_scale=given["guidance_scale"],
            attention_kwargs=given["attention_kwargs"],
            generator=given["generator"],
            scheduler=scheduler,
            history=torch.zeros(
                (
                    1,
                    pipeline.transformer.config.in_channels,
                    sum(plan.history_sizes),
                    *_grid(pipeline, given),
                ),
                device=pipeline._execution_device,
                dtype=torch.float32,
            ),
        )

    def _plan(self, given: Mapping[str, Any], scheduler: Any) -> ChunkPlan:
        pipeline = self._pipeline
        latents, steps = given["num_latent_frames_per_chunk"], given["num_inference_steps"]
        history_sizes = sorted(given["history_sizes"], reverse=True)
        config, patch = scheduler.config, pipeline.transformer.config.patch_size
        rows, columns = _grid(pipeline, given)
        sigmas = given["sigmas"]
        if sigmas is None:
            sigmas = np.linspace(0.999, 0.0, steps + 1)[:-1]
        mu = calculate_shift(
            latents * rows * columns // (patch[0] * patch[1] * patch[2]),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler.set_timesteps(steps, device="cpu", sigmas=sigmas, mu=mu)  # only to count them
        return ChunkPlan(
            num_chunks=self.count_chunks(given),
            num_frames=self._frames_of_a_chunk(given),
            kept_frames=self.size(given).frames,
            height=given["height"],
            width=given["width"],
            num_inference_steps=steps,
            steps=len(scheduler.timesteps),
            sigmas=sigmas,
            mu=mu,
            history_sizes=history_sizes,
            indices=time_indices(history_sizes, latents),
        )

    def denoise(self, state: HeliosState) -> Tensor:
        """Predict the noise of the state's next step; the first of a chunk begins the chunk."""
        if state.latents is None:
            self._begin_chunk(state)
        assert state.latents is not None
        transformer, latents = self._pipeline.transformer, state.latents
        timestep = state.scheduler.timesteps[state.step % state.plan.steps]
        inputs = {
            "hidden_states": latents.to(transformer.dtype),
            "timestep": timestep.expand(latents.shape[0]),
            "attention_kwargs": state.attention_kwargs,
            "return_dict": False,
            **state.plan.indices,
            **state.past,
        }
        with transformer.cache_context("cond"):
            predicted: Tensor = transformer(encoder_hidden_states=state.prompt, **inputs)[0]
        if state.negative is None:
            return predicted
        with transformer.cache_context("uncond"):
            against: Tensor = transformer(encoder_hidden_states=state.negative, **inputs)[0]
        return against + state.guidance_scale * (predicted - against)

    def _begin_chunk(self, state: HeliosState) -> None:
        pipeline, plan, dtype = self._pipeline, state.plan, self._pipeline.transformer.dtype
        seen = state.history[:, :, -sum(plan.history_sizes) :]
        far, near, last = torch.split(seen, plan.history_sizes, dim=2)
        first = torch.zeros_like(last[:, :, :1]) if state.first is None else state.first
        state.past = {
            "latents_history_short": torch.cat([first, last], dim=2).to(dtype),
            "latents_history_mid": near.to(dtype),
            "latents_history_long": far.to(dtype),
        }
        device = pipeline._execution_device
        state.latents = pipeline.prepare_latents(
            1,
            pipeline.transformer.config.in_channels,
            plan.height,
            plan.width,
            plan.num_frames,
            dtype=torch.float32,
            device=device,
            generator=state.generator,
        )
        state.scheduler.set_timesteps(
            plan.num_inference_steps, device=device, sigmas=plan.sigmas, mu=plan.mu
        )
        # Else an Euler scheduler looks its first timestep up on the device and waits for it.
        state.scheduler.set_begin_index(0)

    def advance(self, state: HeliosState, noise_pred: Tensor) -> None:
        """Take the latents one step further; behind a chunk's last step decode the chunk."""
        plan = state.plan
        state.latents = state.scheduler.step(
            noise_pred,
            state.scheduler.timesteps[state.step % plan.steps],
            state.latents,
            generator=state.generator,
            return_dict=False,
        )[0]
        state.step += 1
        if state.step % plan.steps == 0:
            self._end_chunk(state)

    def _end_chunk(self, state: HeliosState) -> None:
        latents, state.latents = state.latents, None
        assert latents is not None
        if state.first is None:
            state.first = latents[:, :, 0:1]
        state.history = torch.cat([state.history, latents], dim=2)
        if state.wants_latents:
            return
        missing = state.plan.kept_frames - sum(chunk.shape[2] for chunk in state.frames)
        frames = self._latents.decode(latents)[:, :, :missing]
        if frames.shape[2]:
            state.frames.append(frames)
            state.chunk = frames

    @staticmethod
    def join(state: HeliosState) -> Tensor:
        """Put the frames of all chunks together, or their latents if these were asked for."""
        if state.wants_latents:
            return state.history[:, :, sum(state.plan.history_sizes) :]
        return torch.cat(state.frames, dim=2)


def _grid(pipeline: HeliosPipeline, given: Mapping[str, Any]) -> tuple[int, int]:
    """Give the rows and columns of latents."""
    factor = pipeline.vae_scale_factor_spatial
    return given["height"] // factor, given["width"] // factor
