"""Every plugin of this repository against the contract that is shipped for all.

What is not here is listed as skipped, with the reason of its probe. ``npu`` runs on a simulated
runtime too: ``make test-npu``.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sidestream.platforms.registry import PlatformRegistry
from sidestream.testing.contract import PlatformContract, PluginContract, ProbeContract

REASONS = {
    record.name: None if record.probe is not None and record.probe.available else record.reason
    for record in PlatformRegistry.discover().records
}
VENDORS = ("cuda", "rocm", "xpu", "npu", "musa")
ABSENT = [name for name in VENDORS if REASONS[name] is not None]


def contract_of(vendor):
    """Without the hardware there is only the probe to test."""
    return ProbeContract if vendor in ABSENT else PlatformContract


class TestCpu(PluginContract):
    platform_name = "cpu"


@pytest.mark.hardware
class TestCuda(contract_of("cuda")):
    platform_name = "cuda"


@pytest.mark.hardware
class TestRocm(contract_of("rocm")):
    platform_name = "rocm"


@pytest.mark.hardware
class TestXpu(contract_of("xpu")):
    platform_name = "xpu"


@pytest.mark.hardware
class TestNpu(contract_of("npu")):
    platform_name = "npu"


@pytest.mark.hardware
class TestMusa(contract_of("musa")):
    platform_name = "musa"


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


@pytest.mark.parametrize("name", ABSENT)
def test_a_vendor_that_is_absent_was_not_run(name):
    pytest.skip(f"not run: {name}: {REASONS[name]}")
