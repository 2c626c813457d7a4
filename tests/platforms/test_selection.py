"""Which platform is meant: the argument, else the variable, else the one that is available."""

from __future__ import annotations

import logging

import pytest
import torch

from sidestream.errors import (
    AmbiguousPlatformError,
    PlatformError,
    PlatformNotFoundError,
    PluginContractError,
    PluginLoadError,
)
from sidestream.platforms.platform import load_platform, load_plugin

BOMB = "raise AssertionError('a plugin that nobody asked for was imported')"


@pytest.fixture(autouse=True)
def _no_hardware(monkeypatch):
    # Where these tests run on a machine with a card, it is hidden from the cuda plugin's probe.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_the_one_available_platform_wins(plugins):
    plugins.add_usable("absent", available=False)
    plugins.add_usable("here")
    assert load_platform().name == "here"


def test_with_none_available_it_is_the_cpu_and_the_log_says_why(plugins, caplog):
    plugins.add_usable("absent", available=False, reason="no card in slot 3")
    with caplog.at_level(logging.INFO, logger="sidestream"):
        platform = load_platform()
    assert platform.name == "cpu"
    assert "absent: no card in slot 3" in caplog.text
    assert "cuda: " in caplog.text


def test_a_broken_plugin_is_a_warning_when_nobody_asked_for_it(plugins, caplog):
    plugins.add("broken", "raise OSError('libvendor.so: cannot open shared object file')")
    assert load_platform().name == "cpu"
    [warning] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "libvendor.so" in warning.getMessage()


def test_two_available_platforms_are_ambiguous(plugins):
    plugins.add_usable("one")
    plugins.add_usable("two")
    with pytest.raises(AmbiguousPlatformError, match="SIDESTREAM_PLATFORM") as raised:
        load_platform()
    assert raised.value.names == ("one", "two")


def test_a_platform_that_is_not_for_auto_never_wins_by_itself(plugins):
    plugins.add_usable("shy", auto=False)
    assert load_platform().name == "cpu"
    assert load_platform("shy").name == "shy"


def test_the_variable_decides_between_two(plugins, monkeypatch):
    plugins.add_usable("one")
    plugins.add_usable("two")
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "two")
    assert load_platform().name == "two"


def test_the_argument_beats_the_variable(plugins, monkeypatch):
    plugins.add_usable("one")
    plugins.add_usable("two")
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "two")
    assert load_platform("one").name == "one"


def test_an_empty_variable_means_auto(plugins, monkeypatch):
    plugins.add_usable("here")
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "")
    assert load_platform().name == "here"


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_forced_platform_is_the_only_plugin_imported(plugins, monkeypatch, how):
    plugins.add("bomb", BOMB)
    plugins.add_usable("mine")
    if how == "variable":
        monkeypatch.setenv("SIDESTREAM_PLATFORM", "mine")
    assert load_platform("mine" if how == "argument" else None).name == "mine"


def test_a_forced_cpu_imports_no_plugin(plugins):
    plugins.add("bomb", BOMB)
    assert not load_platform("cpu").is_asynchronous


def test_what_a_forced_platforms_probe_says_is_ignored(plugins):
    plugins.add_usable("absent", available=False)
    assert load_platform("absent").name == "absent"


def test_a_forced_platform_that_is_broken_is_an_error(plugins):
    plugins.add("broken", "raise OSError('no driver')")
    with pytest.raises(PluginLoadError, match="no driver"):
        load_platform("broken")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(plugins):
    plugins.add_usable("mine")
    with pytest.raises(
        PlatformNotFoundError, match=r"'mime'.*cpu, cuda, mine, musa, npu, rocm, sim, xpu"
    ) as raised:
        load_platform("mime")
    assert raised.value.platform == "mime"


# --- by a device ----------------------------------------------------------------------------


def test_a_device_selects_the_available_platform_of_its_type(plugins):
    plugins.add_usable("absent", available=False)
    plugins.add_usable("other", device_type="hpu")
    plugins.add_usable("mine", auto=False)
    assert load_platform(torch.device("meta", 0)).name == "mine"
    assert load_platform(torch.device("cpu")).name == "cpu"


