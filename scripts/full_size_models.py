"""Models of the released sizes with random weights, built on the device, which mark their steps.

Any of them is the real adapter of ``sidestream.models`` over the library's real classes; a prompt
only chooses random embeddings, which are on the device already. Options: ``kind``, ``size``
("full", "tiny", of Qwen-Image also "shallow"), ``platform``, ``plugin``. For
``scripts/models_cuda.py`` and ``scripts/bench_tp4.py``.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
from full_size_qwen import FullSizeQwen

from sidestream import DiffusionRequest, PipelineConfig
from sidestream.models.helios import Helios
from sidestream.models.hunyuan_image3 import HunyuanImage3, HunyuanImage3Pipeline
from sidestream.models.hunyuan_image3_checkpoint import FULL_TRUNK
from sidestream.models.hunyuan_image3_transformer import HunyuanImage3Transformer
from sidestream.models.post_process import find_post_process
from sidestream.models.qwen_image import QwenImage
from sidestream.models.sharding import sum_over_ranks
from sidestream.platforms.platform import load_plugin

TEXT_TOKENS = 64
#: Of which a lone worker builds one's share of HunyuanImage-3.0.
RANKS = 4


@contextmanager
def on_device(config: PipelineConfig) -> Iterator[None]:
    """Have parameters allocated and drawn on the device; through the host it takes minutes."""
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device("cpu" if config.device.type == "sim" else config.device):
            yield
    finally:
        torch.set_default_dtype(default)


def build_qwen(config: PipelineConfig) -> tuple[Any, dict[str, Any]]:
    pipeline = FullSizeQwen.load(config).pipeline
    width = pipeline.transformer.config.joint_attention_dim
    return QwenImage(pipeline), {"prompt_embeds": width, "negative_prompt_embeds": width}


def build_helios(config: PipelineConfig) -> tuple[Any, dict[str, Any]]:
    network: dict[str, Any] = {}
    coder: dict[str, Any] = {}
    if config.options["size"] == "tiny":
        network = {"num_attention_heads": 2, "attention_head_dim": 12, "rope_dim": (4, 4, 4)}
        network |= {"text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2}
        coder = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    with on_device(config):
        transformer = diffusers.HeliosTransformer3DModel(**network)
        vae = diffusers.AutoencoderKLWan(**coder)
    # Helios-Base: one stage; the scheduler's own defaults are a pyramid of three.
    scheduler = diffusers.HeliosScheduler(
        stages=1, stage_range=[0, 1], use_dynamic_shifting=True, scheduler_type="unipc"
    )
    pipeline = diffusers.HeliosPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer
    )
    ready(pipeline, config)
    return Helios(pipeline), {"prompt_embeds": transformer.config.text_dim}


def build_hunyuan(config: PipelineConfig) -> tuple[Any, dict[str, Any]]:
    """Build one rank's share: its heads, and its part of each expert's width.

    Of a lone worker that is a quarter, and nothing is summed.
    """
    trunk = dict(FULL_TRUNK)
    network: dict[str, Any] = {}
    coder: dict[str, Any] = {}
    if config.options["size"] == "tiny":
        trunk |= {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
        trunk |= {"num_hidden_layers": 2, "head_dim": 8, "num_experts": 8, "moe_topk": 2}
        network = {"latent_channels": 4, "patch_channels": 32, "norm_groups": 8}
        coder = {"latent_channels": 4, "block_out_channels": (16,) * 5, "layers_per_block": 1}
    ranks = RANKS if config.world_size == 1 else config.world_size
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        trunk[name] //= ranks
    with on_device(config):
        transformer = HunyuanImage3Transformer(trunk, **network)
        vae = diffusers.AutoencoderKLHunyuanVideo15(
            spatial_compression_ratio=16,
            temporal_compression_ratio=4,
            scaling_factor=0.5627,
            **coder,
        )
    if config.world_size > 1:
        sum_over_ranks(transformer, transformer.shard_plan)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = HunyuanImage3Pipeline(transformer, vae, None, scheduler)
    pipeline.tokenizer = _tokens
    ready(pipeline, config)
    return HunyuanImage3(pipeline), {}


def _tokens(prompt: str) -> Any:
    ids = [10 + (7 * len(prompt) + place) % 100 for place in range(TEXT_TOKENS)]
    return types.SimpleNamespace(input_ids=ids)


def ready(pipeline: Any, config: PipelineConfig) -> None:
    for model in (pipeline.transformer, pipeline.vae):
        model.to(config.device).eval()
    pipeline.set_progress_bar_config(disable=True)


_BUILDERS: dict[str, Callable[[PipelineConfig], tuple[Any, dict[str, Any]]]] = {
    "qwen": build_qwen,
    "helios": build_helios,
    "hunyuan": build_hunyuan,
}


@dataclass(frozen=True)
class Mark:
    """A point in the device's work.

    ``kind``: a forward's ``begin``; the beginning of a ``step`` (in request mode of the first only)
    and the ``end`` of a request's work, device half of post-processing included; ``prepare``, of
    which the order is known and ``host_s``, how long the host took. ``since_s``: device seconds
    since the last mark that has a time. ``found_idle``: the device had nothing queued when the host
    came to it.
    """

    kind: str
    seed: int
    step: int
    since_s: float | None
    found_idle: bool | None
    host_s: float | None = None


class FullSize:
    """An adapter that marks what it does; the device half of post-processing is done inside."""

    outputs_are_private = True
    #: Its own, so that the last mark comes behind it.
    post_process = None

    def __init__(
        self, adapter: Any, embeddings: dict[str, list[torch.Tensor]], platform: Any
    ) -> None:
        self.adapter = adapter
        self._embeddings = embeddings
        self._platform = platform
        self.device = adapter.pipeline.vae.device
        found = find_post_process(adapter)
        assert found is not None
        self._finish = found[1].device
        self._scrap = torch.zeros(32, device=self.device)
        self._marks: list[tuple[str, int, int, Any, bool | None, float | None]] = []
        self._prepares_beside = True
        self._last: Any = None
        self._awaited: int | None = None
        adapter.pipeline.transformer.register_forward_pre_hook(self._mark_first_step)

    @classmethod
    def load(cls, config: PipelineConfig) -> FullSize:
        diffusers.utils.logging.set_verbosity_error()  # it warns of embeddings without a mask
        adapter, widths = _BUILDERS[config.options["kind"]](config)
        generator = torch.Generator().manual_seed(1)
        embeddings = {
            name: [
                torch.randn(1, TEXT_TOKENS, width, generator=generator).to(
                    config.device, config.dtype
                )
                for _ in range(8)
            ]
            for name, width in widths.items()
        }
        platform = load_plugin(config.options["platform"], config.options["plugin"])
        return cls(adapter, embeddings, platform)

    @property
    def on_step(self) -> Any:
        """What the worker is told after each step of a whole forward."""
        return self.adapter.on_step

    @on_step.setter
    def on_step(self, hook: Any) -> None:
        self.adapter.on_step = hook

    # --- request mode and step mode -------------------------------------------------------------

    def forward(self, requests: Sequence[DiffusionRequest]) -> list[torch.Tensor]:
        (request,) = requests
        self._mark("begin", request)
        self._awaited = request.sampling_params.seed
        (payload,) = self.adapter.forward([self._embedded(request)])
        return [self._end(payload, request)]

    def prepare_encode(self, request: DiffusionRequest) -> Any:
        begun = time.perf_counter()
        state = self.adapter.prepare_encode(self._embedded(request))
        host_s = time.perf_counter() - begun
        self._marks.append(("prepare", request.sampling_params.seed or 0, 0, None, None, host_s))
        return state

    def may_prepare_beside(self, request: DiffusionRequest) -> bool:
        return self._prepares_beside and self.adapter.may_prepare_beside(request)

    def denoise_step(self, state: Any) -> torch.Tensor:
        self._mark("step", state.request, state.step)
        prediction: torch.Tensor = self.adapter.denoise_step(state)
        return prediction

    def step_scheduler(self, state: Any, noise_pred: torch.Tensor) -> None:
        self.adapter.step_scheduler(state, noise_pred)

    def post_decode(self, state: Any) -> torch.Tensor:
        return self._end(self.adapter.post_decode(state), state.request)

    def _embedded(self, request: DiffusionRequest) -> DiffusionRequest:
        inputs = {name: many[len(request.prompt) % 8] for name, many in self._embeddings.items()}
        return replace(request, inputs=inputs)

    def _end(self, payload: torch.Tensor, request: DiffusionRequest) -> torch.Tensor:
        output: torch.Tensor = self._finish(payload, request.sampling_params)
        self._mark("end", request)
        return output

    def _mark_first_step(self, _module: Any, _arguments: Any) -> None:
        if self._awaited is not None:
            seed, self._awaited = self._awaited, None
            self._record("step", seed, 0)

    def _mark(self, kind: str, request: DiffusionRequest, step: int = 0) -> None:
        self._record(kind, request.sampling_params.seed or 0, step)

    def _record(self, kind: str, seed: int, step: int) -> None:
        found_idle = None if self._last is None else self._last.query()
        if kind != "end":
            # A kernel that takes no time: its end tells when the device has work again.
            self._scrap.zero_()
        self._last = self._platform.record_device_event(self.device, timing=True)
        self._marks.append((kind, seed, step, self._last, found_idle, None))

    # --- what the measuring script calls --------------------------------------------------------

    def take_marks(self) -> list[Mark]:
        """Give the marks since the last call, once the device is done."""
        self._platform.synchronize_device(self.device)
        marks, self._marks, self._last = self._marks, [], None
        taken, before = [], None
        for kind, seed, step, event, found_idle, host_s in marks:
            since_s = None if event is None or before is None else event.elapsed_s(before)
            before = event or before
            taken.append(Mark(kind, seed, step, since_s, found_idle, host_s))
        return taken

    def prepare_beside(self, wanted: bool) -> None:
        """Have requests prepared beside the steps of others, or between them as was once the way.

        What a product needs no switch for: only that both can be measured in one run.
        """
        self._prepares_beside = wanted

    def about(self) -> dict[str, Any]:
        """Count the denoiser's parameters and the device's memory in bytes."""
        pipeline = self.adapter.pipeline
        memory = self._platform.memory_info(self.device)
        return {
            "parameters": sum(p.numel() for p in pipeline.transformer.parameters()),
            "dtype": str(pipeline.transformer.dtype),
            "free_bytes": memory[0] if memory else None,
        }
