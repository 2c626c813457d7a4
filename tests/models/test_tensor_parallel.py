"""Ranks that share a transformer: each the image of one process, with a part of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidestream.errors import ConfigError
from sidestream.models.any_diffusers import AnyDiffusers
from sidestream.models.hunyuan_image3 import HunyuanImage3
from sidestream.models.sharding import Cut, ShardPlan

pytestmark = pytest.mark.slow

ADAPTERS = {
    "qwen_folder": ("sidestream.models.qwen_image:QwenImage", 0.80),
    "hunyuan_folder": ("sidestream.models.hunyuan_image3:HunyuanImage3", 0.85),
}
sizes = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def groups(request, qwen_folder, hunyuan_folder, tmp_path_factory):
    """Run every group that is asked for in one process that forks its ranks; give their reports."""
    wanted = {item.callspec.params["size"] for item in request.session.items if is_here(item)}
    folders = {"qwen_folder": qwen_folder, "hunyuan_folder": hunyuan_folder}
    names = {
        (name, size): f"{size}:{adapter}={folders[name]}"
        for name, (adapter, _) in ADAPTERS.items()
        for size in sorted(wanted)
    }
    report = tmp_path_factory.mktemp("ranks") / "report.json"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("ranks.py"), report, *names.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    return {key: found[name] for key, name in names.items()}


def is_here(item):
    return item.module.__name__ == __name__ and "size" in getattr(item, "fixturenames", ())


@sizes
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_rank_has_the_image_of_one_process(name, size, groups):
    group = groups[name, size]
    alone = torch.tensor(group["alone"]["payload"])
    for rank in group["ranks"]:
        assert "failed" not in rank, rank["failed"]
        torch.testing.assert_close(torch.tensor(rank["payload"]), alone, rtol=0, atol=1e-5)
    # All of them go on with the same bits.
    assert all(rank["payload"] == group["ranks"][0]["payload"] for rank in group["ranks"])


@sizes
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_rank_has_a_part_of_the_weights(name, size, groups):
    group = groups[name, size]
    whole = group["alone"]["parameters"]
    parts = [rank["parameters"] for rank in group["ranks"]]
    assert len(set(parts)) == 1
    assert parts[0] < ADAPTERS[name][1] * whole
    assert parts[0] * size >= whole


def test_a_size_that_does_not_divide_the_heads_is_refused(hunyuan_folder, on_cpu):
    with pytest.raises(ConfigError, match=r"=3 .*a divisor of 4, the size of attention heads"):
        HunyuanImage3.load(on_cpu(hunyuan_folder, world_size=3))


class TestPlans:
    def test_a_diffusers_plan_names_cuts_sums_and_what_counts_once(self):
        from diffusers import QwenImageTransformer2DModel

        class Model:
            _tp_plan = QwenImageTransformer2DModel._tp_plan
            config = type("Config", (), {"num_attention_heads": 24})

        plan = ShardPlan.of(Model())
        assert plan.cuts["transformer_blocks.*.attn.to_q.weight"] == Cut(0)
        assert plan.cuts["transformer_blocks.*.attn.to_out.0.weight"] == Cut(1)
        assert "transformer_blocks.*.attn.to_out.0" in plan.sums
        assert "transformer_blocks.*.attn.to_out.0.bias" in plan.once
        assert plan.divided == 24

    @pytest.mark.parametrize("plan", [None, {"blocks.*.proj": "sequence"}])
    def test_a_model_without_a_usable_plan_is_refused(self, plan):
        class Model:
            _tp_plan = plan

        with pytest.raises(ConfigError, match=r"Model\._tp_plan.*tensor parallelism"):
            ShardPlan.of(Model())

    def test_an_adapter_that_does_not_divide_its_model_is_refused(self, qwen_folder, on_cpu):
        with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
            AnyDiffusers.load(on_cpu(qwen_folder, world_size=2))
