"""What a worker does before it says that it is ready, so that no request has to wait for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import ConfigError
from sidestream.request import DiffusionRequest, SamplingParams
from sidestream.transport.packing import pack
from sidestream.worker.sink import OutputSink

if TYPE_CHECKING:
    import torch

    from sidestream.platforms.platform import Platform
    from sidestream.worker.pipeline import LoadedPipeline

logger = logging.getLogger(__name__)

#: Memory is made for as many outputs as ``imap`` has under way, as long as that is cheap: the page
#: faults of this many bytes take some ten milliseconds.
_BACKLOG: Final = 20
_CHEAP_BYTES: Final = 64 << 20


def reserve_outputs(sink: OutputSink[Any], nbytes: int | None, least: int) -> None:
    """Make memory for ``least`` outputs of ``nbytes``, more of small ones; None: nothing to do.

    A reader that keeps more outputs than that has them made on demand, as without this; so does
    one where the host has too little memory.
    """
    if not nbytes:
        return
    try:
        sink.reserve(nbytes, max(least, min(_BACKLOG, _CHEAP_BYTES // nbytes)))
    except MemoryError as error:
        logger.warning("No memory is made for outputs before the first request: %s", error)
        return
    stats = sink.stats
    if stats is not None and stats.arena_bytes < nbytes:
        logger.warning(
            "A worker's share of host_buffer_bytes has no room for an output, which takes %d "
            "bytes: memory is made for each one, in its way. Set host_buffer_bytes to %d or more "
            "for each worker.",
            nbytes,
            least * nbytes,
        )


def declared_nbytes(pipeline: LoadedPipeline) -> int | None:
    """Ask the pipeline for the bytes of an output of its own default size; None: it can't say.

    Raises:
        ConfigError: It says something that is no size.
    """
    ask = getattr(pipeline.pipeline, "output_nbytes", None)
    if ask is None:
        return None
    nbytes = ask(SamplingParams())
    if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
        name = type(pipeline.pipeline).__name__
        raise ConfigError(f"{name}.output_nbytes", nbytes, "a number of bytes, or None")
    return nbytes


def measured_nbytes(
    pipeline: LoadedPipeline, request: DiffusionRequest, platform: Platform, device: torch.device
) -> int:
    """Run a request, drop its output, and give the bytes that it would take.

    Raises:
        RequestError: It failed.
    """
    payload = pipeline.forward([request])[0]
    if payload.error is not None:
        raise payload.error
    nbytes = pack(payload.tree).nbytes
    del payload
    platform.synchronize_device(device)
    return nbytes
