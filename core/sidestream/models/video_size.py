"""How large a video comes out: the frames that a VAE makes of latents, and the bytes of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from sidestream.models.post_process import decoded_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidestream.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class VideoSize:
    """The latents of one video, and the frames that are decoded of them."""

    channels: int
    latents: int
    frames: int
    #: Of latents; each becomes ``scale`` x ``scale`` pixels.
    rows: int
    columns: int
    scale: int

    @classmethod
    def of(cls, given: Mapping[str, Any], *, channels: int, scale: int, factor: int) -> Self:
        """Tell what a call makes whose first latent is a frame, and each after it ``factor``."""
        return cls(
            channels=channels,
            latents=(given["num_frames"] - 1) // factor + 1,
            frames=given["num_frames"],
            rows=given["height"] // scale,
            columns=given["width"] // scale,
            scale=scale,
        )

    def nbytes(self, params: SamplingParams, dtype: torch.dtype) -> int:
        """Give the bytes of the output that ``params`` ask for; ``dtype`` is the decoder's."""
        if params.output_type == "latent":
            values = self.channels * self.latents * self.rows * self.columns
            # Pipelines draw the noise so, and schedulers keep it.
            return values * torch.float32.itemsize
        height, width = self.rows * self.scale, self.columns * self.scale
        return decoded_nbytes(params, dtype, count=self.frames, height=height, width=width)
