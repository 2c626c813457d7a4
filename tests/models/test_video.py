"""Helios, Wan and LTX: the library's own pixels, whole and in steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline

from sidestream.errors import InvalidRequestError
from sidestream.models.helios import Helios
from sidestream.models.post_process import find_post_process, is_video, to_images
from sidestream.models.video import LTX, Wan
from sidestream.models.video_checkpoint import DEFAULTS, build_video_pipeline
from sidestream.request import DiffusionRequest, SamplingParams

from .output_bytes import assert_known
from .stepping import run, run_interleaved, step

pytestmark = pytest.mark.slow

#: Chunks of 5 frames instead of 33.
SMALL_CHUNKS = {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}
CASES = {
    "helios": (Helios, {"num_frames": 10, "extra": SMALL_CHUNKS}),
    "wan": (Wan, {"num_frames": 5}),
    "wan-2.2": (Wan, {"num_frames": 5}),
    "ltx": (LTX, {"num_frames": 9}),
}


@pytest.fixture(scope="module")
def adapters():
    """Make an adapter by its case, once."""
    made = {}

    def make(case: str):
        if case not in made:
            kind = case.partition("-")[0]
            pipeline = build_video_pipeline(kind, seed=0, two_experts=case == "wan-2.2")
            pipeline.set_progress_bar_config(disable=True)
            made[case] = CASES[case][0](pipeline, DEFAULTS[kind])
        made[case].on_step = None
        return made[case]

    return make


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def request(case: str, prompt: str = "a cat", *, inputs=None, **changed) -> DiffusionRequest:
    params = SamplingParams(height=32, width=32, num_inference_steps=2, seed=7, **CASES[case][1])
    return DiffusionRequest(prompt, replace(params, **changed), request_id=prompt, inputs=inputs)


def call(adapter, own: DiffusionRequest, output_type: str):
    """Call the library as ``own`` says."""
    params = own.sampling_params.with_defaults(adapter.defaults)
    return adapter.pipeline(
        prompt=own.prompt,
        negative_prompt=params.negative_prompt,
        height=params.height,
        width=params.width,
        num_frames=params.num_frames,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        generator=torch.Generator().manual_seed(params.seed),
        output_type=output_type,
        **params.extra,
    ).frames


class TestForward:
    def test_the_frames_are_the_librarys(self, case, adapters):
        adapter, own = adapters(case), request(case)
        (payload,) = adapter.forward([own])
        key, post_process = find_post_process(adapter)
        frames = post_process.device(payload, own.sampling_params)
        assert frames.dtype == torch.uint8
        assert frames.shape[1:] == (32, 32, 3)
        assert is_video(key)
        (theirs,) = call(adapter, own, "pil")
        assert len(theirs) == len(frames)
        for mine, image in zip(to_images(frames, key), theirs, strict=True):
            assert np.array_equal(np.asarray(mine), np.asarray(image))

    @pytest.mark.parametrize("case", ["helios", "wan"])
    def test_latents_are_the_librarys(self, case, adapters):
        own = request(case, output_type="latent")
        (payload,) = adapters(case).forward([own])
        _, post_process = find_post_process(adapters(case))
        ours = post_process.device(payload, own.sampling_params)
        assert torch.equal(ours, call(adapters(case), own, "latent"))

    def test_float_is_the_librarys(self, adapters):
        own = request("wan", output_type="float")
        (payload,) = adapters("wan").forward([own])
        _, post_process = find_post_process(adapters("wan"))
        ours = post_process.device(payload, own.sampling_params)
        assert torch.equal(ours, call(adapters("wan"), own, "pt")[0])

    @pytest.mark.parametrize("case", ["helios", "wan-2.2", "ltx"])
    def test_prompt_negative_prompt_and_seed_make_a_difference(self, case, adapters):
        changes = ({}, {"prompt": "two dogs"}, {"seed": 8}, {"negative_prompt": "blurry"})
        requests = [request(case, output_type="latent", **changed) for changed in changes]
        base, *others = adapters(case).forward(requests)
        for other in others:
            assert (base - other).abs().max() > 0.02

    @pytest.mark.parametrize("case", ["helios", "ltx"])
    def test_each_step_is_reported_once(self, case, adapters):
        adapter, steps = adapters(case), []
        adapter.on_step = steps.append
        adapter.forward([request(case)])
        assert steps == ([1, 2, 3, 4] if case == "helios" else [1, 2])

    @pytest.mark.parametrize("case", ["helios", "wan", "ltx"])
    def test_what_is_not_possible_is_refused_by_name(self, case, adapters):
        for changed in (
            {"height": 40},
            {"num_outputs_per_prompt": 2},
            {"true_cfg_scale": 2.0},
            {"seed": 1 << 63},
            {"extra": {"mask": 1}},
        ):
            name = "mask" if "extra" in changed else next(iter(changed))
            with pytest.raises(InvalidRequestError, match=name):
                adapters(case).forward([request(case, **changed)])

    @pytest.mark.parametrize("changed", [{}, {"output_type": "float"}, {"output_type": "latent"}])
    def test_the_bytes_of_a_video_are_known(self, changed, case, adapters):
        assert_known(adapters(case), request(case, **changed))

    def test_the_bytes_of_other_sizes_are_known_and_without_any_those_of_the_defaults(
        self, adapters
    ):
        chunks = {"num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]}
        for changed in ({"height": 64}, {"num_frames": 28, "output_type": "latent"}):
            assert_known(adapters("helios"), request("helios", extra=chunks, **changed))
        assert_known(adapters("wan"), DiffusionRequest("a cat", SamplingParams(num_frames=1)))
        assert_known(adapters("ltx"), DiffusionRequest("a cat", SamplingParams(width=96)))

    @pytest.mark.parametrize(
        ("case", "frames", "height", "width"),
        [("wan", 81, 480, 832), ("ltx", 161, 512, 704), ("helios", 129, 384, 640)],
    )
    def test_what_no_checkpoint_says_is_as_the_library_has_it(
        self, case, frames, height, width, adapters, monkeypatch
    ):
        """These are too large to be made here; of Helios' 132 frames the library keeps 129."""
        monkeypatch.setattr(adapters(case), "defaults", {})
        assert adapters(case).output_nbytes(SamplingParams()) == 3 * frames * height * width

    def test_bytes_that_a_request_alone_does_not_tell_are_not_known(self, adapters):
        for case, changed in (
            ("wan", {"height": 40}),
            ("wan", {"extra": {"latents": torch.zeros(1)}}),
            ("helios", {"extra": {"image_latents": torch.zeros(1)}}),
        ):
            own = request(case, **changed)
            assert adapters(case).output_nbytes(own.sampling_params) is None

    @pytest.mark.parametrize("case", ["wan", "ltx"])
    def test_a_number_of_frames_that_the_library_would_change_is_refused(self, case, adapters):
        with pytest.raises(InvalidRequestError, match="num_frames=6"):
            adapters(case).forward([request(case, num_frames=6)])

    def test_a_vae_with_patches_of_its_own_asks_for_larger_multiples(self, adapters):
        """As Wan 2.2 with 5 B parameters has one."""
        vae = AutoencoderKLWan(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=16,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        ).eval()
        pipeline = WanPipeline(**{**adapters("wan").pipeline.components, "vae": vae})
        pipeline.set_progress_bar_config(disable=True)
        assert_known(Wan(pipeline), request("wan", height=64))
        with pytest.raises(InvalidRequestError, match=r"height=48 .* multiple of 32"):
            Wan(pipeline).forward([request("wan", height=48)])


