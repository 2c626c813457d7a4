"""Whoever waits gets an answer: twice, elsewhere, too late, or from a place that may not wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
import weakref
from concurrent.futures import Future

import pytest

import sidestream
from sidestream import DiffusionRequest, SamplingParams

#: For what is the main process's alone, where another worker would only cost its start.
mostly_uniproc = pytest.mark.parametrize(
    "executor", [pytest.param("multiproc", marks=pytest.mark.soak), "uniproc"]
)


def request(prompt="x", *, seed=0, **inputs):
    return DiffusionRequest(prompt, SamplingParams(seed=seed), inputs=inputs or None)


class Gate:
    """A named pipe that a forward or a call waits at."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = str(path)
        self._is_open = False

    def open(self):
        if not self._is_open:
            self._is_open = True
            # Waits for whoever comes to the gate.
            os.close(os.open(self.path, os.O_WRONLY))


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture(params=["multiproc", "uniproc"])
def engine(request, shared):
    engine = shared("faults_pipes:Faulty", "cpu", request.param)
    yield engine
    assert engine.health().ok
    assert engine.drain(30)


@pytest.fixture
def held(engine, gate):
    """Give a request that waits at a gate, so that nothing behind it is done."""
    handle = engine.submit(request("gate", gate=gate.path, seed=7))
    yield handle
    gate.open()
    handle.result(30)


def in_callback(future, function):
    """Run ``function`` in a done-callback and give what it returned, or raise what it raised."""
    seen: Future = Future()

    def callback(_future):
        try:
            seen.set_result(function())
        except BaseException as error:
            seen.set_exception(error)

    future.add_done_callback(callback)
    return seen.result(30)


# --- asking again, from elsewhere, for nothing ------------------------------------------------


def test_result_gives_the_same_object_each_time_and_to_every_thread(engine):
    handle = engine.submit(request(seed=3))
    outputs = []
    together = threading.Barrier(8)

    def ask():
        together.wait(30)
        outputs.append(handle.result(30))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outputs) == 8
    assert all(output is handle.result(0) for output in outputs)
    assert (outputs[0].output == 3).all()


def test_an_error_is_the_same_each_time_and_does_not_grow(engine):
    handle = engine.submit(request("raise", what="holds a lock"))
    first = handle.exception(30)
    assert first is handle.exception(0)
    for _ in range(3):
        with pytest.raises(sidestream.ExecutionError) as caught:
            handle.result(0)
        assert caught.value is first
        # This test's frame, result() of the handle and of the future; no frames of earlier askers.
        assert len(caught.traceback) <= 4


def test_a_failed_request_is_freed_with_its_handle(engine, eventually):
    handle = engine.submit(request("raise", what="other signature"))
    gc.disable()
    try:
        try:
            handle.result(30)
        except sidestream.ExecutionError as caught:
            error = weakref.ref(caught)
        del handle
        # Whoever resolved it lets go of it a moment later; nothing is collected meanwhile.
        assert eventually(lambda: error() is None)
    finally:
        gc.enable()


def test_a_time_out_leaves_the_request_alone(engine, held, gate):
    with pytest.raises(TimeoutError):
        held.result(0.05)
    with pytest.raises(TimeoutError):
        held.exception(0)
    with pytest.raises(TimeoutError):
        held.output_ready.result(0.01)
    assert not held.done()
    gate.open()
    assert (held.result(30).output == 7).all()


def test_an_id_that_was_never_issued_has_failed(engine):
    future = engine.executor.wait_output_ready("nobody")
    assert future.done()
    with pytest.raises(sidestream.RequestError, match="never issued"):
        future.result(0)


def test_waiting_by_id_and_by_handle_is_the_same(engine, held):
    assert engine.executor.wait_output_ready(held.async_output_id) is held.future()


