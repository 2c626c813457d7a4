"""Starts that fail, and hosts that do as they like: nothing is left, nothing of theirs changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import sidestream
from sidestream import DiffusionRequest

soak = pytest.mark.soak
both = pytest.mark.parametrize("executor", ["multiproc", "uniproc"])


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks):
    """Of every test in this file."""


# --- starts that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "cause", "said"),
    [
        pytest.param("Raises", FileNotFoundError, "looking for the weights", marks=soak),
        pytest.param("Exits", SystemExit, "last words", marks=soak),
        pytest.param("OutOfMemory", MemoryError, "loading 10 GiB of weights", marks=soak),
        pytest.param("FullOfMemory", MemoryError, "", marks=soak),
    ],
)  # one that raises and one that exits are in tests/engine/test_engine.py
def test_a_pipeline_that_can_not_be_loaded_is_told_with_what_it_printed(
    pipeline, cause, said, start
):
    with pytest.raises(sidestream.WorkerStartError, match=cause.__name__) as caught:
        start(pipeline)
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.stage == "pipeline"
    assert said in caught.value.stderr
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("pipeline", "cause"), [("Raises", FileNotFoundError), ("Exits", SystemExit)]
)
def test_a_pipeline_that_can_not_be_loaded_here_is_told(pipeline, cause, start):
    with pytest.raises(sidestream.WorkerStartError, match=cause.__name__) as caught:
        start(pipeline, executor="uniproc")
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.stage == "pipeline"


@pytest.mark.parametrize("executor", [pytest.param("multiproc", marks=soak), "uniproc"])
def test_a_load_that_hangs_is_given_up(executor, start):
    # Here everything is imported already; a worker's own imports count too.
    patience_s = 8 if executor == "multiproc" else 0.3
    with pytest.raises(sidestream.WorkerStartError, match=r"no sign of progress.*start_timeout_s"):
        start(
            executor=executor,
            start_timeout_s=patience_s,
            pipeline_options={"at_load": "idle about"},
        )


def test_options_that_can_not_be_pickled_are_refused_before_anything_starts(start):
    with pytest.raises(sidestream.ConfigError, match=r"pipeline_options.*pickle"):
        start(pipeline_options={"a": lambda: None})


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/true", "/bin/sh"])
def test_an_interpreter_that_is_none_is_told(program, start, monkeypatch):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(sidestream.WorkerStartError):
        start()


@contextlib.contextmanager
def all_descriptors_taken():
    """Take every descriptor that this process may have; give those that a test may close."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield taken
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@soak
def test_a_start_with_too_few_descriptors_keeps_none(start):
    start(executor="uniproc")  # everything is imported from here on: that needs descriptors too
    refusals = 0
    with all_descriptors_taken() as taken:
        os.close(taken.pop())
        left = len(os.listdir("/proc/self/fd"))
        while True:
            try:
                start()
                break
            except (OSError, sidestream.WorkerStartError):
                refusals += 1
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) == left
            os.close(taken.pop())
            left -= 1
    assert refusals > 10


def test_ctrl_c_while_a_worker_starts_ends_it(start, pipes):
    def interrupt():
        pipes.note()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        start(pipeline_options={**pipes.options, "at_load": "wait"})


@pytest.mark.parametrize("platform", ["nowhere", "cpu"])
def test_an_engine_that_was_never_complete_is_dropped_quietly(platform):
    config = sidestream.EngineConfig(
        pipeline="fire_pipes:Raises", platform=platform, executor="uniproc"
    )
    with pytest.raises(sidestream.SidestreamError):
        sidestream.DiffusionEngine(config)
    gc.collect()  # what a finalizer raises fails the test


# --- hosts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_elsewhere():
    """Give an engine that was made in a thread of an event loop, both of which are gone."""
    config = sidestream.EngineConfig(pipeline="fire_pipes:Victim", platform="cpu")

    async def main():
        engine = await asyncio.to_thread(sidestream.DiffusionEngine, config)
        return engine, await engine.submit(DiffusionRequest(""))

    engine, output = asyncio.run(main())
    assert (output.output["image"] == 7).all()
    yield engine
    engine.close(timeout_s=2)


def test_an_engine_outlives_the_thread_and_the_event_loop_that_made_it(made_elsewhere):
    output = made_elsewhere.submit(DiffusionRequest("")).result(30).output
    assert output["image"].shape == (3, 64, 64)


def test_eight_engines_start_at_once_in_one_process(start):
    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(lambda _: start(executor="uniproc"), range(8)))
    handles = [engine.submit(DiffusionRequest("")) for engine in engines]
    assert all((handle.result(30).output["image"] == 7).all() for handle in handles)


EIGHT = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    engines = list(pool.map(lambda _: start(), range(8)))
handles = [engine.submit(DiffusionRequest("")) for engine in engines]
say(all((handle.result(30).output["image"] == 7).all() for handle in handles))
"""


@soak
def test_eight_engines_start_at_once_as_the_first_act_of_a_process(script):
    run = script(EIGHT)
    assert run.line(200) == ["True"]
    assert run.end(30) == (0, "")
    assert run.is_gone(5)


STATE = """
import json, multiprocessing, resource, warnings
if sys.argv[1] != "none":
    multiprocessing.set_start_method(sys.argv[1])

def child(queue):
    queue.put("alive")

