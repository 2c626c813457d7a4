"""Compare the bytes that an adapter says an output takes with what it takes."""

from __future__ import annotations

from sidestream.transport.arena import SlotPool
from sidestream.transport.packing import pack
from sidestream.worker.pipeline import LoadedPipeline


def assert_known(adapter, request) -> None:
    """The bytes of the output of ``request`` are known, and its slot may be made before it."""
    known = adapter.output_nbytes(request.sampling_params)
    (payload,) = LoadedPipeline(adapter).forward([request])
    assert payload.error is None
    packed = pack(payload.tree)
    assert known == packed.leaf_nbytes
    pool = SlotPool(8 * known)
    pool.reserve(known, 1)
    pool.acquire(packed.nbytes)
    assert pool.stats.made == 1
    pool.close()
