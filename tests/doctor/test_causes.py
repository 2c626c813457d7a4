"""What vendors' stacks print when they are broken is understood."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sidestream.doctor
from sidestream.doctor.causes import cause_of
from sidestream.doctor.examination import judge
from sidestream.doctor.questions import Answer, Questions
from sidestream.doctor.report import Copies, Route
from sidestream.doctor.vendors import Vendor, hiding_variable, inaccessible, nodes_of

pytestmark = pytest.mark.slow

DOCS = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")


def answer(*errors, output="", exit_code=0):
    return Answer(
        result=None,
        errors=tuple({"type": kind, "message": text} for kind, text in errors),
        stage="importing it",
        exit_code=exit_code,
        elapsed_s=1.0,
        output=output,
    )


@pytest.mark.parametrize(
    ("cause", "seen"),
    [
        ("torch-missing", answer(("ModuleNotFoundError", "No module named 'torch'"))),
        (
            "cann-missing",
            answer(
                ("PlatformError", "Hook set_device of plugin 'npu' failed"),
                ("ImportError", "libhccl.so: cannot open shared object file: No such file"),
            ),
        ),
        ("cann-path", answer(("Exception", "ASCEND_HOME_PATH : /opt/x does not exist"))),
        (
            "torch-cuda-build",
            answer(
                output="c10::ValueError: Duplicated key 'pinned_reserve_segment_size_mb'",
                exit_code=-signal.SIGABRT,
            ),
        ),
        (
            "two-accelerators",
            answer(("RuntimeError", "Two accelerators cannot be used at the same time in PyTorch")),
        ),
        ("version-mismatch", answer(("ImportError", "/x/_C.so: undefined symbol: _ZN3c104impl"))),
        (
            "ipex-mismatch",
            answer(
                ("AttributeError", "module 'os' has no attribute 'exit'"),
                output="ERROR! Extension for PyTorch* needs to work with PyTorch 2.8.*",
            ),
        ),
        ("driver-missing", answer(("RuntimeError", "Found no NVIDIA driver on your system."))),
        (
            "driver-old",
            answer(("RuntimeError", "CUDA driver version is insufficient for CUDA runtime")),
        ),
        ("torch-build", answer(("AssertionError", "Torch not compiled with CUDA enabled"))),
        (
            "self-test",
            answer(
                (
                    "PlatformError",
                    "Plugin 'x': 7 of 9 bytes copied from x:0 by a side stream are wrong",
                )
            ),
        ),
        ("self-test", answer(("RuntimeError", "x:0 returned 3 of 4096 bytes changed, without"))),
        ("no-devices", answer(("RuntimeError", "No CUDA GPUs are available"))),
        ("no-devices", answer(("RuntimeError", "ACL error code is 507033"))),
        (
            "library-missing",
            answer(("OSError", "libmusart.so.4: cannot open shared object file: No such file")),
        ),
        ("plugin-import", answer(("PluginLoadError", "Plugin 'x' can't be imported"))),
        ("plugin-contract", answer(("PluginContractError", "Plugin 'x' lacks hooks"))),
        ("crashed", answer(exit_code=-signal.SIGSEGV)),
        ("hung", answer(exit_code=None)),
        ("failed", answer(("KeyError", "'soc'"))),
    ],
)
def test_a_failure_has_the_cause_that_its_text_tells(cause, seen):
    found = cause_of(seen)
    assert found.word == cause
    assert found.advice
    assert "{" not in found.advice


def test_every_cause_is_documented():
    folder = Path(sidestream.doctor.__file__).parent
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    words = set(re.findall(r'(?:Cause\(|_known\(|cause=)\s*"([\w-]+)"', source))
    assert {"hung", "cann-missing", "memfd-refused"} <= words
    assert words <= set(re.findall(r"`([\w-]+)`", DOCS))


# --- child processes --------------------------------------------------------------------------


def test_a_child_that_hangs_ends_in_time_and_takes_its_own_children_along(plugins, is_running):
    marker = plugins.path / "grandchild"
    module = plugins.add(
        "forks",
        "import pathlib, subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"path = pathlib.Path({str(marker)!r})\n"
        "path.with_suffix('.new').write_text(str(started.pid))\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(1000)\n",
    )
    for patience_s in (3, 60):  # a busy machine may need more than the first to come that far
        with Questions(patience_s) as questions:
            given = questions.ask("probe", "forks", module)
        if marker.exists():
            break
    assert given.is_hung
    assert f"while importing {module}" in given.failure
    until(lambda: not is_running(int(marker.read_text())))


def test_an_interrupt_ends_the_examination_and_its_children(torchless, is_running):
    marker = torchless.path / "child"
    torchless.add(
        "hangs",
        "import os, pathlib, time\n"
        f"path = pathlib.Path({str(marker)!r})\n"
        "path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(1000)\n",
    )
    path = os.pathsep.join(filter(None, sys.path))
    doctor = subprocess.Popen(
        [sys.executable, "-m", "sidestream.cli.main", "doctor"],
        env={**os.environ, "PYTHONPATH": path},
    )
    until(marker.exists)
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait(60) == 130
    assert not is_running(int(marker.read_text()))


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_child_prints_is_no_part_of_its_answer(plugins):
    module = plugins.add_good("chatty", also="print('{\"result\": 1}', flush=True)")
    with Questions(60) as questions:
        given = questions.ask("probe", "chatty", module)
    assert given.result["name"] == "chatty"
    assert '{"result": 1}' in given.output


def test_after_the_block_nothing_is_asked_any_more(plugins):
    with Questions(60) as questions:
        pass
    with pytest.raises(InterruptedError):
        questions.ask("torch")


# --- what a machine shows ---------------------------------------------------------------------


def test_device_nodes_are_found_and_those_that_cannot_be_opened_told(tmp_path):
    (tmp_path / "card0").touch()
    (tmp_path / "card1").symlink_to(tmp_path / "nowhere")  # can't be opened by root either
    vendor = Vendor(nodes=(str(tmp_path / "none*"), str(tmp_path / "card[0-9]")))
    nodes = nodes_of(vendor)
    assert [os.path.basename(node) for node in nodes] == ["card0", "card1"]
    assert inaccessible(nodes) == [str(tmp_path / "card1")]


@pytest.mark.parametrize(
    ("value", "hides"), [("", True), ("-1", True), ("void", True), ("0", False)]
)
def test_a_variable_that_hides_every_device_is_named(monkeypatch, value, hides):
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", value)
    vendor = Vendor(nodes=(), hiding=("OTHER_DEVICES", "ACME_VISIBLE_DEVICES"))
    assert hiding_variable(vendor) == (f"ACME_VISIBLE_DEVICES={value!r}" if hides else None)


# --- is it worth it ---------------------------------------------------------------------------


def copies(*routes):
    return Copies(
        platform="acme",
        device="acme:0",
        output_bytes=1,
        routes=tuple(
            Route(memory=memory, bytes_per_s=1.0, output_s=output_s, is_asynchronous=free)
            for memory, output_s, free in routes
        ),
    )


@pytest.mark.parametrize(
    ("forward_s", "copy_s", "gain"),
    [(0.1, 0.05, 0.5), (0.1, 0.1, 1.0), (0.1, 0.3, 1 / 3), (0.1, 0.002, 0.02)],
)
def test_the_gain_is_the_sum_of_both_over_the_longer(forward_s, copy_s, gain):
    worth = judge(copies(("page-locked mapping", copy_s, True)), forward_s)
    assert worth.gain == pytest.approx(gain)
    assert worth.is_worth_it


def test_a_gain_below_a_hundredth_changes_little():
    worth = judge(copies(("page-locked mapping", 0.001, True)), 1.0)
    assert worth.gain == pytest.approx(0.001)
    assert not worth.is_worth_it


def test_without_an_asynchronous_copy_nothing_is_gained_however_long_it_takes():
    worth = judge(copies(("pageable", 1.0, False)), 1.0)
    assert (worth.gain, worth.is_worth_it) == (0.0, False)


def test_an_asynchronous_copy_counts_before_a_faster_one_that_blocks():
    worth = judge(copies(("pageable", 0.1, False), ("page-locked buffer", 0.2, True)), 1.0)
    assert worth.copy_s == 0.2
