"""Qwen-Image in four stages: the bits of a whole forward, alone, interleaved and after an abort."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from sidestream.errors import InvalidRequestError
from sidestream.models.qwen_image import QwenImage
from sidestream.request import DiffusionRequest, SamplingParams

from .stepping import run, run_interleaved, step

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(height=64, width=64, num_inference_steps=4, true_cfg_scale=4.0, seed=7)


def request(prompt: str = "a red apple", *, inputs=None, **changed) -> DiffusionRequest:
    return DiffusionRequest(prompt, replace(PARAMS, **changed), request_id=prompt, inputs=inputs)


def latents(seed: int) -> torch.Tensor:
    return torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(seed))


class TestAlone:
    @pytest.mark.parametrize(
        "changed",
        [
            {},
            {"true_cfg_scale": 1.0},
            {"height": 32, "width": 96},
            {"num_outputs_per_prompt": 3},
            {"output_type": "latent"},
            {"extra": {"sigmas": [1.0, 0.7, 0.3]}},
            {"extra": {"max_sequence_length": 2}},
            {"inputs": {"latents": latents(0)}},
        ],
        ids=lambda changed: ",".join(changed) or "plain",
    )
    def test_the_stages_give_the_bits_of_the_forward(self, changed, adapter):
        own = request(**changed)
        (whole,) = adapter.forward([own])
        assert torch.equal(run(adapter, own), whole)

    def test_embeddings_may_take_the_prompts_place(self, adapter, library):
        with torch.no_grad():
            embeds, _ = library.encode_prompt("a red apple")
        own = request("ignored", inputs={"prompt_embeds": embeds})
        assert torch.equal(run(adapter, own), adapter.forward([own])[0])

    def test_in_bfloat16_too(self, qwen_folder, on_cpu):
        adapter = QwenImage.load(on_cpu(qwen_folder, dtype=torch.bfloat16))
        (whole,) = adapter.forward([request()])
        assert torch.equal(run(adapter, request()), whole)

    def test_the_pixels_are_the_librarys(self, adapter, library):
        theirs = library(
            prompt="a red apple",
            negative_prompt=" ",
            height=64,
            width=64,
            num_inference_steps=4,
            true_cfg_scale=4.0,
            generator=torch.Generator().manual_seed(7),
            output_type="pt",
        ).images
        ours = run(adapter, request(negative_prompt=" "))
        assert torch.equal((ours * 0.5 + 0.5).clamp(0, 1), theirs)

    def test_a_state_counts_its_steps(self, adapter):
        state = adapter.prepare_encode(request(num_inference_steps=2))
        counts = [(state.step, state.num_steps, state.done)]
        while not state.done:
            step(adapter, state)
            counts.append((state.step, state.num_steps, state.done))
        assert counts == [(0, 2, False), (1, 2, False), (2, 2, True)]

    def test_what_the_forward_refuses_is_refused(self, adapter):
        for changed in ({"height": 70}, {"num_frames": 5}, {"extra": {"image": 1}}):
            with pytest.raises(InvalidRequestError):
                adapter.prepare_encode(request(**changed))


class TestInterleaved:
    def test_each_of_several_gives_the_bits_that_it_gives_alone(self, adapter):
        requests = [
            request("a red apple", seed=1),
            request("two", seed=2, num_inference_steps=2, height=32),
            request("a much longer prompt", seed=3, true_cfg_scale=1.0),
        ]
        alone = [adapter.forward([one])[0] for one in requests]
        for ours, whole in zip(run_interleaved(adapter, requests), alone, strict=True):
            assert torch.equal(ours, whole)

    def test_a_forward_between_two_steps_changes_neither(self, adapter):
        (whole,) = adapter.forward([request()])
        (other,) = adapter.forward([request("two", seed=1)])
        state = adapter.prepare_encode(request())
        step(adapter, state)
        assert torch.equal(adapter.forward([request("two", seed=1)])[0], other)
        while not state.done:
            step(adapter, state)
        assert torch.equal(adapter.post_decode(state), whole)

    def test_an_aborted_neighbor_is_gone_and_leaves_no_trace(self, adapter):
        (whole,) = adapter.forward([request()])
        mine, neighbor = adapter.prepare_encode(request()), adapter.prepare_encode(request("two"))
        for state in (mine, neighbor, neighbor, mine):
            step(adapter, state)
        gone = weakref.ref(neighbor.latents)
        del neighbor, state
        gc.collect()
        assert gone() is None
        while not mine.done:
            step(adapter, mine)
        assert torch.equal(adapter.post_decode(mine), whole)


class TestShared:
    def forwards(self, adapter):
        """Count the forwards of the transformer from here on."""
        calls = []
        hook = adapter.pipeline.transformer.register_forward_hook(lambda *_: calls.append(1))
        return calls, hook

    def test_requests_at_different_steps_share_a_forward_within_rounding(self, adapter):
        early = request("a red apple", seed=1, num_outputs_per_prompt=2)
        late = request("two words and some more", seed=2, num_inference_steps=3, true_cfg_scale=2.0)
        alone = [adapter.forward([one])[0] for one in (early, late)]
        states = [adapter.prepare_encode(early)]
        step(adapter, states[0])
        states.append(adapter.prepare_encode(late))
        assert adapter.share_key(states[0]) == adapter.share_key(states[1])
        calls, hook = self.forwards(adapter)
        while not states[0].done:
            predictions = adapter.denoise_steps(states)
            for state, prediction in zip(states, predictions, strict=True):
                adapter.step_scheduler(state, prediction)
        hook.remove()
        assert len(calls) == 2 * 3  # with guidance each step is two forwards
        assert [state.done for state in states] == [True, True]
        for state, whole in zip(states, alone, strict=True):
            ours = adapter.post_decode(state)
            assert ours.shape == whole.shape
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-4)

    @pytest.mark.parametrize(
        "changed",
        [
            {"height": 32},
            {"true_cfg_scale": 1.0},
            {"extra": {"max_sequence_length": 9}},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_what_can_not_share_a_forward_has_another_key(self, changed, adapter):
        plain = adapter.share_key(adapter.prepare_encode(request()))
        assert plain is not None
        assert adapter.share_key(adapter.prepare_encode(request(**changed))) != plain
