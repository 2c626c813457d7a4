"""The adapter over a vendor's torch module, on a module whose devices do what a test says."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from sidestream.errors import PlatformError
from sidestream.platforms import torch_stream
from sidestream.platforms.device import DeviceEvent, JoiningStream, SideStream
from sidestream.platforms.host_memory import HostRuntime
from sidestream.platforms.torch_device import TorchDevice, with_devices
from sidestream.platforms.torch_stream import TorchEvent

DEVICE = torch.device("meta", 0)


class VendorEvent:
    """Complete when its stream is let go."""

    def __init__(self, *, enable_timing=False, blocking=False):
        self.options = {"enable_timing": enable_timing, "blocking": blocking}
        self.passed = None

    def record(self, stream):
        self.passed = stream.idle

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        self.passed.wait()

    def elapsed_time(self, later):
        if not (self.options["enable_timing"] and later.options["enable_timing"]):
            raise RuntimeError("not recorded with timing")
        return 12.5


class VendorStream:
    """Takes any object for an event, as torch does; remembers what it was given."""

    def __init__(self, *, device, priority=0):
        if priority > 0:
            raise RuntimeError("Expected stream priority to be less than or equal to 0")
        self.device = device
        self.priority = priority
        self.idle = threading.Event()
        self.idle.set()
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)

    def synchronize(self):
        self.idle.wait()


class VendorTensor:
    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


class VendorModule:
    """What ``torch.cuda`` is to CUDA."""

    Event = VendorEvent
    Stream = VendorStream

    def __init__(self):
        self._local = threading.local()
        self._default = VendorStream(device=DEVICE)
        self.calls = []

    def current_stream(self, device):
        assert device == DEVICE
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def stream(self, stream):
        before = self.current_stream(stream.device)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def set_device(self, device):
        self.calls.append(("set_device", device))

    def synchronize(self, device):
        self.calls.append(("synchronize", device))

    def mem_get_info(self, device):
        return (3, 4)

    def empty_cache(self):
        self.calls.append(("empty_cache",))


@pytest.fixture
def vendor():
    return VendorModule()


@pytest.fixture
def device(vendor):
    return TorchDevice(platform="mine", load=lambda: vendor, event_options={"blocking": True})


def event_of(device, timing=False):
    return device.record_device_event(DEVICE, timing)


def test_streams_and_events_fit_the_protocols(device):
    assert isinstance(device.side_stream(DEVICE, 0), SideStream)
    assert isinstance(event_of(device), DeviceEvent)


def test_an_event_is_made_with_the_plugins_options(device):
    assert event_of(device).native.options == {"enable_timing": False, "blocking": True}
    assert event_of(device, timing=True).native.options["enable_timing"]


def test_an_own_event_reaches_the_vendors_stream(device):
    stream, event = device.side_stream(DEVICE, 0), event_of(device)
    stream.wait_event(event)
    assert stream.native.waits == [event.native]


def test_the_threads_current_stream_joins_a_side_stream_and_keeps_its_tensors(device, vendor):
    stream, outer = device.side_stream(DEVICE, 0), device.side_stream(DEVICE, 0)
    assert isinstance(stream, JoiningStream)
    tensor = VendorTensor()
    with outer:
        stream.join_current([tensor])
    (waited_for,) = outer.native.waits
    assert waited_for.passed is stream.native.idle
    assert tensor.streams == [outer.native]
    assert vendor.current_stream(DEVICE).waits == []


class SubclassedEvent(TorchEvent):
    """Could bring anything as its native event."""


FOREIGN = {
    "another platform's": lambda own: TorchEvent("other", DEVICE, own.native, timing=True),
    "another device's": lambda own: TorchEvent(
        "mine", torch.device("meta", 1), own.native, timing=True
    ),
    "a subclass": lambda own: SubclassedEvent("mine", DEVICE, own.native, timing=True),
    "the vendor's own": lambda own: own.native,
    "a torch.Event": lambda own: torch.Event("cpu"),
    "None": lambda own: None,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_event_is_refused_before_torch_sees_it(device, kind):
    stream = device.side_stream(DEVICE, 0)
    with pytest.raises(PlatformError):
        stream.wait_event(FOREIGN[kind](event_of(device, timing=True)))
    assert stream.native.waits == []


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_time_since_a_foreign_event_is_refused(device, kind):
    own = event_of(device, timing=True)
    with pytest.raises(PlatformError):
        own.elapsed_s(FOREIGN[kind](own))


def test_elapsed_time_is_in_seconds(device):
    start, end = event_of(device, timing=True), event_of(device, timing=True)
    assert end.elapsed_s(start) == 0.0125


def test_elapsed_time_needs_timing_on_both(device):
    plain, timed = event_of(device), event_of(device, timing=True)
    for first, last in ((plain, timed), (timed, plain)):
        with pytest.raises(PlatformError, match="timing=True"):
            last.elapsed_s(first)


def test_elapsed_time_needs_both_complete(device, vendor):
    start = event_of(device, timing=True)
    vendor.current_stream(DEVICE).idle.clear()
    with pytest.raises(PlatformError, match="complete"):
        event_of(device, timing=True).elapsed_s(start)


def test_a_wait_ends_false_when_its_time_is_over(device, vendor):
    vendor.current_stream(DEVICE).idle.clear()
    event = event_of(device)
    assert event.wait(0) is False
    assert event.wait(0.01) is False
    assert not event.query()


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_a_wait_ends_true_with_the_work(device, vendor, timeout_s):
    idle = vendor.current_stream(DEVICE).idle
    idle.clear()
    event = event_of(device)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(event.wait(timeout_s)))
    waiter.start()
    assert answers == []
    idle.set()
    waiter.join(30)
    assert answers == [True]


def test_a_stream_records_on_itself_and_not_on_the_current_one(device, vendor):
    vendor.current_stream(DEVICE).idle.clear()
    assert device.side_stream(DEVICE, 0).record_event().query()
    assert not event_of(device).query()


def test_a_stream_waits_for_its_own_work(device):
    stream = device.side_stream(DEVICE, 0)
    stream.native.idle.clear()
    waiter = threading.Thread(target=stream.synchronize)
    waiter.start()
    assert waiter.is_alive()
    stream.native.idle.set()
    waiter.join(30)
    assert not waiter.is_alive()


def test_a_stream_may_be_entered_again_inside_itself(device, vendor):
    outer = vendor.current_stream(DEVICE)
    stream, other = device.side_stream(DEVICE, 0), device.side_stream(DEVICE, 0)
    with stream, other:
        with stream as entered:
            assert entered is stream
            assert vendor.current_stream(DEVICE) is stream.native
        assert vendor.current_stream(DEVICE) is other.native
    assert vendor.current_stream(DEVICE) is outer


def test_each_thread_gets_its_own_stream_back(device, vendor):
    stream, before = device.side_stream(DEVICE, 0), device.side_stream(DEVICE, 0)
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def use():
        with stream:
            inside.set()
            assert leave.wait(30)
        seen.append(vendor.current_stream(DEVICE))

    other = threading.Thread(target=use)
    with before:
        with stream:
            other.start()
            assert inside.wait(30)
        # The other thread entered last, so a shared record would give its stream back here.
        assert vendor.current_stream(DEVICE) is before.native
        leave.set()
        other.join(30)
    assert seen == [vendor.current_stream(DEVICE)]


def test_a_stream_is_left_when_its_block_raises(device, vendor):
    outer = vendor.current_stream(DEVICE)
    with pytest.raises(KeyError), device.side_stream(DEVICE, 0):
        raise KeyError
    assert vendor.current_stream(DEVICE) is outer


def test_a_less_urgent_priority_is_the_default(device):
    assert device.side_stream(DEVICE, -2).native.priority == -2
    assert device.side_stream(DEVICE, 1).native.priority == 0


def test_the_other_hooks_name_their_device(device, vendor):
    assert device.set_device(DEVICE) is True
    assert device.synchronize_device(DEVICE) is True
    assert device.memory_info(DEVICE) == (3, 4)
    assert device.empty_cache(DEVICE) is True
    assert vendor.calls == [("set_device", DEVICE), ("synchronize", DEVICE), ("empty_cache",)]


# --- how the host waits ---------------------------------------------------------------------


class DeafEvent(VendorEvent):
    """Its own wait would never end, as of a vendor whose driver loses wake-ups."""

    def synchronize(self):
        raise AssertionError("the driver was asked to wait for an event")


@pytest.fixture
def device_that_waits(vendor):
    def make(host_wait):
        vendor.Event = DeafEvent
        return TorchDevice(platform="mine", load=lambda: vendor, host_wait=host_wait)

    return make


@pytest.mark.parametrize("host_wait", ["stream", "poll"])
def test_a_wait_ends_with_the_work_without_asking_the_event_to_wait(
    device_that_waits, vendor, host_wait
):
    device = device_that_waits(host_wait)
    stream = device.side_stream(DEVICE, 0)
    idle = vendor.current_stream(DEVICE).idle
    idle.clear()
    event, answers = event_of(device), []
    waiter = threading.Thread(target=lambda: answers.append(event.wait()))
    waiter.start()
    assert answers == []
    idle.set()
    waiter.join(30)
    assert answers == [True]
    stream.synchronize()


def test_a_poll_ends_false_when_the_event_does_not_come(device_that_waits, vendor, monkeypatch):
    monkeypatch.setattr(torch_stream, "POLL_LIMIT_S", 0.05)
    device = device_that_waits("poll")
    stream = device.side_stream(DEVICE, 0)
    stream.native.idle.clear()
    assert stream.record_event().wait() is False
    with pytest.raises(PlatformError, match="did not finish its work"):
        stream.synchronize()


def test_an_event_that_is_incomplete_on_an_idle_stream_is_told(device_that_waits, vendor):
    event = event_of(device_that_waits("stream"))
    event.native.passed = threading.Event()  # lost: the stream is idle, and never passed it
    assert event.wait() is False


@pytest.mark.parametrize("waits", [False, True])
def test_recording_waits_for_what_is_queued_where_the_plugin_says_so(vendor, waits):
    device = TorchDevice(platform="mine", load=lambda: vendor, waits_before_record=lambda: waits)
    idle = vendor.current_stream(DEVICE).idle
    idle.clear()
    recorded, made = threading.Event(), []

    def record():
        # A thread has a current stream of its own; this one has none yet, so the default's.
        made.append(event_of(device))
        recorded.set()

    recorder = threading.Thread(target=record)
    recorder.start()
    assert recorded.wait(0.1 if waits else 30) != waits
    idle.set()
    recorder.join(30)
    assert made[0].query()


@pytest.mark.parametrize(
    ("host_wait", "waits", "freely"),
    [
        ("event", False, True),
        ("event", True, False),
        ("stream", False, False),
        ("poll", False, False),
    ],
)
def test_a_stream_takes_work_ahead_of_time_where_nothing_makes_the_host_wait(
    vendor, host_wait, waits, freely
):
    device = TorchDevice(
        platform="meta", load=lambda: vendor, host_wait=host_wait, waits_before_record=lambda: waits
    )
    assert device.side_stream(DEVICE, 0).queues_freely is freely


def test_a_recording_whose_wait_fails_is_an_error(vendor, monkeypatch):
    monkeypatch.setattr(torch_stream, "POLL_LIMIT_S", 0.05)
    device = TorchDevice(
        platform="mine", load=lambda: vendor, waits_before_record=lambda: True, host_wait="poll"
    )
    vendor.current_stream(DEVICE).idle.clear()
    with pytest.raises(PlatformError, match="did not finish its work"):
        event_of(device)


def test_a_module_that_sees_no_device_is_not_used(vendor):
    vendor.__name__, vendor.device_count = "torch_mine", lambda: 1
    assert with_devices("mine", vendor, "look") is vendor
    vendor.device_count = lambda: 0
    with pytest.raises(PlatformError, match="torch_mine sees no device; look") as raised:
        with_devices("mine", vendor, "look")
    assert raised.value.platform == "mine"


# --- registration ---------------------------------------------------------------------------


RUNTIME = HostRuntime(getter="runtime", register="hold", unregister="drop", flags=2)


class VendorRuntime:
    """Refuses, and keeps what it was called with and for which device."""

    def __init__(self, vendor):
        self._vendor = vendor
        self.calls = []

    def hold(self, *arguments):
        self.calls.append((self._vendor.entered, *arguments))
        return 712


def test_a_runtime_registers_memory_for_its_device(vendor):
    @contextmanager
    def on_device(wanted):
        vendor.entered = wanted
        yield
        vendor.entered = None

    vendor.device, runtime = on_device, VendorRuntime(vendor)
    vendor.runtime = lambda: runtime
    device = TorchDevice(platform="mine", load=lambda: vendor, runtime=RUNTIME)
    assert device.pin_host_memory(DEVICE, 1 << 40, 4096) is None
    assert runtime.calls == [(DEVICE, 1 << 40, 4096, 2)]


def test_a_module_without_the_runtime_registers_nothing(vendor):
    device = TorchDevice(platform="mine", load=lambda: vendor, runtime=RUNTIME)
    assert device.pin_host_memory(DEVICE, 1 << 40, 4096) is None


# --- profiling ------------------------------------------------------------------------------


class Marker:
    @contextmanager
    def range(self, message, *arguments):
        self.marked = message.format(*arguments)
        yield


def test_a_range_is_marked_in_the_vendors_profiler_else_in_torchs_own(vendor, device):
    marker = Marker()
    own = TorchDevice(platform="mine", load=lambda: vendor, marker=lambda: marker)
    with own.profiler_range("a {forward}"):
        assert marker.marked == "a {forward}"
    profile = torch.profiler.profile(acc_events=True)  # torch 2.10 warns without it
    with profile, device.profiler_range("a {forward}"):
        pass
    assert "a {forward}" in [event.key for event in profile.key_averages()]
