"""Plugins and packages that are broken in every way, and the doctor in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

#: The simulated accelerator under another name.
GOOD = """
import dataclasses

from sidestream.platforms.hookspecs import hookimpl
from sidestream.testing import sim
from sidestream.testing.sim import (
    check_device, memory_info, pin_host_memory, pinned_buffer, record_device_event, set_device,
    side_stream, synchronize_device,
)

@hookimpl
def probe():
    return dataclasses.replace(sim.probe(), name={name!r}, auto={auto!r})
"""


class PluginFolder:
    """Modules on the path, named in ``SIDESTREAM_PLUGINS``."""

    def __init__(self, path, monkeypatch):
        self.path = path
        self._monkeypatch = monkeypatch
        self._entries = []
        monkeypatch.syspath_prepend(path)
        for variable in ("SIDESTREAM_PLATFORM", "SIDESTREAM_PLUGINS"):
            monkeypatch.delenv(variable, raising=False)

    def add(self, name, source, *, module=None):
        """Make ``source`` the plugin ``name``; None: its module is not there."""
        module = module or f"doctor_{name}_plugin"
        if source is not None:
            (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        self._entries.append(f"{name}={module}")
        self._monkeypatch.setenv("SIDESTREAM_PLUGINS", ",".join(self._entries))
        return module

    def add_good(self, name, *, auto=True, also=""):
        """Add the simulated accelerator under this name; ``also`` may spoil it."""
        return self.add(name, GOOD.format(name=name, auto=auto) + f"\n{also}\n")

    def add_backend(self, name, source):
        """Install a distribution whose module torch loads by itself."""
        metadata = self.path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:load\n")
        (self.path / f"{name}.py").write_text(source)


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    return PluginFolder(tmp_path, monkeypatch)


@pytest.fixture
def torchless(plugins):
    """Put a torch on the path that can't be imported: an examination is then quick."""
    (plugins.path / "torch.py").write_text(
        "raise ImportError('libtorch_cpu.so: cannot open shared object file')\n"
    )
    return plugins


@pytest.fixture(scope="session")
def run_doctor():
    """Run ``sidestream doctor`` with options in a process; gives exit code and what it printed."""

    def run(*options, **environment):
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.run(
            [sys.executable, "-m", "sidestream.cli.main", "doctor", *options],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def examine(run_doctor):
    """Run the doctor and give its exit code and its JSON."""

    def examine(*options, **environment):
        done = run_doctor("--json", *options, **environment)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return examine
