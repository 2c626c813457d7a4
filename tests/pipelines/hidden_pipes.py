"""A pipeline that waits inside its forward, once its device has reached it."""

from __future__ import annotations

import torch
from abort_pipes import pause
from sidestream_pipes import Gradient

from sidestream.testing import sim


class Waits(Gradient):
    """Waits at the gate that its prompt names; "raise" fails, "host" makes a host array."""

    def forward(self, requests):
        prompt = requests[0].prompt
        if self.device.type == "sim":
            # The event of its start is reached before a test hears that it waits.
            sim.default_stream(0).synchronize()
        pause(prompt, "forward")
        if prompt == "raise":
            raise ValueError("no image")
        outputs = super().forward(requests)
        return [torch.ones(3, 64, 64)] if prompt == "host" else outputs
