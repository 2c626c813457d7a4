"""Series of requests through engines, with everything that was noted of them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from sidestream.bench.pipelines import DROPPED, REFERENCE, Forward, Usage, usage_of_this_process
from sidestream.bench.workload import Workload, fill_of
from sidestream.config import EngineConfig
from sidestream.engine import DiffusionEngine
from sidestream.errors import InternalError
from sidestream.output import DiffusionOutput
from sidestream.platforms.platform import load_platform
from sidestream.request import OutputTimings

if TYPE_CHECKING:
    from sidestream.transport.arena import PoolStats

Way = Literal["on", "off"]

#: Room for the largest outputs of the tables, some of them held by the reader.
_HOST_BUFFER_BYTES: Final = 2 << 30
#: Requests before a series that is measured: kernels are chosen and arenas made in them.
_WARM: Final = 4
_WARM_S: Final = 0.02


@dataclass(frozen=True)
class Sample:
    """One output: when what happened to it, but not its bytes."""

    request_id: str
    async_output_id: str | None
    timings: OutputTimings
    #: The caller had the tensor and had read from it.
    taken_at: float


@dataclass(frozen=True, kw_only=True)
class Series:
    """Outputs of one series in their order, and the forwards that made them."""

    samples: Sequence[Sample]
    forwards: Sequence[Forward]
    #: What the worker and this process used from the first to the last of them.
    worker: Sequence[Usage]
    host: Sequence[Usage]
    #: The worker's slots before and after; None for a worker of this process.
    slots: Sequence[PoolStats | None] = field(default=(None, None))

    @cached_property
    def rate(self) -> float:
        """Give outputs a second in steady state: from the first one taken to the last."""
        return (len(self.samples) - 1) / (self.samples[-1].taken_at - self.samples[0].taken_at)

    def used(self, name: str) -> float:
        """Give what worker and main process together used of something of :class:`Usage`."""
        return sum(
            float(getattr(after, name)) - float(getattr(before, name))
            for before, after in (self.worker, self.host)
        )

    @property
    def blocks_made(self) -> int | None:
        """Count arenas and one-shots that were made meanwhile."""
        before, after = self.slots
        return None if before is None or after is None else after.made - before.made


class Session:
    """Engines for one platform, which all tables of one run share: a start takes seconds."""

    def __init__(self, platform: str | None = None) -> None:
        """Choose the platform as an engine would.

        Raises:
            PlatformError: It can't be used.
        """
        self.platform: Final = load_platform(platform)
        self._open = contextlib.ExitStack()
        self._engines: dict[tuple[Any, ...], DiffusionEngine] = {}
        self._pure_copy_s: dict[int, float] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engines; idempotent."""
        self._open.close()
        self._engines.clear()

    @property
    def is_real(self) -> bool:
        """Tell whether times mean something: not on the simulated accelerator."""
        return self.platform.name != "sim"

    @property
    def has_device(self) -> bool:
        """Tell whether there is an accelerator whose figures are worth a full run."""
        return self.platform.name not in ("sim", "cpu")

    @property
    def engines(self) -> int:
        """Count the engines that are up."""
        return len(self._engines)

    @property
    def device_name(self) -> str:
        """Name the device as its vendor does."""
        if self.platform.device_type == "cuda":
            return torch.cuda.get_device_name()
        return self.platform.name

    def engine(self, way: Way = "on", **config: Any) -> DiffusionEngine:
        """Give the engine of these settings; it is started when first asked for."""
        key = (way, *sorted(config.items()))
        if key not in self._engines:
            settings = {"host_buffer_bytes": _HOST_BUFFER_BYTES, **config}
            self._engines[key] = self._open.enter_context(
                DiffusionEngine(
                    EngineConfig(
                        pipeline=REFERENCE,
                        pipeline_options={
                            "platform": self.platform.name,
                            "plugin": self.platform.reference,
                        },
                        platform=self.platform.name,
                        async_output=way == "on",
                        **settings,
                    )
                )
            )
        return self._engines[key]

    def drop(self, way: Way = "on", **config: Any) -> None:
        """End one engine, where its state would disturb what is measured next."""
        engine = self._engines.pop((way, *sorted(config.items())), None)
        if engine is not None:
            engine.close()

    def pure_copy_s(self, nbytes: int, rounds: int = 20) -> float:
        """Give the best time of a copy of that size into page-locked memory, and nothing else."""
        if nbytes not in self._pure_copy_s:
            times = call(self.engine(), "pure_copy_s", nbytes, rounds)
            self._pure_copy_s[nbytes] = min(times)
        return self._pure_copy_s[nbytes]


def call(engine: DiffusionEngine, method: str, *args: Any) -> Any:
    """Call a method of the engine's synthetic pipeline, behind the forwards sent so far."""
    return engine.executor.collective_rpc(method, args)[0]


def limit_of(engine: DiffusionEngine, workload: Workload, count: int) -> float:
    """Give forwards a second with outputs dropped on the device and no engine in between."""
    request = workload.without_output().request(0)
    rate: float = call(engine, "run_dropped", request.prompt, count)
    return rate


def warm_up(engine: DiffusionEngine, workload: Workload, count: int = _WARM) -> None:
    """Run what comes before a series that is measured: the same in short."""
    short = dataclasses.replace(workload, forward_s=min(workload.forward_s, _WARM_S))
    for _ in engine.imap(short.requests(count)):
        pass
    call(engine, "take_forwards")


def run_series(
    engine: DiffusionEngine, workload: Workload, count: int, *, window: int = 16
) -> Series:
    """Run ``count`` requests and check that their outputs are right and come in order.

    Raises:
        InternalError: They are not.
    """
    call(engine, "take_forwards")
    slots = [_slots(engine)]
    worker, host = [call(engine, "usage")], [usage_of_this_process()]
    samples = list(_take(engine, workload, count, window))
    worker.append(call(engine, "usage"))
    host.append(usage_of_this_process())
    slots.append(_slots(engine))
    if len(samples) != count:
        raise InternalError(f"{len(samples)} outputs came of {count} requests.")
    return Series(
        samples=samples,
        forwards=call(engine, "take_forwards"),
        worker=worker,
        host=host,
        slots=slots,
    )


def _take(engine: DiffusionEngine, workload: Workload, count: int, window: int) -> Iterator[Sample]:
    for number, output in enumerate(engine.imap(workload.requests(count), window=window)):
        yield sample_of(workload, output, number)
        del output  # its slot is free while the next one is waited for


def sample_of(workload: Workload, output: DiffusionOutput, number: int) -> Sample:
    """Check the output of request ``number`` by its first and last element, and note its times.

    Raises:
        InternalError: It is another's, or not what the forward made.
    """
    if workload.keeps:
        tensor = output.output
        seen = {int(tensor[(0,) * tensor.ndim]), int(tensor[(-1,) * tensor.ndim])}
        right = seen == {fill_of(number)} and tuple(tensor.shape) == workload.shape
    else:
        right = output.output == DROPPED
    if not right or output.request_id != str(number):
        raise InternalError(
            f"Output {output.request_id!r} of {workload} is not that of request {number}."
        )
    return Sample(output.request_id, output.async_output_id, output.timings, time.monotonic())


def _slots(engine: DiffusionEngine) -> PoolStats | None:
    stats: PoolStats | None = call(engine, "describe").get("slots")
    return stats


def settle(engine: DiffusionEngine) -> None:
    """Wait until the worker has nothing left to do."""
    engine.drain()
    call(engine, "drain_async_outputs")
