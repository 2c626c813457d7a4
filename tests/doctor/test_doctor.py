"""The whole examination: of this machine as it is, and where nothing can be selected."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.cli.main import run
from sidestream.doctor.questions import Questions
from sidestream.doctor.selection import select

pytestmark = pytest.mark.slow

DOCS = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
VENDORS = ("cuda", "npu", "rocm", "xpu", "musa")
#: Promised where no device is; CPU time, since wall time is the neighbours' too.
DOCTOR_S = 15
PLUGINS_S = 0.5


def cpu_s(call):
    """Run ``call``; give what it gave and the CPU seconds of its child processes."""

    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    return call(), spent() - before


@pytest.fixture(scope="module")
def healthy(run_doctor):
    """Examine this machine once: what it printed as JSON, its exit code and its CPU seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SIDESTREAM_PLATFORM", "SIDESTREAM_PLUGINS"):
            patch.delenv(variable, raising=False)
        return cpu_s(lambda: run_doctor("--json", "--forward-s", "1"))


def test_each_vendor_is_there_with_its_true_reason(healthy):
    report = json.loads(healthy[0].stdout)
    found = {each["name"]: each for each in report["platforms"]}
    listed = subprocess.run(
        [sys.executable, "-m", "sidestream.cli.main", "plugins", "--json"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    reasons = {each["name"]: each["reason"] for each in json.loads(listed.stdout)}
    assert {"cpu", "sim", *VENDORS} <= found.keys() == reasons.keys()
    assert found["sim"]["state"] == "available"
    for name in VENDORS:
        assert found[name]["state"] in ("absent", "usable"), found[name]
        assert reasons[name] in found[name]["evidence"]
    assert report["torch"]["state"] == "usable"
    assert all(each["evidence"] for each in report["platforms"])


def test_this_machine_is_usable_and_the_exit_code_says_so(healthy):
    done, _ = healthy
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 0
    assert report["is_usable"] is True
    assert done.stderr == ""
    limits = {each["name"]: each for each in report["limits"]}
    assert {"memfd", "pidfd", "memory", "descriptors", "page-locks"} <= limits.keys()
    assert limits["memfd"]["state"] == limits["pidfd"]["state"] == "usable"


def test_on_the_cpu_asynchronous_output_is_not_worth_it(healthy):
    report = json.loads(healthy[0].stdout)
    if report["selection"]["platform"] != "cpu":
        pytest.skip(
            "not run: this machine has an accelerator, where the answer depends on its copies"
        )
    assert report["copies"] is None
    assert report["worth"]["is_worth_it"] is False


def test_it_takes_less_than_its_seconds(healthy):
    assert healthy[1] < DOCTOR_S


def test_the_list_of_plugins_takes_less_than_half_a_second():
    command = [sys.executable, "-m", "sidestream.cli.main", "plugins"]
    took = (cpu_s(lambda: subprocess.run(command, check=True, timeout=60)) for _ in range(10))
    # Once is enough: neighbours of a core take CPU time, too.
    assert any(seconds < PLUGINS_S for _, seconds in took)


def test_every_field_of_the_json_is_documented(healthy):
    report = json.loads(healthy[0].stdout)
    documented = set(re.findall(r"`(\w+)`", DOCS.partition("## The JSON")[2]))
    assert report.keys() <= documented
    for part in ("selection", "torch", "worth"):
        assert report[part].keys() <= documented
    for finding in (*report["platforms"], *report["limits"]):
        assert finding.keys() <= documented


def test_a_page_for_a_person_says_the_same(torchless, run_doctor):
    torchless.add_good("acme")
    done = run_doctor()
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    shown = "\n".join(lines)
    assert lines[0].startswith("sidestream 0.")
    for name in ("cpu", "sim", "acme", *VENDORS):
        assert re.search(rf"^  (ok  |-   |FAIL)  {name} ", shown, re.MULTILINE), name
    assert re.search(r"^  FAIL  torch +library-missing: ImportError: libtorch_cpu.so", shown, re.M)
    assert "-> libtorch_cpu.so is not found" in shown
    assert "Broken: torch" in lines[-1]
    assert not [line for line in lines if line != line.rstrip()]


# --- where nothing can be selected ------------------------------------------------------------


@pytest.fixture
def selection(plugins):
    """Find out what an engine would get, or why it would get nothing."""

    def selection(argument=None):
        with Questions(60) as questions:
            return select(questions, argument)

    return selection


def test_a_typo_in_the_selector_is_told_with_what_was_meant(selection, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_PLATFORM", "cdua")
    found = selection()
    assert (found.platform, found.by) == (None, "variable")
    assert "No platform is named 'cdua'" in found.reason
    assert found.reason.endswith("Did you mean 'cuda'?")
    found = selection("smi")
    assert (found.platform, found.by) == (None, "argument")
    assert found.reason.endswith("Did you mean 'sim'?")


def test_a_malformed_variable_is_told(selection, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_PLUGINS", "acme")
    found = selection()
    assert found.platform is None
    assert "name=module" in found.reason


def test_a_plugin_that_ends_its_process_ends_the_choice_as_it_would_an_engine(plugins, selection):
    plugins.add("aborts", "import os\nos.abort()\n")
    found = selection()
    assert found.platform is None
    assert "SIGABRT" in found.reason
    assert selection("cpu").platform == "cpu", "named, no other plugin is imported"


def test_two_claimants_are_told_with_the_variable_that_decides(torchless, examine):
    torchless.add_good("acme")
    torchless.add_good("emca")
    code, report = examine()
    assert code == 1
    assert report["selection"]["platform"] is None
    assert re.search("acme.*emca.*SIDESTREAM_PLATFORM", report["selection"]["reason"])


def test_a_backend_that_breaks_the_import_of_torch_is_told_apart_from_torch(torchless, examine):
    # A torch that loads what registers itself, and says what torch says when that fails.
    (torchless.path / "torch.py").write_text(
        "import os\n"
        "from importlib.metadata import entry_points\n"
        "__version__ = '2.13.0+cpu'\n"
        "class version: cuda = hip = xpu = None\n"
        "if os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD') != '0':\n"
        "    for entry in entry_points(group='torch.backends'):\n"
        "        try:\n"
        "            entry.load()()\n"
        "        except Exception as error:\n"
        "            raise RuntimeError(f'Failed to load the backend extension: {entry.name}') "
        "from error\n"
    )
    torchless.add_backend("torch_npu", "raise ImportError('libhccl.so: cannot open shared')\n")
    code, report = examine()
    assert code == 1
    assert report["torch"]["state"] == "usable"
    packages = {each["name"]: each for each in report["extensions"]}
    assert packages["torch_npu 1.0"]["cause"] == "cann-missing"
    assert packages["import torch"]["cause"] == "autoload"
    assert "Failed to load the backend extension: torch_npu" in packages["import torch"]["evidence"]
    found = {each["name"]: each for each in report["platforms"]}
    assert (found["npu"]["state"], found["npu"]["cause"]) == ("broken", "cann-missing")
    assert "libhccl.so" in found["npu"]["advice"]


# --- the command ------------------------------------------------------------------------------


def test_wrong_use_is_code_2(capsys):
    assert run(["doctor", "--forward-s", "0"]) == 2
    assert "--forward-s" in capsys.readouterr().err


def test_an_examination_that_fails_is_code_2_and_says_that_it_is_a_bug(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert run(["doctor"]) == 2
    assert "bug in sidestream" in capsys.readouterr().err
