"""The synthetic pipeline that is measured, and what it notes of itself in its worker."""

from __future__ import annotations

import math
import resource
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from sidestream.bench.forwards import forwards_on
from sidestream.bench.workload import Workload, fill_of
from sidestream.models.post_process import decoded_to_output
from sidestream.platforms.platform import Platform, load_plugin
from sidestream.request import DiffusionRequest, SamplingParams

if TYPE_CHECKING:
    from sidestream.config import PipelineConfig
    from sidestream.platforms.device import DeviceEvent

    #: When the host began and was done, the events at both ends, whether the device was idle.
    _Marks = tuple[float, float, DeviceEvent | None, DeviceEvent | None, bool | None]

REFERENCE: Final = "sidestream.bench.pipelines:Synthetic"
#: What stands for an output that was dropped on the device.
DROPPED: Final = "dropped"
#: The thread that copies, by its name.
_OUTPUT_THREAD: Final = "sidestream-output"
#: Forwards whose events are kept; older ones are forgotten.
_KEPT: Final = 4096
#: How many events the clocks may be set by.
_CLOCK_TRIES: Final = 10


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward, as its pipeline saw it."""

    #: ``time.monotonic()`` before its first launch, and from there to its last one.
    began_at: float
    host_s: float
    #: From the end of its first, very small kernel to the end of its last, on the device; None
    #: where there are no timed events.
    device_s: float | None
    #: From the end of the last kernel of the forward before it to the end of its first kernel.
    gap_s: float | None
    #: Whether the device had nothing queued when the host began to launch it.
    found_idle: bool | None
    #: When its last kernel ended, on the host's clock, which is set by the device's before each
    #: series: the two drift apart by some microseconds a second.
    ended_at: float | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process used so far."""

    cpu_s: float
    output_thread_cpu_s: float
    minor_faults: int
    #: How often one of its threads went to sleep, and so was woken.
    wakeups: int
    #: Device memory that was asked of the driver; None where that is not known.
    device_allocations: int | None = None


