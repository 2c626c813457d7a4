"""Every plugin of this repository against the contract that is shipped for all.

What is not here is listed as skipped, with the reason of its probe. ``npu`` runs on a simulated
runtime too: ``make test-npu``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sidestream.platforms.registry import PlatformRegistry
from sidestream.testing.contract import PlatformContract, ProbeContract

REASONS = {
    record.name: None if record.probe is not None and record.probe.available else record.reason
    for record in PlatformRegistry.discover().records
}
VENDORS = ("cuda", "rocm", "xpu", "npu", "musa")
ABSENT = [name for name in VENDORS if REASONS[name] is not None]


def contract_of(vendor):
    """Without the hardware there is only the probe to test."""
    return ProbeContract if vendor in ABSENT else PlatformContract


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("cpu", 5), ("sim", 25)])
def test_the_contract_holds_in_a_fresh_process(name, least, tmp_path):
    """A process holds one device type from outside, and whoever takes it changes the others."""
    file = Path(__file__).parent / "contracts" / f"{name}_contract.py"
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        file,
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, f"--junitxml={report}"],
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {key: int(suite.get(key)) for key in ("tests", "skipped", "failures", "errors")}
    assert counts == {"tests": counts["tests"], "skipped": 0, "failures": 0, "errors": 0}
    assert counts["tests"] >= least, done.stdout
    assert float(suite.get("time")) < 60, "The contract has to take under a minute."


@pytest.mark.parametrize("name", ABSENT)
def test_a_vendor_that_is_absent_was_not_run(name):
    pytest.skip(f"not run: {name}: {REASONS[name]}")
