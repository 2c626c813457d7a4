"""A Qwen-Image of the released model's size with random weights, built on the device.

No checkpoint of 58 GB is at hand on a test machine, and random weights take the same time. Options:
``size`` ("full"; "shallow": of its width, with few layers; "tiny"), ``text_tokens``. Prompts only
choose the random prompt embeddings.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch

from sidestream import DiffusionRequest, PipelineConfig
from sidestream.models.qwen_image import QwenImage

_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "shallow": ({"num_layers": 8}, {}),
    "tiny": (
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 4, 4),
        },
        {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
    ),
}


class FullSizeQwen(QwenImage):
    """The real classes and the real adapter; only the weights and the embeddings are random."""

    @classmethod
    def load(cls, config: PipelineConfig) -> FullSizeQwen:
        diffusers.utils.logging.set_verbosity_error()  # it warns of embeddings without a mask
        transformer_config, vae_config = _SIZES[config.options.get("size", "full")]
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        try:
            # Parameters are allocated and drawn on the device; through the host it takes minutes.
            with torch.device("cpu" if config.device.type == "sim" else config.device):
                transformer = diffusers.QwenImageTransformer2DModel(**transformer_config)
                vae = diffusers.AutoencoderKLQwenImage(**vae_config)
        finally:
            torch.set_default_dtype(default)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            max_image_seq_len=8192,
            base_shift=0.5,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        )
        pipeline = diffusers.QwenImagePipeline(
            scheduler=scheduler,
            vae=vae.to(config.device).eval(),
            text_encoder=None,
            tokenizer=None,
            transformer=transformer.to(config.device).eval(),
        )
        pipeline.set_progress_bar_config(disable=True)
        self = cls(pipeline)
        self.device, self.dtype = config.device, config.dtype
        self.text_tokens = config.options.get("text_tokens", 64)
        return self

    def forward(self, requests: Sequence[DiffusionRequest]) -> list[torch.Tensor]:
        return super().forward([self._embedded(request) for request in requests])

    def _embedded(self, request: DiffusionRequest) -> DiffusionRequest:
        width = self.pipeline.transformer.config.joint_attention_dim
        generator = torch.Generator().manual_seed(len(request.prompt))
        embeds = torch.randn(2, 1, self.text_tokens, width, generator=generator)
        positive, negative = embeds.to(self.device, self.dtype)
        inputs = {"prompt_embeds": positive, "negative_prompt_embeds": negative}
        return replace(request, inputs=inputs)

    # --- what the measuring script calls -------------------------------------------------------

    def parameters(self) -> int:
        """Count the denoiser's parameters."""
        return sum(p.numel() for p in self.pipeline.transformer.parameters())

    def output_thread_cpu_s(self) -> tuple[float, float]:
        """Give the output thread's CPU seconds so far, and the time."""
        return output_thread_cpu_s()

    def start_profile(self) -> None:
        """Record what the device does from now on."""
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        )
        self._profile.__enter__()

    def stop_profile(self) -> list[tuple[str, int]]:
        """Give the copies between device and host since, as (kind, bytes)."""
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self._profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        return [
            (event["name"], event["args"].get("bytes", 0))
            for event in events
            if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]
        ]


def output_thread_cpu_s() -> tuple[float, float]:
    """Give the CPU seconds of this process's output thread so far, and the time."""
    for thread in threading.enumerate():
        if thread.name == "sidestream-output" and thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            return time.clock_gettime(clock), time.monotonic()
    return 0.0, time.monotonic()
