"""The step scheduler: turns, company, joins and leaves at step boundaries, aborts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidestream.protocol import StepFate, StepStage
from sidestream.scheduler.step import StepScheduler


@dataclass(eq=False)
class Item:
    key: str


class Worker:
    """Answers the calls of a scheduler, as a worker would."""

    def __init__(self, max_resident=4, max_batch_size=1, shares=None):
        self.scheduler = StepScheduler(max_resident, max_batch_size)
        self.queue = deque()
        self.shares = shares or {}
        self.log = []

    def run(self, fates=None):
        """Run one call; gives it, None if there is none."""
        call = self.scheduler.next(lambda: self.queue.popleft() if self.queue else None)
        if call is None:
            return None
        keys = [item.key for item in call.items]
        self.log.append((call.stage, keys))
        default = StepFate.GONE if call.stage is StepStage.DROP else StepFate.KEPT
        fates = fates or {}
        self.scheduler.answer((key, fates.get(key, default), self.shares.get(key)) for key in keys)
        return call.stage, keys

    def add(self, *keys):
        self.queue.extend(Item(key) for key in keys)


def prepared(*keys, **options):
    worker = Worker(**options)
    worker.add(*keys)
    for key in keys:
        assert worker.run() == (StepStage.PREPARE, [key])
    return worker


def test_requests_that_share_nothing_take_turns():
    worker = prepared("a", "b", "c")
    assert [worker.run()[1] for _ in range(6)] == [["a"], ["b"], ["c"], ["a"], ["b"], ["c"]]


def test_one_that_joins_waits_for_its_turn():
    worker = prepared("a", "b")
    assert worker.run()[1] == ["a"]
    worker.add("c")
    assert worker.run() == (StepStage.PREPARE, ["c"])
    assert [worker.run()[1] for _ in range(4)] == [["b"], ["a"], ["c"], ["b"]]


def test_equal_share_keys_share_a_forward_at_whatever_step_each_is():
    worker = prepared("a", "b", "c", max_batch_size=3, shares={"a": 1, "b": 2, "c": 1})
    assert [worker.run()[1] for _ in range(4)] == [["a", "c"], ["b"], ["a", "c"], ["b"]]


def test_no_share_key_shares_with_nobody():
    worker = prepared("a", "b", max_batch_size=4)
    assert worker.run()[1] == ["a"]


def test_a_forward_is_shared_by_no_more_than_the_batch_size():
    shares = dict.fromkeys("abcd", 1)
    worker = prepared(*"abcd", max_batch_size=3, shares=shares)
    assert [worker.run()[1] for _ in range(3)] == [
        ["a", "b", "c"],
        ["d", "a", "b"],
        ["c", "d", "a"],
    ]


def test_an_output_on_its_way_keeps_its_room():
    worker = prepared("a", max_resident=1)
    worker.add("b")
    assert worker.run(fates={"a": StepFate.OUT}) == (StepStage.DENOISE, ["a"])
    assert worker.run() is None
    worker.scheduler.leave("a")
    assert worker.run() == (StepStage.PREPARE, ["b"])


def test_an_output_that_comes_before_the_answer_leaves_with_it():
    scheduler = StepScheduler(1)
    scheduler.next(lambda: Item("a"))
    scheduler.answer([("a", StepFate.KEPT, None)])
    scheduler.next()
    scheduler.leave("a")
    assert "a" in scheduler
    scheduler.answer([("a", StepFate.OUT, None)])
    assert "a" not in scheduler


def test_a_part_that_failed_does_not_make_the_state_leave():
    scheduler = StepScheduler(1)
    scheduler.next(lambda: Item("a"))
    scheduler.answer([("a", StepFate.KEPT, None)])
    scheduler.next()
    scheduler.leave("a")
    scheduler.answer([("a", StepFate.KEPT, None)])
    scheduler.next()
    scheduler.answer([("a", StepFate.OUT, None)])
    assert "a" in scheduler


def test_what_is_given_up_goes_before_anything_else():
    worker = prepared("a", "b", "c")
    worker.add("d")
    worker.scheduler.give_up("c")
    assert worker.run() == (StepStage.DROP, ["c"])
    assert worker.run() == (StepStage.PREPARE, ["d"])


def test_what_is_given_up_while_it_is_prepared_never_steps():
    scheduler = StepScheduler(2)
    scheduler.next(lambda: Item("a"))
    scheduler.give_up("a")
    scheduler.answer([("a", StepFate.KEPT, None)])
    assert scheduler.next().stage is StepStage.DROP


def test_what_is_given_up_after_its_last_step_is_not_dropped():
    worker = prepared("a")
    worker.run(fates={"a": StepFate.OUT})
    worker.scheduler.give_up("a")
    assert worker.run() is None
    assert "a" in worker.scheduler


def test_there_is_one_call_at_a_time():
    scheduler = StepScheduler(2)
    assert scheduler.next(lambda: Item("a")) is not None
    assert scheduler.is_busy
    assert scheduler.next(lambda: pytest.fail("asked for one more")) is None


class Turns(RuleBasedStateMachine):
    """Requests come, are given up, finish; whoever stays gets on."""

    RESIDENTS = 4
    BATCH = 2

    def __init__(self):
        super().__init__()
        self.scheduler = StepScheduler(self.RESIDENTS, self.BATCH)
        self.made = 0
        self.queue = deque()
        self.share = {}
        self.call = None
        self.given_up = set()
        self.leaving = set()
        #: Calls of others since each resident's own last one.
        self.waited = {}

    @rule(share=st.sampled_from([None, 1, 2]))
    def submit(self, share):
        self.made += 1
        item = Item(f"r{self.made}")
        self.share[item.key] = share
        self.queue.append(item)

    @precondition(lambda self: self.call is None)
    @rule()
    def ask(self):
        before = {item.key for item in self.scheduler.items()}
        call = self.scheduler.next(lambda: self.queue.popleft() if self.queue else None)
        states = before - self.leaving
        if call is None:
            assert not states
            assert not self.queue or len(before) == self.RESIDENTS
            return
        self.call = call
        keys = [item.key for item in call.items]
        assert len(keys) == len(set(keys))
        if self.given_up & states:
            assert call.stage is StepStage.DROP
            assert set(keys) == self.given_up & states
        elif call.stage is StepStage.PREPARE:
            assert before.isdisjoint(keys)
            self.waited[keys[0]] = 0
        else:
            assert call.stage is StepStage.DENOISE
            assert set(keys) <= states
            shares = {self.share[key] for key in keys}
            assert len(keys) == 1 or (len(shares) == 1 and None not in shares)
            assert len(keys) <= self.BATCH
            for key in states:
                self.waited[key] = 0 if key in keys else self.waited[key] + 1
                # Everybody else at most once before it.
                assert self.waited[key] <= self.RESIDENTS - 1

    @precondition(lambda self: self.call is not None)
    @rule(data=st.data())
    def answer(self, data):
        results = []
        for item in self.call.items:
            if self.call.stage is StepStage.DROP:
                fate = StepFate.GONE
            elif self.call.stage is StepStage.PREPARE:
                fate = data.draw(st.sampled_from([StepFate.KEPT, StepFate.GONE]))
            else:
                fate = data.draw(st.sampled_from(list(StepFate)))
            if fate is StepFate.OUT:
                if data.draw(st.booleans()):
                    self.scheduler.leave(item.key)
                else:
                    self.leaving.add(item.key)
            if fate is not StepFate.KEPT:
                self.given_up.discard(item.key)
                self.waited.pop(item.key, None)
            results.append((item.key, fate, self.share[item.key]))
        self.call = None
        self.scheduler.answer(results)

    @precondition(lambda self: self.waited)
    @rule(data=st.data())
    def give_up(self, data):
        key = data.draw(st.sampled_from(sorted(self.waited)))
        self.given_up.add(key)
        self.scheduler.give_up(key)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def output_leaves(self, data):
        key = data.draw(st.sampled_from(sorted(self.leaving)))
        self.leaving.remove(key)
        self.scheduler.leave(key)
        assert key not in self.scheduler

    @invariant()
    def residents_are_bounded_and_known(self):
        assert len(self.scheduler) <= self.RESIDENTS
        assert {item.key for item in self.scheduler.items()} == set(self.waited) | self.leaving


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=80, stateful_step_count=40)
