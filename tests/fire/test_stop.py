"""Ends of an engine and of its process: in time, quiet, with the right exit code."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest

import sidestream
from sidestream import DiffusionRequest

soak = pytest.mark.soak
both = pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
#: For what differs by no more than the cost of a worker's start.
mostly_uniproc = pytest.mark.parametrize(
    "executor", [pytest.param("multiproc", marks=soak), "uniproc"]
)

#: What a running forward is given, and what follows by force; with slack for a shared machine.
LADDER_S = 5.0


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks):
    """Of every test in this file."""


@pytest.mark.slow
@both
def test_two_threads_close_during_a_long_forward(executor, start, pipes):
    engine = start(executor=executor, pipeline_options={"notes": str(pipes.notes)})
    handles = [engine.submit(DiffusionRequest("idle about")) for _ in range(5)]
    call = threading.Thread(target=outcome, args=(engine.executor.collective_rpc, "pid"))
    call.start()
    pipes.note()
    ended: list[float] = []

    def close():
        engine.close(timeout_s=1)
        ended.append(time.monotonic())

    began = time.monotonic()
    closers = [threading.Thread(target=close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(60)
    assert 1 <= min(ended) - began <= max(ended) - began < 1 + LADDER_S
    for handle in handles:
        assert isinstance(handle.exception(0), sidestream.EngineClosedError)
    call.join(LADDER_S)
    assert not call.is_alive()
    engine.close()
    assert outcome(engine.submit, DiffusionRequest("")) == "EngineClosedError"


@pytest.mark.slow
def test_a_forward_that_does_not_come_back_is_left_to_its_thread(start, pipes, eventually):
    others = set(threading.enumerate())
    engine = start(executor="uniproc", pipeline_options={"notes": str(pipes.notes)})
    handle = engine.submit(DiffusionRequest("take three seconds"))
    pipes.note()
    began = time.monotonic()
    engine.close(timeout_s=0.2)
    assert time.monotonic() - began < 2.5
    assert isinstance(handle.exception(0), sidestream.EngineClosedError)
    assert eventually(lambda: set(threading.enumerate()) <= others, 30)


@mostly_uniproc
def test_close_from_a_callback_resolves_everything(executor, start):
    engine = start(executor=executor)
    first = engine.submit(DiffusionRequest(""))
    others = [engine.submit(DiffusionRequest("idle about")) for _ in range(3)]
    closed = threading.Event()
    first.future().add_done_callback(lambda _future: (engine.close(timeout_s=0.1), closed.set()))
    assert closed.wait(30)
    assert first.result(0)
    for handle in others:
        assert isinstance(handle.exception(0), sidestream.EngineClosedError)


@mostly_uniproc
def test_close_while_threads_submit_resolves_everything(executor, start):
    engine = start(executor=executor)
    handles: list[sidestream.RequestHandle] = []
    refusals: list[str] = []
    is_running = threading.Semaphore(0)

    def submit():
        while True:
            try:
                handles.append(engine.submit(DiffusionRequest("")))
            except sidestream.QueueFullError:
                continue
            except BaseException as error:
                refusals.append(type(error).__name__)
                return
            is_running.release()

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert is_running.acquire(timeout=30)
    engine.close()
    for thread in threads:
        thread.join(30)
    assert refusals == ["EngineClosedError"] * 4
    outcomes = {type(handle.exception(5)) for handle in handles}
    assert outcomes <= {type(None), sidestream.EngineClosedError}


@both
def test_a_close_that_ctrl_c_interrupts_still_leaves_nothing(executor, start, pipes):
    engine = start(executor=executor, pipeline_options={"notes": str(pipes.notes)})
    handle = engine.submit(DiffusionRequest("idle about"))
    pipes.note()
    queued = [engine.submit(DiffusionRequest("")) for _ in range(4)][-1]
    main = threading.main_thread().ident

    def interrupt():
        queued.exception(60)  # closing has begun,
        time.sleep(0.3)  # and waits for what runs; nothing tells of that
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        engine.close(timeout_s=60)
    interrupter.join(60)
    assert isinstance(handle.exception(0), sidestream.EngineClosedError)
    engine.close()


@soak
def test_a_signal_handler_may_close_the_engine_that_is_being_closed(start, pipes):
    engine = start(pipeline_options={"notes": str(pipes.notes)})
    handle = engine.submit(DiffusionRequest("wait"))
    pipes.note()
    before = signal.signal(signal.SIGUSR1, lambda *_: engine.close(timeout_s=0.1))
    main = threading.main_thread().ident
    try:
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        began = time.monotonic()
        engine.close(timeout_s=30)
        assert time.monotonic() - began < LADDER_S + 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(handle.exception(0), sidestream.EngineClosedError)


@soak
def test_close_during_a_restart_does_not_wait_for_it(start, pipes):
    options = {"notes": str(pipes.notes), "at_load": "wait the second time"}
    engine = start(pipeline_options=options, max_restarts=3)
    os.kill(*engine.executor.collective_rpc("pid"), signal.SIGKILL)
    pipes.note()
    began = time.monotonic()
    engine.close(timeout_s=60)
    assert time.monotonic() - began < LADDER_S


@both
def test_an_engine_that_nobody_holds_ends_its_worker(executor, eventually):
    engine = sidestream.DiffusionEngine(
        sidestream.EngineConfig(pipeline="fire_pipes:Victim", platform="cpu", executor=executor)
    )
    assert engine.submit(DiffusionRequest("")).result(30)
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    # Its threads, process and descriptors go: see _nothing_is_left.


def outcome(function, *args):
    try:
        return repr(function(*args))
    except BaseException as error:
        return type(error).__name__


# --- ends of scripts ------------------------------------------------------------------------------

IDLE = """
engine = start(executor=sys.argv[2])
engine.submit(DiffusionRequest("")).result()
"""
BUSY = """
engine = start(executor=sys.argv[2], pipeline_options={"notes": sys.argv[1]})
handles = [engine.submit(DiffusionRequest("compute")) for _ in range(3)]
handles[0].compute_done.add_done_callback(lambda future: None)
noted(sys.argv[1])
say("there")
"""
WITH = """
with start(executor=sys.argv[2], pipeline_options={"notes": sys.argv[1]}) as engine:
    handle = engine.submit(DiffusionRequest("compute"))
    noted(sys.argv[1])
    say("there")
    handle.result()