def test_an_output_that_nobody_waits_for_leaves_nothing_behind(engine, eventually):
    assert eventually(lambda: engine.stats()["ready_bytes"] == 0)
    before = engine.stats()
    for seed in range(20):
        engine.submit(request(seed=seed))
    assert engine.drain(30)
    assert engine.stats()["completed"] - before["completed"] == 20
    # The last one goes with the thread's own reference to it.
    assert eventually(lambda: engine.stats()["ready_bytes"] == 0)


@mostly_uniproc
def test_after_close_what_was_ready_stays_and_the_rest_has_failed(start, gate, executor):
    engine = start("faults_pipes:Faulty", executor=executor)
    ready, failed = engine.submit(request(seed=2)), engine.submit(request("raise", what="group"))
    ready.output_ready.result(30)
    failed.exception(30)
    running = engine.submit(request("gate", gate=gate.path))
    queued = [engine.submit(request()) for _ in range(4)]
    engine.close(timeout_s=0.1)

    assert (ready.result(0).output == 2).all()
    assert isinstance(failed.exception(0), sidestream.ExecutionError)
    for handle in [running, *queued]:
        for future in (handle.future(), handle.output_ready):
            assert isinstance(future.exception(0), sidestream.EngineClosedError)
    assert concurrent.futures.wait([h.future() for h in queued], timeout=1).not_done == set()

    # A callback, and so an await, that comes only now is answered too.
    assert in_callback(ready.future(), lambda: ready.result(0)) is ready.result(0)

    async def ask():
        assert (await ready) is ready.result(0)
        assert (await asyncio.wrap_future(ready.future())) is ready.result(0)
        with pytest.raises(sidestream.EngineClosedError):
            await asyncio.wrap_future(queued[0].future())

    asyncio.run(asyncio.wait_for(ask(), 30))
    for call in (
        lambda: engine.generate("x"),
        lambda: engine.submit(request()),
        lambda: engine.executor.collective_rpc("ping"),
    ):
        with pytest.raises(sidestream.EngineClosedError):
            call()
    assert engine.drain(1)


# --- the standard library's ways to wait ------------------------------------------------------


def test_as_completed_and_wait_see_outputs_and_failures(engine):
    good = [engine.submit(request(seed=i)) for i in range(6)]
    bad = engine.submit(request("raise", what="str raises"))
    futures = {handle.future(): i for i, handle in enumerate([*good, bad])}
    assert {futures[f] for f in concurrent.futures.as_completed(futures, timeout=30)} == set(
        range(7)
    )
    assert isinstance(bad.future().exception(), sidestream.ExecutionError)
    assert good[0].future().exception() is None


def test_wait_for_the_first_exception_ends_with_it(engine, gate):
    bad = engine.submit(request("raise", what="SystemExit"))
    held = engine.submit(request("gate", gate=gate.path))
    try:
        done, not_done = concurrent.futures.wait(
            [bad.future(), held.future()],
            timeout=30,
            return_when=concurrent.futures.FIRST_EXCEPTION,
        )
        assert (done, not_done) == ({bad.future()}, {held.future()})
    finally:
        gate.open()
    held.result(30)


@mostly_uniproc
def test_waiting_for_all_ends_though_nobody_takes_what_is_ready(start, executor):
    # Nothing is sent while one byte is ready and not taken, unless somebody waits for it.
    engine = start("faults_pipes:Faulty", executor=executor, host_buffer_bytes=1)
    handles = [engine.submit(request(seed=i)) for i in range(12)]
    assert not concurrent.futures.wait([h.output_ready for h in handles], timeout=30).not_done
    more = [engine.submit(request(seed=i)) for i in range(12)]
    assert not concurrent.futures.wait([h.future() for h in more], timeout=30).not_done
    for i, handle in enumerate(more):
        assert (handle.result(0).output == i).all()


