"""Events of a request: every step, every part of the output, the end; in order, each once."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

import sidestream
from sidestream import DiffusionRequest, SamplingParams

PROMPT_S = 20

WAYS = pytest.mark.parametrize(
    "way",
    [
        ("cpu", "multiproc", {}),
        ("cpu", "uniproc", {}),
        ("sim", "multiproc", {}),
        ("sim", "multiproc", {"async_final_step": True}),
        ("sim", "uniproc", {"async_final_step": True}),
    ],
    ids=["cpu", "uniproc", "sim", "sim-async", "uniproc-async"],
)
CPU = ("cpu", "multiproc", {})
LOCAL = ("cpu", "uniproc", {})


def request(seed=0, prompt="x", steps=4, chunk=2, size=64, name="r"):
    params = SamplingParams(
        height=size, width=size, seed=seed, num_inference_steps=steps, extra={"chunk": chunk}
    )
    return DiffusionRequest(prompt, params, request_id=name)


@pytest.fixture
def streaming(engines):
    def get(way):
        platform, executor, config = way
        return engines(
            "step_pipes:SharedWalk",
            platform,
            executor,
            streaming_output=True,
            max_batch_size=2,
            **config,
        )

    return get


def summary(event):
    value = None if event.output is None else event.output.output.flatten()[0].item()
    return event.kind.value, event.step, event.chunk, value


def expected(seed):
    return [
        ("step", 1, None, None),
        ("step", 2, None, None),
        ("chunk", 2, 0, seed + 2),
        ("step", 3, None, None),
        ("step", 4, None, None),
        ("chunk", 4, 1, seed + 4),
        ("compute-done", 4, None, None),
        ("output", 4, None, seed + 4),
    ]


def by_kind(events):
    """Split events by kind: copies in the background come behind the steps that follow."""
    return {
        kind: [(chunk, value) for k, _, chunk, value in events if k == kind]
        for kind in ("step", "chunk", "compute-done", "output")
    }


@WAYS
def test_events_come_in_order_and_each_once(streaming, way):
    engine = streaming(way)
    handles = [engine.submit(request(seed)) for seed in range(3)]
    for seed, handle in enumerate(handles):
        events = list(handle.events())
        assert all(event.num_steps == 4 for event in events)
        told = [summary(event) for event in events]
        assert [step for kind, step, _, _ in told if kind == "step"] == [1, 2, 3, 4]
        assert by_kind(told) == by_kind(expected(seed))
        assert told[-1] == expected(seed)[-1]
        if not way[2]:
            assert told == expected(seed)
        assert list(handle.events()) == []


@pytest.mark.parametrize("way", [CPU, LOCAL], ids=["cpu", "uniproc"])
def test_who_asks_late_gets_the_same(streaming, way):
    handle = streaming(way).submit(request(7))
    output = handle.result(PROMPT_S)
    events = list(handle.events())
    assert [summary(event) for event in events] == expected(7)
    assert events[-1].output is output


def test_parts_come_while_the_request_is_under_way(streaming, gate):
    events = streaming(CPU).submit(request(1, gate.prompt)).events()
    for _ in "12":
        gate.reached()
        gate.open()
    assert gate.reached() == "3"
    assert [summary(event) for event in itertools.islice(events, 3)] == expected(1)[:3]
    for _ in "34":
        gate.open()
        gate.reached() if _ == "3" else None
    assert [summary(event) for event in events] == expected(1)[3:]


def test_parts_are_outputs_with_frames_of_the_same_request(streaming):
    events = list(streaming(CPU).submit(request(1, name="mine")).events())
    chunks = [event.output for event in events if event.kind is sidestream.EventKind.CHUNK]
    assert [chunk.request_id for chunk in chunks] == ["mine", "mine"]
    assert {chunk.output.shape for chunk in chunks} == {(3, 64, 64)}


def test_events_can_be_awaited(streaming):
    engine = streaming(CPU)

    async def collect(seed):
        return [summary(event) async for event in engine.submit(request(seed))]

    async def both():
        return await asyncio.gather(collect(1), collect(2))

    assert asyncio.run(both()) == [expected(1), expected(2)]


def test_two_who_ask_share_the_events(streaming, gate):
    handle = streaming(CPU).submit(request(1, gate.prompt))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lambda: [summary(e) for e in handle.events()]) for _ in range(2)]
        for _ in range(4):
            gate.reached()
            gate.open()
        told = [event for each in asked for event in each.result(PROMPT_S)]
    assert sorted(told, key=repr) == sorted(expected(1.0), key=repr)


def test_step_streaming_submits_and_tells(streaming):
    engine = streaming(CPU)
    assert [summary(event) for event in engine.step_streaming(request(3))] == expected(3)


def test_a_stream_that_is_closed_early_aborts_its_request(streaming, gate, until):
    engine = streaming(CPU)
    stream = engine.step_streaming(request(1, gate.prompt))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream)
        gate.reached()
        gate.open()
        assert first.result(PROMPT_S).step == 1
    gate.reached()
    stream.close()
    until(lambda: engine.stats()["aborting"] == 1)
    gate.open()
    assert engine.drain(PROMPT_S)
    assert engine.executor.collective_rpc("count_latents") == [0]


def test_after_an_abort_the_events_end_with_its_error(streaming, gate):
    handle = streaming(CPU).submit(request(1, gate.prompt))
    for _ in "12":
        gate.reached()
        gate.open()
    gate.reached()
    handle.abort()
    gate.open()
    told = []
    with pytest.raises(sidestream.RequestAbortedError) as caught:
        told.extend(summary(event) for event in handle.events())
    assert caught.value.step == 2
    with pytest.raises(sidestream.RequestAbortedError):
        next(handle.events())


def test_a_failure_ends_the_events_behind_what_was_told(streaming):
    events = streaming(CPU).submit(request(1, "raise-3")).events()
    assert [summary(event) for event in itertools.islice(events, 3)] == expected(1)[:3]
    with pytest.raises(sidestream.ExecutionError):
        next(events)


def test_parts_that_nobody_takes_hold_back_others_and_not_their_own_request(make_engine, until):
    nbytes = 3 * 64 * 64 * 4
    engine = make_engine(
        "step_pipes:Walk", executor="uniproc", streaming_output=True, host_buffer_bytes=2 * nbytes
    )
    first = engine.submit(request(1, steps=6, chunk=1))
    assert (first.result(PROMPT_S).output == 7).all()
    # What was taken no longer counts; six parts do.
    assert engine.stats()["ready_bytes"] >= 6 * nbytes
    second = engine.submit(request(2))
    until(lambda: "host_buffer_bytes" in engine.describe())
    assert not second.done()
    assert len(list(first.events())) == 6 + 6 + 2
    until(second.done)
    assert (second.result(0).output == 6).all()
    # Who waits for a request does not wait for others to take their parts.
    third, fourth = engine.submit(request(3, steps=6, chunk=1)), engine.submit(request(4))
    assert (third.result(PROMPT_S).output == 9).all()
    assert (fourth.result(PROMPT_S).output == 8).all()


def test_without_streaming_output_there_are_no_parts(engines):
    engine = engines("step_pipes:Walk", "cpu", "uniproc", step_execution=True)
    told = [summary(event) for event in engine.submit(request(1)).events()]
    assert told == [event for event in expected(1) if event[0] != "chunk"]


@pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
def test_request_mode_tells_what_there_is(engines, executor):
    handle = engines("Gradient", "cpu", executor).submit(request(5))
    assert [summary(event) for event in handle.events()] == [
        ("compute-done", None, None, None),
        ("output", None, None, 5),
    ]


@pytest.mark.slow
def test_a_request_that_runs_again_tells_nothing_twice(make_engine, tmp_path, gate):
    engine = make_engine(
        "step_pipes:Walk",
        streaming_output=True,
        max_restarts=1,
        pipeline_options={"log": str(tmp_path / "log")},
    )
    dies_once, innocent = [
        engine.submit(request(seed, prompt)) for seed, prompt in enumerate(["kill-once-4", "x"])
    ]
    assert [summary(event) for event in dies_once.events()] == expected(0)
    assert [summary(event) for event in innocent.events()] == expected(1)


def test_asking_in_a_done_callback_is_refused_while_it_would_block(streaming, gate):
    engine = streaming(CPU)
    blocked = engine.submit(request(1, gate.prompt))
    caught = []

    def ask(_future):
        try:
            next(blocked.events())
        except RuntimeError as error:
            caught.append(error)

    future = engine.submit(request(2, steps=1)).future()
    gate.reached()
    future.add_done_callback(ask)
    gate.open()
    for _ in "234":
        gate.reached()
        gate.open()
    assert blocked.result(PROMPT_S)
    assert not caught or "done-callback" in str(caught[0])
