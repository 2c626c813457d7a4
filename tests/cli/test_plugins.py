"""The list of plugins tells about broken ones too, and never fails because of them."""

import json

from sidestream.cli.main import run


def listed(capsys):
    assert run(["plugins", "--json"]) == 0
    return {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)}


def test_each_installed_plugin_has_its_state_and_reason(capsys):
    plugins = listed(capsys)
    assert {"cpu", "cuda", "sim"} <= set(plugins)
    assert plugins["cpu"]["state"] == "available"
    assert plugins["sim"]["state"] == "available"
    assert plugins["sim"]["auto"] is False
    for plugin in plugins.values():
        assert plugin["reason"]
        assert "probe" in plugin["hooks"]
        assert plugin["distribution"].startswith("sidestream ")


def test_a_plugin_that_cannot_be_imported_is_listed_with_its_reason(monkeypatch, capsys):
    monkeypatch.setenv("SIDESTREAM_PLUGINS", "ghost=no_such_module_anywhere")
    ghost = listed(capsys)["ghost"]
    assert ghost["state"] == "broken"
    assert "no_such_module_anywhere" in ghost["reason"]


def test_exactly_the_platform_that_would_be_used_is_marked(monkeypatch, capsys):
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "sim")
    assert [name for name, plugin in listed(capsys).items() if plugin["selected"]] == ["sim"]


def test_an_impossible_selection_is_told_and_is_no_failure(monkeypatch, capsys):
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "no-such-platform")
    assert run(["plugins"]) == 0
    shown = capsys.readouterr().out
    assert "None is selected" in shown
    assert "no-such-platform" in shown


def test_the_table_has_a_line_a_plugin(capsys):
    names = set(listed(capsys))
    assert run(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["PLATFORM", "STATE", "DEVICES", "FROM", "REASON"]
    assert {line.removeprefix("*").split()[0] for line in lines[1:]} == names
