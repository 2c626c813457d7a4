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


def _load():
    """Give the simulated runtime, or say why it is not here."""
    if importlib.util.find_spec("torch_npu") is None:
        return None, "torch_npu is not installed here; 'make test-npu' has an environment with it"
    try:
        library = ctypes.CDLL("libascendcl.so")
        for name in ("aclsim_set", "aclsim_hold", "aclsim_release"):
            getattr(library, name).restype = ctypes.c_bool
    except (OSError, AttributeError):
        return None, "no simulated ACL runtime is loaded; 'make test-npu' builds it with g++"
    return library, None


def pytest_collection_modifyitems(items):
    """Skip all of this folder in one line where it can't run."""
    _, reason = _load()
    if reason is not None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"not run: {reason}"))


@pytest.fixture(scope="session")
def simulator():
    return Simulator(_load()[0])


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
