"""The real torch_npu over a simulated ACL runtime: ``make test-npu`` starts pytest with both."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

REPORT = "ACLSIM_REPORT"
PIPELINES = str(Path(__file__).parents[1] / "pipelines")


@pytest.fixture(scope="module", autouse=True)
def _pipelines_on_path():
    sys.path.insert(0, PIPELINES)
    yield
    sys.path.remove(PIPELINES)


class Simulator:
    """What a test can ask of the simulated runtime; see aclsim/aclsim.cpp."""

    def __init__(self, library):
        self._library = library

    def set(self, fault, count):
        assert self._library.aclsim_set(fault.encode(), ctypes.c_int64(count))

    def call(self, name):
        return getattr(self._library, name)()

    def unimplemented_calls(self):
        return self.call("aclsim_unimplemented_calls")

    @contextmanager
    def held(self, stream):
        """Let nothing run on a ``torch.npu.Stream`` meanwhile."""
        handle = ctypes.c_void_p(stream.npu_stream)
        assert self._library.aclsim_hold(handle)
        try:
            yield
        finally:
            assert self._library.aclsim_release(handle)


def _missing():
    """Say why the simulated runtime is not here, or give it."""
    if importlib.util.find_spec("torch_npu") is None:
        return (
            "torch_npu is not installed here; 'make test-npu' runs this in its own environment",
            None,
        )
    try:
        library = ctypes.CDLL("libascendcl.so")
        library.aclsim_set.restype = ctypes.c_bool
        library.aclsim_hold.restype = ctypes.c_bool
        library.aclsim_release.restype = ctypes.c_bool
    except (OSError, AttributeError):
        return "the simulated ACL runtime is not loaded; 'make test-npu' builds it with g++", None
    return None, library


@pytest.fixture(scope="session")
def simulator():
    reason, library = _missing()
    if reason is not None:
        pytest.skip(reason)
    return Simulator(library)


@pytest.fixture(autouse=True)
def _only_what_is_simulated(simulator, tmp_path, monkeypatch):
    """Fail a test that, in any process, calls what the simulator does not do.

    Such a call fails by itself, but who calls it may swallow that, and go on with nonsense.
    """
    report = tmp_path / "not-simulated"
    monkeypatch.setenv(REPORT, str(report))
    yield
    called = report.read_text().split() if report.exists() else []
    assert called == [], "the simulator does not do these"


@pytest.fixture
def device(simulator, monkeypatch):
    """``npu:0`` of a loaded platform, bound to this thread; events are recorded at once."""
    from sidestream.platforms.platform import load_platform

    monkeypatch.setenv("SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD", "0")
    platform = load_platform("npu")
    platform.set_device(platform.device(0))
    return platform.device(0)


@pytest.fixture
def platform(device):
    from sidestream.platforms.platform import load_platform

    return load_platform("npu")


@pytest.fixture
def run_npu(simulator):
    """Run a script in a process of its own; gives its exit code and all that it printed.

    It starts with ``platform`` and ``device``, which is not bound yet.
    """
    head = """
        from sidestream.platforms.platform import load_platform
        platform = load_platform("npu")
        device = platform.device(0)
    """

    def run(script, **environment):
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)],
            env={
                **os.environ,
                "SIDESTREAM_NPU_SYNCHRONIZE_BEFORE_RECORD": "0",
                **{name: str(value) for name, value in environment.items()},
            },
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        return ended.returncode, ended.stdout

    return run
