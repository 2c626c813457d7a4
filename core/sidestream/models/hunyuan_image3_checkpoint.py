"""A small HunyuanImage-3.0 of random weights: the architecture class, not the released model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import MissingDependencyError

if TYPE_CHECKING:
    from sidestream.models.hunyuan_image3 import HunyuanImage3Pipeline

DEFAULTS: Final = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 5.0}

#: The trunk as the released model is published to have it: 80 B parameters with the rest.
FULL_TRUNK: Final = {
    "vocab_size": 133120,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "moe_topk": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SMALL_TRUNK: Final = {
    **FULL_TRUNK,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    # Four key-value heads, for up to four ranks.
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "moe_topk": 2,
    # Larger than usual, so that a prompt moves many pixels of an untrained model.
    "initializer_range": 0.08,
}
_LATENT_CHANNELS: Final = 4


def build_hunyuan_image_3(tokenizer: Any, *, seed: int) -> HunyuanImage3Pipeline:
    """Build a small pipeline with random weights, in float32 on the CPU; 16 pixels a latent.

    Raises:
        MissingDependencyError: diffusers or transformers is not installed.
    """
    try:
        import torch
        from diffusers import AutoencoderKLHunyuanVideo15, FlowMatchEulerDiscreteScheduler

        from sidestream.models.hunyuan_image3 import HunyuanImage3Pipeline
        from sidestream.models.hunyuan_image3_transformer import HunyuanImage3Transformer
    except ImportError as error:
        raise MissingDependencyError(
            "diffusers", "building a checkpoint", 'pip install "sidestream[diffusers]"'
        ) from error

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HunyuanImage3Pipeline(
            transformer=HunyuanImage3Transformer(
                {**_SMALL_TRUNK, "vocab_size": len(tokenizer)},
                latent_channels=_LATENT_CHANNELS,
                patch_channels=32,
                norm_groups=8,
                image_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
                no_prompt_token_id=tokenizer.convert_tokens_to_ids("<|vision_pad|>"),
            ).eval(),
            # The library's nearest to the released model's own: 16 pixels, videos of one frame.
            vae=AutoencoderKLHunyuanVideo15(
                latent_channels=_LATENT_CHANNELS,
                block_out_channels=(16,) * 5,
                layers_per_block=1,
                spatial_compression_ratio=16,
                temporal_compression_ratio=4,
                scaling_factor=0.5627,
            ).eval(),
            tokenizer=tokenizer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
