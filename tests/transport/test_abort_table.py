"""The marks that the main process sets and a worker reads."""

from __future__ import annotations

import os

import pytest

from sidestream.transport.abort_table import AbortTable
from sidestream.transport.control_page import ABORT_PLACES, ControlPage


@pytest.fixture
def page():
    page = ControlPage.create()
    yield page
    page.close()


def test_the_other_side_sees_what_is_marked(page):
    theirs = ControlPage.attach(os.dup(page.fileno()))
    table = AbortTable(page)
    assert theirs.aborts() == frozenset()
    assert table.add(7)
    assert table.add(1 << 40)
    assert table.add(7)
    assert theirs.aborts() == {7, 1 << 40}
    table.discard(7)
    table.discard(7)
    assert theirs.aborts() == {1 << 40}
    table.discard(1 << 40)
    assert theirs.aborts() == frozenset()
    assert len(table) == 0
    theirs.close()


def test_a_full_table_takes_no_more_until_one_is_answered(page):
    table = AbortTable(page)
    numbers = range(1, ABORT_PLACES + 1)
    assert all(table.add(number) for number in numbers)
    assert not table.add(ABORT_PLACES + 1)
    assert page.aborts() == frozenset(numbers)
    table.discard(3)
    assert table.add(ABORT_PLACES + 1)
    assert page.aborts() == {*numbers, ABORT_PLACES + 1} - {3}


def test_thousands_of_marks_leave_no_place_taken(page):
    table = AbortTable(page)
    for number in range(1, 10 * ABORT_PLACES):
        assert table.add(number)
        if number > 5:
            table.discard(number - 5)
    assert len(table) == 5


def test_a_table_whose_worker_is_gone_touches_its_page_no_more():
    page = ControlPage.create()
    table = AbortTable(page)
    table.add(1)
    table.clear()
    page.close()
    table.discard(1)
    assert not table.add(2)
    assert len(table) == 0


def test_no_other_word_is_in_its_way(page):
    table = AbortTable(page)
    page.shutdown = True
    page.steps = 11
    for number in range(1, ABORT_PLACES + 1):
        table.add(number)
    assert page.shutdown
    assert (page.drain, page.heartbeat) == (False, 11)