def test_two_event_loops_await_the_same_output(engine, held, gate):
    outputs = []

    async def ask():
        return await held

    threads = [
        threading.Thread(target=lambda: outputs.append(asyncio.run(ask()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(30)
    assert len(outputs) == 2
    assert outputs[0] is outputs[1] is held.result(0)


def test_an_event_loop_that_ended_meanwhile_hurts_nobody(engine, held, gate, caplog):
    async def ask():
        task = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(_await(held)), 30))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(ask())
    gate.open()
    assert (held.result(30).output == 7).all()
    assert in_callback(held.future(), lambda: "goes on") == "goes on"


async def _await(handle):
    return await handle


# --- done-callbacks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda engine, held: held.result(),
        lambda engine, held: held.exception(30),
        lambda engine, held: held.compute_done.result(),
        lambda engine, held: held.output_ready.result(),
        lambda engine, held: held.future().result(),
        lambda engine, held: concurrent.futures.wait([held.future()]),
        lambda engine, held: next(concurrent.futures.as_completed([held.future()])),
        lambda engine, held: engine.executor.wait_output_ready(held.async_output_id).result(),
        lambda engine, held: engine.submit(request()).result(),
        lambda engine, held: engine.generate(["x", "y"]),
        lambda engine, held: next(engine.imap([request()])),
        lambda engine, held: engine.step(request()),
        lambda engine, held: engine.executor.collective_rpc("ping"),
        lambda engine, held: engine.executor.collective_rpc("execute_model", (request(),)),
        lambda engine, held: engine.drain(),
        lambda engine, held: asyncio.run(_await(held)),
        lambda engine, held: asyncio.run(engine.agenerate("x")),
    ],
    ids=[
        "result",
        "exception",
        "compute_done",
        "output_ready",
        "future",
        "wait",
        "as_completed",
        "by id",
        "submit",
        "generate",
        "imap",
        "step",
        "call",
        "execute_model",
        "drain",
        "await",
        "agenerate",
    ],
)
def test_a_done_callback_may_not_wait(engine, gate, wait):
    quick = engine.submit(request())
    held = engine.submit(request("gate", gate=gate.path))
    quick.result(30)
    try:
        with pytest.raises(RuntimeError, match="done-callback may not wait"):
            in_callback(quick.future(), lambda: wait(engine, held))
        assert not held.done()
    finally:
        gate.open()
    held.result(30)


def test_a_done_callback_may_do_what_does_not_block(engine, held):
    quick = engine.executor.wait_output_ready("nobody")  # done already

    def ask():
        submitted = engine.submit(request(seed=9))
        submitted.future().add_done_callback(lambda future: answers.append(future.result()))
        with pytest.raises(TimeoutError):
            held.result(0)
        concurrent.futures.wait([quick])
        return submitted, engine.stats(), engine.health(), engine.describe()

    answers: list = []
    submitted, *_ = in_callback(quick, ask)
    assert submitted.request_id


@mostly_uniproc
def test_a_done_callback_may_close_the_engine(start, executor):
    engine = start("faults_pipes:Faulty", executor=executor)
    quick = engine.submit(request())
    in_callback(quick.future(), engine.close)
    assert not engine.health().ok
    engine.close()
    assert in_callback(quick.future(), lambda: "still called") == "still called"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_is_logged_and_the_next_one_runs(engine, caplog, kind):
    handle = engine.submit(request())

    def callback(_future):
        raise kind("in a callback")

    handle.future().add_done_callback(callback)
    assert in_callback(handle.future(), lambda: "next") == "next"
    assert "in a callback" in caplog.text
    assert engine.submit(request()).result(30)


# --- calls ------------------------------------------------------------------------------------


def test_a_call_that_times_out_is_forgotten_and_its_answer_counted(engine, gate, eventually):
    before = engine.stats()
    with pytest.raises(TimeoutError):
        engine.executor.collective_rpc("pass_gate", (gate.path,), timeout_s=0.1)
    assert engine.stats()["calls"] == 0
    gate.open()
    assert engine.executor.collective_rpc("echo", (1,), timeout_s=30) == [1]
    assert eventually(lambda: engine.stats()["stale_messages"] == before["stale_messages"] + 1)
