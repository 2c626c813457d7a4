"""Train the ``digits`` checkpoint: a small Qwen-Image pipeline that draws handwritten digits.

    python scripts/train_digits.py OUT [--seed 0]

The text encoder is small, random and frozen: all it has to do is to map each prompt to vectors of
its own. A latent is the digit itself: 16x16 pixels, folded to 4 channels of 8x8 and normalized.
The VAE's two halves learn to go from and to 64x64 pixels, the transformer learns flow matching
on the latents, with the prompt dropped now and then so that classifier-free guidance works.

One thread and fixed numbers of steps, so that a seed gives the same weights again on the same
machine. Takes about twelve minutes of one CPU core.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from sidestream.models.checkpoint import build_qwen_image, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffusers import QwenImagePipeline

DEFAULTS = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 8,
    "true_cfg_scale": 3.0,
    "negative_prompt": " ",
}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: The ways to ask for digit d that the model learns.
TEMPLATES = ("{n}", "{w}", "a handwritten {n}", "a handwritten {w}", "the digit {n}", "number {w}")
NO_PROMPT = " "

DECODER_STEPS, ENCODER_STEPS, TRANSFORMER_STEPS = 1000, 300, 4000


@dataclass(frozen=True)
class Digits:
    """The data: labels (n,), normalized latents (n,4,8,8), images (n,1,64,64) in -1..1."""

    labels: Tensor
    latents: Tensor
    images: Tensor
    latents_mean: list[float]
    latents_std: list[float]


def load_data() -> Digits:
    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    folded = F.pixel_unshuffle(resize(small, 16), 2) * 2 - 1
    mean, std = folded.mean((0, 2, 3)), folded.std((0, 2, 3))
    return Digits(
        labels=torch.tensor(labels),
        latents=(folded - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1),
        # More contrast than the 8x8 blocks have: a pen leaves ink or it doesn't.
        images=((resize(small, 64) - 0.42) * 1.8 + 0.5).clamp(0, 1) * 2 - 1,
        latents_mean=mean.tolist(),
        latents_std=std.tolist(),
    )


def resize(images: Tensor, size: int) -> Tensor:
    return F.interpolate(images, size=size, mode="bicubic", align_corners=False).clamp(0, 1)


def prompts_for(digit: int) -> list[str]:
    return [template.format(n=digit, w=WORDS[digit]) for template in TEMPLATES]


def schedule(optimizer: torch.optim.Optimizer, rate: float, steps: int, name: str) -> Iterator[int]:
    """Count steps: a short warm-up, then a half cosine down to 2 % of ``rate``."""
    started = time.monotonic()
    for step in range(steps):
        decayed = 0.02 + 0.49 * (1 + np.cos(np.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * decayed
        yield step
        if (step + 1) % 100 == 0:
            print(f"{name} {step + 1}/{steps} {time.monotonic() - started:.0f} s", flush=True)


def train_decoder(vae: torch.nn.Module, data: Digits) -> None:
    raw = unnormalize(data)
    parameters = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1.0)
    for step in schedule(optimizer, 4e-3, DECODER_STEPS, "decoder"):
        chosen = torch.randint(0, len(raw), (8,))
        # Noise, because the transformer's latents won't be exact either.
        noisy = raw[chosen] + 0.08 * torch.randn(8, 4, 8, 8)
        drawn = vae.decode(noisy.unsqueeze(2)).sample[:, :, 0]
        loss = F.mse_loss(drawn, data.images[chosen].expand(-1, 3, -1, -1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"decoder loss {loss.item():.4f}", flush=True)


def train_encoder(vae: torch.nn.Module, data: Digits) -> None:
    raw = unnormalize(data)
    parameters = [*vae.encoder.parameters(), *vae.quant_conv.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1.0)
    for step in schedule(optimizer, 4e-3, ENCODER_STEPS, "encoder"):
        chosen = torch.randint(0, len(raw), (16,))
        images = data.images[chosen].expand(-1, 3, -1, -1).unsqueeze(2)
        encoded = vae.encode(images).latent_dist
        loss = F.mse_loss(encoded.mean[:, :, 0], raw[chosen])
        # A fixed, small spread: sampling the posterior is as good as its mean.
        loss = loss + 0.01 * F.mse_loss(encoded.logvar, torch.full_like(encoded.logvar, -8.0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"encoder loss {loss.item():.4f}", flush=True)


def unnormalize(data: Digits) -> Tensor:
    std, mean = (torch.tensor(x).view(1, -1, 1, 1) for x in (data.latents_std, data.latents_mean))
    return data.latents * std + mean


@torch.no_grad()
def embed_prompts(pipeline: QwenImagePipeline) -> tuple[Tensor, Tensor]:
    """Encode every prompt, the empty one last; the second tensor masks the padding."""
    prompts = [prompt for digit in range(10) for prompt in prompts_for(digit)] + [NO_PROMPT]
    vectors = [pipeline.encode_prompt(prompt=prompt)[0][0] for prompt in prompts]
    padded = torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True)
    lengths = torch.tensor([len(vector) for vector in vectors])
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


def train_transformer(pipeline: QwenImagePipeline, data: Digits, batch: int = 64) -> None:
    transformer = pipeline.transformer.train()
    vectors, mask = embed_prompts(pipeline)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1.0, weight_decay=1e-2)
    averaged = {name: p.detach().clone() for name, p in transformer.named_parameters()}
    shapes = [[(1, 4, 4)]] * batch
    mean_loss = None
    for step in schedule(optimizer, 3e-3, TRANSFORMER_STEPS, "transformer"):
        chosen = torch.randint(0, len(data.latents), (batch,))
        prompt = data.labels[chosen] * len(TEMPLATES) + torch.randint(0, len(TEMPLATES), (batch,))
        prompt[torch.rand(batch) < 0.1] = len(vectors) - 1
        clean = data.latents[chosen]
        noise = torch.randn_like(clean)
        sigma = torch.sigmoid(0.3 + torch.randn(batch))
        share = sigma.view(-1, 1, 1, 1)
        velocity = transformer(
            hidden_states=pack((1 - share) * clean + share * noise),
            timestep=sigma,
            encoder_hidden_states=vectors[prompt],
            encoder_hidden_states_mask=mask[prompt],
            img_shapes=shapes,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, pack(noise - clean))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if mean_loss is None else 0.98 * mean_loss + 0.02 * loss.item()
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                averaged[name].lerp_(parameter, 1 - min(0.998, (step + 1) / (step + 10)))
        if step % 100 == 0:
            print(f"transformer loss {mean_loss:.4f}", flush=True)
    transformer.load_state_dict(averaged, strict=False)
    transformer.eval()


def pack(latents: Tensor) -> Tensor:
    """Fold 2x2 latents into one token, as QwenImagePipeline does."""
    n, channels, height, width = latents.shape
    tokens = latents.view(n, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(n, height * width // 4, channels * 4)


def measure(pipeline: QwenImagePipeline, per_prompt: int, sheet: Path) -> dict[str, float]:
    """Draw each prompt with several seeds; give the share that 3-NN on the data recognizes."""
    pixels, labels = load_digits(return_X_y=True)
    classifier = KNeighborsClassifier(3).fit(pixels / 16, labels)
    pipeline.set_progress_bar_config(disable=True)
    right = {}
    rows = []
    for template in TEMPLATES:
        hits = 0
        for digit in range(10):
            images = pipeline(
                prompt=[template.format(n=digit, w=WORDS[digit])] * per_prompt,
                generator=[torch.Generator().manual_seed(s) for s in range(per_prompt)],
                **{**DEFAULTS, "negative_prompt": [NO_PROMPT] * per_prompt},
            ).images
            small = [image.convert("L").resize((8, 8), Image.Resampling.BOX) for image in images]
            seen = classifier.predict([np.asarray(image).ravel() / 255 for image in small])
            hits += int((seen == digit).sum())
            if template == "{n}":
                rows.append(np.hstack([np.asarray(image) for image in images[:16]]))
        right[template] = hits / (10 * per_prompt)
        print(f"{template!r}: {right[template]:.1%}", flush=True)
    Image.fromarray(np.vstack(rows)).save(sheet)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    data = load_data()
    corpus = [prompt for digit in range(10) for prompt in prompts_for(digit)]
    pipeline = build_qwen_image(
        seed=arguments.seed,
        corpus=corpus,
        num_layers=4,
        num_heads=4,
        latents_mean=data.latents_mean,
        latents_std=data.latents_std,
    )
    torch.manual_seed(arguments.seed)
    train_transformer(pipeline, data)
    train_decoder(pipeline.vae, data)
    train_encoder(pipeline.vae, data)
    pipeline.to(torch.float16)
    save_checkpoint(pipeline, arguments.out, DEFAULTS)
    # float16 for the folder, float32 to draw: what dtype "auto" makes of it on the CPU.
    accuracy = measure(pipeline.to(torch.float32), 30, arguments.out.with_suffix(".png"))
    print(json.dumps(accuracy))


if __name__ == "__main__":
    main()
