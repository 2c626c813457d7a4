"""Plugins that the tests write as real modules, found by ``SIDESTREAM_PLUGINS``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from sidestream.platforms.registry import PLATFORM_VARIABLE, PLUGINS_VARIABLE

#: A whole plugin for an accelerator that any torch can name ("meta" tensors have no data).
USABLE = """
from sidestream.platforms.device import Probe
from sidestream.platforms.hookspecs import hookimpl

NAME = {name!r}

@hookimpl
def probe():
    return Probe(
        name=NAME, device_type={device_type!r}, available={available!r}, reason={reason!r},
        auto={auto!r},
    )

@hookimpl
def set_device(device):
    return True

@hookimpl
def side_stream(device, priority):
    return ("stream", device, priority)

@hookimpl
def record_device_event(device, timing):
    return ("event", device, timing)

@hookimpl
def synchronize_device(device):
    return True
"""

#: The simulated accelerator under another name, for a test to spoil.
RELAY = """
import dataclasses

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceFault
from sidestream.platforms.hookspecs import hookimpl
from sidestream.testing import sim
from sidestream.testing.sim import (
    check_device, memory_info, pin_host_memory, pinned_buffer, record_device_event, set_device,
    side_stream, synchronize_device,
)

NAME = {name!r}

@hookimpl
def probe():
    return dataclasses.replace(sim.probe(), name=NAME)

class Relay:
    def __init__(self, stream):
        self.stream = stream

    def wait_event(self, event):
        self.stream.wait_event(event)

    def record_event(self, timing=False):
        return self.stream.record_event(timing)

    def synchronize(self):
        self.stream.synchronize()

    def __enter__(self):
        self.stream.__enter__()
        return self

    def __exit__(self, *error):
        self.stream.__exit__(*error)
"""


class PluginFolder:
    """A folder of plugin modules on the path; ``add`` writes one and names it in the variable."""

    def __init__(self, path, monkeypatch):
        self.path = path
        self._monkeypatch = monkeypatch
        self._entries = []
        monkeypatch.syspath_prepend(path)
        monkeypatch.delenv(PLATFORM_VARIABLE, raising=False)
        monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)

    def add(self, name, source, *, module=None):
        """Make ``source`` the plugin ``name``; gives the module's name."""
        module = module or f"plugin_{name}_{self.path.name}".replace("-", "_")
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        self.name_in_variable(name, module)
        return module

    def add_usable(
        self, name, *, device_type="meta", available=True, reason="found", auto=True, also=""
    ):
        """Add a plugin that works; ``also`` is more source, which may redefine hooks."""
        source = USABLE.format(
            name=name, device_type=device_type, available=available, reason=reason, auto=auto
        )
        return self.add(name, source + textwrap.dedent(also))

    def add_relay(self, name, *, also=""):
        """Add a plugin that passes everything on to ``sim``; ``also`` may redefine hooks."""
        return self.add(name, RELAY.format(name=name) + textwrap.dedent(also))

    def name_in_variable(self, name, module):
        self._entries.append(f"{name}={module}")
        self._monkeypatch.setenv(PLUGINS_VARIABLE, ",".join(self._entries))


@pytest.fixture(scope="session")
def new_plugin_folder():
    """For a fixture that lives longer than a test: call it with a folder and a monkeypatch."""
    return PluginFolder


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    loaded = set(sys.modules)
    yield PluginFolder(tmp_path, monkeypatch)
    for name in set(sys.modules) - loaded:
        if name.startswith("plugin_"):
            del sys.modules[name]


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh interpreter that imports what this one can; gives its output."""

    def run(script, **environment):
        path = os.pathsep.join(filter(None, sys.path))
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    return run
