"""Makes the worker groups that a config asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from sidestream.config import EngineConfig
from sidestream.errors import InvalidRequestError
from sidestream.executor.base import Executor
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.caller_pump import ReadingTurn
from sidestream.executor.groups import WorkerGroups
from sidestream.executor.inflight import InflightTable
from sidestream.executor.multiproc import MultiprocExecutor
from sidestream.executor.tensor_parallel import TensorParallelExecutor
from sidestream.executor.uniproc import UniprocExecutor
from sidestream.models.registry import PipelineSource
from sidestream.platforms.platform import Platform
from sidestream.transport.packing import PackingError, pack_bytes
from sidestream.worker.worker import WorkerSettings


def make_groups(config: EngineConfig, platform: Platform, source: PipelineSource) -> WorkerGroups:
    """Make the groups, each of as many workers as share one copy of the model; starts none.

    Raises:
        InvalidRequestError: The request to warm up with can't be sent to a worker.
    """
    # An in-process worker that is lost takes its device along for the whole process.
    max_restarts = 0 if config.executor == "uniproc" else config.max_restarts
    turn = None
    if config.executor == "multiproc" and not config.starts_pump:
        turn = ReadingTurn()
    return WorkerGroups(
        functools.partial(_make_executor, config, _settings(config, platform, source), turn),
        config.group_count,
        max_restarts=max_restarts,
        is_stepwise=config.step_execution,
        turn=turn,
    )


def _make_executor(
    config: EngineConfig,
    common: WorkerSettings,
    turn: ReadingTurn | None,
    index: int,
    table: InflightTable,
    callbacks: CallbackThread,
) -> Executor:
    """Make the executor of a group, by its ``index``."""
    ranks = _ranks(common, config, index)
    make: Callable[..., Executor]
    if config.executor == "uniproc":
        make = functools.partial(UniprocExecutor, ranks[0])
    elif len(ranks) == 1:
        make = functools.partial(MultiprocExecutor, ranks[0], turn=turn)
    else:
        make = functools.partial(TensorParallelExecutor, ranks)
    return make(
        dispatch_depth=config.dispatch_depth,
        start_timeout_s=config.start_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
        table=table,
        callbacks=callbacks,
    )


def _settings(config: EngineConfig, platform: Platform, source: PipelineSource) -> WorkerSettings:
    """Make the settings that all workers have in common; those of one come out of them."""
    return WorkerSettings(
        platform=platform.name,
        plugin=platform.reference,
        device_index=config.devices[0],
        pipeline=source.reference,
        model=source.model,
        options=config.pipeline_options,
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        on_platform_fault=config.on_platform_fault,
        async_output=config.copies_in_background,
        step_execution=config.step_execution,
        sends_chunks=config.streaming_output,
        max_pending_outputs=(
            config.max_resident if config.step_execution else config.max_pending_outputs
        ),
        announce_last_step=config.max_batch_size > 1,
        slot_budget_bytes=config.host_buffer_bytes // config.group_count,
        max_batch_size=config.max_batch_size,
        warm_up=_pack_warm_up(config, source),
    )


def _ranks(common: WorkerSettings, config: EngineConfig, group: int) -> list[WorkerSettings]:
    """Make the settings of a group's ranks; only the first has outputs."""
    size = config.tensor_parallel_size
    return [
        replace(
            common,
            rank=group * size + rank,
            device_index=config.devices[group * size + rank],
            tensor_parallel_rank=rank,
            async_output=common.async_output and rank == 0,
            announce_last_step=common.announce_last_step and rank == 0,
        )
        for rank in range(size)
    ]


def _pack_warm_up(config: EngineConfig, source: PipelineSource) -> bytes | None:
    if config.warm_up is None:
        return None
    params = config.warm_up.sampling_params.with_defaults(source.defaults)
    if params.seed is None:
        params = replace(params, seed=0)
    try:
        return pack_bytes(replace(config.warm_up, sampling_params=params), root="warm_up")
    except PackingError as error:
        raise InvalidRequestError(f"The request to warm up with can't be sent: {error}") from error
