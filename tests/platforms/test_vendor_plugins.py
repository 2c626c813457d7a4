"""The vendors' plugins as far as they go without their hardware: probes, hooks, options, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sidestream_npu
import sidestream_rocm
from sidestream.errors import ConfigError, PlatformError
from sidestream.platforms import hookspecs
from sidestream.platforms.options import flag
from sidestream.platforms.platform import load_platform
from sidestream.platforms.plugin import implemented_hooks, load_hooks

VENDORS = ("cuda", "musa", "npu", "rocm", "xpu")

#: Asks all five, and shows that nothing of torch or a vendor was imported for it.
PROBE = """
    import dataclasses, importlib, json, sys
    probes = {}
    for name in ("cuda", "musa", "npu", "rocm", "xpu"):
        probe = importlib.import_module(f"sidestream_{name}").probe()
        assert probe.name == name
        probes[name] = dataclasses.asdict(probe)
    assert not [name for name in sys.modules if name.partition("_")[0] == "torch"]
    print(json.dumps(probes))
"""

BUILDS = {
    "cpu": "__version__ = '2.13.0+cpu'\ncuda: str | None = None\nhip = None\nxpu = None\n",
    "cuda": "__version__ = '2.13.0+cu130'\ncuda: str | None = '13.0'\nhip: str | None = None\n",
    "rocm": "__version__ = '2.13.0+rocm7.0'\ncuda: str | None = None\nhip: str | None = '7.0'\n",
    "xpu": "__version__ = '2.13.0+xpu'\ncuda = None\nhip = None\nxpu: str | None = '20250301'\n",
}
VISIBLE = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)


class Machine:
    """Another torch, other packages and libraries than this machine's, as files of their own."""

    def __init__(self, path, run_python, monkeypatch):
        self.path = path
        self._run_python = run_python
        monkeypatch.syspath_prepend(path)
        for name in (*VISIBLE, "ASCEND_HOME_PATH", "LD_LIBRARY_PATH"):
            monkeypatch.delenv(name, raising=False)

    def has_torch(self, build):
        self.has_package("torch")
        (self.path / "torch" / "version.py").write_text(BUILDS[build])

    def has_package(self, name, version=None):
        (self.path / name).mkdir()
        (self.path / name / "__init__.py").write_text(f"raise AssertionError('{name} imported')\n")
        if version is not None:
            self.has_distribution(name, version)

    def has_distribution(self, name, version):
        metadata = self.path / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )

    def has_libraries(self, *names, folder="lib"):
        """Give the first part of ``folder``, which has them."""
        made = self.path / folder
        made.mkdir(parents=True)
        for name in names:
            (made / name).touch()
        return str(self.path / Path(folder).parts[0])

    def probes(self, **environment):
        return json.loads(self._run_python(PROBE, **environment))


@pytest.fixture
def machine(tmp_path, run_python, monkeypatch):
    return Machine(tmp_path, run_python, monkeypatch)


@pytest.mark.parametrize("name", VENDORS)
def test_every_hook_of_the_specification_is_implemented(name):
    specified = [hook for hook, spec in vars(hookspecs).items() if hasattr(spec, "sidestream_spec")]
    if name == "xpu":  # torch.xpu has no call that registers memory
        specified.remove("pin_host_memory")
    assert implemented_hooks(load_hooks(name, f"sidestream_{name}")) == tuple(specified)


@pytest.mark.parametrize(
    ("build", "fitting"), [("cpu", None), ("cuda", "cuda"), ("rocm", "rocm"), ("xpu", "xpu")]
)
def test_a_build_of_torch_is_taken_by_its_own_vendor_alone(machine, build, fitting):
    machine.has_torch(build)
    probes = machine.probes()
    for name in ("cuda", "rocm", "xpu"):
        assert ("build; install one" in probes[name]["reason"]) == (name != fitting)
        assert name == fitting or "pip install torch --index-url" in probes[name]["reason"]
    assert {probes[name]["device_type"] for name in ("cuda", "rocm")} == {"cuda"}


