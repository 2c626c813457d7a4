"""What holds for every test, and for every process that a test starts."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# torch reads it when it is imported; more threads than cores only make a suite of processes slow.
os.environ["OMP_NUM_THREADS"] = "1"
# What a test needs lies on the disk; a try to fetch it has to fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Where a shell starts this in the background it is ignored, by what a test starts too.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Files whose engines are shared from file to file: they run one after another in one process.
TOGETHER = {
    f"tests/{folder}/test_{name}.py": f"{folder}: {names}"
    for folder, names in [
        ("engine", "abort batches deadlines engine hidden_copies observability overlap"),
        ("engine", "step_mode step_streaming"),
        ("fire", "aliasing memory payloads poison quiet waiting"),
    ]
    for name in names.split()
}


try:
    import hypothesis
except ModuleNotFoundError:
    pass  # the environment of tests/npu is without it
else:
    # How long an example takes says how busy the machine is.
    hypothesis.settings.register_profile(
        "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy machine")


def pytest_ignore_collect(collection_path, config):
    """Import no file that has none of the tests that are wanted: many bring diffusers along."""
    wanted = config.getoption("markexpr")
    if collection_path.suffix != ".py" or "slow" not in wanted:
        return None
    text = collection_path.read_text()
    is_all_slow, is_not_slow = "\npytestmark = pytest.mark.slow\n" in text, "mark.slow" not in text
    return (is_all_slow if "not slow" in wanted else is_not_slow) or None


def pytest_collection_finish():
    """Leave all that was imported out of later collections: hundreds of tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each process whole files, or all of ``TOGETHER``: what they set up is for all tests."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def is_running() -> Callable[[int], bool]:
    """Say whether a process is there and has not ended."""
    return _is_running


def _is_running(pid: int) -> bool:
    try:
        # The name, in parentheses, may hold anything. A zombie has ended, and is collected by
        # whoever started or adopted it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no such file, or no such process any more when it is read
        return False
