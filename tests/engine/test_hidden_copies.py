"""How much of an output's copy ran beside a forward, by order: streams are held and released."""

from __future__ import annotations

import pytest
import torch

from sidestream import DiffusionRequest, ExecutionError, HostSink, SamplingParams, load_platform
from sidestream.testing import sim
from sidestream.worker.forwards import shared_s
from sidestream.worker.output_thread import AsyncOutputThread


def request(prompt="x"):
    return DiffusionRequest(prompt, SamplingParams(height=64, width=64, seed=1))


def share(handle):
    return handle.result(30).timings.copy_hidden_share


@pytest.fixture
def engine(engines):
    return engines("hidden_pipes:Waits", "sim", "uniproc")


@pytest.fixture
def copies(engine):
    """Nothing is copied until the test releases it."""
    engine.executor.collective_rpc("hold_copies")

    class Copies:
        release = staticmethod(lambda: [stream.release() for stream in sim.side_streams(0)])

    yield Copies
    Copies.release()


def test_a_copy_inside_the_next_forward_is_hidden(engine, copies, gate):
    first, second = engine.submit(request()), engine.submit(request(gate.prompt))
    assert gate.reached() == "forward"
    assert not first.done()
    copies.release()
    assert share(first) == 1.0
    gate.open()
    assert share(second) == 0.0  # nothing came after it
    timings = first.result().timings
    assert timings.copy_hidden_s == timings.copy_s > 0


def test_a_copy_after_the_next_forward_is_not(engine, copies):
    first, second = engine.submit(request()), engine.submit(request())
    second.compute_done.result(30)
    engine.executor.collective_rpc("finish_forwards", timeout_s=30)
    copies.release()
    assert share(first) == share(second) == 0.0


def test_a_forward_that_failed_hides_nothing_after_its_end(engine, copies):
    first, second = engine.submit(request()), engine.submit(request("raise"))
    assert isinstance(second.exception(30), ExecutionError)
    copies.release()
    assert share(first) == 0.0


def test_host_memory_that_is_copied_beside_no_forward_is_not_hidden(engine):
    assert share(engine.submit(request("host"))) == 0.0


@pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
def test_where_nothing_overlaps_nothing_is_hidden(engines, executor):
    engine = engines("Gradient", "cpu", executor)
    handles = [engine.submit(request()) for _ in range(4)]
    assert [share(handle) for handle in handles] == [0.0] * 4


def test_an_output_thread_without_a_worker_can_not_tell(engine):
    platform = load_platform("sim")
    device = platform.device(0)
    platform.set_device(device)
    told = []
    sink = HostSink(platform, device, deliver=lambda _label, _tree, times, _n: told.append(times))
    with AsyncOutputThread(platform, sink, device=device) as thread:
        thread.submit("one", torch.ones(3, 64, 64, device=device)).result(30)
    assert told[0].copy_s > 0
    assert told[0].copy_hidden_s is told[0].copy_hidden_share is None


@pytest.mark.parametrize(
    ("spans", "shared"),
    [
        ([], 0.0),
        ([(None, None)], 0.0),  # not begun
        ([(0.0, None)], 2.0),  # still running
        ([(12.0, None)], 0.0),
        ([(11.0, None)], 1.0),
        ([(9.0, 10.5), (11.5, 11.75), (11.75, None)], 1.0),
        ([(3.0, 9.0)], 0.0),
        ([(0.0, 20.0), (0.0, 20.0)], 2.0),
        ([(10.0, 11.0), (10.25, 10.75), (10.5, 11.5)], 1.5),  # a request prepared beside steps
        ([(11.5, 13.0), (9.0, 10.5)], 1.0),
    ],
)
def test_a_span_shares_what_lies_in_others(spans, shared):
    assert shared_s(10.0, 12.0, spans) == shared
