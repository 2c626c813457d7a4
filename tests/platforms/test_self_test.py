"""The self-test that a worker makes: it passes on a good platform and names what is broken."""

from __future__ import annotations

import textwrap

import pytest

from sidestream.errors import PlatformError, PluginContractError
from sidestream.platforms.platform import load_platform
from sidestream.platforms.self_test import self_test
from sidestream.testing import sim


@pytest.fixture
def test_platform(plugins):
    """Run the self-test on a platform that differs from ``sim`` by these definitions."""

    def test_platform(also=""):
        plugins.add_relay("relay", also=textwrap.dedent(also))
        platform = load_platform("relay")
        device = platform.device()
        platform.set_device(device)
        self_test(platform, device)

    yield test_platform
    sim.reset()


def test_the_no_op_base_has_nothing_to_test():
    platform = load_platform("cpu")
    self_test(platform, platform.device())


def test_a_good_platform_passes_by_asynchronous_copies_on_a_side_stream(test_platform):
    sim.clear_copies()
    test_platform()
    assert all(copy.pinned for copy in sim.copies())
    # First on the side stream, then of what that wrote.
    are_beside = [copy.stream != sim.default_stream().name for copy in sim.copies()]
    assert are_beside == sorted(are_beside, reverse=True)
    assert set(are_beside) == {True, False}


def test_a_side_stream_that_does_not_wait_is_caught(test_platform):
    with pytest.raises(PlatformError, match=r"'relay': \d+ of 1048576 bytes .* are wrong"):
        test_platform("""
            class Hasty(Relay):
                def wait_event(self, event):
                    if not isinstance(event, sim.SimEvent):
                        raise PlatformError("foreign", platform=NAME)

                def record_event(self, timing=False):
                    # The copy overtakes the work: that runs only once the copy is done.
                    copied = self.stream.record_event(timing)
                    assert copied.wait(30)
                    sim.default_stream().release()
                    return copied

            @hookimpl
            def side_stream(device, priority):
                return Hasty(sim.side_stream(device, priority))

            @hookimpl
            def pinned_buffer(device, nbytes):
                # The last call before the work is queued.
                sim.default_stream().hold()
                return sim.pinned_buffer(device, nbytes)
        """)


def test_a_stream_that_does_not_wait_for_the_one_it_joins_is_caught(test_platform):
    with pytest.raises(PlatformError, match=r"by the stream that joins one are wrong"):
        test_platform("""
            class Hasty(Relay):
                is_reader = False

                def wait_event(self, event):
                    self.stream.wait_event(event)
                    self.is_reader = True

                def __enter__(self):
                    if not self.is_reader:
                        self.stream.hold()  # what is to be waited for does not even run
                    self.is_reader = False
                    return super().__enter__()

                def join_current(self, tensors):
                    pass

            @hookimpl
            def side_stream(device, priority):
                return Hasty(sim.side_stream(device, priority))
        """)


def test_a_stream_that_can_not_be_joined_is_used_without_that(test_platform, caplog):
    caplog.set_level("INFO")
    test_platform("""
        class Unable(Relay):
            def join_current(self, tensors):
                raise NotImplementedError("no record_stream here")

        @hookimpl
        def side_stream(device, priority):
            return Unable(sim.side_stream(device, priority))
    """)
    assert "can't be joined: no record_stream here" in caplog.text


def test_an_event_that_comes_before_the_copy_is_caught(test_platform):
    with pytest.raises(PlatformError, match="the copy's event comes too early"):
        test_platform("""
            class Early(Relay):
                def record_event(self, timing=False):
                    return sim.default_stream().record_event(timing)

                def __enter__(self):
                    self.stream.hold()
                    return super().__enter__()

            @hookimpl
            def side_stream(device, priority):
                return Early(sim.side_stream(device, priority))
        """)


def test_a_side_stream_that_takes_foreign_events_breaks_the_contract(test_platform):
    with pytest.raises(PluginContractError, match="accepts events that are not") as raised:
        test_platform("""
            class Careless(Relay):
                def wait_event(self, event):
                    if isinstance(event, sim.SimEvent):
                        self.stream.wait_event(event)

            @hookimpl
            def side_stream(device, priority):
                return Careless(sim.side_stream(device, priority))
        """)
    assert (raised.value.plugin, raised.value.hook) == ("relay", "side_stream")


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [("side_stream", "device, priority"), ("record_device_event", "device, timing")],
)
def test_an_answer_of_the_wrong_type_breaks_the_contract(test_platform, hook, arguments):
    with pytest.raises(PluginContractError, match=f"Hook {hook} .* answered <object") as raised:
        test_platform(f"@hookimpl\ndef {hook}({arguments}): return object()")
    assert (raised.value.plugin, raised.value.hook) == ("relay", hook)


def test_an_event_that_is_never_complete_breaks_the_contract(test_platform):
    with pytest.raises(PluginContractError, match="incomplete after a later one"):
        test_platform("""
            class Lost(sim.SimEvent):
                __slots__ = ()

                def query(self):
                    return False

            @hookimpl
            def record_device_event(device, timing):
                event = sim.record_device_event(device, timing)
                event.__class__ = Lost
                return event
        """)


def test_a_device_that_fails_meanwhile_is_a_platform_error(test_platform):
    with pytest.raises(PlatformError, match=r"injected by a test") as raised:
        test_platform("""
            @hookimpl
            def record_device_event(device, timing):
                sim.fault()
                return sim.record_device_event(device, timing)
        """)
    assert "relay" in str(raised.value)
