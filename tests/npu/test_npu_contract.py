"""The plugin ``npu`` against the contract, with the real torch_npu.

As everywhere but here, the probe has to see a device's files; the simulator has none.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sidestream.platforms.platform import load_platform
from sidestream.testing.contract import PlatformContract


class TestNpu(PlatformContract):
    platform_name = "npu"

    @pytest.fixture(autouse=True)
    def _simulator(self, simulator, monkeypatch):
        self.aclsim = simulator
        # By default the plugin waits before it records, and so breaks a promise on purpose.
        monkeypatch.setenv("SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD", "0")

    @pytest.fixture
    def platform(self, simulator):
        return load_platform("npu")

    @contextmanager
    def busy_stream(self, device):
        with self.aclsim.held(torch.npu.current_stream(device)):
            yield
