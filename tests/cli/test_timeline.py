"""The drawn timeline: bars stand where the timings say."""

import numpy as np
import pytest

from sidestream.cli.timeline import draw_timeline
from sidestream.request import OutputTimings


def output(forward, copy=None):
    return OutputTimings(
        submitted_at=100.0,
        forward_started_at=forward[0],
        forward_ended_at=forward[1],
        copy_started_at=copy[0] if copy else None,
        copy_ended_at=copy[1] if copy else None,
        ready_at=copy[1] if copy else forward[1],
    )


def columns_of(image, color):
    """Give the first and last column that have this color as a share of the drawn axis."""
    rgb = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    pixels = np.asarray(image)
    # The lane of forwards in the upper panel, right of its label.
    found = np.flatnonzero((pixels[210:252, 271:1450] == rgb).all(axis=2).any(axis=0))
    return found[0] / 1180, found[-1] / 1180


def test_bars_stand_at_their_times():
    image = draw_timeline([output((100.0, 100.4)), output((100.5, 101.0))], "two forwards")
    start, end = columns_of(image, "#c7612a")
    assert start == pytest.approx(0.5, abs=0.02)
    assert end == pytest.approx(1.0, abs=0.02)


def test_a_run_with_overlap_has_a_magnified_panel():
    apart = [output((100.0, 100.4), (100.41, 100.42)), output((100.5, 101.0), (101.1, 101.2))]
    beside = [output((100.0, 100.4), (100.51, 100.52)), output((100.5, 101.0), (101.1, 101.2))]
    assert draw_timeline(beside, "beside").height > draw_timeline(apart, "apart").height + 200


def test_a_copy_of_microseconds_in_a_run_of_minutes_is_visible():
    run = [output((100.0, 130.0), (130.0, 130.000002)), output((130.0, 160.0))]
    pixels = np.asarray(draw_timeline(run, "long"))
    copy_lane = pixels[250:310, 850:870]
    assert (copy_lane == (0x2F, 0x6D, 0xB5)).all(axis=2).any()
