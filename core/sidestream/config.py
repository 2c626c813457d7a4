"""Settings of an engine, and what a pipeline is told when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sidestream.errors import ConfigError
from sidestream.request import DiffusionRequest

if TYPE_CHECKING:
    import torch

MIB: Final = 1 << 20

_DTYPES: Final = ("auto", "float32", "float16", "bfloat16", "float64")
_REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of a :class:`~sidestream.DiffusionEngine`; each has a default but the model.

    Raises:
        ConfigError: A value is not possible; names the field, the value and what is allowed.
    """

    #: A checkpoint folder, a hub id, or a built-in name such as ``"digits"``.
    model: str | Path | None = None
    #: ``"package.module:Class"``; None: found from the checkpoint's ``model_index.json``.
    pipeline: str | None = None
    #: Arrive as ``PipelineConfig.options``.
    pipeline_options: Mapping[str, Any] = field(default_factory=dict)
    #: A platform plugin's name; None: ``SIDESTREAM_PLATFORM``, else the one that is available.
    platform: str | None = None
    #: A platform that fails the self-test of its streams and events is refused, or used without
    #: them: outputs are copied on the forward's stream then, and one warning says so.
    on_platform_fault: Literal["refuse", "synchronous"] = "refuse"
    #: Device indices; each gets a worker with its own copy of the model. One may repeat.
    devices: Sequence[int] = (0,)
    #: Workers that share one copy of the model: each ``tensor_parallel_size`` neighbours among
    #: ``devices`` are a group. Only where the pipeline divides its model; in request mode.
    tensor_parallel_size: int = 1
    #: ``"auto"``: bfloat16 on devices, float32 on the CPU.
    dtype: str = "auto"
    #: ``"multiproc"``: a worker process a device; ``"uniproc"``: a thread of this process.
    executor: Literal["multiproc", "uniproc"] = "multiproc"
    #: False copies outputs on the forward's stream, before the next forward starts.
    async_output: bool = True
    #: Step mode: one denoising step a command, so that requests join, leave and stop between steps.
    #: Copies are synchronous then, and no pump and no output thread are started.
    step_execution: bool = False
    #: In step mode, the last step's output is copied in the background all the same.
    async_final_step: bool = False
    #: Turns step mode on, and brings parts of an output out as they are decoded.
    streaming_output: bool = False
    #: Requests that are with a worker at a time: one runs, the others wait in its socket. In step
    #: mode a worker has one step at a time, whatever this says.
    dispatch_depth: int = 2
    #: Outputs that a worker holds on its device at a time, the one being made included. In step
    #: mode, requests between their first step and their copied output; ``max_batch_size`` times
    #: as many.
    max_pending_outputs: int = 2
    #: Bytes of outputs that are ready and not taken; over it no request is sent to a worker.
    host_buffer_bytes: int = 512 * MIB
    #: Compatible requests that share a forward, where the pipeline supports it.
    max_batch_size: int = 1
    #: How long the oldest request waits for others to share its forward. No effect in step mode,
    #: where others join at the next step.
    max_batch_wait_s: float = 0.0
    #: Requests that wait in the main process; ``submit`` raises over it, ``generate`` waits.
    max_queued_requests: int = 1024
    #: How long a request may take from submit to output where ``submit`` does not say.
    request_timeout_s: float | None = None
    #: How long a worker that has work may show no progress: steps, forwards, outputs, messages.
    #: Its forward is taken for hung then; ``math.inf``: never.
    hang_timeout_s: float = 300.0
    #: How often a worker that died may be restarted within ten minutes; 0: never.
    max_restarts: int = 3
    #: A request that each worker runs before it is ready: kernels are chosen then, and memory for
    #: outputs of that size is made. None: memory for the size that the pipeline's
    #: ``output_nbytes`` says, if it has one.
    warm_up: DiffusionRequest | None = None
    #: How long a starting worker may show no progress.
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.model is None and self.pipeline is None:
            raise ConfigError("model", None, "a checkpoint, or pipeline='package.module:Class'")
        if self.pipeline is not None and not _REFERENCE.fullmatch(self.pipeline):
            raise ConfigError("pipeline", self.pipeline, "'package.module:Class'")
        if self.dtype not in _DTYPES:
            raise ConfigError("dtype", self.dtype, ", ".join(map(repr, _DTYPES)))
        if self.executor not in ("multiproc", "uniproc"):
            raise ConfigError("executor", self.executor, "'multiproc' or 'uniproc'")
        if self.on_platform_fault not in ("refuse", "synchronous"):
            raise ConfigError(
                "on_platform_fault", self.on_platform_fault, "'refuse' or 'synchronous'"
            )
        devices = tuple(self.devices)
        if not devices or not all(isinstance(i, int) and i >= 0 for i in devices):
            raise ConfigError("devices", self.devices, "device indices, such as (0,) or (0, 1)")
        if self.executor == "uniproc" and len(devices) > 1:
            raise ConfigError("devices", self.devices, "one device with executor='uniproc'")
        object.__setattr__(self, "devices", devices)
        for name in (
            "dispatch_depth",
            "max_pending_outputs",
            "max_batch_size",
            "max_queued_requests",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "a positive integer")
        self._check_step_mode()
        self._check_tensor_parallel()
        if not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ConfigError("max_restarts", self.max_restarts, "an integer, 0 or more")
        if not isinstance(self.host_buffer_bytes, int) or self.host_buffer_bytes < 0:
            raise ConfigError("host_buffer_bytes", self.host_buffer_bytes, "a number of bytes")
        if not self.max_batch_wait_s >= 0:
            raise ConfigError("max_batch_wait_s", self.max_batch_wait_s, "seconds, 0 or more")
        if self.warm_up is not None and not isinstance(self.warm_up, DiffusionRequest):
            raise ConfigError("warm_up", self.warm_up, "a DiffusionRequest or None")
        for name in ("start_timeout_s", "hang_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "a positive number")
        if self.request_timeout_s is not None and not is_duration(self.request_timeout_s):
            raise ConfigError("request_timeout_s", self.request_timeout_s, "seconds, 0 or more")

    def _check_step_mode(self) -> None:
        if self.streaming_output:
            object.__setattr__(self, "step_execution", True)
        if not self.async_final_step:
            return
        if not self.step_execution:
            raise ConfigError("async_final_step", True, "False, or True with step_execution=True")
        if not self.async_output:
            raise ConfigError("async_final_step", True, "False with async_output=False")

    def _check_tensor_parallel(self) -> None:
        size = self.tensor_parallel_size
        if len(self.devices) % size:
            allowed = f"a multiple of {size} device indices, with tensor_parallel_size={size}"
            raise ConfigError("devices", self.devices, allowed)
        if size > 1 and self.executor == "uniproc":
            raise ConfigError("tensor_parallel_size", size, "1 with executor='uniproc'")
        if size > 1 and self.step_execution:
            raise ConfigError(
                "tensor_parallel_size", size, "1 with step_execution=True: ranks run whole forwards"
            )

    @property
    def group_count(self) -> int:
        """Give how many copies of the model there are."""
        return len(self.devices) // self.tensor_parallel_size

    @property
    def max_resident(self) -> int:
        """Give how many requests may have device memory of one worker, in step mode."""
        return self.max_pending_outputs * self.max_batch_size

    @property
    def starts_pump(self) -> bool:
        """Tell whether a thread reads what worker processes say; else those who wait do."""
        return not self.step_execution or self.async_final_step

    @property
    def copies_in_background(self) -> bool:
        """Tell whether any output takes the asynchronous way: by a pump and an output thread."""
        return self.async_output and (not self.step_execution or self.async_final_step)


def is_duration(value: object) -> bool:
    """Tell whether ``value`` is a number of seconds, 0 or more; ``math.inf`` is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """What ``Pipeline.load`` is given, in the process and thread that will run the forward."""

    #: A local folder; None for pipelines that need no checkpoint.
    model: Path | None
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
