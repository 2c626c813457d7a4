"""Whatever is wrong with a plugin, it is told with its cause, and the others work."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future

import pytest

from sidestream.doctor.platforms import Examiner
from sidestream.doctor.questions import Questions
from sidestream.doctor.report import Finding, State
from sidestream.platforms.registry import PlatformRegistry

pytestmark = pytest.mark.slow

#: Source (None: no such module; "+": after a good plugin's), the cause, and what the evidence says.
BROKEN = {
    "absent": (None, "plugin-import", "No module named 'doctor_absent_plugin'"),
    "imports": ("import a_package_that_nobody_has", "plugin-import", "a_package_that_nobody_has"),
    "library": (
        "raise ImportError('libvendor.so.1: cannot open shared object file')",
        "plugin-import",
        "libvendor.so.1",
    ),
    "syntax": ("def probe(:", "plugin-import", "SyntaxError"),
    "exits": ("raise SystemExit(127)", "plugin-import", "SystemExit: 127"),
    "lacks": ("+del side_stream", "plugin-contract", "lacks the required hook(s) side_stream"),
    "misspelled": (
        "+@hookimpl\ndef pin_hots_memory(device): return 1",
        "plugin-contract",
        "unknown hook 'pin_hots_memory'",
    ),
    "raises": ("+@hookimpl\ndef probe(): raise KeyError('soc')", "plugin-contract", "KeyError"),
    "nothing": ("+@hookimpl\ndef probe(): return None", "plugin-contract", "answered None"),
}
#: What ends or stops its whole process; an engine that imports it does not survive it either.
DEADLY = {
    "aborts": ("import os\nos.abort()", "crashed", "SIGABRT"),
    "leaves": ("import os\nprint('bye')\nos._exit(3)", "crashed", "exit code 3"),
    "hangs": ("import time\ntime.sleep(1000)", "hung", "no answer after"),
}
ALL = {**BROKEN, **DEADLY}


def add(plugins, name):
    source = ALL[name][0]
    if source is not None and source.startswith("+"):
        plugins.add_good(name, also=source[1:])
    else:
        plugins.add(name, source)


@pytest.fixture
def find(plugins):
    """Examine the plugins of these names as the doctor does, where torch is well."""
    torch = Future()
    torch.set_result(Finding(name="torch", state=State.USABLE, evidence=("it is there",)))

    def find(*names, timeout_s=30):
        with Questions(timeout_s) as questions:
            examiner = Examiner(
                questions=questions,
                named=None,
                device_index=0,
                output_bytes=1 << 20,
                torch=torch,
                extensions={},
            )
            first = {}
            return [
                examiner.examine(each, first.setdefault(each.name, each)).finding
                for each in PlatformRegistry.discover().candidates
                if each.name in names
            ]

    return find


@pytest.mark.parametrize("name", ALL)
def test_one_broken_plugin_is_told_and_the_next_is_available(plugins, find, name):
    add(plugins, name)
    plugins.add_good("shy", auto=False)

    # What hangs is waited for to the end; a busy machine may need more for the good one.
    for timeout_s in (3, 30) if name == "hangs" else (60,):
        broken, good = find(name, "shy", timeout_s=timeout_s)
        if good.cause != "hung":
            break

    _, cause, seen = ALL[name]
    assert (broken.name, broken.state, broken.cause) == (name, State.BROKEN, cause)
    assert seen in " ".join(broken.evidence)
    assert broken.advice
    assert (good.name, good.state) == ("shy", State.AVAILABLE)


def test_a_repeated_name_is_told_and_the_first_is_kept(plugins, find):
    kept = plugins.add_good("twice", auto=False)
    repeated = plugins.add("twice", "raise AssertionError('imported')", module="doctor_second")

    first, second = find("twice")

    assert (first.reference, first.state) == (kept, State.AVAILABLE)
    assert (second.reference, second.state) == (repeated, State.BROKEN)
    assert second.cause == "duplicate-name"
    assert kept in second.evidence[0]


def test_all_of_them_at_once_are_told_and_the_good_one_is_tested(plugins, examine):
    together = ALL.keys() - {"hangs"}  # it would be waited for as long as a slow one may take
    for name in together:
        add(plugins, name)
    plugins.add_good("acme")
    plugins.add_good("unlocked", also="del pinned_buffer, pin_host_memory")

    code, report = examine("--platform", "acme", "--forward-s", "0.001")

    found = {each["name"]: each for each in report["platforms"]}
    assert {name: found[name]["cause"] for name in together} == {
        name: ALL[name][1] for name in together
    }
    assert found["acme"]["state"] == "usable", found["acme"]
    assert (found["unlocked"]["state"], found["unlocked"]["cause"]) == ("limited", "copies-block")
    assert report["selection"]["platform"] == "acme"
    assert code == 0, "what was named works"
    routes = {route["memory"]: route for route in report["copies"]["routes"]}
    assert {name: route["is_asynchronous"] for name, route in routes.items()} == {
        "pageable": False,
        "page-locked buffer": True,
        "page-locked mapping": True,
    }
    assert all(route["bytes_per_s"] > 1e6 for route in routes.values())
    assert report["worth"]["forward_s"] == 0.001
    del routes["pageable"]
    fastest = min(route["output_s"] for route in routes.values())
    assert report["worth"]["copy_s"] == fastest, "outputs go where the host need not wait"


PIPELINE = """
from importlib.util import find_spec

import torch

class Gradient:
    @classmethod
    def load(cls, config):
        # Libraries import it where they find it.
        assert find_spec("broken_vendor") is None
        self = cls()
        self.device = config.device
        return self

    def forward(self, requests):
        return [torch.arange(9, device=self.device) for _ in requests]
"""
ENGINE = """
from sidestream import DiffusionEngine, EngineConfig

with DiffusionEngine(EngineConfig(pipeline="doctor_pipeline:Gradient")) as engine:
    [output] = engine.generate(["anything"])
    print(engine.platform.name, output.output.tolist())
"""


def test_an_engine_chooses_the_good_one_beside_all_of_them(plugins):
    for name in BROKEN:
        add(plugins, name)
    plugins.add_good("acme")
    plugins.add("acme", "raise AssertionError('imported')", module="doctor_second")
    plugins.add_backend("broken_vendor", "raise OSError('libhccl.so is not there')")

    (plugins.path / "doctor_pipeline.py").write_text(PIPELINE)

    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["acme [0, 1, 2, 3, 4, 5, 6, 7, 8]"]
    for name in BROKEN:
        assert f"lugin {name!r}" in done.stderr, "it is a warning"
