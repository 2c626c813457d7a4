"""From a tensor of one process to a view of it in another, on the CPU, against one memcpy."""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sidestream.bench.pipelines import usage_of_this_process
from sidestream.bench.table import Table, median, percentile
from sidestream.bench.workload import OUTPUTS, Workload
from sidestream.errors import InternalError
from sidestream.executor.pump import ResultPumpThread
from sidestream.executor.result_channel import ResultChannel, WorkerEnds
from sidestream.platforms.platform import load_platform
from sidestream.request import OutputTimings
from sidestream.transport.packing import pack
from sidestream.worker.sink import OutputLabel, SlotSink

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sidestream.transport.channel import Channel, Frame
    from sidestream.transport.envelope import Delivery

#: By output: how much longer than one memcpy the whole way may take.
_GOALS: Final = {"1024px-float32": 1.3, "81x720p-bfloat16": 1.15}
_VIEW_US: Final = 20.0
_TIMEOUT_S: Final = 60.0
#: Slots that are there before: the one being written, and one whose return is on its way.
_SLOTS: Final = 2
_FILL: Final = 7


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the writer says of one round."""

    #: One copy of the same bytes into memory that was written to before.
    memcpy_s: float
    #: CPU time of that copy, and of this process's part of the way.
    memcpy_cpu_s: float
    cpu_s: float
    #: ``time.monotonic()`` before it took the tensor apart, and after it had copied and sent.
    began_at: float
    sent_at: float
    minor_faults: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """When the reader's pump began to receive a message, had the view, had read from it."""

    woke_at: float
    viewed_at: float
    read_at: float
    #: CPU time of the pump from its wake-up to the view.
    cpu_s: float


def transport(outputs: Sequence[str], *, seconds: float = 3.0) -> Table:
    """Measure each kind of output for about ``seconds``.

    Each round is one memcpy in the writing process, then the whole way through a warm slot: pack,
    copy, send, receive, rebuild, read. ``view`` is the part from the pump's wake-up on. Ratios are
    of one round, since other work on the machine slows both.
    """
    table = Table(
        name="transport",
        title="From a tensor to a view of it in another process, relative to one memcpy",
    )
    for output in outputs:
        _report(table, output, *_measure(Workload(output=output), seconds))
    return table


def _measure(workload: Workload, seconds: float) -> tuple[list[Written], list[Seen]]:
    written: list[Written] = []
    seen: list[Seen] = []
    faults = usage_of_this_process().minor_faults
    with _writer(workload) as (commands, arrivals):
        commands.recv()  # it is up
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(written) < 5:
            commands.send("write")
            said: Written = commands.recv()
            # The reader's faults are counted here, the writer's there.
            before, faults = faults, usage_of_this_process().minor_faults
            written.append(
                dataclasses.replace(said, minor_faults=said.minor_faults + faults - before)
            )
            seen.append(arrivals.get(timeout=_TIMEOUT_S))
    return written[2:], seen[2:]  # the first ones map the arena and touch its pages


@contextmanager
def _writer(workload: Workload) -> Iterator[tuple[Connection, queue.SimpleQueue[Seen]]]:
    """Start a process that writes one output whenever it is told to."""
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    channel, ends = ResultChannel.pair()
    process = context.Process(target=_write, args=(workload, theirs, ends), daemon=True)
    process.start()
    theirs.close()
    ends.close()
    arrivals: queue.SimpleQueue[Seen] = queue.SimpleQueue()
    stamped = _Stamped(channel.messages)
    channel.messages = stamped  # type: ignore[assignment]

    def on_message(_channel: ResultChannel, delivery: Delivery) -> None:
        message, _ = delivery.open()
        viewed_at, cpu_s = time.monotonic(), time.thread_time() - stamped.entered_cpu_s
        tensor = message.output
        last = int(tensor.view(-1)[-1])
        seen = Seen(
            woke_at=stamped.entered_at,
            viewed_at=viewed_at,
            read_at=time.monotonic(),
            cpu_s=cpu_s,
        )
        arrivals.put(seen)
        if last != _FILL:
            raise InternalError(f"A view shows {last} where {_FILL} was written.")

    pump = ResultPumpThread([channel], on_message).start()
    try:
        yield commands, arrivals
        commands.send(None)
        process.join(_TIMEOUT_S)
    finally:
        process.kill()
        process.join()
        commands.close()
        pump.stop()
        channel.close()


