"""An output's memory is its own: while anything of it lives, and however it is passed on."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from sidestream import DiffusionEngine, DiffusionRequest, SamplingParams

# While tests are collected its names are needed already.
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))

import payload_pipes
from payload_pipes import MIB, fill, is_filled, memory_of, settle

WAYS = [("cpu", "multiproc"), ("sim", "multiproc"), ("cpu", "uniproc"), ("sim", "uniproc")]
#: Both platforms and both executors; the other two pairs are for the soak.
in_every_way = pytest.mark.parametrize(
    "way",
    [
        WAYS[1],
        WAYS[2],
        pytest.param(WAYS[0], marks=pytest.mark.soak),
        pytest.param(WAYS[3], marks=pytest.mark.soak),
    ],
    ids="-".join,
)
in_processes = pytest.mark.parametrize(
    "way", [WAYS[1], pytest.param(WAYS[0], marks=pytest.mark.soak)], ids="-".join
)


def run_others(engine: DiffusionEngine, count: int = 40) -> None:
    """Let every slot be written to anew, some of them many times."""
    held = [output.output for output in engine.imap(fill(MIB, 100 + i) for i in range(count))]
    assert all((tensor == (100 + i) % 251).all() for i, tensor in enumerate(held))


def through_a_thread(tensor: torch.Tensor) -> torch.Tensor:
    """Have another thread hold it, and drop it, before it comes back."""
    there, back = queue.SimpleQueue(), queue.SimpleQueue()
    thread = threading.Thread(target=lambda: back.put(there.get().view(-1)))
    thread.start()
    there.put(tensor)
    del tensor
    thread.join()
    return back.get()


ALIASES = {
    "itself": lambda tensor: tensor,
    "numpy": lambda tensor: tensor.numpy(),
    "a view": lambda tensor: tensor[MIB // 2 :],
    "a view of an array of a view": lambda tensor: torch.from_numpy(tensor[1:].numpy()[1:])[1:],
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "module": lambda tensor: torch.nn.ParameterList([torch.nn.Parameter(tensor, False)])[0],
    "detached": lambda tensor: tensor.detach(),
    "another dtype": lambda tensor: tensor.view(torch.int32).view(torch.uint8),
    "memoryview": lambda tensor: np.frombuffer(memoryview(tensor.numpy()), dtype=np.uint8),
    "dlpack": lambda tensor: np.from_dlpack(tensor),
    "by a thread": through_a_thread,
    "pickled": lambda tensor: pickle.loads(pickle.dumps(tensor)),
}


@pytest.mark.slow
@in_every_way
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_an_alias_keeps_the_bits_while_others_come_and_go(couriers, way, alias):
    engine = couriers(way)
    kept = alias(engine.submit(fill(MIB, 7)).result(30).output)
    run_others(engine, 12)
    assert (kept == 7).all()


@in_every_way
def test_all_who_ask_get_the_same_object(couriers, way):
    engine = couriers(way)
    handle = engine.submit(fill(MIB, 5))

    async def ask():
        return await handle

    async def ask_together():
        return await asyncio.gather(ask(), ask(), ask())

    first, *others = asyncio.run(ask_together())
    assert is_filled(first, MIB, 5)
    assert all(other is first for other in others)
    assert handle.result(0) is first
    assert handle.future().result(0) is first


@in_every_way
def test_what_is_written_to_one_output_shows_in_no_other(couriers, way):
    engine = couriers(way)
    outputs = [engine.submit(fill(100_000, seed)).result(30) for seed in range(20)]
    for output in outputs[::2]:
        output.output.fill_(255)
    assert all(is_filled(output, 100_000, seed) for seed, output in enumerate(outputs) if seed % 2)
    del outputs, output
    for seed in range(20):
        assert is_filled(engine.submit(fill(100_000, seed)).result(30), 100_000, seed)


@pytest.mark.parametrize(
    "way", [pytest.param(WAYS[1], marks=pytest.mark.soak), *WAYS[2:]], ids="-".join
)
def test_what_is_written_to_an_output_does_not_reach_the_pipeline_nor_the_request(way):
    engine = payload_pipes.start(*way, pipeline="payload_pipes:Borrower")
    try:
        requests = [DiffusionRequest("x", SamplingParams(seed=seed)) for seed in range(8)]
        outputs = [handle.result(30) for handle in map(engine.submit, requests)]
        for seed, output in enumerate(outputs):
            assert (output.output == seed).all()
            output.output.fill_(200 + seed)
        assert (engine.submit(requests[3]).result(30).output == 3).all()
        assert all((output.output == 200 + seed).all() for seed, output in enumerate(outputs))
    finally:
        engine.close()


@in_every_way
def test_what_is_written_to_an_echo_does_not_reach_its_request(couriers, way):
    engine = couriers(way)
    tree = [torch.zeros(1000), np.zeros(1000), bytearray(20_000)]
    request = DiffusionRequest("echo", inputs={"tree": tree})
    first = engine.submit(request).result(30).output
    first[0].fill_(1)
    first[1].fill(1)
    first[2][:] = b"x" * 20_000
    second = engine.submit(request).result(30).output
    for got in tree, second:
        assert not got[0].any()
        assert not got[1].any()
        assert got[2] == bytes(20_000)


@in_processes
def test_a_leaf_that_is_pickled_takes_only_its_own_bytes_along(couriers, way):
    engine = couriers(way)
    tree = {"large": torch.zeros(MIB), "small": torch.ones(100), "array": np.ones(100)}
    output = engine.submit(DiffusionRequest("echo", inputs={"tree": tree})).result(30)
    for name in "small", "array":
        assert len(pickle.dumps(output.output[name])) < 2000
    whole = pickle.loads(pickle.dumps(output))
    assert torch.equal(whole.output["small"], tree["small"])


@in_processes
def test_a_detached_copy_gives_the_slot_back(couriers, way):
    engine = couriers(way)
    for _ in range(3):
        settle(engine)
        held = [engine.submit(fill(MIB, seed)).result(30) for seed in range(9)]
        assert [output.timings.carrier for output in held] == ["slot"] * 8 + ["one-shot"]
        held = [output.detach_copy() for output in held]
        run_others(engine, 8)
        assert all(is_filled(output, MIB, seed) for seed, output in enumerate(held))


@in_every_way
@pytest.mark.parametrize(
    ("count", "nbytes"), [(60, 4 * MIB), pytest.param(500, 12 * MIB, marks=pytest.mark.soak)]
)
def test_a_long_run_needs_no_more_memory_than_a_short_one(couriers, way, count, nbytes):
    engine = couriers(way)
    pids = {os.getpid(), *engine.executor.collective_rpc("pid")}
    before = {}
    for seed, output in enumerate(engine.imap(fill(nbytes, seed) for seed in range(count))):
        assert is_filled(output, nbytes, seed)
        if seed == 10:
            before = {pid: memory_of(pid) for pid in pids}
        for pid, then in before.items():
            assert memory_of(pid) < then + 12 * nbytes


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", pytest.param("sim", marks=pytest.mark.soak)])
def test_a_forked_child_never_sees_another_requests_pixels(script, platform):
    program = script(
        """
