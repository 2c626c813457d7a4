"""Thousands of requests leave nothing behind, and each gets its own output."""

import gc
import os
import random
from pathlib import Path

import pytest

from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams

PIPELINE = '''
import os

import torch


class Filled:
    """Fills one buffer that it keeps, with the seed."""

    @classmethod
    def load(cls, config):
        self = cls()
        self.buffer = torch.empty((64, 64, 3), dtype=torch.int64, device=config.device)
        return self

    def forward(self, requests):
        return [self.buffer.fill_(request.sampling_params.seed) for request in requests]

    def process(self):
        return os.getpid()
'''
ROUNDS = 12
REQUESTS = 1000


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def requests(first, count):
    return [
        DiffusionRequest(str(seed), SamplingParams(seed=seed))
        for seed in range(first, first + count)
    ]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("platform", ["cpu", "sim"])
def test_memory_and_descriptors_stay_flat_over_thousands_of_requests(
    platform, tmp_path, monkeypatch
):
    (tmp_path / "soak_pipeline.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(tmp_path)
    rng = random.Random(0)
    sizes, open_files = [], []
    config = EngineConfig(pipeline="soak_pipeline:Filled", platform=platform)
    with DiffusionEngine(config) as engine:
        (worker,) = engine.executor.collective_rpc("process")
        for number in range(ROUNDS):
            seen = 0
            kept = []
            for seed, output in enumerate(engine.imap(requests(number * REQUESTS, REQUESTS))):
                assert (output.output == number * REQUESTS + seed).all()
                seen += 1
                if rng.random() < 0.05:
                    kept.append(output)  # held for a while: their slots are not free meanwhile
                if len(kept) > 20:
                    del kept[: rng.randrange(20)]
            assert seen == REQUESTS
            del kept, output
            gc.collect()
            sizes.append([resident_bytes(pid) for pid in (os.getpid(), worker)])
            open_files.append([descriptors(pid) for pid in (os.getpid(), worker)])
    # The first round makes arenas, caches and threads.
    for first, last in zip(sizes[1], sizes[-1], strict=True):
        assert last - first < 16 << 20, sizes
    assert open_files[-1] == open_files[1], open_files