class _Stamped:
    """A channel that notes when it is asked to receive."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.entered_at = 0.0
        self.entered_cpu_s = 0.0

    def receive(self) -> Frame | None:
        """Receive; the pump asks first right after its wake-up, then until nothing is there."""
        entered_at, entered_cpu_s = time.monotonic(), time.thread_time()
        frame = self._channel.receive()
        if frame is not None:
            self.entered_at, self.entered_cpu_s = entered_at, entered_cpu_s
        return frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def _write(workload: Workload, commands: Connection, ends: WorkerEnds) -> None:
    """Write one output for each command until None comes; in the other process."""
    platform = load_platform("cpu")
    sink = SlotSink(
        ends.messages,
        ends.releases,
        platform,
        platform.device(),
        budget_bytes=_SLOTS * (workload.nbytes + (1 << 20)),
    )
    sink.reserve(workload.nbytes, _SLOTS)
    tensor = torch.full(workload.shape, _FILL, dtype=getattr(torch, workload.dtype))
    source = tensor.view(torch.uint8).numpy().reshape(-1)
    target = np.zeros_like(source)
    target[:] = 1  # its pages exist from here on
    commands.send(None)
    while commands.recv() is not None:
        began, began_cpu_s = time.perf_counter(), time.thread_time()
        np.copyto(target, source)
        memcpy_s = time.perf_counter() - began
        memcpy_cpu_s = time.thread_time() - began_cpu_s
        faults = usage_of_this_process().minor_faults
        began_at, began_cpu_s = time.monotonic(), time.thread_time()
        packed = pack(tensor)
        slot = sink.allocate(packed.nbytes)
        packed.write(slot.buffer)
        sink.publish(OutputLabel(output_id="out-1"), packed, slot, OutputTimings())
        sent_at, cpu_s = time.monotonic(), time.thread_time() - began_cpu_s
        faults = usage_of_this_process().minor_faults - faults
        commands.send(
            Written(
                memcpy_s=memcpy_s,
                memcpy_cpu_s=memcpy_cpu_s,
                cpu_s=cpu_s,
                began_at=began_at,
                sent_at=sent_at,
                minor_faults=faults,
            )
        )
    sink.close()


def _report(table: Table, output: str, written: list[Written], seen: list[Seen]) -> None:
    rounds = list(zip(written, seen, strict=True))
    ratios = [(s.read_at - w.began_at) / w.memcpy_s for w, s in rounds]
    # What other work on the machine adds by taking the cores is not in these.
    cpu_ratios = [(w.cpu_s + s.cpu_s) / w.memcpy_cpu_s for w, s in rounds]
    views_us = [1e6 * (s.viewed_at - s.woke_at) for s in seen]
    whole_s = [s.read_at - w.began_at for w, s in rounds]
    memcpy_s = [w.memcpy_s for w in written]
    table.add(
        output=output,
        mb=Workload(output=output).nbytes / 1e6,
        memcpy_ms=1e3 * median(memcpy_s),
        whole_ms=1e3 * median(whole_s),
        ratio=median(ratios),
        ratio_of_best=min(whole_s) / min(memcpy_s),
        cpu_ratio=median(cpu_ratios),
        wake_up_us=1e6 * median([s.woke_at - w.sent_at for w, s in rounds]),
        view_best_us=min(views_us),
        view_p50_us=percentile(views_us, 0.5),
        view_p99_us=percentile(views_us, 0.99),
        view_cpu_us=1e6 * median([s.cpu_s for s in seen]),
        faults=median([float(w.minor_faults) for w in written]),
        rounds=len(rounds),
        bound=1.0,
    )
    if output in _GOALS:
        table.goal(f"{output}: whole way to memcpy", median(ratios), bound=_GOALS[output])
    table.goal(f"{output}: view, p50", percentile(views_us, 0.5), bound=_VIEW_US, unit="us")


def known_outputs() -> list[str]:
    """List the outputs whose transport has a goal or a use."""
    return [name for name in OUTPUTS if name not in ("64px", "512px", "2048px", "4x1024px")]
