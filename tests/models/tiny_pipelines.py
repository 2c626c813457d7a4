"""Small pipelines of diffusers' real classes, random weights, made offline; saved and cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sidestream.models.checkpoint import build_qwen_image
from sidestream.models.diffusers_pipeline import quiet_progress_bars
from sidestream.models.video_checkpoint import build_t5, build_t5_tokenizer

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip, t5 = clip_tokenizer(), build_t5_tokenizer()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=_vae(latent_channels=4),
        text_encoder=_clip(clip),
        tokenizer=clip,
        text_encoder_2=build_t5(t5, width=32),
        tokenizer_2=t5,
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
    )


def stable_diffusion_3() -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    clip, t5 = clip_tokenizer(), build_t5_tokenizer()
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(latent_channels=16),
        text_encoder=_clip(clip, projects=True),
        tokenizer=clip,
        text_encoder_2=_clip(clip, projects=True),
        tokenizer_2=clip,
        text_encoder_3=build_t5(t5, width=64),
        tokenizer_3=t5,
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=1,
            in_channels=16,  # inpainting takes no other number
            out_channels=16,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
        ),
    )


def z_image() -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = build_qwen_image(seed=0).tokenizer
    tokenizer.chat_template = _CHAT
    transformer = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 32, 32],
    )
    # The library leaves what is in memory.
    for name, parameter in transformer.named_parameters():
        if "pad_token" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(latent_channels=16, levels=4),
        text_encoder=Qwen3Model(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=1024,
            )
        ),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def qwen_image() -> Any:
    return build_qwen_image(seed=0)


def saved(build: Callable[[], Any], folder: Path) -> Path:
    """Build a pipeline with random weights of one seed and save it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = build()
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    with quiet_progress_bars():
        pipeline.save_pretrained(folder)
    return folder


def clip_tokenizer() -> Any:
    """Bytes as tokens, within a word and at its end."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = [f"{letter}</w>" for letter in letters]
    tokens = [*letters, *ends, "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _clip(tokenizer: Any, *, projects: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


def _vae(*, latent_channels: int, levels: int = 2) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
