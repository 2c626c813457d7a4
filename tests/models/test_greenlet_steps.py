"""Any diffusers pipeline in steps: its own call, suspended; the bits of a plain call."""

from __future__ import annotations

import sys
import threading
import weakref

import pytest
import torch

from sidestream.errors import MissingDependencyError
from sidestream.models.checkpoint import build_qwen_image
from sidestream.models.greenlet_steps import GreenletSteps
from sidestream.request import DiffusionRequest, SamplingParams

from . import tiny_pipelines
from .stepping import run, run_interleaved, step

pytestmark = pytest.mark.slow


class Plain(GreenletSteps):
    """The least of an adapter: a call of a pipeline that nobody changed."""

    def __init__(self, pipeline, **call):
        self.pipeline = pipeline
        self.call = call

    def forward(self, requests):
        return [
            self.pipeline(
                prompt=request.prompt,
                num_inference_steps=request.sampling_params.num_inference_steps,
                generator=torch.Generator().manual_seed(request.sampling_params.seed),
                output_type="pt",
                return_dict=False,
                **self.call,
            )[0]
            for request in requests
        ]


def hunyuan_video_15():
    """It has a guider, which counts steps, and no callback at the end of a step."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import (
        ByT5Tokenizer,
        Qwen2_5_VLTextConfig,
        Qwen2_5_VLTextModel,
        T5Config,
        T5EncoderModel,
    )

    tokenizer, letters = build_qwen_image(seed=0).tokenizer, ByT5Tokenizer()
    tokenizer.chat_template = tiny_pipelines._CHAT
    return HunyuanVideo15Pipeline(
        tokenizer=tokenizer,
        text_encoder=Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=2,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [1, 1, 2],
                },
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        ),
        tokenizer_2=letters,
        text_encoder_2=T5EncoderModel(
            T5Config(
                vocab_size=len(letters), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
            )
        ),
        transformer=HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=16,
            image_embed_dim=12,
            rope_axes_dim=(2, 2, 4),
            target_size=16,
            task_type="t2v",
        ),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
    )


BUILDERS = {
    "flux": (tiny_pipelines.flux, {"height": 32, "width": 32}),
    "z-image": (tiny_pipelines.z_image, {"height": 32, "width": 32, "guidance_scale": 3.0}),
    "hunyuan-video-1.5": (hunyuan_video_15, {"height": 32, "width": 32, "num_frames": 5}),
}


@pytest.fixture(scope="module", params=BUILDERS)
def adapter(request):
    build, call = BUILDERS[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = build()
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    return Plain(pipeline, **call)


@pytest.fixture
def qwen(library):
    return Plain(library, height=32, width=32, negative_prompt=" ")


def request(prompt: str = "a cat", seed: int = 1, steps: int = 3) -> DiffusionRequest:
    return DiffusionRequest(prompt, SamplingParams(seed=seed, num_inference_steps=steps))


def count_decodes(pipeline, seen):
    decode = pipeline.vae.decode

    def counting(*args, **kwargs):
        seen.append(1)
        return decode(*args, **kwargs)

    pipeline.vae.decode = counting


def test_the_bits_are_those_of_plain_calls_interleaved_and_beside_an_aborted_neighbor(adapter):
    requests = [request(), request("two dogs", seed=2, steps=2)]
    plain = adapter.forward(requests)
    neighbor = adapter.prepare_encode(request("three", seed=3))
    mine = adapter.prepare_encode(requests[1])
    assert (mine.num_steps, mine.step, mine.done) == (2, 0, False)
    for state in (neighbor, mine):
        step(adapter, state)
    del neighbor, state
    step(adapter, mine)
    assert (mine.step, mine.done) == (2, True)
    assert torch.equal(adapter.post_decode(mine), plain[1])
    for ours, theirs in zip(run_interleaved(adapter, requests), plain, strict=True):
        assert torch.equal(ours, theirs)


class TestOneState:
    def test_dropping_it_ends_the_call_without_decoding(self, qwen):
        decoded = []
        count_decodes(qwen.pipeline, decoded)
        try:
            state = qwen.prepare_encode(request())
            for _ in range(3):
                step(qwen, state)
            del state
            assert decoded == []
            run(qwen, request())
            assert decoded == [1]
        finally:
            del qwen.pipeline.vae.decode

    def test_its_tensors_are_gone_with_it(self, qwen):
        state = qwen.prepare_encode(request())
        step(qwen, state)
        prediction = weakref.ref(qwen.denoise_step(state))
        assert prediction() is not None
        del state
        assert prediction() is None

    def test_one_that_never_took_a_step_can_be_dropped_too(self, qwen):
        state = qwen.prepare_encode(request())
        del state
        assert torch.equal(run(qwen, request()), qwen.forward([request()])[0])

    def test_the_thread_and_the_pipeline_are_as_they_were_between_steps(self, qwen):
        before = dict(vars(qwen.pipeline))
        scheduler = qwen.pipeline.scheduler
        timesteps = scheduler.timesteps
        assert torch.is_grad_enabled()
        state = qwen.prepare_encode(request(steps=2))
        for stage in (lambda: step(qwen, state), lambda: step(qwen, state)):
            assert torch.is_grad_enabled()
            assert vars(qwen.pipeline) == before
            stage()
        with torch.no_grad():
            qwen.post_decode(state)
            assert not torch.is_grad_enabled()
        assert qwen.pipeline.scheduler is scheduler
        assert scheduler.timesteps is timesteps

    def test_context_variables_are_those_of_the_first_stage(self, qwen):
        import contextvars

        variable = contextvars.ContextVar("variable", default=0)
        seen = []
        hook = qwen.pipeline.transformer.register_forward_hook(
            lambda *_: seen.append(variable.get())
        )
        try:
            contextvars.copy_context().run(lambda: (variable.set(5), run(qwen, request(steps=2))))
        finally:
            hook.remove()
        assert set(seen) == {5}

    def test_an_error_in_a_step_comes_out_of_it_and_the_next_request_is_whole(self, qwen):
        (plain,) = qwen.forward([request()])

        def fail(*_):
            raise ZeroDivisionError("in the transformer")

        state = qwen.prepare_encode(request())
        step(qwen, state)
        hook = qwen.pipeline.transformer.register_forward_hook(fail)
        try:
            with pytest.raises(ZeroDivisionError, match="in the transformer"):
                qwen.denoise_step(state)
        finally:
            hook.remove()
        assert torch.is_grad_enabled()
        assert torch.equal(run(qwen, request()), plain)

    def test_a_call_that_fails_before_its_first_step_says_so_at_once(self, qwen):
        with pytest.raises(TypeError, match="no_such_argument"):
            Plain(qwen.pipeline, no_such_argument=1).prepare_encode(request())

    def test_a_call_that_takes_fewer_steps_than_it_said_is_done_earlier(self, qwen):
        def stop_early(pipeline, index, _timestep, tensors):
            pipeline._interrupt = index == 0
            return tensors

        short = Plain(qwen.pipeline, height=32, width=32, callback_on_step_end=stop_early)
        (plain,) = short.forward([request()])
        state = short.prepare_encode(request())
        while not state.done:
            step(short, state)
        assert (state.step, state.num_steps) == (1, 1)
        assert torch.equal(short.post_decode(state), plain)

    def test_one_that_another_thread_drops_does_no_harm(self, qwen):
        held = [qwen.prepare_encode(request())]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert held == []
        assert torch.equal(run(qwen, request()), qwen.forward([request()])[0])

    def test_without_greenlet_the_install_line_is_said(self, qwen, monkeypatch):
        monkeypatch.setitem(sys.modules, "greenlet", None)
        monkeypatch.delitem(sys.modules, "sidestream.models.suspended_call", raising=False)
        with pytest.raises(MissingDependencyError, match="sidestream\\[diffusers\\]"):
            qwen.prepare_encode(request())
