"""Device work of a given length, for each kind of device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch

    from sidestream.bench.workload import Kind

#: Work that calibrates: enough for the device to reach its clocks.
_CALIBRATION_S: Final = 0.1
#: A matrix product of this side takes 0.2 ms on a large GPU and fills it.
_SIDE: Final = 4096
#: A buffer that no cache holds.
_BUFFER_BYTES: Final = 256 << 20


class Forwards(Protocol):
    """Queues work on one device's current stream."""

    def queue(self, kind: Kind, seconds: float) -> None:
        """Queue work that takes about that long; on the CPU, do it."""
        ...

    def tick(self) -> None:
        """Queue one very small kernel."""
        ...


def forwards_on(device: torch.device) -> Forwards:
    """Make the work for a device."""
    if device.type == "cpu":
        return CpuForwards()
    if device.type == "sim":
        return SimForwards(device)
    return DeviceForwards(device)


class DeviceForwards:
    """Work for an accelerator, measured in kernels when a kind is first asked for."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._wait: Callable[[], Any] = torch.get_device_module(device).synchronize
        self._small = torch.zeros(64, device=device)
        self._kernels: dict[Kind, Callable[[], Any]] = {"launch": self.tick}
        self._kernel_s: dict[Kind, float] = {}

    def queue(self, kind: Kind, seconds: float) -> None:
        """Queue as many kernels as take that long on the device, or on the host to launch."""
        if kind not in self._kernel_s:
            self._kernel_s[kind] = self._measure(kind)
        kernel = self._kernels[kind]
        for _ in range(max(1, round(seconds / self._kernel_s[kind]))):
            kernel()

    def tick(self) -> None:
        """Add one to a few numbers."""
        self._small.add_(1)

    def _measure(self, kind: Kind) -> float:
        import torch

        if kind == "compute":
            # Zeros: the power limit, and with it the clock, stays out of it.
            a = torch.zeros(_SIDE, _SIDE, device=self._device, dtype=torch.bfloat16)
            out = torch.empty_like(a)
            self._kernels[kind] = lambda: torch.mm(a, a, out=out)
        elif kind == "memory":
            buffer = torch.zeros(_BUFFER_BYTES // 4, device=self._device)
            self._kernels[kind] = lambda: buffer.add_(1)
        kernel = self._kernels[kind]
        kernel()  # the first of a kind loads its library: no part of what one takes
        count, elapsed_s = 8, 0.0
        while elapsed_s < _CALIBRATION_S:
            count *= 2
            self._wait()
            began = time.perf_counter()
            for _ in range(count):
                kernel()
            launched_s = time.perf_counter() - began
            self._wait()
            elapsed_s = time.perf_counter() - began
        # Small kernels: what counts is how long the host takes to launch them.
        return (launched_s if kind == "launch" else elapsed_s) / count


class SimForwards:
    """Work for the simulated accelerator: its stream sleeps."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._index = device.index or 0
        self._small = torch.zeros(1, device=device)

    def queue(self, kind: Kind, seconds: float) -> None:
        """Queue one kernel that takes that long and no CPU; all kinds are alike."""
        from sidestream.testing import sim
        from sidestream.testing.sim.lane import Kernel

        stream = sim.default_stream(self._index)
        stream.launch(Kernel(f"{kind} forward", lambda: time.sleep(seconds)))

    def tick(self) -> None:
        """Add one to a number."""
        self._small.add_(1)


class CpuForwards:
    """Work for the CPU, which is one busy core; all kinds are alike."""

    def queue(self, kind: Kind, seconds: float) -> None:
        """Multiply small matrices for that long."""
        import torch

        matrix = torch.zeros(64, 64)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)

    def tick(self) -> None:
        """Do nothing: the CPU has no queue."""
