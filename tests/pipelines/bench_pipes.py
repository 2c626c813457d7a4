"""Pipelines that know how large their outputs are."""

import numpy as np
from sidestream_pipes import Gradient


class SaysItsSize(Gradient):
    """Gradients of a size that the options name."""

    def output_nbytes(self, params):
        size = self.config.options["size"]
        return size if size < 0 else 3 * size * size * 4


class KeptArray(Gradient):
    """Gives the same 12 MB each time, as an array of the host."""

    array = np.zeros((1024, 1024, 3), dtype=np.float32)

    def forward(self, requests):
        self.array.fill(requests[0].sampling_params.seed)
        return [self.array]
