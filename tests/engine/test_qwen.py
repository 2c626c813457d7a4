"""Qwen-Image through the engine: the pixels of diffusers' own pipeline, however they travel."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import sidestream
from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
from sidestream.models.registry import find_source

diffusers = pytest.importorskip("diffusers")

SEEDS = [3, 4]
PROMPTS = ["a handwritten 7", "three"]


@pytest.fixture(scope="module")
def checkpoint():
    return find_source("digits", None).model


def _requests():
    return [
        DiffusionRequest(prompt, SamplingParams(seed=seed))
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


def _directly(checkpoint, device, output_type):
    """Call the library's pipeline itself, with the checkpoint's own defaults."""
    pipeline = diffusers.QwenImagePipeline.from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True
    ).to(device)
    pipeline.set_progress_bar_config(disable=True)
    defaults = find_source("digits", None).defaults
    return [
        pipeline(
            prompt=prompt,
            height=defaults["height"],
            width=defaults["width"],
            num_inference_steps=defaults["num_inference_steps"],
            true_cfg_scale=defaults["true_cfg_scale"],
            negative_prompt=defaults["negative_prompt"],
            generator=torch.Generator().manual_seed(seed),
            output_type=output_type,
        ).images
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


@pytest.fixture(scope="module")
def library_images(checkpoint):
    return [images[0] for images in _directly(checkpoint, "cpu", "pil")]


@pytest.mark.parametrize("executor", [pytest.param("multiproc", marks=pytest.mark.soak), "uniproc"])
def test_on_the_cpu_pixels_equal_the_librarys_own(library_images, executor):
    config = EngineConfig(model="digits", platform="cpu", executor=executor)
    with DiffusionEngine(config) as engine:
        outputs = engine.generate(_requests())
    for output, image in zip(outputs, library_images, strict=True):
        assert output.output.dtype is torch.uint8
        assert output.output.shape == (1, 64, 64, 3)
        assert np.array_equal(np.asarray(output.images[0]), np.asarray(image))


@pytest.mark.slow
@pytest.mark.parametrize("executor", [pytest.param("multiproc", marks=pytest.mark.soak), "uniproc"])
def test_on_sim_pixels_equal_the_pipeline_on_sim_and_nearly_the_cpu(
    checkpoint, library_images, executor
):
    platform = sidestream.load_platform("sim")
    device = platform.device(0)
    platform.set_device(device)
    config = EngineConfig(model="digits", platform="sim", executor=executor)
    with DiffusionEngine(config) as engine:
        outputs = engine.generate(_requests())
        assert engine.executor.collective_rpc("describe")[0]["output_thread"] is True
    direct = _directly(checkpoint, device, "pt")
    for output, tensor, image in zip(outputs, direct, library_images, strict=True):
        # The last step of the library's own way to PIL: scale, round, channels last.
        wanted = (tensor.cpu().float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        assert torch.equal(output.output, wanted)
        apart = np.asarray(output.images[0]).astype(int) - np.asarray(image).astype(int)
        assert np.abs(apart).max() <= 1


def test_a_hub_id_is_taken_from_the_local_cache_and_loaded_offline(
    checkpoint, tmp_path, monkeypatch, library_images
):
    revision = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub" / "models--somebody--digits"
    shutil.copytree(checkpoint, home / "snapshots" / revision)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config = EngineConfig(model="somebody/digits", platform="cpu", executor="uniproc")
    with DiffusionEngine(config) as engine:
        (output,) = engine.generate(_requests()[:1])
    assert np.array_equal(np.asarray(output.images[0]), np.asarray(library_images[0]))


def test_float_and_latent_outputs_and_several_images_a_prompt():
    with DiffusionEngine(
        EngineConfig(model="digits", platform="cpu", executor="uniproc")
    ) as engine:
        eight, floats, latents = engine.generate(
            [
                DiffusionRequest("7", SamplingParams(seed=1, num_outputs_per_prompt=2)),
                DiffusionRequest("7", SamplingParams(seed=1, output_type="float")),
                DiffusionRequest("7", SamplingParams(seed=1, output_type="latent")),
            ]
        )
        (second,) = engine.generate(["7"], seed=2)
    assert eight.output.shape == (2, 64, 64, 3)
    assert len(eight.images) == 2
    assert (eight.output[1].int() - second.output[0].int()).abs().max() <= 1
    assert floats.output.shape == (1, 3, 64, 64)
    assert floats.output.min() >= 0
    assert floats.output.max() <= 1
    assert latents.output.dtype is torch.float32
    with pytest.raises(TypeError, match=r"latent|image"):
        _ = latents.images


def test_what_the_pipeline_cannot_do_is_an_invalid_request():
    with DiffusionEngine(
        EngineConfig(model="digits", platform="cpu", executor="uniproc")
    ) as engine:
        with pytest.raises(sidestream.InvalidRequestError, match="multiple of 16"):
            engine.generate(["7"], height=65)
        assert len(engine.generate(["7"], seed=0)) == 1
