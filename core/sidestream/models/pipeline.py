"""What a pipeline has to offer to run in a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from sidestream.config import PipelineConfig
    from sidestream.request import DiffusionRequest


class Pipeline(Protocol):
    """Turn requests into payloads on the device.

    Any class of this shape will do; it need not inherit from this one. Both methods run in the
    worker's main thread, with the device bound. Besides ``load`` and ``forward`` a class may
    have these attributes, each with a default if it is absent:

    ``supports_request_batch`` (False)
        ``forward`` takes several requests at once.
    ``outputs_are_private`` (False)
        No later forward writes to the memory of a payload, so no clone is needed.
    ``output_nbytes(params)`` (None)
        The bytes of one output, after the device half of post-processing, for sampling parameters
        of which any may be None; None: not known. Memory for outputs of the default size is made
        before the first request.
    ``post_process`` (the class's name)
        A key of the post-processing registry; None: payloads go through untouched.
    ``on_step`` (None)
        The worker puts a function here, if the attribute exists. ``forward`` calls it after each
        denoising step with the number of steps done, and lets out what it raises.
    """

    supports_request_batch: bool

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Load the model onto ``config.device``."""
        ...

    def forward(self, requests: Sequence[DiffusionRequest]) -> Sequence[Any]:
        """Queue the work for ``requests``; give one payload each, in their order.

        Payloads are trees of tensors on the device. Don't wait for the device: what is queued
        may still be computing when this returns.
        """
        ...


#: What ``on_step`` may hold.
StepHook = Callable[[int], None]
