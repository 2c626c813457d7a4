"""What an adapter says of the size of its outputs is what they take."""

from __future__ import annotations

import pytest

from sidestream.request import DiffusionRequest, SamplingParams
from sidestream.transport.packing import pack
from sidestream.worker.pipeline import LoadedPipeline


@pytest.mark.parametrize(
    "changed",
    [{}, {"height": 64, "width": 32}, {"output_type": "float"}, {"num_outputs_per_prompt": 2}],
)
def test_qwen_image_knows_the_bytes_of_an_output(adapter, changed):
    params = SamplingParams(num_inference_steps=2, true_cfg_scale=4.0, seed=0, **changed)
    (payload,) = LoadedPipeline(adapter).forward([DiffusionRequest("x", params)])
    assert adapter.output_nbytes(params) == pack(payload.tree).leaf_nbytes


def test_of_latents_it_does_not(adapter):
    assert adapter.output_nbytes(SamplingParams(output_type="latent")) is None
