"""Discovery goes on past every plugin that can't be used, and says why it can't."""

from __future__ import annotations

import pytest

from sidestream import __version__
from sidestream.errors import ConfigError, PluginContractError, PluginLoadError
from sidestream.platforms.registry import PlatformRegistry


def record_of(name):
    records = [record for record in PlatformRegistry.discover().records if record.name == name]
    assert len(records) == 1
    return records[0]


def test_the_installed_plugins_are_found_with_their_distribution(plugins):
    records = {record.name: record for record in PlatformRegistry.discover().records}
    assert next(iter(records)) == "cpu"
    assert {"cpu", "cuda", "sim"} <= records.keys()
    assert records["cuda"].reference == "sidestream_cuda"
    assert records["cuda"].distribution == f"sidestream {__version__}"
    assert records["cuda"].error is None
    assert records["cuda"].hooks[:2] == ("probe", "set_device")


def test_a_plugin_of_the_variable_is_found(plugins):
    module = plugins.add_usable("mine", reason="two cards")
    record = record_of("mine")
    assert (record.reference, record.distribution, record.error) == (module, None, None)
    assert record.probe.available
    assert record.reason == "two cards"
    assert record.hooks == (
        "probe",
        "set_device",
        "side_stream",
        "record_device_event",
        "synchronize_device",
    )


@pytest.mark.parametrize("value", ["mine", "mine=", "=module", "mine=module,other"])
def test_a_malformed_variable_is_an_error(plugins, monkeypatch, value):
    monkeypatch.setenv("SIDESTREAM_PLUGINS", value)
    with pytest.raises(ConfigError, match=r"SIDESTREAM_PLUGINS=.*name=module"):
        PlatformRegistry.discover()


def test_empty_parts_of_the_variable_are_nothing(plugins, monkeypatch):
    module = plugins.add_usable("mine")
    monkeypatch.setenv("SIDESTREAM_PLUGINS", f" , mine = {module} ,")
    assert record_of("mine").error is None


# What breaks a plugin: its source (or None: no such module), the error, its hook, its text, and
# the cause.
BROKEN = {
    "absent": (None, PluginLoadError, None, "ModuleNotFoundError", ModuleNotFoundError),
    "raises": ("raise OSError('no driver')", PluginLoadError, None, "no driver", OSError),
    "exits": ("raise SystemExit(127)", PluginLoadError, None, "SystemExit: 127", SystemExit),
    "syntax": ("def probe(:", PluginLoadError, None, "SyntaxError", SyntaxError),
    "misspelled": (
        "@hookimpl\ndef record_device_evnt(device, timing): return 1",
        PluginContractError,
        "record_device_evnt",
        "unknown hook 'record_device_evnt'",
        Exception,
    ),
    "argument": (
        "@hookimpl\ndef set_device(dev): return True",
        PluginContractError,
        "set_device",
        "dev",
        Exception,
    ),
    "unmarked": (
        "def side_stream(device, priority): return object()",
        PluginContractError,
        "side_stream",
        "lacks the required hook(s) side_stream; a function is a hook only if it is marked",
        type(None),
    ),
    "probe-raises": (
        "@hookimpl\ndef probe(): raise KeyError('soc')",
        PluginContractError,
        "probe",
        "raised, which it never may: KeyError: 'soc'",
        KeyError,
    ),
    "probe-exits": (
        "@hookimpl\ndef probe(): raise SystemExit(1)",
        PluginContractError,
        "probe",
        "SystemExit",
        SystemExit,
    ),
    "probe-none": (
        "@hookimpl\ndef probe(): return None",
        PluginContractError,
        "probe",
        "answered None instead of a Probe",
        type(None),
    ),
    "probe-name": (
        "NAME = 'somebody-else'",
        PluginContractError,
        "probe",
        "'somebody-else'",
        type(None),
    ),
}


def add_broken(plugins, name):
    source = BROKEN[name][0]
    if source is None:
        plugins.name_in_variable(name, "plugin_that_is_not_there")
    elif name in ("raises", "exits", "syntax"):
        plugins.add(name, source)
    else:
        plugins.add_usable(name, also=source)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_recorded_with_its_reason_and_the_rest_go_on(plugins, name):
    plugins.add_usable("before")
    add_broken(plugins, name)
    plugins.add_usable("after")

    record = record_of(name)

    _, kind, hook, text, cause = BROKEN[name]
    assert record.probe is None
    assert type(record.error) is kind
    assert text in str(record.error)
    assert record.error.plugin == name
    assert getattr(record.error, "hook", None) == hook
    assert isinstance(record.error.__cause__, cause)
    assert "\n" not in record.reason
    assert record_of("before").probe.available
    assert record_of("after").probe.available


def test_all_broken_plugins_at_once_leave_the_usable_one(plugins):
    for name in BROKEN:
        add_broken(plugins, name)
    plugins.add_usable("good")
    assert PlatformRegistry.discover().select().name == "good"


def test_a_repeated_name_is_recorded_and_the_first_is_kept(plugins):
    plugins.add_usable("twice", reason="the first")
    plugins.add("twice", "raise AssertionError('imported')", module="plugin_second_of_two")

    first, second = (r for r in PlatformRegistry.discover().records if r.name == "twice")

    assert first.reason == "the first"
    assert isinstance(second.error, PluginLoadError)
    assert "plugin_second_of_two" in str(second.error)
    assert first.reference in str(second.error)
    assert PlatformRegistry.discover().select("twice") == first


def test_an_installed_plugin_named_again_is_one_plugin(plugins):
    plugins.name_in_variable("cuda", "sidestream_cuda")
    assert record_of("cuda").error is None


def test_nobody_can_take_the_name_of_the_no_op_base(plugins):
    plugins.add("cpu", "raise AssertionError('imported')")
    first, second = (r for r in PlatformRegistry.discover().records if r.name == "cpu")
    assert first.reference == "sidestream.platforms.noop"
    assert "repeats the name" in str(second.error)


def test_discovery_and_probing_import_no_torch(plugins, run_python):
    output = run_python("""
        import sys
        from sidestream.platforms.registry import PlatformRegistry
        registry = PlatformRegistry.discover()
        assert len(registry.records) >= 3
        registry.select()
        print([name for name in sys.modules if name.partition("_")[0] in ("torch", "numpy")])
    """)
    assert output == "[]"
