"""The CUDA plugin as far as it goes without a card: its probe, and that it imports nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidestream.platforms import hookspecs
from sidestream.platforms.plugin import implemented_hooks, load_hooks

PROBE = """
    import dataclasses, json, sys
    import sidestream_cuda
    probe = sidestream_cuda.probe()
    assert not [name for name in sys.modules if name.partition("_")[0] == "torch"]
    print(json.dumps(dataclasses.asdict(probe)))
"""
CUDA_BUILD = "__version__ = '2.11.0+cu130'\ncuda: str | None = '13.0'\nhip = None\n"
HAS_DRIVER = any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))


@pytest.fixture
def probe_with(run_python, tmp_path, monkeypatch):
    """Ask the probe where the torch that would be imported has this ``version.py``."""

    def probe_with(version, **environment):
        torch = tmp_path / "torch"
        torch.mkdir()
        (torch / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
        if version is not None:
            (torch / "version.py").write_text(version)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return json.loads(run_python(PROBE, **environment))

    return probe_with


def test_a_cuda_build_is_available_where_the_driver_is(probe_with):
    probe = probe_with(CUDA_BUILD)
    assert (probe["name"], probe["device_type"]) == ("cuda", "cuda")
    assert probe["available"] == HAS_DRIVER
    assert ("/dev/nvidiactl" in probe["reason"]) != HAS_DRIVER


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_hidden_devices_are_not_available(probe_with, value):
    probe = probe_with(CUDA_BUILD, CUDA_VISIBLE_DEVICES=value)
    assert not probe["available"]
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides all devices" in probe["reason"]


@pytest.mark.parametrize(
    "version",
    [
        "__version__ = '2.13.0+cpu'\ncuda: str | None = None\nhip = None\n",
        "__version__ = '2.13.0+rocm7.0'\ncuda: str | None = None\nhip = '7.0'\n",
        # Read, not believed to be simple: whatever else the file holds is skipped.
        "import os\n__version__ = '2.13.0+cpu'\ncuda = None\nx: int\na, b = 1, os.sep\n",
    ],
)
def test_another_build_of_torch_is_not_available(probe_with, version):
    probe = probe_with(version)
    assert not probe["available"]
    assert "torch 2.13.0+" in probe["reason"]
    assert "is not a CUDA build; install one: pip install torch --index-url" in probe["reason"]


@pytest.mark.parametrize("version", [None, "this is no Python"])
def test_a_torch_whose_build_is_not_known_is_not_available(probe_with, version):
    probe = probe_with(version)
    assert not probe["available"]
    assert "torch is not installed; install it: pip install torch" in probe["reason"]


def test_every_hook_of_the_specification_is_implemented():
    specified = [name for name, hook in vars(hookspecs).items() if hasattr(hook, "sidestream_spec")]
    assert implemented_hooks(load_hooks("cuda", "sidestream_cuda")) == tuple(specified)
