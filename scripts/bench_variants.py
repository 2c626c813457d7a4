"""Ways to bring outputs out beside a launch-bound forward, each compared with dropping them.

    python scripts/bench_variants.py [--platform cuda] [--times 4] [--json FILE]

A way is a class in ``WAYS``. Each runs in short blocks in turn with the same forwards whose outputs
are dropped, all in one process, as a worker is; this process reads and checks what comes out.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import errno
import functools
import itertools
import json
import multiprocessing
import os
import queue
import resource
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from sidestream import ResultChannel, ResultPumpThread, SlotSink, load_platform
from sidestream.bench.blocks import BLOCK, ORDER, ratio_of
from sidestream.bench.findings import Findings
from sidestream.bench.forwards import forwards_on
from sidestream.bench.run import timed
from sidestream.bench.table import Table
from sidestream.bench.workload import Workload, fill_of
from sidestream.request import OutputTimings
from sidestream.transport.control_page import ControlPage
from sidestream.transport.packing import pack
from sidestream.worker.handover import HandOver
from sidestream.worker.pipeline import Payload
from sidestream.worker.place import Places
from sidestream.worker.sink import OutputLabel


class Case(NamedTuple):
    """Forwards of small kernels, of which the host is the limit."""

    forward_s: float
    output: str
    #: For all ways together.
    seconds: float


CASES = (
    Case(0.005, "1024px", 9.0),
    Case(0.02, "1024px", 20.0),
    Case(0.02, "4x1024px-float32", 10.0),
)
#: Elsewhere than on a real device: only that it runs, and that outputs are right.
SMALL_CASES = (Case(0.005, "64px", 0.5),)
#: Forwards between a pause and the first block.
LEAD = 3
#: Outputs on the device at a time, as ``max_pending_outputs``.
PLACES = 2
TIMEOUT_S = 10.0
#: Bytes for one POSIX semaphore, of which glibc needs 32.
GATE_BYTES = 64


@dataclass(frozen=True)
class Stage:
    """What a way has to work with, in the process of the forwards."""

    platform: Any
    device: torch.device
    ends: Any
    #: Address of memory that the reader shares, with a semaphore in it.
    gate: int


class Way:
    """Brings outputs out; used by the thread that queues the forwards."""

    name: ClassVar[str]

    @staticmethod
    def missing(platform: str) -> str | None:
        """Say why it can't run on a platform; None: it can."""
        return None

    @staticmethod
    def before_open(gate: int) -> None:
        """Wait in the reader, which has the message, until the bytes are there too."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def begin(self) -> None:
        """Do what comes before a forward: its start on the device, and a place for its output."""
        self.stage.platform.record_device_event(self.stage.device, timing=True)

    def bring_out(self, number: int, tensor: torch.Tensor) -> None:
        """Do what comes behind it."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until what was brought out so far is out."""

    def close(self) -> None:
        """End it, once it is settled."""

    def sink(self) -> SlotSink:
        """Make the memory for its outputs."""
        stage = self.stage
        ends = stage.ends
        sink = SlotSink(
            ends.messages, ends.releases, stage.platform, stage.device, budget_bytes=1 << 30
        )
        sink.reserve(60 << 20, 4)
        return sink


class Dropped(Way):
    """The other half of each pair; by itself it shows what the comparison can't tell apart."""

    name = "dropped, too"

    def bring_out(self, number: int, tensor: torch.Tensor) -> None:
        self.stage.platform.record_device_event(self.stage.device, timing=True)


class AsItIs(Way):
    """What a worker does, by its own parts."""

    name = "as it is"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.outputs = HandOver(ControlPage.create(), self.lost)
        self.outputs.start(stage.platform, stage.device, self.sink(), in_background=True)
        self.places = Places(PLACES)

    def lost(self, error: Exception) -> None:
        raise error

    def begin(self) -> None:
        if not self.places.take(TIMEOUT_S):
            raise TimeoutError(f"{self.name}: no place came free within {TIMEOUT_S:g} s.")
        self.forward = self.outputs.begin_forward()

    def bring_out(self, number: int, tensor: torch.Tensor) -> None:
        forward = self.forward
        timings = OutputTimings(
            forward_started_at=forward.started_at, forward_ended_at=time.monotonic()
        )
        payload = Payload(tree=tensor, is_private=True)
        label = OutputLabel(output_id=str(number))
        self.outputs.hand_over(label, payload, forward, timings, self.places.give_back)
        forward.end()

    def settle(self) -> None:
        self.outputs.drain()

    def close(self) -> None:
        self.outputs.close()


