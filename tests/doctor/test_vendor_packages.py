"""Real packages of vendors, from the package index, on a machine that lacks what they need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.soak

TORCH_NPU = "torch-npu==2.13.0"
TORCH_OPENCL = "torch-opencl==0.1.0.dev23"
IPEX = "intel-extension-for-pytorch==2.8.0"

ENGINE = """
from sidestream import DiffusionEngine, EngineConfig

for platform in ("cpu", "sim", None):
    with DiffusionEngine(EngineConfig(model="digits", platform=platform)) as engine:
        [output] = engine.generate(["7"], seed=1, num_inference_steps=2)
        print(engine.platform.name, output.images[0].size)
"""


@pytest.fixture(scope="module")
def fetch(tmp_path_factory):
    """Put a package, without what it asks for, into a folder of its own; skip without a network."""

    def fetch(requirement):
        folder = tmp_path_factory.mktemp("package")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", folder, requirement],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"pip can't fetch {requirement}: {done.stderr.strip().splitlines()[-1]}")
        return folder

    return fetch


@pytest.fixture(scope="module")
def torch_npu(fetch):
    return fetch(TORCH_NPU)


@pytest.fixture
def python_with(monkeypatch):
    """Run Python where these folders are beside everything that is installed here."""
    for variable in ("SIDESTREAM_PLATFORM", "SIDESTREAM_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(variable, raising=False)

    def run(script, *folders):
        path = os.pathsep.join(map(str, folders))
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def examine_with(examine, monkeypatch):
    """Run the doctor where these folders are on the path."""

    def examine_with(*folders):
        monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
        # Large packages, which a busy machine reads for longer than is waited for as a rule.
        code, report = examine("--timeout-s", "200")
        return code, report, {each["name"]: each for each in report["extensions"]}

    return examine_with


@pytest.mark.timeout(600)
def test_torch_npu_without_cann_breaks_torch_and_neither_the_doctor_nor_an_engine(
    torch_npu, python_with, examine_with
):
    plain = python_with("import torch", torch_npu)
    assert "Failed to load the backend extension: torch_npu" in plain.stderr
    assert plain.returncode == 1, "else this shows nothing"

    code, report, packages = examine_with(torch_npu)
    assert code == 1
    assert report["torch"]["state"] == "usable"
    assert packages["import torch"]["cause"] == "autoload"
    assert packages["torch_npu 2.13.0"]["cause"] == "cann-missing"
    found = {each["name"]: each for each in report["platforms"]}
    assert (found["npu"]["state"], found["npu"]["cause"]) == ("broken", "cann-missing")
    assert found["cpu"]["state"] == "usable"

    served = python_with(ENGINE, torch_npu)
    assert served.returncode == 0, served.stderr
    assert served.stdout.splitlines() == ["cpu (64, 64)", "sim (64, 64)", "cpu (64, 64)"]


@pytest.mark.timeout(600)
def test_a_backend_for_another_torch_is_a_version_mismatch(fetch, python_with, examine_with):
    folder = fetch(TORCH_OPENCL)
    assert python_with("import torch", folder).returncode == 1
    code, report, packages = examine_with(folder)
    assert code == 1
    assert report["torch"]["state"] == "usable"
    assert packages["torch-opencl 0.1.0.dev23"]["cause"] == "version-mismatch"
    assert packages["import torch"]["cause"] == "autoload"


@pytest.mark.timeout(600)
def test_ipex_beside_another_torch_is_told(fetch, examine_with):
    code, report, packages = examine_with(fetch(IPEX))
    assert code == 1
    found = packages["intel_extension_for_pytorch 2.8.0"]
    assert found["cause"] == "ipex-mismatch"
    assert any("needs to work with PyTorch 2.8" in line for line in found["evidence"])
    assert report["torch"]["state"] == "usable"
