"""Who dies, how and when, and what everybody else sees of it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sidestream
from sidestream import DiffusionRequest, ResultChannel, ResultPumpThread
from sidestream.protocol import AsyncOutputKind
from sidestream.transport.channel import ChannelClosed
from sidestream.transport.frame import Frame

soak = pytest.mark.soak

#: What is promised, from the moment that the kernel shows a death to who asks for it: whoever waits
#: for a worker is told, and the workers of a main process are gone.
TOLD_S, GONE_S = 1.0, 3.0
#: For what nothing is promised of.
PROMPT_S = 5.0

HOWS = ("SIGKILL", "SIGTERM", "SIGSEGV", "exit 3")
RAISES, FAILS, GONE = "the constructor raises", "whoever waits is told", "nothing is left"
#: Who dies, how, in which phase (of main: what its workers are doing), and what has to follow.
TABLE = [
    *(("worker", how, "load", RAISES) for how in HOWS),
    *(("worker", how, "idle", FAILS) for how in HOWS),
    *(("worker", how, "forward", FAILS) for how in HOWS),
    *(("worker", how, "forward that holds the GIL", FAILS) for how in HOWS),
    *(("worker", how, "computed", FAILS) for how in HOWS),
    *(("worker", how, "copying", FAILS) for how in HOWS),
    *(("worker", how, "sending a call's result", FAILS) for how in HOWS),
    *(("worker", how, "sending an output's head", FAILS) for how in HOWS),
    ("main", "SIGKILL", "hold the GIL, children live on", GONE),
    ("main", "SIGKILL", "wait, load, idle", GONE),
    ("main, then workers", "SIGKILL", "wait", GONE),
    ("workers, then main", "SIGKILL", "wait", GONE),
    ("process group of main", "SIGKILL", "hold the GIL", GONE),
    ("everybody", "SIGKILL", "hold the GIL, children live on", GONE),
]
#: In the fast cut: every way to die, the phases that differ most.
FAST = [
    ("worker", "SIGKILL", "load", RAISES),
    ("worker", "SIGTERM", "forward that holds the GIL", FAILS),
    ("worker", "SIGSEGV", "copying", FAILS),
    ("worker", "exit 3", "sending a call's result", FAILS),
    ("main", "SIGKILL", "hold the GIL, children live on", GONE),
]


def rows(expectation: str) -> list:
    return [
        pytest.param(*row[:3], marks=() if row in FAST else soak, id="-".join(row[:3]))
        for row in TABLE
        if row[3] == expectation
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks):
    """Of every test in this file."""


class Deaths:
    """When processes die, by the kernel's word and not by what the engine makes of it."""

    def __init__(self, *pids: int) -> None:
        # Descriptors: nobody else can get the number of a process that one is open for.
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def last(self, timeout_s: float = 30) -> float:
        """Wait until all are dead; gives when that was."""
        try:
            for fd in self._fds:
                assert select.select([fd], [], [], timeout_s)[0]
            return time.monotonic()
        finally:
            for fd in self._fds:
                os.close(fd)


@pytest.fixture
def within(record_property) -> Callable[[float, str, float], None]:
    """Have something happen soon enough after a death, and keep how soon that was."""

    def check(since: float, what: str, limit_s: float) -> None:
        took_s = time.monotonic() - since
        record_property(what, f"{took_s:.4f}")
        assert took_s < limit_s, f"{what} took {took_s:.2f} s"

    return check


def end(pid: int, how: str, pipes) -> None:
    if how == "exit 3":
        pipes.order_exit(3)
    else:
        os.kill(pid, signal.Signals[how])


def assert_names(error: BaseException | None, how: str, pid: int) -> None:
    assert isinstance(error, sidestream.WorkerDiedError)
    assert (error.rank, error.pid) == (0, pid)
    if how == "exit 3":
        assert (error.exit_code, error.signal) == (3, None)
        assert "exited with code 3" in str(error)
    else:
        assert (error.exit_code, error.signal) == (-signal.Signals[how], how)
        assert how in str(error)