class ThreadQueues(AsItIs):
    """The output thread queues the copies, too: what a worker does where no slot waits for one."""

    name = "output thread queues"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.outputs.transfer.queue_copy = lambda job, stream: None


class DriverCallback(Way):
    """A bound: no Python signals, and no thread of the worker's wakes.

    The forwards' thread queues the copy and sends the message; behind the copy the driver posts a
    semaphore, and the reader waits for that. It also looks itself whether copies are done.
    """

    name = "driver callback"

    @staticmethod
    def missing(platform: str) -> str | None:
        if platform != "cuda":
            return f"it needs a CUDA driver, and {platform!r} has none"
        return None

    @staticmethod
    def before_open(gate: int) -> None:
        seconds, nanoseconds = divmod(time.time_ns() + int(TIMEOUT_S * 1e9), 10**9)
        until = (ctypes.c_long * 2)(seconds, nanoseconds)
        libc = ctypes.CDLL(None, use_errno=True)
        while libc.sem_timedwait(ctypes.c_void_p(gate), until) != 0:
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.slots = self.sink()
        self.stream = stage.platform.side_stream(stage.device, 0)
        self.pending: deque[tuple[Any, Any]] = deque()
        post = ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p)
        self.arguments = post, ctypes.c_void_p(stage.gate)

    @functools.cached_property
    def launch(self) -> Any:
        return ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc

    def post_behind_copy(self) -> None:
        """Have the driver post the semaphore once the stream gets there."""
        code = self.launch(ctypes.c_void_p(self.stream.native.cuda_stream), *self.arguments)
        if code != 0:
            raise RuntimeError(f"cuLaunchHostFunc answered {code}.")

    def begin(self) -> None:
        while self.pending:
            done, packed = self.pending[0]
            if len(self.pending) >= PLACES:
                done.wait()
            elif not done.query():
                break
            packed.drop()
            self.pending.popleft()
        super().begin()

    def bring_out(self, number: int, tensor: torch.Tensor) -> None:
        stage = self.stage
        packed = pack(tensor)
        computed = stage.platform.record_device_event(stage.device, timing=True)
        slot = self.slots.allocate(packed.nbytes)
        self.stream.wait_event(computed)
        with self.stream:
            packed.write(slot.buffer, non_blocking=True)
        done = self.stream.record_event()
        self.slots.publish(OutputLabel(output_id=str(number)), packed, slot, OutputTimings())
        self.post_behind_copy()
        self.pending.append((done, packed))

    def settle(self) -> None:
        while self.pending:
            done, packed = self.pending.popleft()
            done.wait()
            packed.drop()

    def close(self) -> None:
        self.slots.close()


WAYS: tuple[type[Way], ...] = (Dropped, AsItIs, ThreadQueues, DriverCallback)


@dataclass(frozen=True)
class Block:
    """What was seen of one block, for each of its forwards."""

    #: From its first launch to its last: the median.
    forward_s: float
    #: From its first launch to the next one's: the mean.
    period_s: float
    #: How often threads went to sleep, and the CPU time of all but the forwards'.
    wakeups: float
    others_s: float


def planned_s(platform: str) -> float:
    """Give the seconds that all takes, with the start of a process."""
    return 10.0 + sum(case.seconds for case in cases_of(platform))


def cases_of(platform: str) -> Sequence[Case]:
    return SMALL_CASES if platform in ("cpu", "sim") else CASES


