"""What a platform plugin has to do, as pytest classes to subclass.

::

    from sidestream.testing.contract import PlatformContract

    class TestMyPlatform(PlatformContract):
        platform_name = "mine"

The plugin is found as always, by its entry point or ``SIDESTREAM_PLUGINS``. Where its probe says
that the hardware is absent, the tests that need it are skipped with the probe's reason.

Run each platform in a process of its own: torch has one place for device types from outside (npu,
musa, sim), and whoever takes it changes what torch calls pinned memory. ``PlatformContract`` takes
well under a minute. For a plugin without streams there is ``PluginContract``, for a machine without
the hardware ``ProbeContract``, which both contain.

The tests never compare durations: a stream is kept busy, and what completes meanwhile tells which
work waits for which.
"""

from __future__ import annotations

from sidestream.testing.contract.events import EventContract
from sidestream.testing.contract.host_memory import HostMemoryContract
from sidestream.testing.contract.plugin import PluginContract
from sidestream.testing.contract.probe import ProbeContract
from sidestream.testing.contract.queueing import QueueingContract
from sidestream.testing.contract.streams import StreamContract

__all__ = ["PlatformContract", "PluginContract", "ProbeContract"]


class PlatformContract(EventContract, StreamContract, QueueingContract, HostMemoryContract):
    """What a platform with streams does.

    Override :meth:`queue_work` where there is no page-locked memory, or :meth:`busy_stream` where a
    stream can be held.
    """
