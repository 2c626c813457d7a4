"""HunyuanImage-3.0's architecture, measured against transformers' trunk and a whole sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sidestream.errors import InvalidRequestError
from sidestream.models.hunyuan_image3 import HunyuanImage3
from sidestream.models.post_process import find_post_process, to_images
from sidestream.models.registry import find_source
from sidestream.request import DiffusionRequest, SamplingParams

PARAMS = SamplingParams(height=64, width=48, num_inference_steps=3, guidance_scale=5.0, seed=7)


def request(prompt: str = "a red apple", *, inputs=None, **changed) -> DiffusionRequest:
    return DiffusionRequest(prompt, replace(PARAMS, **changed), request_id=prompt, inputs=inputs)


@pytest.fixture(scope="module")
def loaded(hunyuan_folder, on_cpu):
    return HunyuanImage3.load(on_cpu(hunyuan_folder))


@pytest.fixture
def adapter(loaded):
    yield loaded
    loaded.on_step = None


@pytest.fixture
def trunk(adapter):
    return adapter.pipeline.transformer


def test_a_folder_is_small_and_found_by_the_registry(hunyuan_folder, size_of):
    assert size_of(hunyuan_folder) < 5_000_000
    source = find_source(hunyuan_folder, None)
    assert source.reference == "sidestream.models.hunyuan_image3:HunyuanImage3"
    assert source.defaults["height"] == 64


class TestTheSequence:
    @torch.no_grad()
    def test_text_goes_through_transformers_own_trunk(self, trunk):
        """The prefix holds the keys and values that the library computes of the same tokens."""
        ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
        ours = trunk.encode(ids).cache
        theirs = trunk.trunk(ids, use_cache=True)
        cache = getattr(theirs, "cache", None) or theirs.past_key_values
        for mine, other in zip(ours.layers, cache.layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=1e-6)
            torch.testing.assert_close(mine.values, other.values, rtol=0, atol=1e-6)

    @torch.no_grad()
    def test_a_kept_prefix_gives_what_the_whole_sequence_gives(self, trunk):
        """The trunk's output for the image, with nothing kept and one mask for all tokens."""
        ids = torch.tensor([[3, 14, 15, 92]])
        latents, time = torch.randn(1, 4, 3, 2), torch.tensor([600.0])
        prefix = trunk.encode(ids)
        canvas = trunk.lay_out(prefix, 3, 2, torch.device("cpu"))
        seen = []
        hook = trunk.trunk.norm.register_forward_hook(lambda _m, args, _r: seen.append(args[0]))
        try:
            trunk(latents, time, prefix, canvas)
        finally:
            hook.remove()

        image = trunk.block_in(trunk.patch_in(latents), trunk.time_in(time, latents.dtype))
        tokens = torch.cat(
            [
                trunk.trunk.embed_tokens(ids),
                trunk.time_token(time, latents.dtype)[:, None],
                image.flatten(2).transpose(1, 2),
            ],
            dim=1,
        )
        count = tokens.shape[1]
        sees = torch.ones(count, count, dtype=torch.bool).tril()
        sees[5:, 5:] = True
        place = torch.arange(4.0)
        text = trunk._rotation(place, place)
        rotation = tuple(
            torch.cat([one, other], dim=1) for one, other in zip(text, canvas.rotation, strict=True)
        )
        for layer in trunk.trunk.layers:
            tokens = layer(tokens, attention_mask=sees[None, None], position_embeddings=rotation)
        torch.testing.assert_close(seen[0], tokens[:, 4:], rtol=0, atol=1e-5)

    @torch.no_grad()
    def test_a_prefix_is_as_before_after_a_step(self, trunk):
        prefix = trunk.encode(torch.tensor([[3, 14, 15]]))
        canvas = trunk.lay_out(prefix, 2, 2, torch.device("cpu"))
        before = [layer.keys.clone() for layer in prefix.cache.layers]
        latents, time = torch.randn(1, 4, 2, 2), torch.tensor([500.0])
        one = trunk(latents, time, prefix, canvas)
        assert torch.equal(trunk(latents, time, prefix, canvas), one)
        for layer, keys in zip(prefix.cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys)

    @torch.no_grad()
    def test_grouped_experts_give_what_the_loop_over_them_gives(self, trunk):
        tokens = torch.randn(1, 9, 64)
        grouped = trunk.trunk.layers[0].mlp(tokens)
        config = trunk.trunk.config
        try:
            config._experts_implementation = "eager"
            looped = trunk.trunk.layers[0].mlp(tokens)
        finally:
            config._experts_implementation = "grouped_mm"
        torch.testing.assert_close(grouped, looped, rtol=0, atol=1e-5)