class Synthetic:
    """Make forwards as a :class:`Workload` says, with outputs that can be checked."""

    supports_request_batch = True
    outputs_are_private = True
    post_process = None

    def __init__(self, device: torch.device, platform: Platform) -> None:
        self.device = device
        self._platform = platform
        self._work = forwards_on(device)
        self._marks: deque[_Marks] = deque(maxlen=_KEPT)
        self._last: DeviceEvent | None = None
        self._zero: tuple[DeviceEvent, float] | None = None

    @classmethod
    def load(cls, config: PipelineConfig) -> Self:
        """Make it for the device and the platform that the options name."""
        platform = load_plugin(config.options["platform"], config.options["plugin"])
        return cls(config.device, platform)

    def forward(self, requests: Sequence[DiffusionRequest]) -> list[Any]:
        """Queue one forward; every member of a batch gets an output of its own."""
        workload = Workload.of(requests[0])
        found_idle = None if self._last is None else self._last.query()
        began_at = time.monotonic()
        self._work.tick()
        first = self._mark()
        self._work.queue(workload.kind, workload.forward_s)
        outputs = [self._output(workload, r.sampling_params.seed or 0) for r in requests]
        launched_at = time.monotonic()
        self._last = self._mark()
        self._marks.append((began_at, launched_at, first, self._last, found_idle))
        if workload.waits:
            self._platform.synchronize_device(self.device)
        return outputs if workload.keeps else [DROPPED] * len(requests)

    def _output(self, workload: Workload, number: int) -> torch.Tensor:
        dtype = getattr(torch, workload.dtype)
        return torch.full(workload.shape, fill_of(number), device=self.device, dtype=dtype)

    def _mark(self) -> DeviceEvent | None:
        return self._platform.record_device_event(self.device, timing=True)

    # --- what the bench calls ------------------------------------------------------------------

    def run_dropped(self, prompt: str, count: int) -> float:
        """Run forwards back to back with nothing between them; gives forwards a second."""
        request = DiffusionRequest(prompt, SamplingParams(seed=0))
        self._platform.synchronize_device(self.device)
        began = time.perf_counter()
        for _ in range(count):
            self.forward([request])
        self._platform.synchronize_device(self.device)
        return count / (time.perf_counter() - began)

    def take_forwards(self) -> list[Forward]:
        """Give the forwards since the last call, once the device is done with them."""
        self._platform.synchronize_device(self.device)
        marks, self._last = list(self._marks), None
        self._marks.clear()
        forwards: list[Forward] = []
        before = None
        for began_at, launched_at, first, last, found_idle in marks:
            forwards.append(
                Forward(
                    began_at=began_at,
                    host_s=launched_at - began_at,
                    device_s=_between(first, last),
                    gap_s=_between(before, first),
                    found_idle=found_idle,
                    ended_at=launched_at if last is None else self._host_time(last),
                )
            )
            before = last
        self._set_clock()
        return forwards

    def _set_clock(self) -> None:
        """Set the clocks by the event that the host was quickest to see: it may be late for one."""
        quickest_s = math.inf
        for _ in range(_CLOCK_TRIES):
            began_at = time.monotonic()
            zero = self._mark()
            if zero is None:
                return
            while not zero.query():  # the device is idle, so it takes microseconds
                pass
            seen_at = time.monotonic()
            if seen_at - began_at < quickest_s:
                quickest_s, self._zero = seen_at - began_at, (zero, seen_at)

    def _host_time(self, event: DeviceEvent) -> float | None:
        if self._zero is None:
            return None
        elapsed_s = event.elapsed_s(self._zero[0])
        return None if elapsed_s is None else self._zero[1] + elapsed_s

    def usage(self) -> Usage:
        """Say what this process used so far."""
        return usage_of_this_process(self.device)

    def pure_copy_s(self, nbytes: int, rounds: int) -> list[float]:
        """Time single copies of that size from the device into a page-locked buffer."""
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        target = self._platform.pinned_buffer(self.device, nbytes)
        if target is None:
            target = torch.empty(nbytes, dtype=torch.uint8)
        times = []
        for _ in range(rounds + 1):
            self._platform.synchronize_device(self.device)
            first, began = self._mark(), time.perf_counter()
            target.copy_(source, non_blocking=True)
            last = self._mark()
            self._platform.synchronize_device(self.device)
            took = _between(first, last)
            times.append(time.perf_counter() - began if took is None else took)
        return times[1:]  # the first also wakes the device up

    def workspace_bytes(self, frames: int, height: int, width: int) -> int | None:
        """Measure what making uint8 on the device takes beside its input and its result.

        None where the device does not count its memory.
        """
        if self.device.type != "cuda":
            return None
        decoded = torch.zeros(frames, 3, height, width, device=self.device, dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = decoded_to_output(decoded, SamplingParams())
        peak = torch.cuda.max_memory_allocated(self.device)
        return peak - before - result.numel()

    def start_profile(self) -> None:
        """Record the device's copies from now on."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop_profile(self) -> list[tuple[str, int]]:
        """Give the copies from device to host since, as (kind, bytes)."""
        from sidestream.bench.profile import device_to_host_copies

        self._platform.synchronize_device(self.device)
        self._profile.stop()
        return device_to_host_copies(self._profile)


def usage_of_this_process(device: torch.device | None = None) -> Usage:
    """Say what the calling process used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allocations = None
    if device is not None and device.type == "cuda":
        allocations = torch.cuda.memory_stats(device).get("num_device_alloc")
    return Usage(
        cpu_s=time.process_time(),
        output_thread_cpu_s=_output_thread_cpu_s(),
        minor_faults=used.ru_minflt,
        wakeups=used.ru_nvcsw,
        device_allocations=allocations,
    )


def _output_thread_cpu_s() -> float:
    for thread in threading.enumerate():
        if thread.name == _OUTPUT_THREAD and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def _between(first: DeviceEvent | None, last: DeviceEvent | None) -> float | None:
    return None if first is None or last is None else last.elapsed_s(first)
