"""What every plugin does, with streams or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from sidestream.platforms.platform import Platform, load_platform
from sidestream.platforms.registry import PluginRecord
from sidestream.platforms.self_test import self_test
from sidestream.testing.contract.material import filled, in_a_thread, random_bytes
from sidestream.testing.contract.probe import ProbeContract, output_of

if TYPE_CHECKING:
    import torch

_SELF_TEST_SCRIPT: Final = """
import sys
from sidestream.platforms.platform import load_plugin
from sidestream.platforms.self_test import self_test
platform = load_plugin(sys.argv[1], sys.argv[2])
device = platform.device(int(sys.argv[3]))
platform.set_device(device)
self_test(platform, device)
platform.synchronize_device(device)
print("passed")
"""


class PluginContract(ProbeContract):
    """What every plugin does, also one without streams such as the no-op base."""

    #: The device that the tests use.
    device_index: ClassVar[int] = 0

    @pytest.fixture
    def platform(self, record: PluginRecord) -> Platform:
        """Load the platform, or skip with the reason why that is not possible here."""
        if record.probe is None or not record.probe.available:
            pytest.skip(f"{record.name}: {record.reason}")
        platform = load_platform(self.platform_name)
        holder = _private_use_holder()
        if platform.device_type not in (holder, "cpu") and holder is not None:
            pytest.skip(
                f"this process runs platform {holder!r} already, which changes what torch calls "
                f"pinned memory; run the contract of {record.name!r} in a process of its own"
            )
        return platform

    @pytest.fixture
    def device(self, platform: Platform) -> Iterator[torch.device]:
        """Bind this thread to the device, and leave it idle."""
        device = platform.device(self.device_index)
        platform.set_device(device)
        yield device
        platform.synchronize_device(device)

    def test_it_works_in_a_fresh_process(self, platform: Platform, device: torch.device) -> None:
        """A worker imports the plugin by its reference and tests it before it says ready."""
        output = output_of(
            _SELF_TEST_SCRIPT, platform.name, platform.reference, str(device.index or 0)
        )
        assert output.splitlines()[-1] == "passed"

    def test_it_works_in_a_new_thread(self, platform: Platform, device: torch.device) -> None:
        """A new thread needs no more than ``set_device``."""

        def use() -> str:
            platform.set_device(device)
            self_test(platform, device)
            platform.synchronize_device(device)
            return "done"

        assert in_a_thread(use) == "done"

    def test_a_healthy_device_has_no_fault(self, platform: Platform, device: torch.device) -> None:
        """``check_device`` answers None, also a second time and with work queued."""
        filled(device, random_bytes())
        assert platform.check_device(device) is None
        assert platform.check_device(device) is None

    def test_free_memory_is_part_of_the_total(
        self, platform: Platform, device: torch.device
    ) -> None:
        """``memory_info`` answers (free, total) bytes, or None."""
        info = platform.memory_info(device)
        if info is not None:
            free, total = info
            assert 0 <= free <= total
            assert total > 0

    def test_emptying_the_cache_keeps_live_tensors(
        self, platform: Platform, device: torch.device
    ) -> None:
        """``empty_cache`` frees what nobody holds."""
        sent = random_bytes()
        kept = filled(device, sent)
        platform.empty_cache(device)
        assert kept.cpu().equal(sent)

    def test_the_distributed_backend_has_a_name(self, platform: Platform) -> None:
        """``distributed_backend`` answers a name for ``torch.distributed``, or None."""
        backend = platform.distributed_backend()
        assert backend is None or (isinstance(backend, str) and backend)

    def test_a_profiler_range_takes_any_name_and_passes_errors_on(
        self, platform: Platform, device: torch.device
    ) -> None:
        """A range wraps code that may fail."""
        with pytest.raises(KeyError), platform.profiler_range("request {7} %s"):
            raise KeyError


def _private_use_holder() -> str | None:
    """Name the platform that took torch's one slot for devices from outside, if one did."""
    import torch

    # The name has no public getter.
    name: str = torch._C._get_privateuse1_backend_name()
    return None if name == "privateuseone" else name