def test_two_platforms_of_one_device_type_are_ambiguous(plugins):
    plugins.add_usable("one")
    plugins.add_usable("two")
    with pytest.raises(AmbiguousPlatformError):
        load_platform(torch.device("meta"))


def test_a_device_that_no_platform_has_is_an_error_with_every_reason(plugins):
    plugins.add_usable("absent", available=False, reason="no card in slot 3")
    with pytest.raises(PlatformNotFoundError, match="'meta'") as raised:
        load_platform(torch.device("meta"))
    assert raised.value.reasons["absent"] == "no card in slot 3"
    assert "CUDA" in raised.value.reasons["cuda"]


def test_the_variable_decides_between_platforms_of_one_device_type(plugins, monkeypatch):
    plugins.add_usable("one")
    plugins.add_usable("two")
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "two")
    assert load_platform(torch.device("meta")).name == "two"


def test_a_device_that_contradicts_the_variable_is_an_error(plugins, monkeypatch):
    plugins.add_usable("mine")
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "mine")
    with pytest.raises(PlatformError, match=r"'mine'.*SIDESTREAM_PLATFORM.*'cpu'"):
        load_platform(torch.device("cpu"))


# --- in a worker ----------------------------------------------------------------------------


def test_a_worker_loads_a_plugin_by_its_reference_without_discovery(plugins, monkeypatch):
    module = plugins.add_usable("mine", available=False)
    monkeypatch.setenv("SIDESTREAM_PLUGINS", "not well formed")
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "cuda")
    platform = load_plugin("mine", module)
    assert (platform.name, platform.device_type, platform.reference) == ("mine", "meta", module)


def test_a_platforms_reference_is_all_that_a_worker_needs(plugins):
    chosen = load_platform("cpu")
    again = load_plugin(chosen.name, chosen.reference)
    assert again.reference == chosen.reference
    assert not again.is_asynchronous


def test_a_reference_may_name_an_object_in_a_module(plugins):
    module = plugins.add_usable("mine")
    (plugins.path / "plugin_holder.py").write_text(f"import {module} as held\n")
    assert load_plugin("mine", "plugin_holder:held").name == "mine"


def test_a_worker_is_told_when_the_plugin_is_another_one(plugins):
    module = plugins.add_usable("mine")
    with pytest.raises(PluginContractError, match="'mine'"):
        load_plugin("other", module)


# --- the first import of torch --------------------------------------------------------------


def test_a_vendor_package_that_breaks_torch_does_not_break_the_cpu(
    run_python, tmp_path, monkeypatch
):
    metadata = tmp_path / "broken_vendor-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-vendor\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nbroken = broken_vendor:load\n")
    (tmp_path / "broken_vendor.py").write_text("raise OSError('libhccl.so is not there')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    output = run_python("""
        from importlib.metadata import entry_points
        from sidestream.platforms.platform import load_platform
        platform = load_platform("cpu")
        print([entry.name for entry in entry_points(group="torch.backends")], platform.device())
    """)
    assert output == "['broken'] cpu"


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_variable_around_the_import_of_torch_gets_its_value_back(
    run_python, tmp_path, monkeypatch, before
):
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ[os.environ['NAME']])\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    monkeypatch.delenv(name, raising=False)
    output = run_python(
        """
        import os
        from sidestream.platforms.platform import load_platform
        load_platform("cpu")
        print(os.environ.get(os.environ["NAME"]))
        """,
        NAME=name,
        **({} if before is None else {name: before}),
    )
    assert output.splitlines() == ["0", str(before)]


def test_an_absent_torch_is_an_error_with_the_install_line(run_python):
    output = run_python("""
        import os, sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, Finder())
        from sidestream.errors import MissingDependencyError
        from sidestream.platforms.platform import load_platform
        before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        try:
            load_platform("cpu")
        except MissingDependencyError as error:
            print(error)
        assert os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == before
    """)
    assert 'pip install "sidestream[cpu]"' in output
