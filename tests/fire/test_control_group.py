"""A real control group that kills whoever takes more memory than it allows."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
LIMIT_BYTES = 1400 * MIB

#: Takes memory by the megabyte, and is the one to be killed wherever others are in its group.
HOG = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
Path("/proc/self/oom_score_adj").write_text("1000")
taken = [bytearray(b"x") * (1 << 20) for _ in range(int(sys.argv[2]) >> 20)]
"""


class ControlGroup:
    """A group of this test's own, below the one that it runs in."""

    def __init__(self, parent: Path, limit: str, others: tuple[str, ...]) -> None:
        self.path = parent / f"sidestream-{uuid.uuid4()}"
        self.path.mkdir()
        try:
            (self.path / limit).write_text(str(LIMIT_BYTES))
            for name in others:  # what would be swapped out would not be killed for
                if (self.path / name).exists():
                    (self.path / name).write_text(str(LIMIT_BYTES if "memsw" in name else 0))
        except OSError:
            self.path.rmdir()
            raise

    def remove(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.path.rmdir()
            except OSError:  # what died in it is not all gone
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def candidates() -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Find the groups below which one with a memory limit might be made: v1's, then v2's."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounts = [(Path(words[4]), words[words.index("-") + 1 :]) for words in lines]
    owns = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for number, names, own in owns:
        for mount, (kind, _, options) in mounts:
            is_first = kind == "cgroup" and "memory" in names.split(",")
            if is_first and "memory" in options.split(","):
                limit, others = "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes",)
            elif kind == "cgroup2" and number == "0":
                limit, others = "memory.max", ("memory.swap.max",)
            else:
                continue
            group = mount / own.lstrip("/")
            yield from (
                (path, limit, others)
                for path in (group, *group.parents)
                if path.is_relative_to(mount)
            )


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    reasons = []
    for parent, limit, others in candidates():
        try:
            made = ControlGroup(parent, limit, others)
        except OSError as error:
            reasons.append(str(error))
            continue
        yield made
        made.remove()
        return
    pytest.skip(f"no control group with a memory limit can be made here: {reasons or 'no mount'}")


@pytest.mark.soak
def test_what_a_real_control_group_kills_for_is_refused_before(group, script):
    hog = [sys.executable, "-c", HOG, str(group.path), str(2 * LIMIT_BYTES)]
    assert subprocess.run(hog, timeout=60).returncode == -signal.SIGKILL
    program = script(
        """
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from payload_pipes import *
from sidestream.transport.memory_limit import available_bytes

engine = start(host_buffer_bytes=4 << 30)
(pid,) = engine.executor.collective_rpc("pid")
assert is_filled(engine.submit(fill(MIB, 7)).result(60), MIB, 7)
for _ in range(3):
    # The pipeline's own tensor has room, the slot beside it has none.
    left = available_bytes()
    assert left < int(sys.argv[2])
    error = engine.submit(fill(left * 7 // 10 // MIB * MIB)).exception(60)
    assert isinstance(error, sidestream.OutputTransferError), repr(error)
    assert "the memory limit leaves" in str(error.__cause__), error
    assert is_filled(engine.submit(fill(MIB, 7)).result(60), MIB, 7)
assert engine.executor.collective_rpc("pid") == [pid]
engine.close()
""",
        group.path,
        LIMIT_BYTES,
    )
    code, stderr = program.end(110)
    assert (code, stderr) == (0, "")
