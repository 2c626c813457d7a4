"""Qwen-Image on the simulated accelerator: the same bits as the library's, and no wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from sidestream.models.post_process import find_post_process, to_images
from sidestream.models.qwen_image import QwenImage
from sidestream.request import DiffusionRequest, SamplingParams

from .moves import Moves
from .stepping import run_interleaved, step

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(height=32, width=32, seed=3)
REQUEST = DiffusionRequest("a red apple", PARAMS)


@pytest.fixture
def on_sim(sim, qwen_folder, on_cpu):
    return QwenImage.load(on_cpu(qwen_folder, device=sim.device()))


def forward_and_finish(adapter, params=PARAMS):
    """Queue all that a worker queues before it hands an output over."""
    (payload,) = adapter.forward([DiffusionRequest(REQUEST.prompt, params)])
    _, post_process = find_post_process(adapter)
    return post_process.device(payload, params)


def test_the_pixels_are_the_librarys_on_the_same_device(on_sim):
    finished = forward_and_finish(on_sim)
    assert finished.device.type == "sim"
    (image,) = on_sim.pipeline(
        prompt="a red apple",
        **{**on_sim.defaults, "height": 32, "width": 32},
        generator=torch.Generator().manual_seed(3),
    ).images
    np.testing.assert_array_equal(finished[0].cpu().numpy(), np.asarray(image))


def test_the_pixels_are_those_of_the_cpu_within_one_step(on_sim, adapter):
    ours = to_images(forward_and_finish(on_sim).cpu(), on_sim.post_process)
    theirs = to_images(forward_and_finish(adapter), adapter.post_process)
    differences = np.asarray(ours[0], dtype=int) - np.asarray(theirs[0], dtype=int)
    assert np.abs(differences).max() <= 1


def test_steps_give_the_bits_of_the_forward_also_interleaved(on_sim):
    requests = [REQUEST, DiffusionRequest("two", replace(PARAMS, num_inference_steps=2))]
    whole = [on_sim.forward([request])[0] for request in requests]
    for ours, theirs in zip(run_interleaved(on_sim, requests), whole, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def test_no_step_waits_for_the_device(sim, on_sim):
    (whole,) = on_sim.forward([REQUEST])
    expected = whole.cpu()
    stream = sim.default_stream()
    states = [on_sim.prepare_encode(REQUEST) for _ in range(2)]
    step(on_sim, states[0])
    stream.hold()

    def finish(state):
        while not state.done:
            step(on_sim, state)
        return on_sim.post_decode(state)

    with ThreadPoolExecutor(1) as pool:
        try:
            payload = pool.submit(finish, states[0]).result(timeout=60)
            predictions = pool.submit(on_sim.denoise_steps, states[1:] * 2).result(timeout=60)
        finally:
            stream.release()
    assert torch.equal(payload.cpu(), expected)
    assert torch.equal(predictions[0].cpu(), predictions[1].cpu())


@pytest.mark.parametrize("output_type", ["uint8", "float"])
def test_nothing_waits_for_the_device_from_the_first_step_on(output_type, sim, on_sim):
    params = replace(PARAMS, output_type=output_type)
    expected = forward_and_finish(on_sim, params).cpu()
    stream = sim.default_stream()
    steps = []

    def hold_at_the_first(step: int) -> None:
        steps.append(step)
        if step == 1:
            stream.hold()

    on_sim.on_step = hold_at_the_first
    with ThreadPoolExecutor(1) as pool:
        try:
            # A wait for the device would never end: nothing is computed after the first step.
            finished = pool.submit(forward_and_finish, on_sim, params).result(timeout=60)
        finally:
            stream.release()
    assert steps == [1, 2, 3, 4]
    assert torch.equal(finished.cpu(), expected)


def test_nothing_moves_between_host_and_device_after_the_first_step(on_sim):
    at_first_step = []
    with Moves() as moves:
        on_sim.on_step = lambda step: at_first_step.append(moves.count) if step == 1 else None
        forward_and_finish(on_sim)
        ours = moves.count - at_first_step[0]

        def note_first_step(_pipeline, step, _timestep, tensors):
            if step == 0:
                at_first_step.append(moves.count)
            return tensors

        on_sim.pipeline(
            prompt="a red apple",
            height=64,
            width=64,
            num_inference_steps=2,
            true_cfg_scale=1.0,
            output_type="pt",
            callback_on_step_end=note_first_step,
        )
        theirs = moves.count - at_first_step[1]
    # The library moves the latents' mean and deviation: the count counts.
    assert (ours, theirs) == (0, 2)