@pytest.mark.parametrize(("who", "how", "phase"), rows(FAILS))
def test_a_dead_worker_fails_whatever_waits_for_it(
    who, how, phase, start, pipes, eventually, within
):
    on_sim = phase in ("computed", "copying")
    engine = start(platform="sim" if on_sim else "cpu", pipeline_options=pipes.options)
    (pid,) = engine.executor.collective_rpc("pid")
    deaths = Deaths(pid)
    calls = ThreadPoolExecutor(4)
    handles, pending = [], []

    def call(method):
        pending.append(calls.submit(engine.executor.collective_rpc, method))

    def submit(*prompts):
        handles.extend(engine.submit(DiffusionRequest(prompt)) for prompt in prompts)

    match phase:
        case "forward":
            submit("wait", "", "", "")
        case "forward that holds the GIL":
            submit("exit while holding the GIL" if how == "exit 3" else "hold the GIL", "", "")
        case "computed" | "copying":
            held = "hold_forwards" if phase == "computed" else "hold_copies"
            engine.executor.collective_rpc(held)
            submit("")
            handles[0].compute_done.result(30)
            submit("", "", "")
            call("wait")
        case "sending a call's result":
            call("large_result")
        case "sending an output's head":
            submit("large head", "", "")
    if phase not in ("idle", "computed", "copying"):
        pipes.note()
        call("pid")
        call("pid")
        assert eventually(lambda: engine.stats()["calls"] >= 2)
    in_flight = [handle.request_id for handle in handles[:1]]

    if how != "exit 3" or phase != "forward that holds the GIL":
        end(pid, how, pipes)
    died_at = deaths.last()
    for future in (*(handle.output_ready for handle in handles), *pending):
        future.exception(PROMPT_S)
    within(died_at, "futures", TOLD_S)
    # Without any traffic.
    assert eventually(lambda: not engine.health().ok)
    within(died_at, "health", TOLD_S)
    for handle in handles:
        for future in (handle.future(), handle.output_ready):
            error = future.exception(PROMPT_S)
            assert_names(error, how, pid)
            assert set(in_flight) <= set(error.request_ids)
        assert handle.compute_done.done()
    for future in pending:
        assert_names(future.exception(PROMPT_S), how, pid)
    calls.shutdown()
    # Who heard by a request is refused at once. health() looks for itself, ahead of all others.
    assert eventually(lambda: refusal(engine) is not None, 0 if handles else PROMPT_S)
    assert_names(refusal(engine), how, pid)
    depths = set()
    for _ in range(3):
        with pytest.raises(sidestream.WorkerDiedError) as caught:
            engine.executor.collective_rpc("pid")
        depths.add(len(caught.traceback))
    assert len(depths) == 1  # raised again and again, an error would collect tracebacks
    assert str(pid) in engine.health().reason


def refusal(engine) -> Exception | None:
    """Give what submit raises."""
    try:
        engine.submit(DiffusionRequest(""))
    except sidestream.SidestreamError as error:
        return error
    return None


@pytest.mark.parametrize(("who", "how", "phase"), rows(RAISES))
def test_a_worker_that_dies_while_it_loads_fails_the_constructor(
    who, how, phase, start, pipes, within
):
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start, pipeline_options={**pipes.options, "at_load": "wait"})
        pid = pipes.note()
        deaths = Deaths(pid)
        end(pid, how, pipes)
        died_at = deaths.last()
        error = starting.exception(PROMPT_S)
        within(died_at, "constructor", TOLD_S)
    assert isinstance(error, sidestream.WorkerStartError)
    assert error.stage == "pipeline"
    assert_names(error.__cause__, how, pid)


@soak
def test_a_worker_killed_while_it_writes_a_large_message_leaves_no_part_of_it(start):
    engine = start()
    with pytest.raises(sidestream.WorkerDiedError, match="SIGKILL"):
        engine.executor.collective_rpc("die_while_writing", timeout_s=60)


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("send_garbage", "another version"),
        pytest.param("close_descriptors", "other end of a channel is gone", marks=soak),
    ],
)
def test_a_worker_that_can_not_be_reached_any_more_is_ended(deed, reason, start):
    engine = start()
    with pytest.raises(sidestream.WorkerDiedError, match=f"connection was lost.*{reason}"):
        engine.executor.collective_rpc(deed, timeout_s=30)
    assert not engine.health().ok


@soak
def test_outputs_outlive_their_worker(start, eventually):
    engine = start(platform="sim")
    output = engine.submit(DiffusionRequest("")).result(30)
    assert output.timings.carrier == "slot"
    os.kill(*engine.executor.collective_rpc("pid"), signal.SIGKILL)
    assert eventually(lambda: not engine.health().ok)
    engine.close()
    assert torch.equal(output.output["image"], torch.full((3, 64, 64), 7.0))
    output.output["image"].fill_(1)


@soak
def test_helpers_of_a_killed_worker_go_with_it_unless_they_left_its_session(
    start, eventually, is_running
):
    engine = start()
    ((children, apart),) = engine.executor.collective_rpc("start_helpers")
    try:
        os.kill(*engine.executor.collective_rpc("pid"), signal.SIGKILL)
        # A helper holds the other end of the socket, so its end tells nothing.
        assert eventually(lambda: not engine.health().ok)
        assert eventually(lambda: not any(map(is_running, children)))
        assert all(map(is_running, apart))
    finally:
        for pid in apart:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed(start, pipes, is_running):
    engine = start(pipeline_options=pipes.options)
    handle = engine.submit(DiffusionRequest("ignore SIGTERM"))
    pid = pipes.note()
    before = time.monotonic()
    engine.close(timeout_s=0.1)
    assert time.monotonic() - before < PROMPT_S
    assert isinstance(handle.exception(0), sidestream.EngineClosedError)
    assert not is_running(pid)