@dataclass
class Contender:
    """A way, the numbers of its outputs, and of one case its blocks and those beside them."""

    way: Way
    numbers: Iterator[int] = field(default_factory=itertools.count)
    groups: list[tuple[Block, Block]] = field(default_factory=list)

    def row(self, case: Case) -> dict[str, Any]:
        forward = ratio_of([(own.forward_s, other.forward_s) for own, other in self.groups])
        period = ratio_of([(own.period_s, other.period_s) for own, other in self.groups])
        others = [own.others_s - other.others_s for own, other in self.groups]
        return {
            "forward": f"launch, {1e3 * case.forward_s:g} ms, {case.output}",
            "way": self.way.name,
            "dropped_ms": 1e3 * statistics.median(other.forward_s for _, other in self.groups),
            "forward_ratio": forward.value,
            "forward_95": forward.interval,
            "period_ratio": period.value,
            "period_95": period.interval,
            "groups": forward.pairs,
            "wakeups_per_output": statistics.median(own.wakeups for own, _ in self.groups),
            "other_threads_us": 1e6 * statistics.median(others),
        }


def run_ways(
    platform_name: str, times: float, ends: Sequence[Any], gates: Sequence[Any], results: Any
) -> None:
    """Run each way in turn over the same forwards; in a process of its own.

    Puts rows and what to note, then None.
    """
    platform = load_platform(platform_name)
    device = platform.device(0)
    platform.set_device(device)
    work = forwards_on(device)
    dropped = Dropped(Stage(platform, device, None, 0))
    contenders = []
    for cls, its_ends, gate in zip(ways_of(platform_name), ends, gates, strict=True):
        try:
            contender = Contender(cls(Stage(platform, device, its_ends, ctypes.addressof(gate))))
            small = Case(0.001, "64px", 0.0)
            run_block(device, work, small, contender.way, contender.numbers)
            contenders.append(contender)
        except Exception as error:  # noqa: BLE001 - boundary: one way; the others go on
            traceback.print_exc()
            results.put(f"{cls.name}: failed: {error!r}.")
    for case in cases_of(platform_name):
        until = time.monotonic() + times * case.seconds
        platform.synchronize_device(device)

        def one_round(case: Case = case) -> None:
            for contender in contenders:
                # The first forwards behind a pause are nobody's.
                run_block(device, work, case, dropped, itertools.count(), size=LEAD)
                blocks: dict[bool, list[Block]] = {True: [], False: []}
                for is_way in ORDER:
                    way, numbers = dropped, itertools.count()
                    if is_way:
                        way, numbers = contender.way, contender.numbers
                    blocks[is_way].append(run_block(device, work, case, way, numbers))
                contender.groups.append((mean_of(blocks[True]), mean_of(blocks[False])))
                # Else the next one would have this one's last outputs beside it.
                contender.way.settle()
                platform.synchronize_device(device)

        one_round()  # makes arenas, and chooses kernels
        began = time.monotonic()
        one_round()
        now = time.monotonic()
        for contender in contenders:
            contender.groups.clear()
        for _ in range(max(1, int((until - now) / (now - began)))):
            one_round()
        for contender in contenders:
            results.put(contender.row(case))
            contender.groups.clear()
    for contender in contenders:
        contender.way.settle()
        contender.way.close()
    results.put(None)


def run_block(
    device: torch.device,
    work: Any,
    case: Case,
    way: Way,
    numbers: Iterator[int],
    *,
    size: int = BLOCK,
) -> Block:
    """Run one block; its first forward counts for nothing."""
    workload = Workload(output=case.output, forward_s=case.forward_s, kind="launch")
    dtype = getattr(torch, workload.dtype)
    began, launched = [], []
    for index in range(size):
        if index == 1:
            sleeps, others_s = _sleeps(), _others_s()
        began.append(time.perf_counter())
        way.begin()
        work.queue(workload.kind, workload.forward_s)
        number = next(numbers)
        tensor = torch.full(workload.shape, fill_of(number), device=device, dtype=dtype)
        launched.append(time.perf_counter())
        way.bring_out(number, tensor)
        del tensor
    ended = time.perf_counter()
    counted = size - 1
    forwards = [end - start for start, end in zip(began, launched, strict=True)]
    return Block(
        forward_s=statistics.median(forwards[1:]),
        period_s=(ended - began[1]) / counted,
        wakeups=(_sleeps() - sleeps) / counted,
        others_s=(_others_s() - others_s) / counted,
    )


