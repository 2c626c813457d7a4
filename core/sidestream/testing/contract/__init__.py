"""What a platform plugin has to do, as pytest classes to subclass.

::

    from sidestream.testing.contract import PlatformContract

    class TestMyPlatform(PlatformContract):
        platform_name = "mine"

The plugin is found as always, by its entry point or ``SIDESTREAM_PLUGINS``. Where its probe says
that the hardware is absent, the tests that need it are skipped with the probe's reason.

The tests never compare durations: a stream is kept busy, and what completes meanwhile tells which
work waits for which.
"""

from __future__ import annotations

from sidestream.testing.contract.events import EventContract
from sidestream.testing.contract.host_memory import HostMemoryContract
from sidestream.testing.contract.plugin import PluginContract
from sidestream.testing.contract.streams import StreamContract

__all__ = ["PlatformContract", "PluginContract"]


class PlatformContract(EventContract, StreamContract, HostMemoryContract):
    """What a platform with streams does.

    Override :meth:`busy_stream` where a stream can be held, or where there is no page-locked
    memory.
    """