# --- the main process -----------------------------------------------------------------------------

#: Engines in several phases at once, and children of main and of a worker that live on.
MAIN = """
notes = os.path.join(sys.argv[1], "notes")
os.mkfifo(notes)
busy = start(pipeline_options={"notes": notes})
workers = busy.executor.collective_rpc("pid")
family = []
if "children live on" in sys.argv:
    (family,) = busy.executor.collective_rpc("start_helpers")
handle = busy.submit(DiffusionRequest(sys.argv[2]))
noted(notes)
if "load" in sys.argv:
    threading.Thread(target=start, kwargs={"pipeline_options":
        {"notes": notes, "at_load": "wait"}}, daemon=True).start()
    workers.append(noted(notes).strip())
if "idle" in sys.argv:
    idle = start()
    workers += idle.executor.collective_rpc("pid")
child = 0
if family:
    child = os.fork()
    if child == 0:
        signal.pause()
say(child, *workers)
say(*(family[1] if family else [0]))
signal.pause()
"""


@pytest.mark.parametrize(("who", "how", "phase"), rows(GONE))
def test_nothing_outlives_a_killed_main_process(who, how, phase, script, tmp_path, within):
    main = script(MAIN, tmp_path, *phase.split(", "))
    child, *workers = map(int, main.line())
    apart = set(map(int, main.line()))
    assert not main.files("/dev/shm/")
    victims = {
        "main": [main.pid],
        "main, then workers": [main.pid, *workers],
        "workers, then main": [*workers, main.pid],
        "process group of main": [],
        "everybody": main.family(),
    }[who]
    of_main, of_workers = Deaths(main.pid), Deaths(*workers)
    if not victims:
        main.signal_group(signal.Signals[how])
    for pid in victims:
        # Those that are killed later may have gone by then, with the first.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[how])
    died_at = of_main.last()
    of_workers.last()
    within(died_at, "workers", GONE_S)
    # What a user forked, and what took a session of its own, is theirs to end.
    assert main.is_gone(PROMPT_S, but={child, *apart})
    assert os.listdir(tmp_path) == ["notes"]


FORKING = """
children = []

def fork():
    while len(children) < 300 and not is_up:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
        time.sleep(0.005)

is_up = False
thread = threading.Thread(target=fork)
thread.start()
engine = start()
is_up = True
thread.join()
say(*children)
signal.pause()
"""


@soak
def test_children_forked_while_a_worker_starts_do_not_keep_it_alive(script):
    main = script(FORKING)
    children = set(map(int, main.line()))
    assert len(children) > 20
    os.kill(main.pid, signal.SIGKILL)
    assert main.is_gone(PROMPT_S, but=children)


@soak
def test_a_worker_is_found_dead_by_every_thread_that_waits(start, pipes):
    engine = start(pipeline_options=pipes.options)
    handles = [engine.submit(DiffusionRequest("wait")) for _ in range(20)]
    seen: list[BaseException | None] = []
    threads = [
        threading.Thread(target=lambda h=handle: seen.append(h.exception(30)))
        for handle in handles
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    os.kill(pipes.note(), signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in seen] == [sidestream.WorkerDiedError] * 40


# --- the pump alone -------------------------------------------------------------------------------


def test_a_pump_hears_of_a_death_and_of_returned_slots_at_once_and_goes_on():
    dead, dead_worker = ResultChannel.pair()
    alive, alive_worker = ResultChannel.pair()
    heard: queue.SimpleQueue = queue.SimpleQueue()
    pump = ResultPumpThread(
        [dead, alive],
        lambda channel, delivery: heard.put((channel, delivery.open()[0].result)),
        on_closed=lambda channel, reason: heard.put((channel, type(reason))),
    )
    dead_worker.close()
    os.eventfd_write(dead.released_fd, 1)
    pump.start()
    assert heard.get(timeout=10) == (dead, ChannelClosed)
    alive_worker.messages.send(Frame(kind=AsyncOutputKind.PROGRESS, body=b"here"))
    assert heard.get(timeout=10) == (alive, "here")
    assert pump.stop(10)
    alive_worker.close()
    alive.close()


def test_a_stopped_pump_writes_to_nobody_elses_descriptor():
    channel, worker = ResultChannel.pair()
    pump = ResultPumpThread([channel], lambda _channel, _delivery: None).start()
    assert pump.stop(10)
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(10)]
    pump.send(channel, Frame(kind=0))
    for fd in fds:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        os.close(fd)
    channel.close()
    worker.close()
