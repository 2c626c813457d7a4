"""The order of requests: first come, first served, in compatible batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream import DiffusionRequest, QueueFullError, SamplingParams
from sidestream.scheduler.batch import batch_key
from sidestream.scheduler.request import RequestScheduler


@dataclass
class Item:
    key: str
    batch_key: str | None = "k"
    submitted_at: float = 0.0
    request_id: str = ""


def fill(scheduler, keys):
    for i, key in enumerate(keys):
        scheduler.add(Item(str(i), key, submitted_at=float(i)))
    return scheduler


def ids(items):
    return [item.key for item in items]


keys = st.lists(st.sampled_from(["a", "b", None]), max_size=20)


@given(keys, st.integers(1, 5))
def test_every_request_runs_once_in_batches_led_by_the_oldest(keys, size):
    scheduler = fill(RequestScheduler(100, max_batch_size=size), keys)
    taken = []
    while len(scheduler):
        oldest = scheduler.items()[0]
        batch = scheduler.take()
        assert batch[0] is oldest
        assert 1 <= len(batch) <= size
        assert len({item.batch_key for item in batch}) == 1
        assert batch[0].batch_key is not None or len(batch) == 1
        taken += batch
    assert sorted(ids(taken), key=int) == [str(i) for i in range(len(keys))]


@given(keys)
def test_requests_of_one_key_keep_their_order(keys):
    scheduler = fill(RequestScheduler(100, max_batch_size=3), keys)
    taken = []
    while len(scheduler):
        taken += scheduler.take()
    for key in ("a", "b", None):
        own = [int(item.key) for item in taken if item.batch_key == key]
        assert own == sorted(own)


def test_compatible_requests_overtake_others_only_to_join_the_oldest():
    scheduler = fill(RequestScheduler(100, max_batch_size=4), ["a", "b", "a", "b", "a"])
    assert ids(scheduler.take()) == ["0", "2", "4"]
    assert ids(scheduler.take()) == ["1", "3"]


def test_a_full_queue_refuses_and_says_how_many_it_holds():
    scheduler = fill(RequestScheduler(2), ["a", "a"])
    with pytest.raises(QueueFullError, match="max_queued_requests") as caught:
        scheduler.add(Item("9", request_id="mine"))
    assert caught.value.limit == 2
    assert caught.value.request_id == "mine"


def test_what_was_taken_before_goes_in_front_even_of_a_full_queue():
    scheduler = fill(RequestScheduler(3, max_batch_size=2), ["a", "a", "b"])
    taken = scheduler.take()
    scheduler.add(Item("3"))
    scheduler.add(Item("4"))
    scheduler.put_back(taken)
    assert ids(scheduler.items()) == ["0", "1", "2", "3", "4"]
    assert not scheduler.has_room


def test_a_batch_that_is_not_full_waits_for_others_from_its_leaders_submission_on():
    scheduler = RequestScheduler(100, max_batch_size=2, max_batch_wait_s=0.5)
    assert scheduler.ready_at() is None
    scheduler.add(Item("0", submitted_at=10.0))
    assert scheduler.ready_at() == 10.5
    scheduler.add(Item("1", submitted_at=10.2))
    assert scheduler.ready_at() == 10.0


def test_a_request_that_runs_alone_does_not_wait_for_others():
    scheduler = RequestScheduler(100, max_batch_size=8, max_batch_wait_s=0.5)
    scheduler.add(Item("0", None, submitted_at=10.0))
    assert scheduler.ready_at() == 10.0


def test_a_request_in_the_middle_can_be_given_up():
    scheduler = fill(RequestScheduler(100), ["a", "a", "a"])
    assert scheduler.remove("1")
    assert not scheduler.remove("1")
    assert ids(scheduler.take_all()) == ["0", "2"]


def params(**fields):
    return DiffusionRequest("x", SamplingParams(**fields))


def test_requests_that_differ_in_prompt_and_seed_share_a_key():
    one = DiffusionRequest("cat", SamplingParams(height=64, seed=1, negative_prompt="a"))
    other = DiffusionRequest("dog", SamplingParams(height=64, seed=2, negative_prompt="b"))
    assert batch_key(one) == batch_key(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"height": 128},
        {"width": 128},
        {"num_frames": 9},
        {"num_inference_steps": 4},
        {"guidance_scale": 2.0},
        {"true_cfg_scale": 2.0},
        {"num_outputs_per_prompt": 2},
        {"negative_prompt": " "},
        {"output_type": "latent"},
    ],
)
def test_what_one_forward_takes_only_once_keeps_requests_apart(fields):
    assert batch_key(params()) != batch_key(params(**fields))


def test_inputs_and_extra_arguments_make_a_request_run_alone():
    assert batch_key(params(extra={"sigmas": [1.0]})) is None
    assert batch_key(DiffusionRequest("x", inputs={"image": 1})) is None
