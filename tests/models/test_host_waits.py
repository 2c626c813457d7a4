"""Where the host waits for the device: nowhere between the first step and the hand-over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .host_waits import PIPELINES, HostWaits, build, measure, table

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
#: Of these the library reads numbers back in its steps.
WAITING = {"Wan 2.2", "Helios, one chunk"}


@pytest.fixture(scope="module")
def sim_device():
    from sidestream.testing import sim

    yield sim.device()
    sim.reset()


@pytest.fixture(scope="module")
def measured(sim_device):
    return {name: measure(*build(name, sim_device)) for name in PIPELINES}


@pytest.mark.parametrize("name", sorted(PIPELINES.keys() - WAITING))
def test_nothing_waits_in_the_steps_and_until_the_hand_over(name, measured):
    waits = measured[name]
    assert len(waits.steps) == 3
    assert [*waits.steps, waits.after] == [[], [], [], []]


@pytest.mark.parametrize("name", sorted(WAITING))
def test_where_a_step_waits_the_decoder_and_the_hand_over_do_not(name, measured):
    assert any(measured[name].steps)
    assert measured[name].after == []


def test_the_table_of_the_documents_is_what_is_measured(measured):
    """If not: python scripts/write_host_waits.py."""
    assert table(measured) in PAGE.read_text()


class TestTheMeasure:
    """It sees each kind of wait, so that none seen means none there."""

    @pytest.mark.parametrize(
        ("what", "act"),
        [
            ("value read", lambda there: bool(there.sum() > 0)),
            ("value read", lambda there: torch.tensor([there[0], 1.0])),
            ("copy to the host", lambda there: there.cpu()),
            ("copy to the host", lambda there: torch.empty(3).copy_(there)),
            ("copy to the device", lambda there: torch.ones(3).to(there.device)),
            ("copy to the device", lambda there: torch.tensor([1.0], device=there.device)),
            ("copy to the device", lambda there: there[torch.tensor([0, 2])]),
            ("shape read", lambda there: there.nonzero()),
            ("shape read", lambda there: there[there > 0]),
        ],
    )
    def test_it_sees(self, what, act, sim_device):
        there = torch.ones(3, device=sim_device)
        with HostWaits("sim") as waits:
            act(there)
        assert {wait.what for wait in waits.take()} == {what}

    def test_what_is_only_queued_is_no_wait(self, sim_device):
        there = torch.ones(3, device=sim_device)
        with HostWaits("sim") as waits:
            torch.ones(3).to(sim_device, non_blocking=True)
            (there * 2 + there.mean()).to(torch.bfloat16)
            torch.full((2,), 1.0, device=sim_device)
            there[:2] = 0
        assert waits.take() == []

    def test_it_sees_the_eager_loop_over_experts(self, sim_device):
        adapter, request = build("HunyuanImage-3.0 (architecture class)", sim_device)
        adapter.pipeline.transformer.trunk.config._experts_implementation = "eager"
        assert all(measure(adapter, request).steps)

    def test_it_sees_the_librarys_own_end_of_qwen_image(self, sim_device):
        adapter, _ = build("Qwen-Image", sim_device)
        pipeline, at_the_end = adapter.pipeline, []
        decode = pipeline.vae.decode
        with HostWaits("sim") as waits:

            def decoding(*args, **kwargs):
                at_the_end.extend(waits.take())
                return decode(*args, **kwargs)

            pipeline.vae.decode = decoding
            pipeline(
                prompt="a cat",
                height=32,
                width=32,
                num_inference_steps=2,
                output_type="pt",
                callback_on_step_end=lambda *args: (waits.take(), args[-1])[1],
            )
        # The latents' mean and deviation, which the adapter moved when it was made.
        assert [wait.what for wait in at_the_end] == ["copy to the device"] * 2


@pytest.mark.parametrize("name", ["Wan 2.1", "LTX", "Stable Diffusion 3"])
def test_quiet_steps_have_the_bits_of_the_librarys(name, sim_device):
    adapter, request = build(name, sim_device)
    latent = replace(request.sampling_params, output_type="latent")
    (ours,) = adapter.forward([replace(request, sampling_params=latent)])
    pipeline = adapter.pipeline
    # What it was before.
    pipeline.scheduler.__class__ = type(pipeline.scheduler).__base__
    theirs = pipeline(
        prompt=request.prompt,
        height=latent.height,
        width=latent.width,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(1),
        output_type="latent",
        return_dict=False,
        **({"num_frames": latent.num_frames} if latent.num_frames else {}),
    )[0]
    assert torch.equal(ours.cpu(), theirs.cpu())
