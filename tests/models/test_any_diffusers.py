"""Pipelines of diffusers that have no adapter of their own, measured against their own calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import PIL.ExifTags
import PIL.Image
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, DiffusionPipeline

from sidestream.cli.main import run
from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.models.any_diffusers import AnyDiffusers
from sidestream.models.post_process import find_post_process, is_video, to_images
from sidestream.models.registry import find_source
from sidestream.models.video_checkpoint import build_video_pipeline
from sidestream.request import DiffusionRequest, SamplingParams

from .output_bytes import assert_known
from .tiny_pipelines import flux, qwen_image, saved, stable_diffusion_3, z_image

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(height=64, width=64, num_inference_steps=2, seed=7)
PHOTO = PIL.Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "RGB"
)
MASK = PIL.Image.fromarray(np.eye(64, dtype=np.uint8) * 255, "L")

TASKS = {
    "text to image": ({}, None),
    "image to image": ({"image": PHOTO}, AutoPipelineForImage2Image),
    "inpainting": ({"image": PHOTO, "mask_image": MASK}, AutoPipelineForInpainting),
}


def request(prompt: str = "a red apple", *, inputs=None, **changed) -> DiffusionRequest:
    return DiffusionRequest(prompt, replace(PARAMS, **changed), request_id=prompt, inputs=inputs)


def images_of(adapter, payload, params=PARAMS):
    key, post_process = find_post_process(adapter)
    return to_images(post_process.device(payload, params), key)


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.fixture(scope="module", params=[flux, stable_diffusion_3, z_image, qwen_image])
def folder(request, tmp_path_factory):
    build = request.param
    return saved(build, tmp_path_factory.mktemp(build.__name__) / "checkpoint")


@pytest.fixture(scope="module")
def loaded(folder, on_cpu):
    return AnyDiffusers.load(on_cpu(folder))


@pytest.fixture
def adapter(loaded):
    yield loaded
    loaded.on_step = None


@pytest.fixture(scope="module")
def library(folder):
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class TestEachPipeline:
    @pytest.mark.parametrize("task", TASKS)
    def test_a_request_gives_the_librarys_pixels(self, task, adapter, library):
        inputs, auto = TASKS[task]
        theirs = library if auto is None else auto.from_pipe(library)
        theirs.set_progress_bar_config(disable=True)
        (payload,) = adapter.forward([request(inputs=inputs)])
        expected = theirs(
            prompt="a red apple",
            height=64,
            width=64,
            num_inference_steps=2,
            generator=generators(7),
            **inputs,
        ).images
        (image,) = images_of(adapter, payload)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected[0]))

    def test_outputs_of_a_prompt_are_drawn_with_seeds_that_count_on(self, adapter):
        (both,) = adapter.forward([request(num_outputs_per_prompt=2)])
        for j in range(2):
            (alone,) = adapter.forward([request(seed=7 + j)])
            torch.testing.assert_close(both[j], alone[0], rtol=0, atol=1e-4)

    def test_members_of_a_batch_equal_themselves_alone_where_the_class_batches(self, adapter):
        members = [request("a red apple", seed=1), request("a much longer prompt", seed=2)]
        calls = []
        hook = adapter.pipeline.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
        try:
            together = adapter.forward(members)
        finally:
            hook.remove()
        # An image a call in a class of which batches aren't known to be right.
        assert (len(calls) == 2) == adapter.supports_request_batch
        for member, payload in zip(members, together, strict=True):
            (alone,) = adapter.forward([member])
            torch.testing.assert_close(payload, alone, rtol=0, atol=1e-4)
        assert not torch.allclose(*together, atol=1e-2)

    def test_latents_are_not_decoded(self, adapter, library):
        (payload,) = adapter.forward([request(output_type="latent")])
        expected = library(
            prompt="a red apple",
            height=64,
            width=64,
            num_inference_steps=2,
            generator=generators(7),
            output_type="latent",
        ).images
        assert torch.equal(payload, expected)

    @pytest.mark.parametrize(
        "changed",
        [{}, {"output_type": "float"}, {"num_outputs_per_prompt": 2}, {"height": 32, "width": 48}],
    )
    def test_the_bytes_of_an_output_are_known_of_some_classes(self, changed, adapter):
        own = request(**changed)
        if type(adapter.pipeline).__name__ == "QwenImagePipeline":  # has an adapter of its own
            assert adapter.output_nbytes(own.sampling_params) is None
        else:
            assert_known(adapter, own)

    @pytest.mark.parametrize(("task", "steps"), [("text to image", 3), ("image to image", 2)])
    def test_stepped_it_gives_the_same_bits(self, task, steps, adapter):
        own = request(inputs=TASKS[task][0], num_inference_steps=3)
        state = adapter.prepare_encode(own)
        assert state.num_steps == steps  # an image starts part of the way
        while not state.done:
            adapter.step_scheduler(state, adapter.denoise_step(state))
        assert state.step == steps
        assert torch.equal(adapter.post_decode(state), adapter.forward([own])[0])


@pytest.fixture(scope="module")
def wan():
    """It has an adapter of its own, and goes through this one all the same."""
    pipeline = build_video_pipeline("wan", seed=0)
    pipeline.set_progress_bar_config(disable=True)
    return AnyDiffusers(pipeline)


class TestVideos:
    def test_a_video_gives_the_librarys_frames(self, wan):
        params = replace(PARAMS, height=32, width=32, num_frames=5)
        (payload,) = wan.forward([DiffusionRequest("a cat", params)])
        (expected,) = wan.pipeline(
            prompt="a cat",
            height=32,
            width=32,
            num_frames=5,
            num_inference_steps=2,
            generator=generators(7),
            output_type="pil",
        ).frames
        key, _ = find_post_process(wan)
        frames = images_of(wan, payload, params)
        assert (is_video(key), len(frames)) == (True, 5)
        for ours, theirs in zip(frames, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))

    def test_a_request_makes_one_video(self, wan):
        with pytest.raises(InvalidRequestError, match="one video"):
            wan.forward([request(num_frames=5, num_outputs_per_prompt=2)])


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    return saved(flux, tmp_path_factory.mktemp("any") / "flux")


@pytest.fixture(scope="module")
def one(flux_folder, on_cpu):
    return AnyDiffusers.load(on_cpu(flux_folder))


def test_the_command_line_takes_a_picture(flux_folder, tmp_path):
    # Lying on its side, as a camera says it: read upright.
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = 6
    PHOTO.rotate(90).save(tmp_path / "photo.png", exif=exif)
    options = ["--image", tmp_path / "photo.png", "--height", 64, "--width", 64, "--steps", 2]
    options += ["--seed", 7, "--platform", "cpu", "--executor", "uniproc"]
    command = ["generate", flux_folder, "--prompt", "a red apple", "--out", tmp_path, *options]
    assert run([str(part) for part in command]) == 0
    library = AutoPipelineForImage2Image.from_pretrained(flux_folder, local_files_only=True)
    library.set_progress_bar_config(disable=True)
    (expected,) = library(
        prompt="a red apple",
        image=PHOTO,
        height=64,
        width=64,
        num_inference_steps=2,
        generator=generators(7)[0],
    ).images
    with PIL.Image.open(tmp_path / "00000_a-red-apple_seed7.png") as image:
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


class TestRequests:
    def test_the_registry_gives_any_class_of_diffusers_to_this_adapter(self, flux_folder):
        assert find_source(flux_folder, None).reference.endswith("any_diffusers:AnyDiffusers")

    def test_requests_that_differ_in_more_than_prompts_and_seeds_are_sampled_one_by_one(self, one):
        members = [request("one"), request("two", guidance_scale=1.0)]
        together = one.forward(members)
        for member, payload in zip(members, together, strict=True):
            assert torch.equal(payload, one.forward([member])[0])

    def test_steps_are_reported_and_raising_stops_before_the_decoder(self, one):
        class Stop(Exception):
            pass

        steps, decoded = [], []
        hook = one.pipeline.vae.decoder.register_forward_hook(lambda *_: decoded.append(1))

        def stop_at_the_second(step: int) -> None:
            steps.append(step)
            if step == 2:
                raise Stop

        one.on_step = stop_at_the_second
        try:
            with pytest.raises(Stop):
                one.forward([request(num_inference_steps=3)])
        finally:
            hook.remove()
            one.on_step = None
        assert (steps, decoded) == ([1, 2], [])

    def test_a_field_that_the_pipeline_does_not_take_is_refused_by_name(self, one):
        with pytest.raises(InvalidRequestError, match="FluxPipeline does not take num_frames=5"):
            one.forward([request(num_frames=5)])

    def test_a_default_that_the_pipeline_does_not_take_is_left_out(self, one):
        adapter = AnyDiffusers(one.pipeline, {"num_frames": 5, "num_inference_steps": 2})
        own = DiffusionRequest("a red apple", SamplingParams(height=64, width=64, seed=7))
        assert torch.equal(adapter.forward([own])[0], one.forward([request()])[0])

    def test_a_size_that_the_pipeline_rounds_has_the_bytes_of_the_rounded_one(self, one):
        assert one.pipeline.vae_scale_factor == 2
        assert_known(one, request(height=66, width=70))

    def test_the_default_size_is_the_pipelines(self, one):
        assert one.output_nbytes(SamplingParams()) == 3 * 256 * 256
        assert one.output_nbytes(replace(PARAMS, output_type="latent")) is None

    def test_an_unknown_input_is_refused(self, one):
        with pytest.raises(InvalidRequestError, match="'picture' is not an argument"):
            one.forward([request(inputs={"picture": PHOTO})])

    def test_an_image_to_a_class_without_such_a_task_is_refused(self, one):
        class Lonely(type(one.pipeline)):
            """A class that diffusers knows no other tasks of."""

        adapter = AnyDiffusers(Lonely(**one.pipeline.components))
        with pytest.raises(InvalidRequestError, match="'image' is not an argument"):
            adapter.forward([request(inputs={"image": PHOTO})])

    def test_a_pipeline_without_prompts_is_refused(self):
        from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

        unet = UNet2DModel(
            sample_size=8,
            block_out_channels=(32,),
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        )
        with pytest.raises(ConfigError, match=r"DDPMPipeline.*takes a prompt"):
            AnyDiffusers(DDPMPipeline(unet, DDPMScheduler()))