"""
STARTING = """
options = {"notes": sys.argv[1], "at_load": "wait"}
make = lambda: start(executor=sys.argv[2], pipeline_options=options)
"""
ELSEWHERE = """
threading.Thread(target=make, daemon=True).start()
noted(sys.argv[1])
say("there")
"""
FIVE = """
engines = [start(pipeline_options={"notes": sys.argv[1]}) for _ in range(5)]
handles = [engine.submit(DiffusionRequest("compute")) for engine in engines]
noted(sys.argv[1], lines=5)
say("there")
"""
SAY, WAIT = "say('there')\n", "handles[0].result()\n"

NOTHING, OWN, CTRL_C = "", "RuntimeError: mine", "KeyboardInterrupt"
#: Who, script, signals, exit code, and the last line of stderr.
ENDS = {
    "idle, falls off the end": (IDLE + SAY, 0, 0, NOTHING),
    "busy, falls off the end": (BUSY, 0, 0, NOTHING),
    "busy, sys.exit": (BUSY + "sys.exit(7)", 0, 7, NOTHING),
    "busy, an error of the script": (BUSY + "raise RuntimeError('mine')", 0, 1, OWN),
    "busy, os._exit": (BUSY + "os._exit(8)", 0, 8, NOTHING),
    "idle, Ctrl-C": (IDLE + SAY + "signal.pause()", 1, -signal.SIGINT, CTRL_C),
    "busy, Ctrl-C": (BUSY + WAIT, 1, -signal.SIGINT, CTRL_C),
    "idle, Ctrl-C twice": (IDLE + SAY + "signal.pause()", 2, -signal.SIGINT, CTRL_C),
    "busy, Ctrl-C twice": (BUSY + WAIT, 2, -signal.SIGINT, CTRL_C),
    "busy in a with block, Ctrl-C": (WITH, 1, -signal.SIGINT, CTRL_C),
    "busy in a with block, Ctrl-C twice": (WITH, 2, -signal.SIGINT, CTRL_C),
    "starting, Ctrl-C": (STARTING + "say('there'); make()", 1, -signal.SIGINT, CTRL_C),
    "starting in a thread, falls off the end": (STARTING + ELSEWHERE, 0, 0, NOTHING),
    "five busy engines, fall off the end": (FIVE, 0, 0, NOTHING),
}
FAST = {
    ("multiproc", "busy, Ctrl-C twice"),
    ("multiproc", "starting in a thread, falls off the end"),
    ("uniproc", "busy, falls off the end"),
}
#: There the forward runs on; a load that hangs has no end but the process's.
NOT_IN_ONE_PROCESS = {"five busy engines, fall off the end"}


@pytest.mark.parametrize(
    ("executor", "name"),
    [
        pytest.param(executor, name, marks=() if (executor, name) in FAST else soak)
        for executor in ("multiproc", "uniproc")
        for name in ENDS
        if executor == "multiproc" or name not in NOT_IN_ONE_PROCESS
    ],
)
def test_a_process_ends_in_time_quietly_and_with_its_own_exit_code(executor, name, script, pipes):
    body, signals, code, last_words = ENDS[name]
    run = script(body, pipes.notes, executor)
    assert run.line(120) == ["there"]
    if name == "starting, Ctrl-C":
        pipes.note()
    began = time.monotonic()
    for number in range(signals):
        if number:
            # The second one is meant for the end; nothing tells from outside when that begins.
            time.sleep(0.5)
        run.signal_group(signal.SIGINT)
    # Output and all: a worker that lived on would keep the pipes open.
    exit_code, stderr = run.end(60)
    assert time.monotonic() - began < 5 + 2
    assert exit_code == code, stderr
    assert_quiet(stderr, last_words)
    assert run.is_gone(3)


def assert_quiet(stderr: str, last_words: str) -> None:
    """Nothing but the traceback of what the script or its user did."""
    lines = stderr.splitlines()
    assert (lines[-1] if lines else "") == last_words, stderr
    for line in lines:
        is_of_traceback = line.startswith((" ", "Traceback (most recent call last)")) or not line
        is_chained = line.startswith("During handling of the above exception")
        assert is_of_traceback or is_chained or line == last_words, stderr


@soak
def test_sigterm_ends_the_process_and_its_worker(script, pipes):
    run = script(BUSY + WAIT, pipes.notes, "multiproc")
    run.line()
    os.kill(run.pid, signal.SIGTERM)
    assert run.end(10) == (-signal.SIGTERM, "")
    assert run.is_gone(3)
