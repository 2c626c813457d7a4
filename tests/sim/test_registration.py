"""How a process comes to have the device type, and how it ends with it."""

import json
import subprocess
import sys
import textwrap

import pytest

from sidestream.platforms.registry import PlatformRegistry

REFUSALS_THEN_FIRST_USE_AND_EXIT = """
    import json, os, sys
    import torch
    import torch.utils.backend_registration as registration
    from sidestream.errors import SidestreamError
    from sidestream.testing import sim

    def in_child(do):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                do()
            except (SidestreamError, sim.SimDeviceError) as error:
                os.write(theirs, f"{type(error).__name__}: {error}".encode())
            sys.exit()
        os.wait()
        os.close(theirs)
        return os.read(ours, 1000).decode()

    def with_an_old_torch():
        del registration._setup_privateuseone_for_python_backend
        sim.device()

    def beside_another_type():
        torch.utils.rename_privateuse1_backend("npu")
        sim.device()

    said = {
        "old torch": in_child(with_an_old_torch),
        "other type": in_child(beside_another_type),
        "name before": torch._C._get_privateuse1_backend_name(),
    }
    sim.set_device(torch.device("privateuseone", 1))
    said["current device"] = str(torch.empty(1, device="sim").device)
    device = sim.device()
    ones = torch.ones(4, device=device)

    said["forked child"] = in_child(lambda: ones + 1)
    said["parent"] = (ones + 1).tolist()
    said["imported"] = sorted({"sympy", "torch.distributed.tensor"} & set(sys.modules))

    side, stuck = sim.side_stream(device, 0), sim.side_stream(device, 0)
    sim.faults().next_event_never_fires = True
    stuck.wait_event(sim.record_device_event(device, False))
    side.hold()
    with side:
        ones.to("cpu", non_blocking=True)
    sim.default_stream().hold()
    ones + 1
    print(json.dumps(said))
"""


def run(script):
    """Run a script in a fresh process; what it printed, parsed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first_use():
    return run(REFUSALS_THEN_FIRST_USE_AND_EXIT)


def test_importing_the_plugin_and_probing_imports_no_torch():
    script = """
        import json, sys
        import sidestream.testing.pytest_plugin
        from sidestream.testing import sim
        print(json.dumps([sim.probe().available, "torch" in sys.modules]))
    """
    assert run(script) == [True, False]


def test_the_simulated_platform_is_found_but_never_chosen_by_itself(sim):
    probe = sim.probe()
    assert (probe.name, probe.device_type, probe.auto) == ("sim", "sim", False)
    assert PlatformRegistry.discover().select("sim").reference == "sidestream.testing.sim"


def test_importing_registers_nothing_and_the_first_use_does(first_use):
    assert first_use["name before"] == "privateuseone"
    assert first_use["current device"] == "sim:1"


def test_operators_import_no_more_of_torch_than_torch_does(first_use):
    assert first_use["imported"] == []  # it would take each worker a second


def test_a_forked_child_is_told_that_its_device_is_useless(first_use):
    assert "used before this process was forked" in first_use["forked child"]
    assert first_use["parent"] == [2.0] * 4


def test_a_process_ends_whatever_is_held_or_never_happens(first_use):
    assert first_use  # its script leaves three streams blocked; its exit code was 0


def test_a_process_with_another_such_device_type_is_told_which(first_use):
    assert "PlatformError" in first_use["other type"]
    assert "this process has 'npu'" in first_use["other type"]


def test_a_torch_without_python_backends_is_named_as_the_missing_part(first_use):
    assert first_use["old torch"].startswith("MissingDependencyError")
    assert "needs torch>=2.10" in first_use["old torch"]
