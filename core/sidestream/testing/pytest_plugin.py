"""Fixtures for whoever tests with sidestream; pytest loads them where sidestream is installed.

Imports no torch and no simulated device before a test asks for one.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

_PATIENCE_S: Final = 5.0
_POLL_S: Final = 0.01
_PROC: Final = Path("/proc")
#: Live as long as the process, once a simulated device was used.
_LASTING_THREADS: Final = re.compile(r"sim:\d+ default")


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """Give :mod:`sidestream.testing.sim`, with every device reset before and after the test."""
    from sidestream.testing import sim

    sim.reset()
    yield sim
    sim.reset()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread, a descriptor or a memfd's mapping behind.

    What is about to end gets 5 s. Ask for it before the fixtures whose leftovers it shall see: it
    looks after they are gone.
    """
    before = _Belongings.take_stock()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while left := _Belongings.take_stock().beyond(before):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("The test left behind: " + "; ".join(left))
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class _Belongings:
    """What a process has that a test could leave behind."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: frozenset[tuple[int, str]]
    mappings: frozenset[str]

    @classmethod
    def take_stock(cls) -> _Belongings:
        """List everything now; children, descriptors and mappings on Linux only."""
        return cls(
            threads=frozenset(
                thread
                for thread in threading.enumerate()
                if not _LASTING_THREADS.fullmatch(thread.name)
            ),
            children=frozenset(_children()),
            descriptors=frozenset(_descriptors()),
            mappings=frozenset(_memfd_mappings()),
        )

    def beyond(self, before: _Belongings) -> list[str]:
        """Describe what is here and was not before."""
        return [
            *(f"thread {thread.name!r}" for thread in self.threads - before.threads),
            *(f"child process {pid}" for pid in sorted(self.children - before.children)),
            *(
                f"descriptor {number} ({target})"
                for number, target in sorted(self.descriptors - before.descriptors)
            ),
            *(f"mapping {line}" for line in sorted(self.mappings - before.mappings)),
        ]


def _children() -> Iterator[int]:
    me = str(os.getpid())
    for status in _PROC.glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; state and parent follow it.
            parent = status.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it ended meanwhile
        if parent == me:
            yield int(status.parent.name)


def _descriptors() -> Iterator[tuple[int, str]]:
    folder = _PROC / "self" / "fd"
    if not folder.is_dir():
        return
    for name in os.listdir(folder):
        try:
            yield int(name), os.readlink(folder / name)
        except OSError:
            continue  # the one that listed the folder


def _memfd_mappings() -> Iterator[str]:
    try:
        lines = (_PROC / "self" / "maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if "/memfd:" in line:
            span, _, _, _, inode, name = line.split(maxsplit=5)
            yield f"{span} of {name} (inode {inode})"
