"""The network of HunyuanImage-3.0's architecture, made of library parts.

A language model of mixture-of-experts layers that denoises: a sequence is the prompt's tokens, one
token for the time step, one for each 16 x 16 pixels. Text sees what is before it, an image token
sees everything. This is the architecture class, not the released model: its weights have other
names and were never loaded here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.resnet import ResnetBlock2D
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn
from transformers import DynamicCache, HunYuanMoEV1Config, HunYuanMoEV1Model

from sidestream.models.sharding import Cut, ShardPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIME_CHANNELS: Final = 256


@dataclass(frozen=True)
class Prefix:
    """The prompt's part of the sequence, computed once: keys and values of each layer."""

    cache: DynamicCache
    length: int


@dataclass(frozen=True)
class Canvas:
    """Where the time's and the image's tokens are: the same in all steps of a request.

    ``rotation`` is the cosine and sine, each (1, 1 + h * w, head size); ``mask`` is True where a
    token (row) sees another (column), the prefix's included.
    """

    rotation: tuple[Tensor, Tensor]
    mask: Tensor


class HunyuanImage3Transformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Predict the flow of latents, given a prompt's prefix and the time.

    ``trunk_config`` goes to transformers' ``HunYuanMoEV1Config``. The defaults of the others are
    the released model's as published.
    """

    # The router picks experts by its own small differences.
    _keep_in_fp32_modules: ClassVar = ["wg"]
    _repeated_blocks: ClassVar = ["HunYuanMoEV1DecoderLayer"]

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        trunk_config: Mapping[str, Any],
        latent_channels: int = 32,
        patch_channels: int = 1024,
        norm_groups: int = 32,
        image_token_id: int = 4,
        no_prompt_token_id: int = 5,
    ) -> None:
        super().__init__()
        config = HunYuanMoEV1Config(**trunk_config)
        config._attn_implementation = "sdpa"
        # The eager loop over experts asks the device which of them were hit: two waits for each.
        config._experts_implementation = "grouped_mm"
        self.trunk = HunYuanMoEV1Model(config)
        width = config.hidden_size
        self.time_token = _TimeEmbedding(width)
        self.time_in = _TimeEmbedding(width)
        self.time_out = _TimeEmbedding(width)
        block = {
            "temb_channels": width,
            "groups": norm_groups,
            "eps": 1e-5,
            "time_embedding_norm": "scale_shift",
        }
        self.patch_in = nn.Conv2d(latent_channels, patch_channels, 3, padding=1)
        self.block_in = ResnetBlock2D(in_channels=patch_channels, out_channels=width, **block)
        self.block_out = ResnetBlock2D(in_channels=width, out_channels=patch_channels, **block)
        self.norm_out = nn.GroupNorm(norm_groups, patch_channels)
        self.patch_out = nn.Conv2d(patch_channels, latent_channels, 3, padding=1)
        self._head_size: int = config.head_dim or width // config.num_attention_heads
        self._theta = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
        # transformers renamed past_key_values to cache; 5.40 drops the old name.
        layer = inspect.signature(self.trunk.layers[0].forward).parameters
        self._cache_argument = "cache" if "cache" in layer else "past_key_values"

    @property
    def shard_plan(self) -> ShardPlan:
        """Say how ranks share the trunk: heads and each expert's width; the rest is everybody's."""
        layer = "trunk.layers.*."
        rows, columns = Cut(0), Cut(1)
        return ShardPlan(
            cuts={
                **{f"{layer}self_attn.{name}_proj.weight": rows for name in "qkv"},
                f"{layer}self_attn.o_proj.weight": columns,
                f"{layer}mlp.shared_mlp.gate_proj.weight": rows,
                f"{layer}mlp.shared_mlp.up_proj.weight": rows,
                f"{layer}mlp.shared_mlp.down_proj.weight": columns,
                # (expert, gate and up, hidden) and (expert, hidden, inner).
                f"{layer}mlp.experts.gate_up_proj": Cut(1, blocks=2),
                f"{layer}mlp.experts.down_proj": Cut(2),
            },
            sums=(f"{layer}self_attn.o_proj", f"{layer}mlp"),
            divided=self.trunk.config.num_key_value_heads,
        )

    @apply_forward_hook  # type: ignore[untyped-decorator]  # where it is offloaded to the host
    def encode(self, token_ids: Tensor) -> Prefix:
        """Run the prompt (rows, tokens) through the trunk; rows have one length."""
        length = token_ids.shape[1]
        place = torch.arange(length, device=token_ids.device, dtype=torch.float32)
        sees = torch.ones(length, length, dtype=torch.bool, device=token_ids.device).tril()
        cache = DynamicCache()
        self._run(
            self.trunk.embed_tokens(token_ids),
            self._rotation(place, place),
            sees[None, None],
            cache,
        )
        return Prefix(cache, length)

    def lay_out(self, prefix: Prefix, height: int, width: int, device: torch.device) -> Canvas:
        """Place the tokens of a latent image behind a prefix.

        Text counts on in both directions at once. An image's rows and columns are counted around
        the middle of the tokens that it takes, as if it lay across the line of text.
        """
        time, first, count = prefix.length, prefix.length + 1, height * width
        rows = torch.arange(height, device=device, dtype=torch.float32)
        columns = torch.arange(width, device=device, dtype=torch.float32)
        y = (rows + first + (count - height) / 2).repeat_interleave(width)
        x = (columns + first + (count - width) / 2).repeat(height)
        here = torch.full((1,), float(time), device=device)
        sees = torch.ones(1 + count, first + count, dtype=torch.bool, device=device)
        sees[0, first:] = False  # the time's token is text: it does not see the image
        return Canvas(self._rotation(torch.cat([here, y]), torch.cat([here, x])), sees[None, None])

    def forward(self, latents: Tensor, time: Tensor, prefix: Prefix, canvas: Canvas) -> Tensor:
        """Predict the flow of ``latents`` (rows, channels, h, w) at ``time`` (rows,), 0 to 1000.

        The prefix is as before when this returns; its rows are those of ``latents``.
        """
        rows, _, height, width = latents.shape
        image = self.block_in(self.patch_in(latents), self.time_in(time, latents.dtype))
        tokens = torch.cat(
            [self.time_token(time, latents.dtype)[:, None], image.flatten(2).transpose(1, 2)], dim=1
        )
        tokens = self._run(tokens, canvas.rotation, canvas.mask, prefix.cache)
        prefix.cache.crop(-tokens.shape[1])  # negative: so many off the end
        image = self.trunk.norm(tokens)[:, 1:].transpose(1, 2).reshape(rows, -1, height, width)
        image = self.block_out(image, self.time_out(time, latents.dtype))
        flow: Tensor = self.patch_out(nn.functional.silu(self.norm_out(image)))
        return flow

    def _run(
        self, tokens: Tensor, rotation: tuple[Tensor, Tensor], sees: Tensor, cache: DynamicCache
    ) -> Tensor:
        cosine, sine = (part.to(tokens.dtype) for part in rotation)
        for layer in self.trunk.layers:
            tokens = layer(
                tokens,
                attention_mask=sees,
                position_embeddings=(cosine, sine),
                use_cache=True,
                **{self._cache_argument: cache},
            )
        return tokens

    def _rotation(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding in two directions: frequencies turn with y and with x by turns.

        Where y equals x it is the trunk's own, in one direction.
        """
        size = self._head_size
        steps = torch.arange(0, size, 2, device=y.device, dtype=torch.float32)
        place = torch.stack([y, x], dim=1).repeat(1, size // 4)
        angle = place / self._theta ** (steps / size)
        angle = torch.cat([angle, angle], dim=1)[None]
        return angle.cos(), angle.sin()


class _TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = Timesteps(_TIME_CHANNELS, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.embed = TimestepEmbedding(_TIME_CHANNELS, width, act_fn="gelu")

    def forward(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        embedded: Tensor = self.embed(self.project(time).to(dtype))
        return embedded
