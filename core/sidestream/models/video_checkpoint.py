"""Small video checkpoints of the real classes, with random weights: Helios, Wan and LTX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TEXT_WIDTH: Final = 32
# Both VAEs' means and deviations are given for 16 channels.
_LATENT_CHANNELS: Final = 16
#: What Helios' and Wan's take by the same names.
_TRANSFORMER: Final = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": _LATENT_CHANNELS,
    "out_channels": _LATENT_CHANNELS,
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
}

_SIZE: Final = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 5.0}
#: Sampling defaults by kind.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Two chunks, of 33 frames each.
    "helios": {**_SIZE, "height": 32, "width": 32, "num_frames": 66, "num_inference_steps": 2},
    "wan": {**_SIZE, "num_frames": 9},
    "ltx": {**_SIZE, "num_frames": 9, "guidance_scale": 3.0},
}


def build_video_pipeline(kind: str, *, seed: int, two_experts: bool = False) -> Any:
    """Build a small pipeline with random weights, in float32 on the CPU; less than 2 MB.

    ``two_experts`` gives Wan the layout of Wan 2.2. A prompt changes the video, which shows
    nothing.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _BUILDERS[kind]()
        if two_experts:
            pipeline.register_modules(transformer_2=_build_wan_transformer())
            pipeline.register_to_config(boundary_ratio=0.875)
        with torch.no_grad():
            # Under the library's own initialization a prompt hardly moves a pixel.
            for transformer in (pipeline.transformer, getattr(pipeline, "transformer_2", None)):
                for name, values in transformer.named_parameters() if transformer else ():
                    if name.endswith("attn2.to_v.weight"):
                        values.mul_(16)
    return pipeline


def build_t5_tokenizer() -> Any:
    """Build a tokenizer of the T5 layout: one token a character of ASCII."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(
        vocab=pieces,
        extra_ids=0,
        additional_special_tokens=["<extra_id_0>"],
        model_max_length=512,
    )


def _build_umt5(tokenizer: Any) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    size = _encoder_size(tokenizer, _TEXT_WIDTH)
    return UMT5EncoderModel(UMT5Config(**size, tie_word_embeddings=True)).eval()


def build_t5(tokenizer: Any, *, width: int = _TEXT_WIDTH) -> Any:
    """Build a text encoder of the T5 layout."""
    from transformers import T5Config, T5EncoderModel

    size = _encoder_size(tokenizer, width)
    return T5EncoderModel(T5Config(**size, feed_forward_proj="gated-gelu")).eval()


def _encoder_size(tokenizer: Any, width: int) -> dict[str, int]:
    small = {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return {"vocab_size": len(tokenizer), "d_model": width, **small}


def _build_wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=_LATENT_CHANNELS,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


def _build_helios() -> Any:
    from diffusers import HeliosPipeline, HeliosScheduler, HeliosTransformer3DModel

    tokenizer = build_t5_tokenizer()
    return HeliosPipeline(
        tokenizer=tokenizer,
        text_encoder=_build_umt5(tokenizer),
        vae=_build_wan_vae(),
        # Helios-Base: one stage; the scheduler's own defaults are a pyramid of three.
        scheduler=HeliosScheduler(
            stages=1, stage_range=[0, 1], use_dynamic_shifting=True, scheduler_type="unipc"
        ),
        transformer=HeliosTransformer3DModel(**_TRANSFORMER, rope_dim=(4, 4, 4)).eval(),
    )


def _build_wan_transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        **_TRANSFORMER,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()


def _build_wan() -> Any:
    from diffusers import UniPCMultistepScheduler, WanPipeline

    tokenizer = build_t5_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_build_umt5(tokenizer),
        vae=_build_wan_vae(),
        # Wan-AI/Wan2.1-T2V's scheduler_config.json.
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=3.0,
        ),
        transformer=_build_wan_transformer(),
    )


def _build_ltx() -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    tokenizer = build_t5_tokenizer()
    widths = (8, 8, 8, 8)
    halvings = (True, True, False, False)
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=widths,
        decoder_block_out_channels=widths,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=halvings,
        decoder_spatio_temporal_scaling=halvings,
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
        patch_size_t=1,
    ).eval()
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, shift_terminal=0.1
        ),
        vae=vae,
        text_encoder=build_t5(tokenizer),
        tokenizer=tokenizer,
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=_TEXT_WIDTH,
            num_layers=1,
            caption_channels=_TEXT_WIDTH,
        ).eval(),
    )


_BUILDERS: Final[Mapping[str, Callable[[], Any]]] = {
    "helios": _build_helios,
    "wan": _build_wan,
    "ltx": _build_ltx,
}
