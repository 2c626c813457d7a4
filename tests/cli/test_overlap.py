"""Reading a run's timings: which copies ran beside which forwards."""

import pytest

from sidestream.cli.overlap import Span, hand_over, overlapped, whole_run
from sidestream.request import OutputTimings


def output(forward, copy=None, ready=None, submitted=None):
    return OutputTimings(
        submitted_at=submitted,
        forward_started_at=forward[0],
        forward_ended_at=forward[1],
        copy_started_at=copy[0] if copy else None,
        copy_ended_at=copy[1] if copy else None,
        ready_at=ready,
    )


def test_a_copy_counts_when_the_next_forward_runs_beside_it():
    run = [output((0, 10), (11, 13)), output((10, 20), (20, 22)), output((30, 40), (41, 42))]
    assert overlapped(run) == [0]


def test_a_copy_inside_its_own_forward_does_not_count():
    assert overlapped([output((0, 10), (4, 6))]) == []


def test_touching_is_not_overlapping():
    assert overlapped([output((0, 10), (10, 12)), output((12, 20))]) == []


def test_outputs_without_copies_are_left_out():
    assert overlapped([output((0, 10)), output((5, 20))]) == []


def test_the_run_spans_everything_that_happened():
    run = [output((2, 10), (11, 13), ready=14, submitted=1), output((10, 20))]
    assert whole_run(run) == Span(1, 20)


def test_a_run_that_was_not_timed_has_no_span():
    with pytest.raises(ValueError, match="timed"):
        whole_run([OutputTimings()])


def test_the_hand_over_shows_the_longest_overlapped_copy_between_its_forward_and_its_arrival():
    run = [
        output((0, 10), (11, 12), ready=13),
        output((10, 20), (21, 29), ready=30),
        output((20, 40), (41, 99), ready=100),
    ]
    index, window = hand_over(run)
    assert index == 1
    assert window.start < 20
    assert window.end > 30


def test_there_is_no_hand_over_without_overlap():
    assert hand_over([output((0, 10), (11, 12))]) is None