def state():
    return {
        "handlers": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "method": multiprocessing.get_start_method(allow_none=True),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "umask": [os.umask(0o22), os.umask(0o22)][0],
        "limits": [resource.getrlimit(what) for what in range(resource.RLIM_NLIMITS)]
        if hasattr(resource, "RLIM_NLIMITS") else resource.getrlimit(resource.RLIMIT_NOFILE),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "group": [os.getpgrp(), os.getsid(0)],
    }

if __name__ == "__main__":
    before = state()
    with start() as engine:
        assert (engine.submit(DiffusionRequest("")).result(60).output["image"] == 7).all()
        within = state()
        if sys.argv[1] == "fork":
            queue = multiprocessing.SimpleQueue()
            process = multiprocessing.Process(target=child, args=(queue,))
            process.start()
            assert queue.get() == "alive"
            process.join()
            assert process.exitcode == 0
            assert (engine.submit(DiffusionRequest("")).result(60).output["image"] == 7).all()
    for name, was in before.items():
        for now in (within, state()):
            if now[name] != was:
                say(name, was, now[name])
    say("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=soak), pytest.param("none", marks=soak)],
)
def test_nothing_of_the_host_is_changed(method, script):
    run = script(STATE, method)
    assert run.line() == ["end"]
    assert run.end(30) == (0, "")
    assert run.is_gone(5)


CLOSED_STREAMS = """
with start() as engine:
    engine.executor.collective_rpc("print_much")
    answer = engine.submit(DiffusionRequest("")).result(60).output["image"][0, 0, 0].item()
with open(sys.argv[1], "w") as file:
    file.write(str(answer))
"""


@soak
def test_a_host_without_standard_streams_starts_engines(script, tmp_path):
    answer = tmp_path / "answer"
    shell = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-']
    run = script(CLOSED_STREAMS, answer, before=shell)
    run.process.wait(60)
    assert answer.read_text() == "7.0"


@pytest.mark.slow
@both
def test_a_forked_child_is_told_at_once_and_its_parent_goes_on(executor, start, made_elsewhere):
    engine = made_elsewhere if executor == "multiproc" else start(executor=executor)
    done = engine.submit(DiffusionRequest(""))
    output = done.result(30)
    waiting = [engine.submit(DiffusionRequest("take a second")) for _ in range(2)]

    def child():
        outcomes = {
            "submit": outcome(engine.submit, DiffusionRequest("")),
            "generate": outcome(engine.generate, "a"),
            "call": outcome(engine.executor.collective_rpc, "pid"),
            "wait": outcome(waiting[1].result),
            "wait for the forward": outcome(lambda: waiting[1].compute_done.result()),
            "wait by id": outcome(engine.executor.wait_output_ready, waiting[1].async_output_id),
            "callback": outcome(lambda: waiting[1].future().add_done_callback(print)),
            "drain": outcome(engine.drain),
        }
        assert "forked" in engine.health().reason
        assert done.result() is output
        assert (output.output["image"] == 7).all()
        engine.close()
        return outcomes

    outcomes = in_child(child)
    assert set(outcomes.values()) == {"EngineClosedError"}, outcomes
    assert all((handle.result(60).output["image"] == 7).all() for handle in waiting)
    assert engine.health().ok


@pytest.mark.parametrize("executor", [pytest.param("multiproc", marks=soak), "uniproc"])
def test_forks_while_threads_submit_leave_no_child_stuck(executor, start):
    engine = start(executor=executor)
    is_over = threading.Event()

    def submit():
        while not is_over.is_set():
            engine.submit(DiffusionRequest("")).result(30)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            answer = in_child(lambda: outcome(engine.submit, DiffusionRequest("")))
            assert answer == "EngineClosedError"
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert engine.submit(DiffusionRequest("")).result(30)


def outcome(function, *args):
    try:
        return repr(function(*args))
    except BaseException as error:
        return type(error).__name__


def in_child(function, within_s=20):
    """Run ``function`` in a forked child; gives its result."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of what is tested here: a fork in a process that has threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(function()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        deadline = threading.Timer(within_s, os.kill, (pid, signal.SIGKILL))
        deadline.start()
        try:
            text = answer.read()
        finally:
            deadline.cancel()
            deadline.join()
            os.waitpid(pid, 0)
    assert text, "the child hung or failed"
    return json.loads(text)


# --- hosts that reap children themselves ----------------------------------------------------------


@pytest.fixture
def ignored_children():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def reaped_children():
    """Collect whatever child ends, as some servers do."""
    is_over = threading.Event()

    def reap():
        while not is_over.is_set():
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.001)
            except ChildProcessError:
                time.sleep(0.001)

    thread = threading.Thread(target=reap)
    thread.start()
    yield
    is_over.set()
    thread.join()


@pytest.mark.parametrize("host", ["ignored_children", pytest.param("reaped_children", marks=soak)])
def test_a_host_that_collects_children_itself_hears_of_an_unknown_status(
    host, request, start, monkeypatch
):
    request.getfixturevalue(host)
    engine = start()
    handle = engine.submit(DiffusionRequest("wait"))
    os.kill(*engine.executor.collective_rpc("pid"), signal.SIGKILL)
    error = handle.exception(10)
    assert isinstance(error, sidestream.WorkerDiedError)
    # A loop of the host's may lose the race for it.
    if host == "ignored_children" or error.exit_code is None:
        assert (error.exit_code, error.signal) == (None, None)
        assert "unknown status" in str(error)
    assert not engine.health().ok
    engine.close()
    # A worker that is collected before anybody can watch it.
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(sidestream.WorkerStartError):
        start()
