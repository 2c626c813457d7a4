"""The fixture no_leaks fails a test that leaves something behind, and only such a test."""

import subprocess
import sys

import pytest

TESTS = """
import mmap
import os
import subprocess
import threading

kept = []


def test_messy(no_leaks):
    kept.append(threading.Event())
    threading.Thread(target=kept[0].wait, daemon=True, name="left-thread").start()
    kept.append(subprocess.Popen(["sleep", "60"]))
    fd = os.memfd_create("left-memfd")
    os.truncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))


def test_tidy(no_leaks):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    subprocess.Popen(["true"]).wait()
    fd = os.memfd_create("gone")
    os.truncate(fd, 4096)
    mmap.mmap(fd, 4096).close()
    os.close(fd)


def teardown_module():
    kept[0].set()
    kept[1].kill()
    kept[1].wait()
"""


@pytest.mark.slow
def test_a_test_that_leaves_something_behind_is_told_what(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
    )
    assert "2 passed, 1 error" in done.stdout
    complaint = next(line for line in done.stdout.splitlines() if line.startswith("E  "))
    for what in ("thread 'left-thread'", "child process", "descriptor", "mapping"):
        assert what in complaint
    assert complaint.count("left-memfd") >= 2


def test_simulated_streams_that_were_dropped_are_no_leak(no_leaks, sim):
    with sim.side_stream(sim.device(), 0) as stream:
        stream.record_event().wait(10)
