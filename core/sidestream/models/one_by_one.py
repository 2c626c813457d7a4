"""What adapters have in common whose requests don't share a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidestream.models.pipeline import StepHook
    from sidestream.request import DiffusionRequest


class OneByOne:
    """Sample one request after the other, by ``_sample``."""

    supports_request_batch = False
    #: Every forward allocates its results anew, and decoders keep none of them.
    outputs_are_private = True

    def __init__(self, defaults: Mapping[str, Any] | None = None) -> None:
        #: Sampling parameters where a request names none.
        self.defaults = dict(defaults or {})
        #: Called after each denoising step with the number of steps done; may raise.
        self.on_step: StepHook | None = None

    @torch.no_grad()
    def forward(self, requests: Sequence[DiffusionRequest]) -> list[Tensor]:
        """Sample the requests one after the other; give one tensor each.

        Raises:
            InvalidRequestError: A request asks for something that the model doesn't take.
        """
        return [self._sample(request) for request in requests]

    def _sample(self, request: DiffusionRequest) -> Tensor:
        raise NotImplementedError