class TestRequests:
    def test_a_payload_is_the_decoders_tensor_and_becomes_an_image(self, adapter):
        (payload,) = adapter.forward([request()])
        assert payload.shape == (1, 3, 64, 48)
        key, post_process = find_post_process(adapter)
        (image,) = to_images(post_process.device(payload, PARAMS), key)
        assert (key, image.size) == ("HunyuanImage3Pipeline", (48, 64))

    def test_the_decoded_latents_are_the_payload(self, adapter):
        (latents,) = adapter.forward([request(output_type="latent")])
        assert latents.shape == (1, 4, 4, 3)
        vae = adapter.pipeline.vae
        with torch.no_grad():
            decoded = vae.decode(latents[:, :, None] / vae.config.scaling_factor).sample[:, :, 0]
        (payload,) = adapter.forward([request()])
        assert torch.equal(payload, decoded)

    @pytest.mark.parametrize(
        "changed", [{"prompt": "two words"}, {"seed": 8}, {"guidance_scale": 1.0}]
    )
    def test_what_a_request_says_makes_a_difference(self, changed, adapter):
        (base,), (other,) = adapter.forward([request()]), adapter.forward([request(**changed)])
        assert ((base - other).abs() > 0.02).float().mean() > 0.2

    def test_output_j_is_drawn_with_seed_plus_j(self, adapter):
        (both,) = adapter.forward([request(num_outputs_per_prompt=2)])
        for j in range(2):
            (alone,) = adapter.forward([request(seed=7 + j)])
            torch.testing.assert_close(both[j], alone[0], rtol=0, atol=1e-4)

    def test_several_requests_are_sampled_one_by_one(self, adapter):
        together = adapter.forward([request("one"), request("a second one", height=32)])
        for payload, own in zip(
            together, [request("one"), request("a second one", height=32)], strict=True
        ):
            assert torch.equal(payload, adapter.forward([own])[0])

    def test_latents_may_be_given(self, adapter):
        latents = torch.randn(1, 4, 4, 3, generator=torch.Generator().manual_seed(7))
        (given,) = adapter.forward([request(inputs={"latents": latents})])
        (drawn,) = adapter.forward([request()])
        assert torch.equal(given, drawn)

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"height": 70}, "height=70 .*multiple of 16"),
            ({"num_frames": 5}, "num_frames=5"),
            ({"negative_prompt": "blur"}, "negative_prompt"),
            ({"true_cfg_scale": 4.0}, "true_cfg_scale"),
            ({"seed": 1 << 63}, "seed="),
            ({"inputs": {"image": 1}}, "'image' is not.*latents"),
            ({"inputs": {"latents": torch.zeros(1, 4, 2, 2)}}, r"has to be \(1, 4, 4, 3\)"),
        ],
    )
    def test_what_the_model_does_not_take_is_refused(self, changed, why, adapter):
        with pytest.raises(InvalidRequestError, match=why):
            adapter.forward([request(**changed)])

    def test_bfloat16_keeps_the_router_in_float32(self, hunyuan_folder, on_cpu):
        adapter = HunyuanImage3.load(on_cpu(hunyuan_folder, dtype=torch.bfloat16))
        (payload,) = adapter.forward([request()])
        assert payload.dtype == torch.bfloat16
        layer = adapter.pipeline.transformer.trunk.layers[0]
        assert layer.mlp.gate.wg.weight.dtype == torch.float32
        assert layer.self_attn.q_proj.weight.dtype == torch.bfloat16


class TestSteps:
    def test_steps_are_reported(self, adapter):
        steps = []
        adapter.on_step = steps.append
        adapter.forward([request()])
        assert steps == [1, 2, 3]

    def test_stepped_with_another_between_it_equals_the_forward_bit_for_bit(self, adapter):
        requests = [request("one"), request("a longer two", height=32, num_inference_steps=4)]
        states = [adapter.prepare_encode(own) for own in requests]
        while any(not state.done for state in states):
            for state in states:
                if not state.done:
                    adapter.step_scheduler(state, adapter.denoise_step(state))
        assert [state.step for state in states] == [3, 4]
        for own, state in zip(requests, states, strict=True):
            assert torch.equal(adapter.post_decode(state), adapter.forward([own])[0])

    def test_a_request_given_up_half_way_leaves_no_trace(self, adapter):
        (before,) = adapter.forward([request()])
        state = adapter.prepare_encode(request("another"))
        adapter.step_scheduler(state, adapter.denoise_step(state))
        del state
        assert torch.equal(adapter.forward([request()])[0], before)
