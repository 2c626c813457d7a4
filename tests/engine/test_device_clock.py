"""Device times on the host's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from sidestream.worker.device_clock import DeviceClock


@dataclass
class At:
    """An event at a time of the device's clock, as platforms give them."""

    device_s: float

    def query(self):
        return True

    def wait(self, timeout_s=None):
        return True

    def elapsed_s(self, earlier):
        return self.device_s - earlier.device_s


class Untimed(At):
    def elapsed_s(self, earlier):
        raise RuntimeError("not recorded with timing")


def test_distances_are_the_devices_own_however_late_the_host_looks():
    clock = DeviceClock()
    clock.start(At(10.0))
    first_end, first_start = clock.place(At(9.97), At(9.9))
    second_end, second_start = clock.place(At(9.99), At(9.95))
    assert first_end - first_start == pytest.approx(0.07, abs=1e-6)
    assert second_end - first_end == pytest.approx(0.02, abs=1e-6)
    assert second_start - first_start == pytest.approx(0.05, abs=1e-6)
    assert second_end <= time.monotonic()


def test_the_axis_is_placed_by_the_host():
    assert DeviceClock().place(At(123.0))[0] == pytest.approx(time.monotonic(), abs=1)


def test_clocks_that_drift_apart_are_set_again():
    clock = DeviceClock()
    clock.place(At(0.0))
    (end,) = clock.place(At(1000.0))  # the device says 1,000 s have passed, the host next to none
    assert end == pytest.approx(time.monotonic(), abs=1)
    assert end - clock.place(At(999.99))[0] == pytest.approx(0.01, abs=1e-6)


def test_what_cannot_be_timed_is_none():
    clock = DeviceClock()
    assert clock.place(At(1.0), None)[1] is None
    assert clock.place(Untimed(2.0), At(1.0)) == [None, None]
    assert clock.place(At(3.0), At(2.0))[0] is not None
