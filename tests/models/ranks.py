"""Ranks of a tensor-parallel group: processes with gloo between them, forked after one import.

python ranks.py REPORT.json WORLD_SIZE:ADAPTER=FOLDER ...
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from sidestream.config import PipelineConfig
from sidestream.request import DiffusionRequest, SamplingParams
from sidestream.worker.pipeline import resolve

REQUEST = DiffusionRequest(
    "a red apple",
    SamplingParams(height=64, width=64, num_inference_steps=3, seed=7),
)


def load(adapter: str, folder: str, rank: int = 0, world_size: int = 1) -> Any:
    config = PipelineConfig(
        model=Path(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        rank=rank,
        world_size=world_size,
    )
    return resolve(adapter).load(config)


def parameters_of(adapter: Any) -> int:
    return sum(parameter.numel() for parameter in adapter.pipeline.transformer.parameters())


def run_rank(adapter: str, folder: str, rank: int, world_size: int, meeting: str) -> dict[str, Any]:
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
        )
        loaded = load(adapter, folder, rank, world_size)
        (payload,) = loaded.forward([REQUEST])
        return {"payload": payload.tolist(), "parameters": parameters_of(loaded)}
    except Exception:
        return {"failed": traceback.format_exc()}


def run_group(adapter: str, folder: str, world_size: int, place: Path) -> list[dict[str, Any]]:
    answers = [place / f"rank{rank}.json" for rank in range(world_size)]
    children = []
    for rank, answer in enumerate(answers):
        child = os.fork()
        if child == 0:
            result = run_rank(adapter, folder, rank, world_size, str(place / "meeting"))
            answer.write_text(json.dumps(result))
            os._exit(0)  # no farewell: what the parent has open is the parent's
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads(answer.read_text()) for answer in answers]


def main(report: str, *groups: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    result = {}
    for group in groups:
        size, _, model = group.partition(":")
        adapter, _, folder = model.partition("=")
        # First, so that the ranks are forked with the libraries imported.
        alone = load(adapter, folder)
        (payload,) = alone.forward([REQUEST])
        whole = {"payload": payload.tolist(), "parameters": parameters_of(alone)}
        with tempfile.TemporaryDirectory() as place:
            ranks = run_group(adapter, folder, int(size), Path(place))
        result[group] = {"ranks": ranks, "alone": whole}
    Path(report).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
