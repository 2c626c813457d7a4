"""What all chunks of a Helios video have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """What all chunks of a video have in common."""

    num_chunks: int
    #: Decoded frames of a chunk, and of the whole video: the library cuts a few off at its end.
    num_frames: int
    kept_frames: int
    height: int
    width: int
    num_inference_steps: int
    #: How many these come to: sigmas of a request's own may be more or fewer.
    steps: int
    sigmas: Any
    mu: float
    #: How many latents of the past a chunk sees: far, near, last.
    history_sizes: list[int]
    #: The positions of latents in time, as the transformer's arguments.
    indices: Mapping[str, Tensor]


def time_indices(history_sizes: list[int], num_latents: int) -> dict[str, Tensor]:
    """Give the positions in time of what a chunk sees and of its own latents, on the host."""
    sizes = [1, *history_sizes, num_latents]
    first, far, near, last, current = torch.split(torch.arange(sum(sizes)), sizes)
    return {
        "indices_hidden_states": current.unsqueeze(0),
        "indices_latents_history_short": torch.cat([first, last]).unsqueeze(0),
        "indices_latents_history_mid": near.unsqueeze(0),
        "indices_latents_history_long": far.unsqueeze(0),
    }
