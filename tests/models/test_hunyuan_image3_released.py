"""A folder of the shape of HunyuanImage-3.0's release, made here: its own code, run if trusted.

The released weights and code were never loaded in these tests.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.models.hunyuan_image3_released import HunyuanImage3Released
from sidestream.models.post_process import find_post_process, to_images
from sidestream.models.registry import find_source
from sidestream.request import DiffusionRequest, SamplingParams

CONFIGURATION = """
from transformers import PretrainedConfig

class HunyuanImage3Config(PretrainedConfig):
    model_type = "hunyuan_image_3_moe"
"""
MODELING = """
import re
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from transformers import PreTrainedModel
from .configuration_hunyuan import HunyuanImage3Config

class Pipeline:
    def __init__(self, vae):
        self.vae, self.scheduler = vae, FlowMatchEulerDiscreteScheduler()

class HunyuanImage3ForCausalMM(PreTrainedModel):
    config_class = HunyuanImage3Config

    def __init__(self, config):
        super().__init__(config)
        self.denoiser = torch.nn.Conv2d(4, 4, 1)
        self.vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
        )
        self.pipeline = Pipeline(self.vae)
        self.post_init()

    def load_tokenizer(self, folder):
        self.tokenizer = folder

    def generate_image(self, prompt, seed=None, image_size="auto", bot_task=None, **kwargs):
        height, width = (64, 64) if image_size == "auto" else map(int, re.split("x", image_size))
        generator = torch.Generator(self.device).manual_seed(seed)
        latents = torch.randn(1, 4, height // 2, width // 2, generator=generator, dtype=self.dtype)
        latents = latents + len(prompt) / 100
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(kwargs.get("diff_infer_steps", 5))
        for time in scheduler.timesteps:
            scale = kwargs.get("diff_guidance_scale", 1.0)
            flow = scale * self.denoiser(latents)
            latents = scheduler.step(flow, time, latents, return_dict=False)[0]
        image = self.vae.decode(latents, return_dict=False)[0]
        return bot_task, VaeImageProcessor().postprocess(image, "pil", do_denormalize=[True])
"""

PARAMS = SamplingParams(height=32, width=48, num_inference_steps=3, seed=7)


def request(prompt: str = "a red apple", *, inputs=None, **changed) -> DiffusionRequest:
    return DiffusionRequest(prompt, replace(PARAMS, **changed), request_id=prompt, inputs=inputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

    place = tmp_path_factory.mktemp("released")
    folder = place / "HunyuanImage-3.0"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # transformers imports a copy of the code, from a folder of the user's.
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place / "modules"))
        patch.setattr(sys, "path", [*sys.path])
        (folder / "configuration_hunyuan.py").write_text(CONFIGURATION)
        (folder / "modeling_hunyuan.py").write_text(MODELING)
        config = {
            "architectures": ["HunyuanImage3ForCausalMM"],
            "model_type": "hunyuan_image_3_moe",
            "auto_map": {
                "AutoConfig": "configuration_hunyuan.HunyuanImage3Config",
                "AutoModelForCausalLM": "modeling_hunyuan.HunyuanImage3ForCausalMM",
            },
        }
        (folder / "config.json").write_text(json.dumps(config))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").unlink(missing_ok=True)
        yield folder


@pytest.fixture(scope="module")
def adapter(folder, on_cpu):
    options = {"trust_remote_code": True, "model_arguments": {"attn_implementation": "eager"}}
    return HunyuanImage3Released.load(on_cpu(folder, options=options))


def test_the_registry_knows_such_a_folder(folder):
    assert find_source(folder, None).reference.endswith(":HunyuanImage3Released")


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}, {"trust_remote_code": 1}])
def test_code_of_a_folder_is_not_run_unless_asked_for(options, tmp_path, on_cpu):
    (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["HunyuanImage3ForCausalMM"],
                "auto_map": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"},
            }
        )
    )
    with pytest.raises(ConfigError, match=r"trust_remote_code.*True.*all rights") as caught:
        HunyuanImage3Released.load(on_cpu(tmp_path, options=options))
    assert str(tmp_path) in str(caught.value)


def test_the_payload_is_the_decoders_tensor_and_becomes_the_models_own_image(adapter):
    (payload,) = adapter.forward([request()])
    assert payload.shape == (1, 3, 32, 48)
    assert payload.is_floating_point()
    with torch.no_grad():
        _, (expected,) = adapter.model.generate_image(
            "a red apple", seed=7, image_size="32x48", diff_infer_steps=3
        )
    key, post_process = find_post_process(adapter)
    (image,) = to_images(post_process.device(payload, PARAMS), key)
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_arguments_and_the_folder_reach_the_model(adapter, folder):
    assert adapter.model.config._attn_implementation == "eager"
    assert adapter.model.tokenizer == str(folder)


def test_guidance_and_outputs_reach_the_model(adapter):
    (both,) = adapter.forward([request(guidance_scale=3.0, num_outputs_per_prompt=2)])
    assert both.shape[0] == 2
    (second,) = adapter.forward([request(guidance_scale=3.0, seed=8)])
    assert torch.equal(both[1], second[0])
    assert not torch.equal(both[:1], adapter.forward([request()])[0])


def test_steps_are_reported_and_may_end_the_call(adapter):
    steps = []
    adapter.on_step = steps.append
    try:
        adapter.forward([request()])
    finally:
        adapter.on_step = None
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"negative_prompt": "blur"}, "negative_prompt"),
        ({"height": None}, "together"),
        ({"output_type": "latent"}, "latent"),
        ({"extra": {"image_size": "8x8"}}, "'image_size' can't be given by name"),
        ({"extra": {"speed": 1}}, "'speed' is not an argument.*bot_task"),
    ],
)
def test_what_the_model_does_not_take_is_refused(changed, why, adapter):
    with pytest.raises(InvalidRequestError, match=why):
        adapter.forward([request(**changed)])


def test_code_that_does_not_decode_is_an_error(adapter):
    class Model:
        vae = adapter.model.vae

        def generate_image(self, prompt, **_):
            return None

    with pytest.raises(RuntimeError, match=r"without vae\.decode"):
        HunyuanImage3Released(Model()).forward([request()])


def test_ranks_can_not_share_it(folder, on_cpu):
    with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
        HunyuanImage3Released.load(
            on_cpu(folder, options={"trust_remote_code": True}, world_size=2)
        )
