"""Qwen-Image and Helios through an engine in step mode: the pixels of the library's own calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import sidestream
from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
from sidestream.models.checkpoint import make_checkpoint
from sidestream.models.registry import find_source
from sidestream.output import EventKind

pytestmark = pytest.mark.slow

diffusers = pytest.importorskip("diffusers")

#: Chunks of 5 frames instead of 33.
SMALL_CHUNKS = {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}
HELIOS = SamplingParams(num_frames=10, num_inference_steps=2, seed=3, extra=SMALL_CHUNKS)
QWEN = SamplingParams(num_inference_steps=4, seed=3)


@pytest.fixture(scope="module")
def helios(tmp_path_factory):
    return make_checkpoint("helios", tmp_path_factory.mktemp("helios") / "checkpoint")


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    return make_checkpoint("wan", tmp_path_factory.mktemp("wan") / "checkpoint")


def device_of(platform):
    loaded = sidestream.load_platform(platform)
    device = loaded.device(0)
    loaded.set_device(device)
    return device


def directly(kind, folder, platform, requests):
    """Call the library's pipeline itself; gives the uint8 pixels of each request."""
    pipeline = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    pipeline.to(device_of(platform)).set_progress_bar_config(disable=True)
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")
    names += ("true_cfg_scale", "negative_prompt")
    outputs = []
    for request in requests:
        params = request.sampling_params.with_defaults(find_source(folder, None).defaults)
        given = {name: getattr(params, name) for name in names}
        tensor = pipeline(
            prompt=request.prompt,
            generator=torch.Generator().manual_seed(params.seed),
            output_type="pt",
            return_dict=False,
            **{name: value for name, value in given.items() if value is not None},
            **params.extra,
        )[0]
        pixels = (tensor.cpu().float() * 255).round().to(torch.uint8).movedim(-3, -1)
        outputs.append(pixels[0] if pixels.ndim == 5 else pixels)
    return outputs


def slots(engine):
    return engine.executor.collective_rpc("describe")[0]["slots"]


@pytest.mark.parametrize("platform", ["cpu", "sim"])
def test_qwen_images_that_take_turns_have_the_librarys_pixels(platform):
    folder = find_source("digits", None).model
    requests = [
        DiffusionRequest("7", QWEN),
        DiffusionRequest("three", replace(QWEN, num_inference_steps=3, seed=4)),
    ]
    config = EngineConfig(
        model="digits", platform=platform, executor="uniproc", step_execution=True
    )
    with DiffusionEngine(config) as engine:
        outputs = engine.generate(requests)
    expected = directly(diffusers.QwenImagePipeline, folder, platform, requests)
    for output, pixels in zip(outputs, expected, strict=True):
        assert torch.equal(output.output, pixels)


def test_qwen_images_that_share_forwards_have_them_within_rounding():
    requests = [DiffusionRequest(str(digit), replace(QWEN, seed=digit)) for digit in range(3)]
    requests.append(DiffusionRequest("9", replace(QWEN, num_inference_steps=2)))
    config = EngineConfig(model="digits", platform="cpu", executor="uniproc")
    with DiffusionEngine(config) as engine:
        alone = engine.generate(requests)
    config = replace(config, step_execution=True, max_batch_size=4, max_pending_outputs=4)
    with DiffusionEngine(config) as engine:
        together = engine.generate(requests)
    for one, other in zip(together, alone, strict=True):
        assert (one.output.int() - other.output.int()).abs().max() <= 1


def test_a_helios_video_comes_in_chunks_that_are_the_librarys(helios):
    requests = [DiffusionRequest("a cat", HELIOS)]
    config = EngineConfig(model=helios, platform="cpu", executor="uniproc", streaming_output=True)
    with DiffusionEngine(config) as engine:
        events = list(engine.step_streaming(requests[0]))
    steps = [(e.step, e.num_steps) for e in events if e.kind is EventKind.STEP]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    chunks = [event.output for event in events if event.kind is EventKind.CHUNK]
    assert [chunk.output.shape for chunk in chunks] == [(5, 32, 32, 3), (4, 32, 32, 3)]
    assert all(chunk.is_video and len(chunk.frames) == len(chunk.output) for chunk in chunks)
    (whole,) = directly(diffusers.HeliosPipeline, helios, "cpu", requests)
    assert torch.equal(events[-1].output.output, whole)
    assert torch.equal(torch.cat([chunk.output for chunk in chunks]), whole)
    assert np.array_equal(np.asarray(events[-1].output.frames[8]), whole[8].numpy())


@pytest.mark.parametrize("step_execution", [False, True])
def test_wan_videos_have_the_librarys_pixels_whole_and_in_steps(step_execution, wan):
    params = SamplingParams(height=32, width=32, num_frames=5, num_inference_steps=2, seed=3)
    requests = [DiffusionRequest("a cat", params), DiffusionRequest("a dog", params)]
    config = EngineConfig(
        model=wan, platform="cpu", executor="uniproc", step_execution=step_execution
    )
    with DiffusionEngine(config) as engine:
        outputs = engine.generate(requests)
    expected = directly(diffusers.WanPipeline, wan, "cpu", requests)
    for output, pixels in zip(outputs, expected, strict=True):
        assert output.output.shape == (5, 32, 32, 3)
        assert torch.equal(output.output, pixels)


@pytest.mark.timeout(300)  # a process that imports diffusers, on a device that is slow
def test_helios_videos_of_a_worker_on_sim_have_the_librarys_pixels_behind_an_aborted_one(helios):
    requests = [DiffusionRequest("a cat", HELIOS)]
    config = EngineConfig(
        model=helios,
        platform="sim",
        streaming_output=True,
        async_final_step=True,
        start_timeout_s=200,
    )
    with DiffusionEngine(config) as engine:
        assert slots(engine).made == 1  # the model knows the size of its videos
        aborted = engine.submit(DiffusionRequest("a dog", replace(HELIOS, num_frames=100)))
        handle = engine.submit(requests[0])
        next(aborted.events())
        result = aborted.abort(wait=True)
        chunks = [e.output for e in handle.events() if e.kind is EventKind.CHUNK]
        output = handle.result()
        assert output.timings.carrier == "slot"
        assert slots(engine).made == 1
    assert result.outcome == sidestream.AbortOutcome.STOPPED
    (whole,) = directly(diffusers.HeliosPipeline, helios, "sim", requests)
    assert torch.equal(output.output, whole)
    assert torch.equal(torch.cat([chunk.output for chunk in chunks]), whole)