@pytest.mark.parametrize(
    ("build", "name", "variable"),
    [
        ("cuda", "cuda", "CUDA_VISIBLE_DEVICES"),
        ("rocm", "rocm", "HIP_VISIBLE_DEVICES"),
        ("rocm", "rocm", "ROCR_VISIBLE_DEVICES"),
        ("rocm", "rocm", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_variable_that_hides_all_devices_is_named(machine, build, name, variable):
    machine.has_torch(build)
    probe = machine.probes(**{variable: ""})[name]
    assert not probe["available"]
    assert f"{variable}='' hides all devices" in probe["reason"]


def test_without_torch_each_says_what_to_install(machine):
    machine.has_package("torch")  # without a version.py: not to be read
    for name, probe in machine.probes().items():
        assert not probe["available"]
        assert "is not installed; install it: pip install" in probe["reason"], name


# --- npu ------------------------------------------------------------------------------------------


def test_torch_npu_on_a_cuda_build_is_not_imported_since_it_ends_the_process(machine):
    machine.has_torch("cuda")
    machine.has_package("torch_npu", "2.13.0")
    reason = machine.probes()["npu"]["reason"]
    assert "torch 2.13.0+cu130 is not a CPU build" in reason
    assert "importing torch_npu in a CUDA build ends the process" in reason


def test_torch_npu_of_another_torch_is_told(machine):
    machine.has_torch("cpu")
    machine.has_package("torch_npu", "2.12.0.post3")
    assert (
        "torch_npu 2.12.0.post3 does not fit torch 2.13.0+cpu" in machine.probes()["npu"]["reason"]
    )


def test_torch_npu_without_cann_says_which_libraries_are_missing(machine):
    machine.has_torch("cpu")
    machine.has_package("torch_npu", "2.13.0")
    folder = machine.has_libraries("libascendcl.so")
    reason = machine.probes(LD_LIBRARY_PATH=folder)["npu"]["reason"]
    assert reason.startswith("libhccl.so can't be found; install CANN")


def test_torch_npu_finds_cann_by_its_own_variable_too(machine):
    machine.has_torch("cpu")
    machine.has_package("torch_npu", "2.13.0")
    home = machine.has_libraries("libascendcl.so", "libhccl.so", folder="home/lib64")
    hidden = machine.probes(ASCEND_HOME_PATH=home, ASCEND_RT_VISIBLE_DEVICES="")["npu"]
    assert "ASCEND_RT_VISIBLE_DEVICES='' hides all devices" in hidden["reason"]


def test_torch_npu_with_cann_asks_for_the_device(machine):
    machine.has_torch("cpu")
    machine.has_package("torch_npu", "2.13.0")
    folder = machine.has_libraries("libascendcl.so", "libhccl.so")
    hidden = machine.probes(LD_LIBRARY_PATH=folder, ASCEND_RT_VISIBLE_DEVICES="")["npu"]
    assert "ASCEND_RT_VISIBLE_DEVICES='' hides all devices" in hidden["reason"]
    probe = machine.probes(LD_LIBRARY_PATH=folder)["npu"]
    assert probe["available"] or "/dev/davinci" in probe["reason"]


@pytest.mark.parametrize("value", ["yes", "-1"])
def test_a_switch_with_another_value_is_an_error(monkeypatch, value):
    monkeypatch.setenv(sidestream_npu.SYNCHRONIZE_VARIABLE, value)
    with pytest.raises(ConfigError, match=r"SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD.*0 or 1"):
        flag(sidestream_npu.SYNCHRONIZE_VARIABLE, default=True)


# --- musa -----------------------------------------------------------------------------------------


def test_torch_musa_asks_for_its_runtime_and_then_for_the_device(machine):
    machine.has_torch("cpu")
    machine.has_package("torch_musa", "2.9.0")
    assert machine.probes()["musa"]["reason"].startswith("libmusart.so can't be found")
    folder = machine.has_libraries("libmusart.so")
    probe = machine.probes(LD_LIBRARY_PATH=folder)["musa"]
    assert probe["available"] or "no Moore Threads device on the PCI bus" in probe["reason"]


# --- xpu ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.8.0", "2.13.10+xpu"])
def test_intels_old_extension_is_reported_and_not_imported(machine, version):
    machine.has_torch("xpu")
    machine.has_package("intel_extension_for_pytorch", version)
    reason = machine.probes()["xpu"]["reason"]
    assert f"intel_extension_for_pytorch {version} is not used here" in reason
    assert ("importing it fails with torch 2.13.0+xpu" in reason) == (version == "2.8.0")


# --- rocm -----------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.version.hip is not None, reason="this torch registers memory")
def test_a_large_mapping_is_not_registered_unless_the_limit_is_raised(monkeypatch):
    device, address, nbytes = torch.device("cuda", 0), 1 << 40, sidestream_rocm.LOCK_LIMIT_BYTES + 1
    assert sidestream_rocm.pin_host_memory(device, address, nbytes) is None
    # The call that registers is reached, and this torch has none.
    monkeypatch.setenv(sidestream_rocm.LOCK_LIMIT_VARIABLE, str(nbytes))
    with pytest.raises(Exception, match=r"(?i)cuda|no NVIDIA driver"):
        sidestream_rocm.pin_host_memory(device, address, nbytes)


# --- in use ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in VENDORS if name != "cuda"])
def test_a_vendor_that_was_named_and_is_not_there_says_what_to_install(name):
    platform = load_platform(name)
    if load_hooks(name, f"sidestream_{name}").hook.probe().available:
        pytest.skip(f"not run: this is about machines without {name}, and it is usable here")
    with pytest.raises(PlatformError, match=r"The plugin's probe says: .*pip install") as raised:
        platform.set_device(platform.device())
    assert raised.value.platform == name
    assert raised.value.__cause__ is not None
