"""Helios on the simulated accelerator: the library's bits, whole and in steps, and fewer waits."""

from __future__ import annotations

import pytest
import torch

from sidestream.models.helios import Helios
from sidestream.models.video_checkpoint import build_video_pipeline
from sidestream.request import DiffusionRequest, SamplingParams

from .moves import Moves
from .stepping import run_interleaved

pytestmark = pytest.mark.slow

SMALL_CHUNKS = {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}
PARAMS = {"height": 32, "width": 32, "num_frames": 10, "num_inference_steps": 2}


def request(prompt: str, **changed) -> DiffusionRequest:
    params = {**PARAMS, "seed": 7, "extra": SMALL_CHUNKS, **changed}
    return DiffusionRequest(prompt, SamplingParams(**params))


class Enough(Exception):
    pass


def call(pipeline, output_type: str, **changed):
    return pipeline(
        prompt="a cat",
        **PARAMS,
        **SMALL_CHUNKS,
        generator=torch.Generator().manual_seed(7),
        output_type=output_type,
        **changed,
    ).frames


@pytest.fixture
def pipeline(sim):
    built = build_video_pipeline("helios", seed=0)
    built.set_progress_bar_config(disable=True)
    return built.to(sim.device())


def test_the_bits_are_the_librarys_whole_and_in_steps_beside_another(pipeline):
    theirs = call(pipeline, "pt").cpu()
    adapter = Helios(pipeline)
    requests = [request("a cat"), request("a dog", num_frames=5, output_type="latent")]
    whole = adapter.forward(requests)
    assert whole[0].device.type == "sim"
    assert torch.equal((whole[0].cpu() * 0.5 + 0.5).clamp(0, 1).movedim(1, 2), theirs)
    for ours, forward in zip(run_interleaved(adapter, requests), whole, strict=True):
        assert torch.equal(ours.cpu(), forward.cpu())


def test_positions_are_moved_once_and_not_in_every_forward(pipeline):
    def moves_of_forwards():
        """Count the moves in each of the transformer's forwards of two steps."""
        counts, transformer = [], pipeline.transformer

        def stop_at_the_second(_pipeline, step, _timestep, tensors):
            if step == 1:
                raise Enough
            return tensors

        with Moves() as moves:
            # Before the adapter's own hook, and behind all.
            before = transformer.register_forward_pre_hook(
                lambda *_: counts.append(-moves.count), prepend=True
            )
            behind = transformer.register_forward_hook(
                lambda *_: counts.append(counts.pop() + moves.count)
            )
            with pytest.raises(Enough):
                call(pipeline, "latent", callback_on_step_end=stop_at_the_second)
            before.remove()
            behind.remove()
        return counts

    assert moves_of_forwards() == [4, 4, 4, 4]  # with the prompt and against it, in two steps
    Helios(pipeline)
    assert moves_of_forwards() == [4, 0, 0, 0]
    assert moves_of_forwards() == [0, 0, 0, 0]