import select, warnings
from payload_pipes import *

engine = start(sys.argv[1], host_buffer_bytes=8 * MIB)
taken = [engine.submit(fill(MIB, seed)).result(60) for seed in range(3)]
ready = [engine.submit(fill(MIB, seed)) for seed in range(3, 5)]
for handle in ready:
    handle.output_ready.result(60)
parent_says, parent_writes = os.pipe()
child_writes = os.pipe()

with warnings.catch_warnings(action="ignore"):  # from 3.12 on, of threads that were started
    child = os.fork()
if child == 0:
    tensors = [output.output for output in taken]
    del taken[0]
    tensors += [handle.result(0).output for handle in ready]
    is_over = False
    while not is_over:
        # Again and again, but not all the time: that would take the parent a core.
        is_over = bool(select.select([parent_says], [], [], 0.01)[0])
        for seed, tensor in enumerate(tensors):
            if not (tensor == seed).all():
                os._exit(1)
    os._exit(0)

del ready, handle
assert is_filled(taken[0], MIB, 0)  # the child dropped its own
del taken
held = []
for seed, output in enumerate(engine.imap(fill(MIB, 10 + seed) for seed in range(200))):
    assert is_filled(output, MIB, 10 + seed)
    if seed % 20 == 0:
        held.append(output)
assert all(is_filled(output, MIB, 10 + 20 * i) for i, output in enumerate(held))
os.write(parent_writes, b"x")
_, status = os.wait()
assert status == 0, status
engine.close()
""",
        platform,
    )
    code, stderr = program.end(90)
    assert code == 0, stderr
    assert stderr == ""
