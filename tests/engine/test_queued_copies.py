"""Copies are queued by the thread that queues the forwards, wherever that takes it no time."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch

from sidestream import (
    AsyncOutputThread,
    OutputTransferError,
    RequestAbortedError,
    ResultChannel,
    ResultPumpThread,
    SlotSink,
)
from sidestream.platforms.platform import load_plugin
from sidestream.request import AbortOutcome
from sidestream.testing import sim

#: One page, so that an arena holds as many as it was made for.
SHAPE = (32, 32)
NBYTES = 4 * 32 * 32
LIMIT_S = 30


@contextmanager
def output_thread(plugin="sidestream.testing.sim", *, slots, **options):
    """An output thread whose outputs go through slots of this process; gives what arrives."""
    platform = load_plugin("sim", plugin)
    device = platform.device(0)
    platform.set_device(device)
    channel, ends = ResultChannel.pair()
    arrived = SimpleQueue()
    pump = ResultPumpThread([channel], lambda _, delivery: arrived.put(delivery)).start()
    sink = SlotSink(ends.messages, ends.releases, platform, device)
    sink.reserve(NBYTES, slots)
    sim.clear_copies()
    try:
        with AsyncOutputThread(platform, sink, device=device, **options) as thread:
            yield thread, sink, arrived
    finally:
        pump.stop(LIMIT_S)
        ends.close()
        channel.close()


def tensor(value):
    return torch.full(SHAPE, float(value), device=sim.device(0))


def take(arrived):
    message, _ = arrived.get(timeout=LIMIT_S).open()
    if message.error is not None:
        raise message.error
    return message.output


@contextmanager
def busy(thread):
    """Keep the output thread in the end of one output, which is on its way when this begins."""
    entered, leave = threading.Event(), threading.Event()

    def on_done():
        entered.set()
        leave.wait(LIMIT_S)

    thread.submit("busy", tensor(0), private=True, on_done=on_done)
    assert entered.wait(LIMIT_S)
    try:
        yield
    finally:
        leave.set()


def test_a_copy_runs_though_the_output_thread_is_busy_with_another(until):
    with output_thread(slots=3) as (thread, _, arrived):
        with busy(thread):
            output = thread.submit("next", tensor(7), private=True)
            until(lambda: len(sim.copies()) == 2)
            assert not output.done()
        assert (take(arrived) == 0).all()
        assert (take(arrived) == 7).all()


def test_a_stream_that_may_make_the_host_wait_is_left_to_the_output_thread():
    with output_thread("faults_platforms:hesitates", slots=3) as (thread, _, arrived):
        with busy(thread):
            thread.submit("next", tensor(7), private=True)
            assert len(sim.copies()) == 1
        assert [float(take(arrived)[0, 0]) for _ in range(2)] == [0, 7]


def test_without_a_free_slot_nothing_is_made_for_the_caller():
    with output_thread(slots=1) as (thread, sink, arrived):
        with busy(thread):
            output = thread.submit("next", tensor(7), private=True)
            assert sink.stats.made == 1
            assert len(sim.copies()) == 1
        output.result(LIMIT_S)
        assert [float(take(arrived)[0, 0]) for _ in range(2)] == [0, 7]


def test_outputs_come_in_order_whoever_queued_their_copies():
    with output_thread(slots=2) as (thread, _, arrived):
        with busy(thread):
            for value in range(1, 6):
                thread.submit(str(value), tensor(value), private=True)
        assert [float(take(arrived)[0, 0]) for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_leaves_of_the_host_are_not_copied_by_the_caller():
    with output_thread(slots=3) as (thread, _, arrived):
        with busy(thread):
            thread.submit("mixed", {"a": tensor(3), "b": torch.ones(4)}, private=True)
            assert len(sim.copies()) == 1
        take(arrived)
        mixed = take(arrived)
        assert (mixed["a"] == 3).all()
        assert (mixed["b"] == 1).all()


def test_a_copy_that_nobody_wants_any_more_gives_its_slot_back_when_it_is_over(until):
    gone = set()

    def given_up(label):
        if label.output_id in gone:
            return RequestAbortedError(outcome=AbortOutcome.DETACHED)
        return None

    with output_thread(slots=3, given_up=given_up) as (thread, sink, arrived):
        with busy(thread):
            output = thread.submit("unwanted", tensor(7), private=True)
            until(lambda: len(sim.copies()) == 2)
            gone.add("unwanted")
            assert sink.stats.slots_in_use == 2
        with pytest.raises(RequestAbortedError):
            output.result(LIMIT_S)
        assert sink.stats.slots_in_use == 1
        assert (take(arrived) == 0).all()
        with pytest.raises(RequestAbortedError):
            take(arrived)


@contextmanager
def full_device():
    """Let the device have no memory for anything more."""
    faults = sim.faults(0)
    free, total = load_plugin("sim", "sidestream.testing.sim").memory_info(sim.device(0))
    faults.memory_bytes = total - free
    try:
        yield
    finally:
        faults.memory_bytes = total


def test_a_copy_is_not_queued_before_one_that_was_left_to_the_output_thread():
    stream = sim.default_stream(0)
    with output_thread(slots=3) as (thread, _, arrived):
        with busy(thread):
            thread.submit("mixed", {"a": tensor(3), "b": torch.ones(4)}, private=True)
            stream.synchronize()
            stream.hold()
            thread.submit("next", tensor(7), private=True)
        try:
            assert (take(arrived) == 0).all()
            # On its way, though the next one's forward goes on.
            assert (take(arrived)["a"] == 3).all()
        finally:
            stream.release()
        assert (take(arrived) == 7).all()


def test_after_one_that_was_left_to_it_copies_are_queued_at_once_again(until):
    with output_thread(slots=4) as (thread, _, arrived):
        thread.submit("mixed", {"a": tensor(3), "b": torch.ones(4)}, private=True)
        take(arrived)
        with busy(thread):
            thread.submit("next", tensor(7), private=True)
            until(lambda: len(sim.copies()) == 3)
        assert [float(take(arrived)[0, 0]) for _ in range(2)] == [0, 7]


def test_a_copy_that_fails_for_the_caller_fails_its_output_alone():
    with output_thread(slots=3) as (thread, sink, arrived):
        with busy(thread):
            scattered = tensor(7)[:, ::2]  # to be put together on the device, in one piece
            with full_device():
                output = thread.submit("scattered", scattered, private=True)
            thread.submit("next", tensor(8), private=True)
        with pytest.raises(OutputTransferError, match="OutOfMemory"):
            output.result(LIMIT_S)
        first = take(arrived)
        with pytest.raises(OutputTransferError):
            take(arrived)
        last = take(arrived)
        assert (float(first[0, 0]), float(last[0, 0])) == (0, 8)
        assert sink.stats.slots_in_use == 2


def test_a_copy_that_failed_and_is_unwanted_keeps_nothing():
    def given_up(label):
        unwanted = label.output_id == "unwanted"
        return RequestAbortedError(outcome=AbortOutcome.DETACHED) if unwanted else None

    with output_thread(slots=3, given_up=given_up) as (thread, sink, _):
        gc.collect()
        gc.disable()
        try:
            with busy(thread):
                scattered = tensor(7)[:, ::2]
                kept = weakref.ref(scattered)
                with full_device():
                    output = thread.submit("unwanted", scattered, private=True)
                del scattered
            with pytest.raises(RequestAbortedError):
                output.result(LIMIT_S)
            thread.drain(LIMIT_S)
            assert kept() is None
        finally:
            gc.enable()
        assert sink.stats.slots_in_use == 1


@pytest.mark.parametrize("is_wanted", [True, False])
def test_an_output_does_not_suffer_from_what_its_callback_raises(is_wanted, caplog):
    def given_up(label):
        return None if is_wanted else RequestAbortedError(outcome=AbortOutcome.DETACHED)

    def on_done():
        raise RuntimeError("a callback's own mistake")

    with output_thread(slots=3, given_up=given_up) as (thread, _, arrived):
        output = thread.submit("one", tensor(7), private=True, on_done=on_done)
        if is_wanted:
            output.result(LIMIT_S)
            assert (take(arrived) == 7).all()
        else:
            with pytest.raises(RequestAbortedError):
                output.result(LIMIT_S)
    assert "a callback's own mistake" in caplog.text


def test_an_output_whose_hand_over_is_interrupted_comes_all_the_same():
    done = threading.Event()
    with output_thread("faults_platforms:interrupts", slots=3) as (thread, sink, arrived):
        with pytest.raises(KeyboardInterrupt):
            thread.submit("one", tensor(7), private=True, on_done=done.set)
        held = take(arrived)
        assert (held == 7).all()
        assert done.wait(LIMIT_S)
        thread.submit("next", tensor(8), private=True)
        assert (take(arrived) == 8).all()
        assert sink.stats.slots_in_use == 2


@contextmanager
def interrupted_behind_call(module):
    """Have Ctrl-C come right behind the first call of C in a module: there Python looks for it."""

    def look(frame, event, _):
        if event == "c_return" and frame.f_globals["__name__"] == module:
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_ctrl_c_while_a_slot_is_taken_keeps_nobody_from_the_slots():
    with output_thread(slots=4) as (thread, _, arrived):
        first = tensor(1)
        with pytest.raises(KeyboardInterrupt), interrupted_behind_call(SlotSink.__module__):
            thread.submit("first", first, private=True)
        output = thread.submit("last", tensor(9), private=True)
        output.result(LIMIT_S)
        while not (take(arrived) == 9).all():
            pass


def test_nobody_waits_longer_than_told_while_a_hand_over_waits_for_its_device(until):
    stream = sim.default_stream(0)
    with output_thread(slots=3) as (thread, _, arrived):
        stream.hold()
        try:
            sim.faults(0).fail_next_waits = 1  # the device is synchronized in place of it
            submit = threading.Thread(
                target=thread.submit, args=("late", tensor(7)), kwargs={"private": True}
            )
            submit.start()
            until(lambda: not sim.faults(0).fail_next_waits)
            answers = []
            ends = threading.Thread(
                target=lambda: answers.extend((thread.drain(0.01), thread.close(0.01)))
            )
            ends.start()
            ends.join(LIMIT_S)
            assert answers == [False, False]
        finally:
            stream.release()
            submit.join(LIMIT_S)
        assert (take(arrived) == 7).all()


@pytest.mark.parametrize("attempt", range(5))
def test_a_planted_missing_wait_reads_poison_on_this_way_too(attempt):
    stream = sim.default_stream(0)
    with output_thread("careless_platform", slots=3) as (thread, _, arrived):
        stream.hold()
        try:
            thread.submit("early", tensor(attempt) + 1, private=True)
            assert take(arrived).isnan().all()
        finally:
            stream.release()


@pytest.mark.parametrize("attempt", range(5))
def test_with_the_wait_it_is_right_on_this_way_too(attempt):
    stream = sim.default_stream(0)
    with output_thread(slots=3) as (thread, _, arrived):
        stream.hold()
        output = thread.submit("late", tensor(attempt) + 1, private=True)
        assert not output.done()
        stream.release()
        assert (take(arrived) == attempt + 1).all()


def test_a_device_that_fails_under_a_queued_copy_fails_that_output(until):
    lost = []
    stream = sim.default_stream(0)
    with output_thread(slots=3, on_device_lost=lost.append) as (thread, _, arrived):
        stream.hold()
        try:
            sim.fault(0)
            output = thread.submit("late", tensor(7), private=True)
            stream.release()
            with pytest.raises(OutputTransferError, match="injected by a test"):
                output.result(LIMIT_S)
            with pytest.raises(OutputTransferError):
                take(arrived)
            until(lambda: lost)
        finally:
            stream.release()
            sim.reset()
