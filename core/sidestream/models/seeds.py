"""Seeds become generators: on the CPU, so that a seed gives the same noise on every device."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import torch

from sidestream.errors import InvalidRequestError

if TYPE_CHECKING:
    from sidestream.request import DiffusionRequest, SamplingParams

# What torch's generators take, with room for the seeds of further outputs.
_SEEDS: Final = range(-(1 << 63), 1 << 63)


def generators(params: SamplingParams) -> list[torch.Generator]:
    """Make one generator for each output: output j has ``seed + j``; without a seed, any."""
    seed = secrets.randbits(31) if params.seed is None else params.seed
    return [
        torch.Generator().manual_seed(seed + j) for j in range(params.num_outputs_per_prompt or 1)
    ]


def check_seed(request: DiffusionRequest) -> None:
    """Refuse a seed that torch's generators don't take.

    Raises:
        InvalidRequestError: It does not fit in 63 bits.
    """
    seed = request.sampling_params.seed
    if seed is not None and seed not in _SEEDS:
        raise InvalidRequestError(
            f"seed={seed} is not possible: it has to fit in 63 bits.",
            request_id=request.request_id,
        )
