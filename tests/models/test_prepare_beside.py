"""Adapters whose requests are prepared beside the steps of others: the bits are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sidestream import DiffusionRequest, SamplingParams, load_platform
from sidestream.models.helios import Helios
from sidestream.models.hunyuan_image3 import HunyuanImage3
from sidestream.models.qwen_image import QwenImage
from sidestream.models.video import Wan
from sidestream.models.video_checkpoint import build_video_pipeline
from sidestream.worker.prepare_stream import PrepareStream

from .stepping import step

pytestmark = pytest.mark.slow

IMAGE = SamplingParams(height=32, width=32, num_inference_steps=2, seed=3)
GUIDED = replace(IMAGE, true_cfg_scale=4.0, negative_prompt="a dog, and more of it")
SMALL_CHUNKS = {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}
VIDEO = replace(IMAGE, num_frames=5, extra=SMALL_CHUNKS)


def load(kind, request, device, **options):
    if kind is Helios:
        pipeline = build_video_pipeline("helios", seed=0)
        pipeline.set_progress_bar_config(disable=True)
        return Helios(pipeline.to(device))
    folder = request.getfixturevalue("qwen_folder" if kind is QwenImage else "hunyuan_folder")
    on_cpu = request.getfixturevalue("on_cpu")
    return kind.load(on_cpu(folder, device=device, options=options))


@pytest.mark.parametrize(
    ("kind", "params", "waits_in_steps"),
    [
        (QwenImage, GUIDED, False),
        (HunyuanImage3, replace(IMAGE, guidance_scale=5.0), False),
        pytest.param(Helios, VIDEO, True, marks=pytest.mark.soak),
    ],
    ids=["qwen", "hunyuan", "helios"],
)
def test_what_was_prepared_while_another_is_held_has_the_same_bits(
    sim, request, kind, params, waits_in_steps
):
    platform, device, steps = load_platform("sim"), sim.device(), sim.default_stream()
    adapter = load(kind, request, device)
    preparing = PrepareStream(platform, device, lambda: platform.record_device_event(device))
    mine, other = DiffusionRequest("7 apples", params), DiffusionRequest("a pear", params)

    def prepare(one):
        assert adapter.may_prepare_beside(one)
        with preparing.block(may_be_beside=True) as preparation:
            preparation.made.append(adapter.prepare_encode(one))
        return preparation.made[0], preparation.is_beside

    def finish(state):
        while not state.done:
            step(adapter, state)
        return adapter.post_decode(state)

    first, is_beside = prepare(other)
    assert not is_beside
    expected = finish(adapter.prepare_encode(mine)).cpu()
    steps.hold()
    queued = torch.zeros(4, device=device) + 1
    preparing.note_queued()
    second, is_beside = prepare(mine)
    assert is_beside
    assert not platform.record_device_event(device).query()
    if waits_in_steps:
        steps.release()
    output = finish(second)
    del second  # what it held is free for the next one to be prepared
    third, is_beside = prepare(other)
    steps.release()
    assert torch.equal(output.cpu(), expected)
    assert torch.equal(finish(third).cpu(), finish(first).cpu())
    assert queued.tolist() == [1.0] * 4


@pytest.mark.parametrize("kind", [QwenImage, HunyuanImage3])
@pytest.mark.parametrize("way", ["model", "sequential", "group"])
def test_where_weights_move_as_they_run_requests_are_prepared_between_steps(
    sim, request, kind, way
):
    adapter = load(kind, request, sim.device(), cpu_offload=way)
    assert not adapter.may_prepare_beside(DiffusionRequest("x", IMAGE))


@pytest.mark.parametrize(
    ("kind", "options", "may_be_beside"),
    [
        (HunyuanImage3, {"quantization": "float8"}, False),
        (QwenImage, {"quantization": "float8"}, True),  # its denoiser only
        pytest.param(HunyuanImage3, {"compile": True}, False, marks=pytest.mark.soak),
        pytest.param(QwenImage, {"compile": True}, True, marks=pytest.mark.soak),
    ],
)
def test_weights_that_are_cast_or_compiled_matter_where_preparing_uses_them(
    request, kind, options, may_be_beside
):
    adapter = load(kind, request, torch.device("cpu"), **options)
    assert adapter.may_prepare_beside(DiffusionRequest("x", IMAGE)) is may_be_beside


def test_a_suspended_call_is_prepared_between_steps():
    image = DiffusionRequest("x", VIDEO, inputs={"image": torch.zeros(1, 3, 32, 32)})
    helios = build_video_pipeline("helios", seed=0)
    assert not Helios(helios).may_prepare_beside(image)
    assert not hasattr(Wan, "may_prepare_beside")
