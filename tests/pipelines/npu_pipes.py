"""A pipeline of copies alone, which is all that the simulated NPU can compute."""

from __future__ import annotations

import ctypes

import torch


class Copies:
    """Answers a square of the request's seed, made on the host and copied to the device."""

    @classmethod
    def load(cls, config):
        pipeline = cls()
        pipeline.device = config.device
        return pipeline

    def forward(self, requests):
        return [self._square(request.sampling_params) for request in requests]

    def _square(self, params):
        host = torch.full((params.height, params.height), params.seed, dtype=torch.uint8)
        made = torch.empty(host.shape, dtype=torch.uint8, device=self.device)
        made.copy_(host)
        return made

    def simulate(self, fault, count):
        """Have the simulated runtime of this process show a fault."""
        library = ctypes.CDLL("libascendcl.so")
        library.aclsim_set.restype = ctypes.c_bool
        return library.aclsim_set(fault.encode(), ctypes.c_int64(count))
