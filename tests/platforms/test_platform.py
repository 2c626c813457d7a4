"""The facade: what a hook answers or raises arrives as the caller was promised."""

from __future__ import annotations

import pytest
import torch

from sidestream.errors import DeviceLostError, PlatformError, PluginContractError
from sidestream.platforms.device import DeviceFault
from sidestream.platforms.platform import load_platform

DEVICE = torch.device("meta", 1)


@pytest.fixture
def load(plugins):
    """Load a plugin named "mine" that has these definitions beside, or instead of, usable ones."""

    def load(also=""):
        plugins.add_usable("mine", also=also)
        return load_platform("mine")

    return load


# Every method that calls a hook with a device, by the hook's name.
CALLS = {
    "set_device": lambda p: p.set_device(DEVICE),
    "side_stream": lambda p: p.side_stream(DEVICE),
    "record_device_event": lambda p: p.record_device_event(DEVICE),
    "synchronize_device": lambda p: p.synchronize_device(DEVICE),
    "pin_host_memory": lambda p: p.pin_host_memory(DEVICE, 4096, 64),
    "pinned_buffer": lambda p: p.pinned_buffer(DEVICE, 64),
    "memory_info": lambda p: p.memory_info(DEVICE),
    "empty_cache": lambda p: p.empty_cache(DEVICE),
}
REQUIRED = ["set_device", "side_stream", "record_device_event", "synchronize_device"]
ARGUMENTS = {
    "side_stream": "device, priority",
    "record_device_event": "device, timing",
    "pin_host_memory": "device, address, nbytes",
    "pinned_buffer": "device, nbytes",
}


def hook(name, body):
    return f"@hookimpl\ndef {name}({ARGUMENTS.get(name, 'device')}):\n    {body}\n"


def test_a_hook_gets_every_argument(load):
    platform = load("""
        @hookimpl
        def pin_host_memory(device, address, nbytes):
            return ("pin", device, address, nbytes)
    """)
    assert platform.side_stream(DEVICE, priority=-2) == ("stream", DEVICE, -2)
    assert platform.side_stream(DEVICE) == ("stream", DEVICE, 0)
    assert platform.record_device_event(DEVICE) == ("event", DEVICE, False)
    assert platform.record_device_event(DEVICE, timing=True) == ("event", DEVICE, True)
    assert platform.pin_host_memory(DEVICE, 4096, 64) == ("pin", DEVICE, 4096, 64)


def test_a_platform_gives_its_devices(load):
    platform = load()
    assert platform.device() == torch.device("meta", 0)
    assert platform.device(3) == torch.device("meta", 3)
    assert load_platform("cpu").device(2) == torch.device("cpu")


@pytest.mark.parametrize("name", REQUIRED)
def test_none_from_a_required_hook_of_a_vendor_is_an_error(load, name):
    platform = load(hook(name, "return None"))
    with pytest.raises(PluginContractError, match="answered None") as raised:
        CALLS[name](platform)
    assert (raised.value.plugin, raised.value.hook) == ("mine", name)
    assert name in str(raised.value)
    assert "mine" in str(raised.value)


@pytest.mark.parametrize("name", ["set_device", "synchronize_device"])
def test_only_true_says_that_it_was_done(load, name):
    platform = load(hook(name, "return False"))
    with pytest.raises(PluginContractError, match="answered False instead of True"):
        CALLS[name](platform)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_hook_raises_is_the_cause_of_a_platform_error(load, name):
    platform = load(hook(name, "raise RuntimeError('driver error 719')"))
    with pytest.raises(PlatformError, match="driver error 719") as raised:
        CALLS[name](platform)
    assert type(raised.value.__cause__) is RuntimeError
    assert raised.value.platform == "mine"
    assert all(part in str(raised.value) for part in (name, "'mine'", "meta:1"))


def test_a_vendor_package_that_exits_is_an_error_too(load):
    platform = load(hook("set_device", "raise SystemExit(127)"))
    with pytest.raises(PlatformError, match="SystemExit: 127"):
        platform.set_device(DEVICE)


def test_an_error_of_sidestream_arrives_as_it_is(load):
    platform = load("""
        from sidestream.errors import DeviceLostError
        @hookimpl
        def synchronize_device(device):
            raise DeviceLostError("gone", platform="mine", device=str(device))
    """)
    with pytest.raises(DeviceLostError, match=r"^gone$"):
        platform.synchronize_device(DEVICE)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("device", "problem"), [("cpu", "is of another type"), ("meta", "has no index")]
)
def test_a_device_that_could_mean_another_one_is_refused(load, name, device, problem):
    platform = load(hook(name, "raise AssertionError('the hook was called')"))
    method = getattr(platform, name)
    arguments = {"pin_host_memory": (4096, 64), "pinned_buffer": (64,)}.get(name, ())
    with pytest.raises(PlatformError, match=problem):
        method(torch.device(device), *arguments)


def test_optional_hooks_that_are_absent_answer_none(load):
    platform = load()
    assert platform.check_device(DEVICE) is None
    assert platform.pin_host_memory(DEVICE, 4096, 64) is None
    assert platform.pinned_buffer(DEVICE, 64) is None
    assert platform.memory_info(DEVICE) is None
    assert platform.distributed_backend() is None
    platform.empty_cache(DEVICE)
    with platform.profiler_range("forward"):
        pass


def test_a_profiler_range_of_the_plugin_is_entered(load):
    platform = load("""
        import contextlib
        @hookimpl
        def profiler_range(name):
            return contextlib.nullcontext(name)
    """)
    with platform.profiler_range("forward") as marked:
        assert marked == "forward"


def test_an_exception_while_checking_a_device_is_a_fault(load):
    platform = load(hook("check_device", "raise RuntimeError('driver error 719')"))
    fault = platform.check_device(DEVICE)
    assert isinstance(fault, DeviceFault)
    assert "driver error 719" in fault.reason


def test_a_fault_that_a_plugin_found_is_passed_on(load):
    platform = load("""
        from sidestream.platforms.device import DeviceFault
        @hookimpl
        def check_device(device):
            return DeviceFault(reason=f"{device} is off by one")
    """)
    assert platform.check_device(DEVICE) == DeviceFault(reason="meta:1 is off by one")


def test_the_no_op_base_has_no_streams_and_no_events():
    platform = load_platform("cpu")
    device = platform.device()
    platform.set_device(device)
    assert not platform.is_asynchronous
    assert platform.side_stream(device) is None
    assert platform.record_device_event(device) is None
    assert platform.check_device(device) is None
    assert platform.distributed_backend() == "gloo"
    platform.synchronize_device(device)
    platform.empty_cache(device)


def test_a_vendor_is_asynchronous(load):
    assert load().is_asynchronous
