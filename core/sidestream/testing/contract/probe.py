"""What every plugin does on every machine, also where its hardware is absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import ClassVar, Final

import pytest

from sidestream.platforms.registry import PlatformRegistry, PluginRecord
from sidestream.testing.contract.material import LIVENESS_S

_PROBE_SCRIPT: Final = """
import json, os, sys, time
from sidestream.platforms.plugin import ask_probe, load_hooks
before = dict(os.environ), os.getcwd()
started = time.perf_counter()
manager = load_hooks(*sys.argv[1:])
first, second = ask_probe(sys.argv[1], manager), ask_probe(sys.argv[1], manager)
print(json.dumps({
    "elapsed_s": time.perf_counter() - started,
    "is_repeatable": first == second,
    "is_pure": before == (dict(os.environ), os.getcwd()),
    "vendor_modules": [name for name in sys.modules if name.partition("_")[0] == "torch"],
    "name": first.name,
    "device_type": first.device_type,
    "reason": first.reason,
}))
"""


class ProbeContract:
    """What a probe promises; all that can be tested of a plugin whose hardware is absent."""

    #: The plugin's name.
    platform_name: ClassVar[str]

    @pytest.fixture
    def record(self) -> PluginRecord:
        """Find the plugin; it is imported and probed, and torch is not needed."""
        return PlatformRegistry.discover().select(self.platform_name)

    def test_the_probe_is_quick_and_pure_and_says_why(self, record: PluginRecord) -> None:
        """A probe runs in every main process, on machines that lack the vendor's packages."""
        answer = json.loads(output_of(_PROBE_SCRIPT, record.name, record.reference))
        assert answer["vendor_modules"] == [], "importing or probing the plugin imports these"
        assert answer["is_pure"], "the probe changed the environment or the working directory"
        assert answer["is_repeatable"], "a second call answered something else"
        assert answer["elapsed_s"] < 5, "a probe that takes seconds looks at more than files"
        assert answer["name"] == self.platform_name
        assert answer["device_type"], "device_type is empty"
        assert answer["reason"].strip(), "a probe always says why"


def output_of(script: str, *arguments: str) -> str:
    """Run a script in a fresh process that imports what this one can; gives what it printed."""
    # The plugin may be importable only by what this process added to its path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # As workers start: only the plugin itself imports its vendor package.
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=4 * LIVENESS_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
