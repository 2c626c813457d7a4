"""The simulated accelerator with a planted fault: its side stream forgets to wait for events.

A test of the tests: with this platform every output must be poison.
"""

from __future__ import annotations

from sidestream.platforms.hookspecs import hookimpl
from sidestream.testing import sim


class CarelessStream:
    queues_freely = True

    def __init__(self, stream):
        self._stream = stream

    def wait_event(self, event):
        """Forget it."""

    def record_event(self, timing=False):
        return self._stream.record_event(timing)

    def synchronize(self):
        self._stream.synchronize()

    def __enter__(self):
        self._stream.__enter__()
        return self

    def __exit__(self, *exc):
        self._stream.__exit__(*exc)


@hookimpl
def side_stream(device, priority):
    return CarelessStream(sim.side_stream(device=device, priority=priority))


probe = sim.probe
set_device = sim.set_device
record_device_event = sim.record_device_event
synchronize_device = sim.synchronize_device
check_device = sim.check_device
pin_host_memory = sim.pin_host_memory
pinned_buffer = sim.pinned_buffer
