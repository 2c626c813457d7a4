"""Overlap, proven by order: streams are held and released, nothing sleeps."""

from __future__ import annotations

import pytest
import torch

from sidestream import AsyncOutputThread, DiffusionRequest, HostSink, SamplingParams, load_platform
from sidestream.platforms.platform import load_plugin
from sidestream.testing import sim


def request(seed):
    return DiffusionRequest("x", SamplingParams(height=64, width=64, seed=seed))


@pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
def test_the_next_forward_completes_while_a_copy_is_held(engines, executor):
    engine = engines("OneBuffer", "sim", executor)
    call = engine.executor.collective_rpc
    call("hold_copies")
    first, second = engine.submit(request(1)), engine.submit(request(2))
    second.compute_done.result(30)
    call("finish_forwards", timeout_s=30)
    assert not first.done()
    assert not second.done()
    call("release_copies")
    assert (first.result(30).output == 1).all()
    assert (second.result(30).output == 2).all()


def test_places_bound_the_outputs_that_a_device_holds(make_engine):
    engine = make_engine("Gradient", platform="sim", executor="uniproc", max_pending_outputs=1)
    call = engine.executor.collective_rpc
    call("hold_copies")
    try:
        first, second = engine.submit(request(1)), engine.submit(request(2))
        first.compute_done.result(30)
        # The worker waits for a place with the second request in its hands: it takes no call.
        with pytest.raises(TimeoutError):
            second.compute_done.result(0.3)
        assert not second.done()
        engine.close(timeout_s=0.3)
    finally:
        # All of this process are held, also those of an engine that other tests share.
        for stream in sim.side_streams(0):
            stream.release()


def test_without_async_output_the_copy_runs_before_the_next_forward(make_engine):
    engine = make_engine("OneBuffer", platform="sim", executor="uniproc", async_output=False)
    assert engine.executor.collective_rpc("describe")[0]["output_thread"] is False
    handles = [engine.submit(request(i)) for i in range(4)]
    for i, handle in enumerate(handles):
        assert (handle.result(30).output == i).all()
    copies = engine.executor.collective_rpc("copies")[0]
    assert all(stream == "default" or "default" in stream for _, _, stream in copies[-4:])


def test_on_the_cpu_there_is_no_output_thread_and_the_bits_are_the_same(engines):
    engine = engines("Gradient")
    assert engine.executor.collective_rpc("describe")[0]["output_thread"] is False
    assert (engine.submit(request(3)).result(30).output == 3).all()


def test_each_leaf_is_copied_once_into_page_locked_memory(engines):
    engine = engines("Gradient", "sim")
    engine.submit(request(0)).result(30)
    engine.executor.collective_rpc("clear_copies")
    for i in range(5):
        engine.submit(request(i)).result(30)
    copies = engine.executor.collective_rpc("copies")[0]
    assert [(nbytes, pinned) for nbytes, pinned, _ in copies] == [(3 * 64 * 64 * 4, True)] * 5
    assert all("side" in stream for _, _, stream in copies)


def test_the_times_of_an_output_are_in_order(engines):
    engine = engines("Gradient", "sim")
    times = engine.submit(request(0)).result(30).timings
    points = [
        times.submitted_at,
        times.dispatched_at,
        times.forward_started_at,
        times.forward_ended_at,
        times.copy_started_at,
        times.copy_ended_at,
        times.ready_at,
    ]
    assert None not in points
    assert points == sorted(points)


@pytest.mark.parametrize("attempt", range(10))
def test_a_planted_missing_wait_reads_poison_every_time(attempt):
    careless = load_plugin("sim", "careless_platform")
    device = careless.device(0)
    careless.set_device(device)
    stream = sim.default_stream(0)
    with AsyncOutputThread(careless, HostSink(careless, device), device=device) as thread:
        stream.hold()
        try:
            tensor = torch.ones(64, device=device) * (attempt + 2)
            early = thread.submit("early", tensor, private=True)
            assert early.result(30).isnan().all()
        finally:
            stream.release()


@pytest.mark.parametrize("attempt", range(10))
def test_with_the_wait_the_output_is_right_every_time(attempt):
    platform = load_platform("sim")
    device = platform.device(0)
    platform.set_device(device)
    stream = sim.default_stream(0)
    with AsyncOutputThread(platform, HostSink(platform, device), device=device) as thread:
        stream.hold()
        tensor = torch.ones(64, device=device) * (attempt + 2)
        output = thread.submit("late", tensor)
        tensor.zero_()  # the caller may overwrite it at once: the output is private
        assert not output.done()
        stream.release()
        assert (output.result(30) == attempt + 2).all()
