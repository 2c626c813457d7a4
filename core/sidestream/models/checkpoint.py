"""Small checkpoint folders of the real classes, made offline: for tests and for a first look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import ConfigError, MissingDependencyError
from sidestream.models.registry import GENERATION_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffusers import QwenImagePipeline
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

_QWEN_IMAGE_DEFAULTS: Final = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 4,
    "true_cfg_scale": 4.0,
    "negative_prompt": " ",
}
# Qwen/Qwen-Image's scheduler_config.json.
_QWEN_IMAGE_SCHEDULER: Final = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
}
_QWEN_SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# What QwenImagePipeline puts before a prompt, without the special tokens. The pipeline cuts the
# first 34 tokens off, so the tokenizer has to need exactly 34 tokens for it.
_QWEN_TEMPLATE: Final = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:",
    "\nuser\n",
    "\nassistant\n",
)
_TEXT_WIDTH: Final = 32
_LATENT_CHANNELS: Final = 4


def make_checkpoint(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a small checkpoint folder with random weights; give the folder.

    The weights depend on ``seed`` alone. Nothing is downloaded.

    Raises:
        ConfigError: ``kind`` is unknown, or ``folder`` exists and isn't an empty folder.
        MissingDependencyError: A package that saves the folder is not installed.
    """
    make = _KINDS.get(kind)
    if make is None:
        raise ConfigError("kind", kind, ", ".join(map(repr, _KINDS)))
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("folder", str(folder), "a new or an empty folder")
    make(folder, seed)
    return folder


def save_checkpoint(pipeline: Any, folder: Path, defaults: Mapping[str, Any]) -> None:
    """Save a diffusers pipeline with its sampling defaults."""
    from sidestream.models.diffusers_pipeline import quiet_progress_bars

    with quiet_progress_bars():
        pipeline.save_pretrained(folder)
    (folder / GENERATION_CONFIG).write_text(json.dumps(dict(defaults), indent=2) + "\n")


def _make_qwen_image(folder: Path, seed: int) -> None:
    import torch

    pipeline = build_qwen_image(seed=seed)
    with torch.no_grad():
        # Under the library's own initialization a prompt moves about 8 % of the pixels: too few
        # to tell one request's image from another's.
        for block in pipeline.transformer.transformer_blocks:
            block.attn.add_v_proj.weight.mul_(16)
    save_checkpoint(pipeline, folder, _QWEN_IMAGE_DEFAULTS)


def _make_hunyuan_image_3(folder: Path, seed: int) -> None:
    from sidestream.models.hunyuan_image3_checkpoint import DEFAULTS, build_hunyuan_image_3

    pipeline = build_hunyuan_image_3(_build_tokenizer(()), seed=seed)
    save_checkpoint(pipeline, folder, DEFAULTS)


def _make_video(kind: str) -> Callable[[Path, int], None]:
    def make(folder: Path, seed: int) -> None:
        from sidestream.models.video_checkpoint import DEFAULTS, build_video_pipeline

        save_checkpoint(build_video_pipeline(kind, seed=seed), folder, DEFAULTS[kind])

    return make


_KINDS: Final[Mapping[str, Callable[[Path, int], None]]] = {
    "qwen-image": _make_qwen_image,
    "hunyuan-image-3": _make_hunyuan_image_3,
    **{kind: _make_video(kind) for kind in ("helios", "wan", "ltx")},
}


def build_qwen_image(
    *,
    seed: int,
    corpus: Sequence[str] = (),
    num_layers: int = 2,
    num_heads: int = 4,
    latents_mean: Sequence[float] = (0.0,) * _LATENT_CHANNELS,
    latents_std: Sequence[float] = (1.0,) * _LATENT_CHANNELS,
) -> QwenImagePipeline:
    """Build a small Qwen-Image pipeline with random weights, in float32 on the CPU.

    It has 4 latent channels and the real pipeline's 8 pixels a latent. The text of ``corpus``
    gets tokens of its own; any other text works too, byte by byte.
    """
    try:
        import torch
        from diffusers import (
            AutoencoderKLQwenImage,
            FlowMatchEulerDiscreteScheduler,
            QwenImagePipeline,
            QwenImageTransformer2DModel,
        )
    except ImportError as error:
        raise MissingDependencyError(
            "diffusers", "building a checkpoint", 'pip install "sidestream[diffusers]"'
        ) from error

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _build_tokenizer(corpus)
        return QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**_QWEN_IMAGE_SCHEDULER),
            # Three halvings need four levels.
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=_LATENT_CHANNELS,
                dim_mult=[1, 2, 2, 2],
                num_res_blocks=1,
                temperal_downsample=[False, True, True],
                latents_mean=list(latents_mean),
                latents_std=list(latents_std),
            ).eval(),
            text_encoder=_build_text_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer2DModel(
                patch_size=2,
                in_channels=4 * _LATENT_CHANNELS,
                out_channels=_LATENT_CHANNELS,
                num_layers=num_layers,
                attention_head_dim=16,
                num_attention_heads=num_heads,
                joint_attention_dim=_TEXT_WIDTH,
                axes_dims_rope=(8, 4, 4),
            ).eval(),
        )


def _build_tokenizer(corpus: Sequence[str]) -> Qwen2Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=4000,  # far above what the texts give: each of their words gets a token
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator([*_QWEN_TEMPLATE, *corpus], trainer)
    model = json.loads(bpe.to_str())["model"]
    vocab = dict(model["vocab"])
    for token in _QWEN_SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in model["merges"]],
        extra_special_tokens=list(_QWEN_SPECIAL_TOKENS[1:]),
        model_max_length=4096,
    )


def _build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _QWEN_SPECIAL_TOKENS}
    end = ids["<|endoftext|>"]
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [1, 1, 2],
            },
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": end,
        },
        # Never run for a text prompt, but a part of the class.
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": _TEXT_WIDTH,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()