class TestSteps:
    @pytest.mark.parametrize("case", ["helios", "wan"])
    def test_without_guidance_and_as_latents_too(self, case, adapters):
        own = request(case, output_type="latent", guidance_scale=1.0)
        assert torch.equal(run(adapters(case), own), adapters(case).forward([own])[0])

    def test_the_bits_are_the_forwards_interleaved_and_beside_an_aborted_neighbor(
        self, case, adapters
    ):
        adapter = adapters(case)
        requests = [request(case, seed=1), request(case, "two", num_inference_steps=3)]
        whole = adapter.forward(requests)
        neighbor = adapter.prepare_encode(request(case, "three"))
        step(adapter, neighbor)
        mine = adapter.prepare_encode(requests[0])
        for state in (mine, neighbor, mine):
            step(adapter, state)
        del neighbor, state
        while not mine.done:
            step(adapter, mine)
        assert torch.equal(adapter.post_decode(mine), whole[0])
        for ours, theirs in zip(run_interleaved(adapter, requests), whole, strict=True):
            assert torch.equal(ours, theirs)


class TestHelios:
    def chunks_of(self, adapter, own):
        chunks, steps = [], []
        state = adapter.prepare_encode(own)
        while not state.done:
            step(adapter, state)
            if state.chunk is not None:
                chunks.append(state.chunk)
                steps.append(state.step)
                state.chunk = None
        return chunks, steps, adapter.post_decode(state)

    def test_each_chunk_is_there_when_its_last_step_is_done(self, adapters):
        adapter = adapters("helios")
        chunks, steps, payload = self.chunks_of(adapter, request("helios"))
        assert steps == [2, 4]
        # Two chunks of 5 frames; the library keeps four times something, plus one.
        assert [chunk.shape[2] for chunk in chunks] == [5, 4]
        assert torch.equal(torch.cat(chunks, dim=2), payload)

    def test_chunks_that_the_library_cuts_off_whole_are_not_there(self, adapters):
        tiny = {"num_latent_frames_per_chunk": 1, "history_sizes": [4, 2, 1]}
        own = request("helios", num_frames=4, extra=tiny, num_inference_steps=2)
        chunks, _, payload = self.chunks_of(adapters("helios"), own)
        assert [chunk.shape[2] for chunk in chunks] == [1]
        assert torch.equal(payload, adapters("helios").forward([own])[0])

    def test_latents_come_without_decoding(self, adapters):
        adapter, decoded = adapters("helios"), []
        hook = adapter.pipeline.vae.decoder.register_forward_hook(lambda *_: decoded.append(1))
        chunks, _, _ = self.chunks_of(adapter, request("helios", output_type="latent"))
        hook.remove()
        assert (chunks, decoded) == ([], [])

    @pytest.mark.parametrize(
        "inputs",
        [
            {"prompt_embeds": "encoded"},
            {"sigmas": np.array([0.9, 0.6, 0.2])},
            {"max_sequence_length": 16},
            {
                "image_latents": torch.ones(1, 16, 1, 4, 4),
                "fake_image_latents": torch.ones(1, 16, 1, 4, 4),
            },
            {"is_skip_first_chunk": True},
        ],
        ids=lambda inputs: next(iter(inputs)),
    )
    def test_arguments_by_name_reach_both_ways(self, inputs, adapters):
        adapter = adapters("helios")
        if "prompt_embeds" in inputs:
            with torch.no_grad():
                embeds, _ = adapter.pipeline.encode_prompt("a dog", max_sequence_length=16)
            inputs = {"prompt_embeds": embeds, "negative_prompt_embeds": embeds * 0.5}
        # Three chunks: of a skipped one the third is the first to see something.
        changed = {"output_type": "latent", "num_frames": 11}
        own = request("helios", inputs=inputs, **changed)
        (whole,) = adapter.forward([own])
        assert torch.equal(run(adapter, own), whole)
        assert not torch.equal(whole, run(adapter, request("helios", **changed)))
