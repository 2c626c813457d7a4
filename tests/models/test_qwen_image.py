"""The Qwen-Image adapter, measured against diffusers' own pipeline on the same folder."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest
import torch

from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.models.post_process import find_post_process, to_images
from sidestream.models.qwen_image import QwenImage
from sidestream.request import DiffusionRequest, SamplingParams

PARAMS = SamplingParams(
    height=64, width=64, num_inference_steps=2, true_cfg_scale=4.0, negative_prompt=" ", seed=7
)


def request(prompt: str = "a red apple", *, inputs=None, **changed) -> DiffusionRequest:
    return DiffusionRequest(prompt, replace(PARAMS, **changed), request_id=prompt, inputs=inputs)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images_of(adapter, payload, params=PARAMS):
    key, post_process = find_post_process(adapter)
    return to_images(post_process.device(payload, params), key)


def call(library, **changed):
    """Call the library as PARAMS says."""
    return library(
        **{
            "prompt": "a red apple",
            "negative_prompt": " ",
            "height": 64,
            "width": 64,
            "num_inference_steps": 2,
            "true_cfg_scale": 4.0,
            "generator": generator(7),
            **changed,
        }
    ).images


def same_pixels(ours, theirs) -> bool:
    return all(
        np.array_equal(np.asarray(one), np.asarray(other))
        for one, other in zip(ours, theirs, strict=True)
    )


class TestAgainstTheLibrary:
    def test_one_request_gives_the_librarys_pixels(self, adapter, library):
        (payload,) = adapter.forward([request()])
        assert payload.shape == (1, 3, 64, 64)
        assert payload.dtype == torch.float32
        assert payload.min() < 0
        assert same_pixels(images_of(adapter, payload), call(library))

    def test_without_guidance_too(self, adapter, library):
        (payload,) = adapter.forward([request(true_cfg_scale=1.0, negative_prompt=" ")])
        assert same_pixels(images_of(adapter, payload), call(library, true_cfg_scale=1.0))

    def test_a_size_that_is_not_square(self, adapter, library):
        (payload,) = adapter.forward([request(height=32, width=96)])
        assert payload.shape == (1, 3, 32, 96)
        assert same_pixels(images_of(adapter, payload), call(library, height=32, width=96))

    def test_output_j_is_drawn_with_seed_plus_j(self, adapter, library):
        (payload,) = adapter.forward([request(num_outputs_per_prompt=3)])
        theirs = call(library, num_images_per_prompt=3, generator=[generator(s) for s in (7, 8, 9)])
        assert same_pixels(images_of(adapter, payload), theirs)

    def test_latents_are_the_librarys(self, adapter, library):
        (payload,) = adapter.forward([request(output_type="latent")])
        assert torch.equal(payload, call(library, output_type="latent"))

    def test_bfloat16_gives_the_librarys_pixels(self, qwen_folder, library, on_cpu):
        ours = QwenImage.load(on_cpu(qwen_folder, dtype=torch.bfloat16))
        theirs = type(library).from_pretrained(
            qwen_folder, dtype=torch.bfloat16, local_files_only=True
        )
        theirs.set_progress_bar_config(disable=True)
        (payload,) = ours.forward([request()])
        assert payload.dtype == torch.bfloat16
        assert same_pixels(images_of(ours, payload), call(theirs))

    def test_latents_are_scaled_as_the_checkpoint_says(self, library, on_cpu):
        """The digits checkpoint has means and deviations that matter."""
        from sidestream.models.registry import find_source

        folder = find_source("digits", None).model
        ours = QwenImage.load(on_cpu(folder))
        theirs = type(library).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        theirs.set_progress_bar_config(disable=True)
        assert any(theirs.vae.config.latents_mean)
        (payload,) = ours.forward([request("7")])
        assert same_pixels(images_of(ours, payload), call(theirs, prompt="7"))


class TestBatches:
    def test_each_member_equals_itself_alone_within_rounding(self, adapter):
        members = [
            request("a red apple", seed=1),
            request("two words", seed=2, negative_prompt="blurry"),
            request("a much longer prompt about an apple on a table", seed=3),
        ]
        together = adapter.forward(members)
        for member, payload in zip(members, together, strict=True):
            (alone,) = adapter.forward([member])
            torch.testing.assert_close(payload, alone, rtol=0, atol=1e-4)

    def test_members_get_all_their_outputs(self, adapter):
        members = [request(seed=s, num_outputs_per_prompt=2) for s in (1, 2)]
        one, two = adapter.forward(members)
        assert one.shape == two.shape == (2, 3, 64, 64)
        # Seed 2 is the second output of the one and the first of the other.
        torch.testing.assert_close(one[1], two[0], rtol=0, atol=1e-4)
        assert not torch.allclose(one[0], one[1], atol=1e-2)

    def test_prompts_and_seeds_make_a_difference(self, adapter):
        base, other_prompt, other_seed = adapter.forward(
            [request("one"), request("two"), request("one", seed=8)]
        )
        assert not torch.allclose(base, other_prompt, atol=1e-2)
        assert not torch.allclose(base, other_seed, atol=1e-2)

    @pytest.mark.parametrize(
        "changed",
        [
            {"height": 32},
            {"width": 32},
            {"num_inference_steps": 3},
            {"true_cfg_scale": 2.0},
            {"num_outputs_per_prompt": 2},
            {"output_type": "latent"},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_members_that_differ_in_more_are_refused_by_name(self, changed, adapter):
        with pytest.raises(InvalidRequestError, match=next(iter(changed))) as caught:
            adapter.forward([request("one"), request("two", **changed)])
        assert caught.value.request_id == "two"

    def test_members_may_want_other_forms_of_their_images(self, adapter):
        one, two = adapter.forward(
            [request("one", output_type="float"), request("two", num_outputs_per_prompt=1)]
        )
        assert one.shape == two.shape == (1, 3, 64, 64)

    def test_members_with_and_without_a_negative_prompt_are_refused(self, qwen_folder, adapter):
        bare = QwenImage(adapter.pipeline)
        with pytest.raises(InvalidRequestError, match="negative_prompt"):
            bare.forward([request("one"), request("two", negative_prompt=None)])

    def test_a_member_with_arguments_of_its_own_is_sampled_alone(self, adapter):
        latents = torch.randn(1, 16, 16, generator=generator(0))
        own = request("two", inputs={"latents": latents})
        together = adapter.forward([request("one"), own])
        assert torch.equal(together[0], adapter.forward([request("one")])[0])
        assert torch.equal(together[1], adapter.forward([own])[0])


class TestArguments:
    def test_inputs_reach_the_pipeline_by_name(self, adapter, library):
        latents = torch.randn(1, 16, 16, generator=generator(0))
        (payload,) = adapter.forward([request(inputs={"latents": latents})])
        assert same_pixels(images_of(adapter, payload), call(library, latents=latents))

    def test_extra_reaches_the_pipeline_by_name(self, adapter, library):
        (payload,) = adapter.forward([request(extra={"sigmas": [1.0, 0.3]})])
        assert same_pixels(images_of(adapter, payload), call(library, sigmas=[1.0, 0.3]))

    def test_embeddings_take_the_prompts_place(self, adapter, library):
        with torch.no_grad():
            embeds, _ = library.encode_prompt("a red apple")
        own = request("ignored", inputs={"prompt_embeds": embeds})
        (payload,) = adapter.forward([own])
        (from_prompt,) = adapter.forward([request("a red apple")])
        assert torch.equal(payload, from_prompt)

    def test_an_unknown_name_is_refused_and_the_known_ones_listed(self, adapter):
        with pytest.raises(InvalidRequestError, match=r"'image' is not.*latents") as caught:
            adapter.forward([request("mine", inputs={"image": 1})])
        assert caught.value.request_id == "mine"

    @pytest.mark.parametrize("name", ["height", "generator", "output_type", "self"])
    def test_a_name_with_a_place_of_its_own_is_refused(self, name, adapter):
        with pytest.raises(InvalidRequestError, match=f"'{name}' can't be given by name"):
            adapter.forward([request(extra={name: 1})])

    def test_a_name_given_twice_is_refused(self, adapter):
        with pytest.raises(InvalidRequestError, match="both inputs and extra"):
            adapter.forward([request(inputs={"sigmas": [1.0]}, extra={"sigmas": [1.0]})])

    def test_a_size_that_the_library_would_change_is_refused(self, adapter):
        with pytest.raises(InvalidRequestError, match=r"height=70 .*multiple of 16"):
            adapter.forward([request(height=70)])

    @pytest.mark.parametrize("seed", [1 << 63, -(1 << 63) - 1])
    def test_a_seed_that_is_too_large_is_refused(self, seed, adapter):
        with pytest.raises(InvalidRequestError, match=f"seed={seed}"):
            adapter.forward([request(seed=seed)])

    def test_the_largest_seed_has_room_for_further_outputs(self, adapter):
        seed = (1 << 63) - 1
        (payload,) = adapter.forward([request(seed=seed, num_outputs_per_prompt=2)])
        assert payload.shape[0] == 2

    def test_videos_are_refused(self, adapter):
        with pytest.raises(InvalidRequestError, match="num_frames=5"):
            adapter.forward([request(num_frames=5)])

    def test_what_a_request_leaves_open_comes_from_the_checkpoint(self, adapter, library):
        own = DiffusionRequest("a red apple", SamplingParams(seed=7))
        (payload,) = adapter.forward([own])
        assert same_pixels(images_of(adapter, payload), call(library, num_inference_steps=4))

    def test_without_a_seed_each_forward_draws_something_else(self, adapter):
        one, two = (adapter.forward([request(seed=None)])[0] for _ in range(2))
        assert not torch.equal(one, two)


class Stop(Exception):
    pass


class TestSteps:
    def test_each_step_is_reported_and_changes_nothing(self, adapter):
        (quiet,) = adapter.forward([request()])
        steps = []
        adapter.on_step = steps.append
        (watched,) = adapter.forward([request()])
        assert steps == [1, 2]
        assert torch.equal(watched, quiet)

    def test_raising_stops_before_the_decoder_and_leaves_the_adapter_usable(self, adapter):
        (before,) = adapter.forward([request()])
        decoded = []
        hook = adapter.pipeline.vae.decoder.register_forward_hook(lambda *_: decoded.append(1))
        reached = []

        def stop_at_the_last_step(step: int) -> None:
            reached.append(step)
            if step == 2:
                raise Stop

        adapter.on_step = stop_at_the_last_step
        try:
            with pytest.raises(Stop):
                adapter.forward([request(num_inference_steps=2)])
        finally:
            hook.remove()
        assert (reached, decoded) == ([1, 2], [])
        adapter.on_step = None
        (after,) = adapter.forward([request()])
        assert torch.equal(after, before)


class TestLoading:
    def test_it_needs_no_network_and_draws_no_progress_bar(
        self, qwen_folder, monkeypatch, capfd, on_cpu
    ):
        def refuse(*arguments, **_):
            raise AssertionError(f"somebody looked up {arguments}")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(socket.socket, "connect", refuse)
        adapter = QwenImage.load(on_cpu(qwen_folder))
        adapter.forward([request()])
        assert capfd.readouterr() == ("", "")

    def test_the_libraries_progress_bars_are_as_they_were(self, qwen_folder, on_cpu):
        from diffusers.utils import logging

        before = logging.is_progress_bar_enabled()
        QwenImage.load(on_cpu(qwen_folder))
        assert logging.is_progress_bar_enabled() == before

    def test_it_needs_a_folder(self, on_cpu):
        with pytest.raises(ConfigError, match="checkpoint folder for QwenImagePipeline"):
            QwenImage.load(on_cpu(None))

    def test_options_that_mean_nothing_are_refused(self, qwen_folder, on_cpu):
        with pytest.raises(ConfigError, match=r"pipeline_options.*fast"):
            QwenImage.load(on_cpu(qwen_folder, options={"fast": True}))

    def test_a_missing_weight_file_is_an_error_that_names_it(self, qwen_folder, tmp_path, on_cpu):
        import shutil

        folder = tmp_path / "broken"
        shutil.copytree(qwen_folder, folder)
        (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
        with pytest.raises(OSError, match="diffusion_pytorch_model"):
            QwenImage.load(on_cpu(folder))
