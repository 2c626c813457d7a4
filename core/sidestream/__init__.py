"""Moves finished images and videos off the accelerator while the next one is being made.

Importing this package imports no torch and no vendor package; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sidestream.config import EngineConfig as EngineConfig
    from sidestream.config import PipelineConfig as PipelineConfig
    from sidestream.engine import DiffusionEngine as DiffusionEngine
    from sidestream.errors import AmbiguousPlatformError as AmbiguousPlatformError
    from sidestream.errors import ConfigError as ConfigError
    from sidestream.errors import DeviceLostError as DeviceLostError
    from sidestream.errors import DeviceMemoryError as DeviceMemoryError
    from sidestream.errors import EngineClosedError as EngineClosedError
    from sidestream.errors import ExecutionError as ExecutionError
    from sidestream.errors import InternalError as InternalError
    from sidestream.errors import InvalidRequestError as InvalidRequestError
    from sidestream.errors import MissingDependencyError as MissingDependencyError
    from sidestream.errors import OutputTransferError as OutputTransferError
    from sidestream.errors import PlatformError as PlatformError
    from sidestream.errors import PlatformNotFoundError as PlatformNotFoundError
    from sidestream.errors import PluginContractError as PluginContractError
    from sidestream.errors import PluginError as PluginError
    from sidestream.errors import PluginLoadError as PluginLoadError
    from sidestream.errors import QueueFullError as QueueFullError
    from sidestream.errors import RemoteTraceback as RemoteTraceback
    from sidestream.errors import RequestAbortedError as RequestAbortedError
    from sidestream.errors import RequestError as RequestError
    from sidestream.errors import RequestTimeoutError as RequestTimeoutError
    from sidestream.errors import SidestreamError as SidestreamError
    from sidestream.errors import WorkerDiedError as WorkerDiedError
    from sidestream.errors import WorkerError as WorkerError
    from sidestream.errors import WorkerHungError as WorkerHungError
    from sidestream.errors import WorkerStartError as WorkerStartError
    from sidestream.executor.health import GroupHealth as GroupHealth
    from sidestream.executor.health import Health as Health
    from sidestream.executor.pump import ResultPumpThread as ResultPumpThread
    from sidestream.executor.result_channel import ResultChannel as ResultChannel
    from sidestream.handle import RequestHandle as RequestHandle
    from sidestream.models.pipeline import Pipeline as Pipeline
    from sidestream.models.step import StepPipeline as StepPipeline
    from sidestream.models.step import StepState as StepState
    from sidestream.output import DiffusionOutput as DiffusionOutput
    from sidestream.output import EventKind as EventKind
    from sidestream.output import RequestEvent as RequestEvent
    from sidestream.platforms.platform import Platform as Platform
    from sidestream.platforms.platform import load_platform as load_platform
    from sidestream.request import AbortOutcome as AbortOutcome
    from sidestream.request import AbortResult as AbortResult
    from sidestream.request import DiffusionRequest as DiffusionRequest
    from sidestream.request import OutputTimings as OutputTimings
    from sidestream.request import SamplingParams as SamplingParams
    from sidestream.trace import write_trace as write_trace
    from sidestream.worker.output_thread import AsyncOutputThread as AsyncOutputThread
    from sidestream.worker.sink import HostSink as HostSink
    from sidestream.worker.sink import OutputSink as OutputSink
    from sidestream.worker.sink import SlotSink as SlotSink
    from sidestream.worker.to_host import to_host as to_host

_HOMES: Final = {
    "DiffusionEngine": "sidestream.engine",
    "RequestHandle": "sidestream.handle",
    "EngineConfig": "sidestream.config",
    "PipelineConfig": "sidestream.config",
    "DiffusionRequest": "sidestream.request",
    "SamplingParams": "sidestream.request",
    "OutputTimings": "sidestream.request",
    "AbortOutcome": "sidestream.request",
    "AbortResult": "sidestream.request",
    "DiffusionOutput": "sidestream.output",
    "RequestEvent": "sidestream.output",
    "EventKind": "sidestream.output",
    "Health": "sidestream.executor.health",
    "GroupHealth": "sidestream.executor.health",
    "write_trace": "sidestream.trace",
    "Pipeline": "sidestream.models.pipeline",
    "StepPipeline": "sidestream.models.step",
    "StepState": "sidestream.models.step",
    "AsyncOutputThread": "sidestream.worker.output_thread",
    "HostSink": "sidestream.worker.sink",
    "SlotSink": "sidestream.worker.sink",
    "OutputSink": "sidestream.worker.sink",
    "ResultPumpThread": "sidestream.executor.pump",
    "ResultChannel": "sidestream.executor.result_channel",
    "Platform": "sidestream.platforms.platform",
    "load_platform": "sidestream.platforms.platform",
    "to_host": "sidestream.worker.to_host",
    "SidestreamError": "sidestream.errors",
    "ConfigError": "sidestream.errors",
    "MissingDependencyError": "sidestream.errors",
    "EngineClosedError": "sidestream.errors",
    "InternalError": "sidestream.errors",
    "PluginError": "sidestream.errors",
    "PluginLoadError": "sidestream.errors",
    "PluginContractError": "sidestream.errors",
    "PlatformError": "sidestream.errors",
    "PlatformNotFoundError": "sidestream.errors",
    "AmbiguousPlatformError": "sidestream.errors",
    "DeviceLostError": "sidestream.errors",
    "RequestError": "sidestream.errors",
    "InvalidRequestError": "sidestream.errors",
    "QueueFullError": "sidestream.errors",
    "ExecutionError": "sidestream.errors",
    "DeviceMemoryError": "sidestream.errors",
    "OutputTransferError": "sidestream.errors",
    "RequestTimeoutError": "sidestream.errors",
    "RequestAbortedError": "sidestream.errors",
    "WorkerError": "sidestream.errors",
    "WorkerStartError": "sidestream.errors",
    "WorkerDiedError": "sidestream.errors",
    "WorkerHungError": "sidestream.errors",
    "RemoteTraceback": "sidestream.errors",
}

__all__ = sorted(_HOMES)  # pyright can't see through this; TYPE_CHECKING above is for it


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
    # The first import of torch may be among it.
    from sidestream.autoload import without_autoload

    with without_autoload():
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
