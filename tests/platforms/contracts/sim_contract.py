from __future__ import annotations

from contextlib import contextmanager

import torch

from sidestream.testing.contract import PlatformContract


class TestSim(PlatformContract):
    platform_name = "sim"

    @contextmanager
    def busy_stream(self, device):
        stream = torch.get_device_module(device).current_stream(device)
        stream.hold()
        try:
            yield
        finally:
            stream.release()
