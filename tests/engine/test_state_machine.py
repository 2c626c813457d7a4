"""Anything that users do to one long-lived engine, in any order, on the simulated accelerator.

Every future resolves exactly once, never with another request's bits, and nothing is left at the
end.
"""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import sidestream
from sidestream import DiffusionRequest, SamplingParams

#: What a request that was disturbed may end with.
DISTURBED = (
    sidestream.RequestAbortedError,
    sidestream.RequestTimeoutError,
    sidestream.WorkerDiedError,
)


class Requests(RuleBasedStateMachine):
    """Submit, wait, hold, drop, abort, let time out, kill the worker."""

    engine: sidestream.DiffusionEngine
    may_kill = False
    #: What the pipeline adds to a request's seed.
    added = 0

    handles = Bundle("handles")

    @initialize()
    def begin(self):
        self.seeds = 0
        self.disturbed: set[int] = set()
        self.held: list = []
        assert self.engine.drain(60)

    def _submit(self, count=1, **options):
        made = []
        for _ in range(count):
            self.seeds += 1
            params = SamplingParams(height=8, width=8, seed=self.seeds)
            handle = self.engine.submit(DiffusionRequest("x", params), **options)
            made.append((self.seeds, handle))
        return made

    @rule(target=handles)
    def submit(self):
        return self._submit()[0]

    @rule(target=handles, count=st.integers(2, 6))
    def submit_many(self, count):
        *others, last = self._submit(count)
        for seed, handle in others:
            self._check(seed, handle)
        return last

    @rule(target=handles)
    def submit_with_a_deadline_that_may_pass(self):
        ((seed, handle),) = self._submit(timeout_s=0.002)
        self.disturbed.add(seed)
        return seed, handle

    @rule(pair=handles)
    def wait(self, pair):
        self._check(*pair)

    @rule(pair=handles)
    def wait_twice_for_the_same_object(self, pair):
        seed, handle = pair
        self._check(seed, handle)
        if handle.exception(60) is None:
            assert handle.result() is handle.result()

    @rule(pair=consumes(handles))
    def drop(self, pair):
        """Forget a request that may still be under way."""

    @rule(pair=handles)
    def hold_the_output(self, pair):
        seed, handle = pair
        self.disturbed_or_right(seed, handle, self.held.append)

    @rule()
    def let_go_of_the_outputs(self):
        for seed, output in self.held:
            assert (output.output == seed + self.added).all()
        self.held.clear()

    @rule(pair=handles, wait=st.booleans())
    def abort(self, pair, wait):
        seed, handle = pair
        self.disturbed.add(seed)
        result = handle.abort(wait=wait)
        if wait:
            assert handle.done()
            assert result.outcome is not sidestream.AbortOutcome.REQUESTED

    @rule(value=st.integers())
    def call_a_method(self, value):
        with contextlib.suppress(sidestream.WorkerDiedError):
            assert self.engine.executor.collective_rpc("echo", (value,)) == [value]

    @rule()
    def kill_the_worker(self):
        if not self.may_kill:
            return
        with contextlib.suppress(sidestream.EngineClosedError):
            self.engine.executor.workers[0].process.signal_group(9)
        # Who was with it runs again; who was killed twice fails.
        self.disturbed.update(range(self.seeds + 1))

    @invariant()
    def the_engine_is_well(self):
        if not self.may_kill:
            assert self.engine.health().ok

    def _check(self, seed, handle):
        self.disturbed_or_right(seed, handle, lambda _pair: None)

    def disturbed_or_right(self, seed, handle, keep):
        try:
            output = handle.result(60)
        except DISTURBED:
            assert seed in self.disturbed
        else:
            assert (output.output == seed + self.added).all()
            keep((seed, output))

    def teardown(self):
        if not hasattr(self, "held"):
            return
        self.let_go_of_the_outputs()
        assert self.engine.drain(60), self.engine.describe()
        # A request that timed out is answered at once; its forward may end a moment later.
        deadline = time.monotonic() + 30
        while (stats := self.engine.stats())["forwards"] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stats["queued"] == stats["outputs"] == stats["forwards"] == stats["calls"] == 0


def run(engine, examples, *, may_kill=False, added=0):
    fields = {"engine": engine, "may_kill": may_kill, "added": added}
    machine = type("Machine", (Requests,), fields)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_users_do_every_request_gets_its_own_output_or_its_own_error(make_engine):
    run(make_engine("Batching", platform="sim", max_batch_size=3), 100)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_the_same_for_long(make_engine):
    run(make_engine("Batching", platform="sim", max_batch_size=3), 5000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_same_with_a_worker_that_is_killed_now_and_then(make_engine):
    engine = make_engine("Batching", platform="sim", max_batch_size=3, max_restarts=100_000)
    run(engine, 30, may_kill=True)


def run_stepped(make_engine, examples, *, may_kill=False, **config):
    engine = make_engine(
        "step_pipes:SharedWalk", platform="sim", step_execution=True, max_batch_size=2, **config
    )
    run(engine, examples, may_kill=may_kill, added=3)


@pytest.mark.slow
def test_the_same_in_step_mode(make_engine):
    run_stepped(make_engine, 30, async_final_step=True, streaming_output=True)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_same_in_step_mode_without_a_pump(make_engine):
    run_stepped(make_engine, 500)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_same_in_step_mode_with_a_worker_that_is_killed_now_and_then(make_engine):
    run_stepped(make_engine, 30, may_kill=True, max_restarts=100_000)
