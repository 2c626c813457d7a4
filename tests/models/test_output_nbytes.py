"""What an adapter of images says of the size of its outputs is what they take."""

from __future__ import annotations

import pytest

from sidestream.models.hunyuan_image3 import HunyuanImage3
from sidestream.request import DiffusionRequest, SamplingParams

from .output_bytes import assert_known

CHANGES = [
    {},
    {"height": 64, "width": 32},
    {"output_type": "float"},
    {"num_outputs_per_prompt": 2},
]
TWO_LATENTS = {"output_type": "latent", "num_outputs_per_prompt": 2, "width": 48}


def request(**changed) -> DiffusionRequest:
    return DiffusionRequest("x", SamplingParams(num_inference_steps=2, seed=0, **changed))


@pytest.fixture(scope="module")
def hunyuan(hunyuan_folder, on_cpu):
    return HunyuanImage3.load(on_cpu(hunyuan_folder))


@pytest.mark.parametrize("changed", CHANGES)
def test_qwen_image_knows_the_bytes_of_an_output(adapter, changed):
    assert_known(adapter, request(**changed))


def test_of_latents_it_does_not(adapter):
    assert adapter.output_nbytes(SamplingParams(output_type="latent")) is None


@pytest.mark.parametrize("changed", [*CHANGES, TWO_LATENTS])
def test_hunyuan_image_knows_the_bytes_of_an_output(hunyuan, changed):
    assert_known(hunyuan, request(**changed))
