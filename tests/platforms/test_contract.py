"""Every plugin of this repository against the contract that is shipped for all."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sidestream.testing.contract import PlatformContract, PluginContract


class TestCpu(PluginContract):
    platform_name = "cpu"


@pytest.mark.hardware
class TestCuda(PlatformContract):
    """Needs an NVIDIA card, and a process in which no simulated device was used."""

    platform_name = "cuda"


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
