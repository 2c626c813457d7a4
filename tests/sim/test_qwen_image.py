"""A whole diffusers pipeline runs on the simulated device as it is."""

import pytest
import torch

from sidestream.models.checkpoint import make_checkpoint

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = make_checkpoint("qwen-image", tmp_path_factory.mktemp("sim") / "checkpoint")
    loaded = diffusers.QwenImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipeline, prompt="a red cube"):
    return pipeline(
        prompt=prompt,
        negative_prompt=" ",
        true_cfg_scale=4.0,
        height=32,
        width=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    ).images


def test_qwen_image_draws_on_the_device_what_it_draws_on_the_cpu(pipeline, device):
    here = draw(pipeline)
    pipeline.to(device)
    there = draw(pipeline)
    assert there.device == device
    assert (there.cpu() - here).abs().max() * 255 <= 1
    assert torch.equal(there.cpu(), draw(pipeline).cpu())
    with torch.inference_mode():
        assert (draw(pipeline).cpu() - here).abs().max() * 255 <= 1
    assert (draw(pipeline, "a dog").cpu() - here).abs().max() * 255 > 1
