"""Executors without a pump: one of those who wait reads, for all of them."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import sidestream
from sidestream.executor.caller_pump import ReadingTurn
from sidestream.executor.multiproc import MultiprocExecutor
from sidestream.worker.worker import WorkerSettings

PROMPT_S = 20


@pytest.fixture(scope="module")
def turn():
    turn = ReadingTurn()
    yield turn
    turn.close()
    assert not turn.wait(lambda: False)  # at once: there is nothing to read any more


@pytest.fixture(scope="module")
def executor(_pipelines_on_path, turn):
    settings = WorkerSettings(
        platform="cpu",
        plugin="sidestream.platforms.noop",
        device_index=0,
        pipeline="step_pipes:Walk",
        model=None,
        step_execution=True,
        async_output=False,
    )
    executor = MultiprocExecutor(settings, dispatch_depth=1, start_timeout_s=200, turn=turn)
    executor.start()
    yield executor
    executor.shutdown(2.0)


def test_a_lone_caller_reads_its_own_answer(executor):
    before = set(threading.enumerate())
    assert executor.collective_rpc("echo", ("hello",)) == ["hello"]
    assert set(threading.enumerate()) <= before


def test_a_lone_executor_has_one_rank(executor):
    assert executor.collective_rpc("echo", (1,), ranks=[0]) == [1]
    with pytest.raises(sidestream.ConfigError, match="ranks"):
        executor.collective_rpc("echo", (1,), ranks=[1])


def test_callers_of_many_threads_each_get_their_own_answer(executor):
    def ask(number):
        return executor.collective_rpc("echo", (number,), timeout_s=PROMPT_S)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(500))) == [[number] for number in range(500)]


def test_who_gives_up_waiting_leaves_the_turn_to_others(executor, gate):
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(executor.collective_rpc, "wait_at", (gate.prompt,))
        assert gate.reached() == "call"
        with pytest.raises(TimeoutError):
            executor.collective_rpc("ping", timeout_s=0.1)
        gate.open()
        assert blocked.result(PROMPT_S) == [None]
    assert executor.collective_rpc("ping") == ["pong"]


def test_ctrl_c_while_waiting_takes_no_answer_away_from_others(executor, gate):
    with ThreadPoolExecutor(1) as pool:
        main = threading.main_thread().ident

        def interrupt():
            where = gate.reached()
            signal.pthread_kill(main, signal.SIGINT)
            return where

        interrupter = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.collective_rpc("wait_at", (gate.prompt,), timeout_s=60)
        assert interrupter.result(PROMPT_S) == "call"
        other = pool.submit(executor.collective_rpc, "echo", (5,), timeout_s=PROMPT_S)
        gate.open()
        assert other.result(PROMPT_S) == [5]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_resident_reads_for_all_and_hands_the_turn_back(executor, turn):
    is_over = threading.Event()

    def reside():
        turn.take_residence()
        turn.wait(is_over.is_set)
        turn.end_residence()

    resident = threading.Thread(target=reside)
    resident.start()
    assert [executor.collective_rpc("echo", (i,)) for i in range(50)] == [[i] for i in range(50)]
    is_over.set()
    turn.wake()
    resident.join(PROMPT_S)
    assert not resident.is_alive()
    assert executor.collective_rpc("ping") == ["pong"]


def test_health_and_every_caller_hear_of_a_death(executor, gate):
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(executor.collective_rpc, "wait_at", (gate.prompt,)) for _ in range(4)
        ]
        assert gate.reached() == "call"
        assert executor.check_health().ok
        executor.process.signal_group(signal.SIGKILL)
        for call in waiting:
            assert isinstance(call.exception(PROMPT_S), sidestream.WorkerDiedError)
    assert not executor.check_health().ok
