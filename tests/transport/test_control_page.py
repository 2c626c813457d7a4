"""The page that two processes share."""

from __future__ import annotations

import os
import signal

import pytest

from sidestream.transport.control_page import ControlPage


@pytest.fixture
def page():
    page = ControlPage.create()
    yield page
    page.close()


def test_a_new_page_says_nothing(page):
    assert (page.shutdown, page.drain, page.heartbeat) == (False, False, 0)


def test_each_side_sees_what_the_other_wrote(page, fork):
    def work():
        theirs = ControlPage.attach(os.dup(page.fileno()))
        while not theirs.shutdown:
            theirs.steps += 1
        theirs.forwards = 2**63
        theirs.outputs += 3
        return theirs.drain

    page.drain = True
    child = fork(work)
    while page.steps < 100:
        os.sched_yield()
    page.shutdown = True
    assert child.result() is True
    assert (page.forwards, page.outputs) == (2**63, 3)


def test_what_a_killed_worker_wrote_stays_readable(page, fork):
    def work():
        page.steps = 41
        signal.pause()

    child = fork(work)
    while page.steps != 41:
        os.sched_yield()
    child.kill()
    assert page.heartbeat == 41


def test_any_progress_shows_in_the_heartbeat(page):
    seen = [page.heartbeat]
    for name in ("steps", "forwards", "outputs", "progress"):
        setattr(page, name, getattr(page, name) + 1)
        seen.append(page.heartbeat)
    assert seen == [0, 1, 2, 3, 4]


def test_flags_can_be_taken_back(page):
    page.drain = True
    page.drain = False
    assert (page.drain, page.shutdown) == (False, False)


def test_a_closed_page_raises_and_keeps_no_descriptor(holdings):
    before = holdings()
    page = ControlPage.create()
    page.close()
    page.close()
    assert holdings() == before
    with pytest.raises(ValueError, match="released"):
        page.shutdown = True


def test_where_there_is_no_memfd_a_temporary_file_does(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    page = ControlPage.create()
    page.steps = 5
    assert ControlPage.attach(os.dup(page.fileno())).steps == 5
    page.close()