def mean_of(blocks: Sequence[Block]) -> Block:
    """Take the blocks of one group together."""
    names = [field.name for field in dataclasses.fields(Block)]
    return Block(**{n: statistics.fmean(getattr(block, n) for block in blocks) for n in names})


def _sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _others_s() -> float:
    return time.process_time() - time.thread_time()


class Reader:
    """Reads and checks what one way brings out."""

    def __init__(self, cls: type[Way], channel: ResultChannel, gate: Any) -> None:
        self.cls = cls
        self.gate = ctypes.addressof(gate)
        self.count = 0
        self.wrong: list[str] = []
        # A pump each: waiting for one way's bytes holds no other one up.
        self.pump = ResultPumpThread([channel], self.take).start()

    def take(self, channel: ResultChannel, delivery: Any) -> None:
        self.cls.before_open(self.gate)
        message, _ = delivery.open()
        tensor = message.output
        if message.error is not None or tensor is None:
            self.wrong.append(f"output {self.count} failed: {message.error}")
            return
        seen = {int(tensor[(0,) * tensor.ndim]), int(tensor[(-1,) * tensor.ndim])}
        if seen != {fill_of(self.count)} or message.async_output_id != str(self.count):
            self.wrong.append(f"{message.async_output_id} in place of {self.count} shows {seen}")
        self.count += 1


def ways_of(platform: str) -> list[type[Way]]:
    """List the ways that a platform can go."""
    return [cls for cls in WAYS if cls.missing(platform) is None]


def variants(platform: str, times: float = 1.0) -> Iterator[Findings]:
    """Measure all ways, ``times`` as long as planned; gives the table after each case.

    Raises:
        RuntimeError: An output was wrong, or out of order.
    """
    table = Table(
        name="variants",
        title="Ways to bring outputs out: a forward's and a period's time, relative to dropped "
        "outputs (95 %)",
    )
    for cls in WAYS:
        if (reason := cls.missing(platform)) is not None:
            table.notes.append(f"{cls.name}: not run: {reason}.")
    ways = ways_of(platform)
    context = multiprocessing.get_context("spawn")
    pairs = [ResultChannel.pair() for _ in ways]
    gates = [context.RawArray(ctypes.c_byte, GATE_BYTES) for _ in ways]
    for gate in gates:
        if ctypes.CDLL(None).sem_init(ctypes.c_void_p(ctypes.addressof(gate)), 1, 0) != 0:
            raise OSError("sem_init failed.")
    results = context.Queue()
    ends = [theirs for _, theirs in pairs]
    process = context.Process(
        target=run_ways, args=(platform, times, ends, gates, results), daemon=True
    )
    process.start()
    for theirs in ends:
        theirs.close()
    readers = [
        Reader(cls, channel, gate)
        for cls, (channel, _), gate in zip(ways, pairs, gates, strict=True)
    ]
    try:
        while (found := next_of(results, process)) is not None:
            if isinstance(found, str):
                table.notes.append(found)
            else:
                table.add(**found)
            yield Findings(tables=[table])
        process.join(TIMEOUT_S)
    finally:
        process.kill()
        for reader in readers:
            reader.pump.stop(TIMEOUT_S)
    wrong = [f"{reader.cls.name}: {what}" for reader in readers for what in reader.wrong]
    if wrong:
        raise RuntimeError("; ".join(wrong[:5]))
    counts = (f"{reader.cls.name} {reader.count}" for reader in readers if reader.count)
    table.notes.append(f"Outputs that were read and right: {', '.join(counts)}.")
    yield Findings(tables=[table])


def next_of(results: Any, process: Any) -> Any:
    """Give what the process says next.

    Raises:
        RuntimeError: It ended without a word.
    """
    while True:
        is_alive = process.is_alive()
        try:
            return results.get(timeout=1.0)
        except queue.Empty:
            if not is_alive:
                raise RuntimeError(f"The process ended with {process.exitcode}.") from None


def main() -> int:
    """Measure them alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--times", type=float, default=1.0, help="as long as planned")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for findings in timed(variants(arguments.platform, arguments.times)):
        (table,) = findings.tables
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(table.to_json(), indent=1) + "\n")
    print(table.to_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
