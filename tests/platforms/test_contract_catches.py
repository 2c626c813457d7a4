"""The contract has to fail for a plugin that breaks it: each defect by the test that is for it."""

from __future__ import annotations

import contextlib
import io
import os
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.slow

# A defect: definitions that spoil the relay to ``sim``, and the test that must fail.
DEFECTS = {
    "none": ("", None),
    "skips-waits": (
        """
        class Hasty(Relay):
            def wait_event(self, event):
                if not isinstance(event, sim.SimEvent):
                    raise PlatformError("foreign", platform=NAME)

        @hookimpl
        def side_stream(device, priority):
            return Hasty(sim.side_stream(device, priority))
        """,
        "test_waiting_for_an_event_orders_a_copy_after_the_work",
    ),
    "takes-foreign-events": (
        """
        class Careless(Relay):
            def wait_event(self, event):
                if isinstance(event, sim.SimEvent):
                    self.stream.wait_event(event)

        @hookimpl
        def side_stream(device, priority):
            return Careless(sim.side_stream(device, priority))
        """,
        "test_a_foreign_event_is_refused_before_torch_sees_it",
    ),
    "joins-without-waiting": (
        """
        class Hasty(Relay):
            def join_current(self, tensors):
                pass

        @hookimpl
        def side_stream(device, priority):
            return Hasty(sim.side_stream(device, priority))
        """,
        "test_joining_orders_the_current_stream_after_a_side_stream",
    ),
    "joins-and-forgets-the-memory": (
        """
        class Forgetful(Relay):
            def join_current(self, tensors):
                self.stream.join_current([])

        @hookimpl
        def side_stream(device, priority):
            return Forgetful(sim.side_stream(device, priority))
        """,
        "test_what_a_joined_stream_made_stays_whole_until_it_was_read",
    ),
    "claims-to-queue-freely-and-waits": (
        """
        class Hesitant(Relay):
            queues_freely = True

            def record_event(self, timing=False):
                event = self.stream.record_event(timing)
                sim.default_stream().release()  # what is queued gets done
                event.wait()
                return event

        @hookimpl
        def side_stream(device, priority):
            return Hesitant(sim.side_stream(device, priority))
        """,
        "test_a_copy_is_queued_freely_while_the_device_is_busy",
    ),
    "claims-to-queue-freely-and-is-early": (
        """
        class Early(sim.SimEvent):
            __slots__ = ()

            def query(self):
                return True

        class Hasty(Relay):
            queues_freely = True

            def record_event(self, timing=False):
                event = self.stream.record_event(timing)
                event.__class__ = Early
                return event

        @hookimpl
        def side_stream(device, priority):
            return Hasty(sim.side_stream(device, priority))
        """,
        "test_a_copy_is_queued_freely_while_the_device_is_busy",
    ),
    "claims-to-queue-freely-and-waits-for-the-stream": (
        """
        def event_of(stream):
            class Patient(sim.SimEvent):
                __slots__ = ()

                def wait(self, timeout_s=None):
                    if timeout_s is None:
                        sim.default_stream().release()
                        stream.synchronize()
                    return super().wait(timeout_s)

            return Patient

        class Patiently(Relay):
            queues_freely = True

            def record_event(self, timing=False):
                event = self.stream.record_event(timing)
                event.__class__ = event_of(self.stream)
                return event

        @hookimpl
        def side_stream(device, priority):
            return Patiently(sim.side_stream(device, priority))
        """,
        "test_a_wait_for_a_copy_that_was_queued_freely_is_not_for_what_is_behind_it",
    ),
    "records-elsewhere": (
        """
        @hookimpl
        def record_device_event(device, timing):
            return sim.side_stream(device, 0).record_event(timing)
        """,
        "test_recording_returns_while_the_work_before_it_runs",
    ),
    "answers-none-after-a-timeout": (
        """
        class Vague(sim.SimEvent):
            __slots__ = ()

            def wait(self, timeout_s=None):
                return super().wait(timeout_s) or None

        @hookimpl
        def record_device_event(device, timing):
            event = sim.record_device_event(device, timing)
            event.__class__ = Vague
            return event
        """,
        "test_a_wait_gives_up_when_its_time_is_over",
    ),
    "tells-milliseconds": (
        """
        class Hurried(sim.SimEvent):
            __slots__ = ()

            def elapsed_s(self, earlier):
                return super().elapsed_s(earlier) * 1e3

        @hookimpl
        def record_device_event(device, timing):
            event = sim.record_device_event(device, timing)
            event.__class__ = Hurried
            return event
        """,
        "test_elapsed_time_is_device_time_in_seconds",
    ),
    "unpins-only-once": (
        """
        class Strict:
            def __init__(self, pin):
                self.pin = pin

            def close(self):
                self.pin.close()
                del self.pin

        @hookimpl
        def pin_host_memory(device, address, nbytes):
            return Strict(sim.pin_host_memory(device, address, nbytes))
        """,
        "test_a_copy_into_a_pinned_mapping_is_asynchronous",
    ),
    "binds-every-thread-to-device-0": (
        """
        @hookimpl
        def set_device(device):
            return sim.set_device(sim.device(0))
        """,
        "test_a_thread_is_bound_to_a_device_of_its_own",
    ),
    "cries-wolf": (
        """
        @hookimpl
        def check_device(device):
            return DeviceFault(reason="always")
        """,
        "test_a_healthy_device_has_no_fault",
    ),
}

SUITE_HEAD = """
from contextlib import contextmanager

import torch

from sidestream.testing.contract import PlatformContract


class OnSim(PlatformContract):
    @contextmanager
    def busy_stream(self, device):
        stream = torch.get_device_module(device).current_stream(device)
        stream.hold()
        try:
            yield
        finally:
            stream.release()
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory, new_plugin_folder):
    """What fails, by defect; one run of pytest over all the plugins."""
    folder = tmp_path_factory.mktemp("defects")
    suite, chosen = SUITE_HEAD, []
    with pytest.MonkeyPatch.context() as monkeypatch:
        plugins = new_plugin_folder(folder, monkeypatch)
        for number, (name, (also, test)) in enumerate(DEFECTS.items()):
            plugins.add_relay(name, also=also)
            suite += f"\n\nclass Test{number}(OnSim):\n    platform_name = {name!r}\n"
            chosen.append("::".join(filter(None, [f"test_defects.py::Test{number}", test])))
        (folder / "test_defects.py").write_text(suite)
        monkeypatch.chdir(folder)
        # In this process: one of its own would import torch and all the plugins again.
        with contextlib.redirect_stdout(io.StringIO()) as said:
            pytest.main(
                [
                    *("-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist"),
                    *("-c", os.devnull, "--rootdir", str(folder)),
                    *("--junitxml", "report.xml", "--import-mode=importlib", *chosen),
                    # It says nothing here that test_contract.py does not, and starts a process.
                    *("-k", "not fresh_process"),
                ]
            )
    report = folder / "report.xml"
    assert report.exists(), said.getvalue()
    names = list(DEFECTS)
    failed = {name: set() for name in names}
    for case in ElementTree.parse(report).iter("testcase"):
        name = names[int(case.get("classname").rpartition("Test")[2])]
        if case.find("failure") is not None or case.find("error") is not None:
            failed[name].add(case.get("name").partition("[")[0])
    return failed


@pytest.mark.parametrize("defect", [name for name in DEFECTS if name != "none"])
def test_a_defect_is_caught(failed, defect):
    assert failed[defect] == {DEFECTS[defect][1]}


def test_a_plugin_without_a_defect_passes(failed):
    assert failed["none"] == set()
