"""A signal handler closes the engine, whatever the thread that it interrupts was doing there.

Tracing raises a real signal at a line of the engine's own code, so that each place is met for sure.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sidestream
from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams

CODE = str(Path(sidestream.__file__).parent)
#: Much less than any deadlock takes, much more than an end does.
SOON_S = 30.0


def at_line(number: int, scene: Callable[[], object]) -> int:
    """Play a scene with a signal at the n-th line of sidestream's code in it; counts the lines."""
    seen = 0

    def trace_lines(frame, event, _argument):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == number:
                signal.raise_signal(signal.SIGUSR1)
        return trace_lines

    def trace_calls(frame, _event, _argument):
        return trace_lines if frame.f_code.co_filename.startswith(CODE) else None

    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        scene()
    finally:
        sys.settrace(before)
    return seen


@pytest.fixture
def on_signal():
    """Have a handler called at SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, lambda _number, _frame: handler())
    signal.signal(signal.SIGUSR1, before)


class Scene:
    """All that a caller's thread does with an engine, and the engine's end in the middle of it."""

    def __init__(self, executor: str) -> None:
        self.threads_of_others = set(threading.enumerate())
        self.engine = DiffusionEngine(
            EngineConfig(
                pipeline="fire_pipes:Victim", platform="cpu", executor=executor, max_restarts=0
            )
        )
        self.handles: list[sidestream.RequestHandle] = []
        self.handler_s = 0.0

    def close(self) -> None:
        began = time.monotonic()
        self.engine.close(timeout_s=5)
        self.handler_s = time.monotonic() - began

    def play(self) -> None:
        request = DiffusionRequest("", SamplingParams(height=8, width=8, seed=1))
        try:
            for timeout_s in (None, 60):
                self.handles.append(self.engine.submit(request, timeout_s=timeout_s))
            self.handles[0].result(SOON_S)
            self.handles[0].future().add_done_callback(lambda _future: None)
            self.engine.abort(self.handles[1])
            self.engine.stats()
            self.engine.describe()
            self.engine.health()
            self.engine.executor.collective_rpc("pid")
            for output in self.engine.imap([request] * 2):
                assert output.request_id
            self.engine.drain(SOON_S)
        except sidestream.SidestreamError:
            assert self.handler_s  # closed, and not before

    def assert_over(self) -> None:
        began = time.monotonic()
        self.engine.close(timeout_s=5)
        assert self.handler_s + time.monotonic() - began < SOON_S
        for handle in self.handles:
            assert handle.done()
        assert not self.engine.health().ok
        with pytest.raises(sidestream.EngineClosedError):
            self.engine.submit(DiffusionRequest(""))
        names = {thread.name for thread in set(threading.enumerate()) - self.threads_of_others}
        assert not names & {"sidestream-engine", "sidestream-pump"}


@pytest.fixture
def play_with_signal_at(on_signal):
    def play(number: int, executor: str) -> int:
        scene = Scene(executor)
        try:
            on_signal(scene.close)
            lines = at_line(number, scene.play)
            scene.assert_over()
        finally:
            scene.engine.close(0)
        return lines

    return play


def play_undisturbed(executor: str) -> int:
    scene = Scene(executor)
    try:
        return at_line(0, scene.play)
    finally:
        scene.engine.close()


@pytest.mark.parametrize(
    "places", [pytest.param(12, id="some"), pytest.param(10**6, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(1200)
def test_a_handler_may_close_the_engine_at_any_line_of_a_call(play_with_signal_at, places):
    lines = play_undisturbed("uniproc")
    for number in range(1, lines, max(1, lines // places)):
        play_with_signal_at(number, "uniproc")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_handler_may_close_an_engine_with_a_process_at_any_line(play_with_signal_at):
    lines = play_undisturbed("multiproc")
    for number in range(1, lines, lines // 25):
        play_with_signal_at(number, "multiproc")


#: Where a caller's thread holds a lock that another thread of the engine needs.
LOCKED = [
    ("inflight.py", "new_output_id"),
    ("inflight.py", "add_flight"),
    ("inflight.py", "flights"),
    ("inflight.py", "counts"),
    ("loop.py", "add"),
    ("loop.py", "want"),
    ("loop.py", "abort"),
    ("callbacks.py", "post"),
]


@pytest.mark.parametrize(("module", "function"), LOCKED)
def test_a_handler_may_close_the_engine_inside_any_lock(on_signal, module, function):
    scene = Scene("uniproc")
    on_signal(scene.close)
    is_met = False

    def trace_lines(frame, event, _argument):
        nonlocal is_met
        if event == "line" and not is_met and frame.f_lineno > first_line_inside(frame.f_code):
            is_met = True
            signal.raise_signal(signal.SIGUSR1)
        return trace_lines

    def trace_calls(frame, _event, _argument):
        code = frame.f_code
        is_there = code.co_name == function and code.co_filename == where
        return trace_lines if is_there else None

    where = next(str(path) for path in Path(CODE).rglob(module) if "testing" not in path.parts)
    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        scene.play()
    finally:
        sys.settrace(before)
    try:
        assert is_met
        assert scene.handler_s < SOON_S / 10  # it did not wait for the thread that it interrupted
        scene.assert_over()
    finally:
        scene.engine.close(0)


def first_line_inside(code) -> int:
    """Find the line of a function's first ``with``."""
    lines = Path(code.co_filename).read_text().splitlines()
    return next(n for n in range(code.co_firstlineno, len(lines)) if "with self._" in lines[n - 1])
