"""Page-locking of mappings, with the C library's ``mlock`` as the runtime that registers them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest
import torch

from sidestream.errors import PlatformError
from sidestream.platforms.host_memory import (
    MAX_LOCKED_BYTES,
    HostRuntime,
    LockedMapping,
    clear_pending_error,
    lock_mapping,
)


def never():
    raise AssertionError("the runtime was called")


class Runtime:
    """Locks pages by ``mlock``; torch has no accelerator here and calls no page pinned."""

    def __init__(self):
        self.memory = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.calls = []

    def register(self):
        return self._code("mlock", self.address)

    def unregister(self):
        return self._code("munlock", self.address)

    def refuse(self):
        # The last page of the address space is nobody's.
        return self._code("munlock", 2**47 - mmap.PAGESIZE)

    def _code(self, name, address):
        call = getattr(self._libc, name)
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        failed = call(address, mmap.PAGESIZE)
        self.calls.append(name)
        return ctypes.get_errno() if failed else 0


@pytest.fixture
def runtime():
    return Runtime()


def lock(runtime, **calls):
    return lock_mapping(
        "mine",
        runtime.address,
        mmap.PAGESIZE,
        **{"register": runtime.register, "unregister": runtime.unregister, **calls},
    )


def test_a_range_that_the_runtime_refuses_is_not_locked(runtime):
    assert lock(runtime, register=runtime.refuse, unregister=never) is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch could call the page pinned")
def test_a_success_that_torch_does_not_confirm_is_undone(runtime):
    assert lock(runtime) is None
    assert runtime.calls == ["mlock", "munlock"]


@pytest.mark.parametrize("nbytes", [0, -1, MAX_LOCKED_BYTES + 1])
def test_a_size_that_runtimes_fail_at_is_not_tried(nbytes):
    assert lock_mapping("mine", 4096, nbytes, register=never, unregister=never) is None


def test_closing_unlocks_once(runtime):
    assert runtime.register() == 0
    pin = LockedMapping("mine", runtime.address, runtime.unregister)
    pin.close()
    pin.close()
    assert runtime.calls == ["mlock", "munlock"]


def test_a_runtime_that_refuses_to_unlock_is_an_error_and_may_be_asked_again(runtime):
    answers = [runtime.refuse, runtime.unregister]
    pin = LockedMapping("mine", runtime.address, lambda: answers.pop(0)())
    with pytest.raises(PlatformError, match=rf"{runtime.address:#x}.*code {errno.ENOMEM}"):
        pin.close()
    pin.close()
    assert answers == []


def test_a_forked_child_unlocks_nothing(runtime):
    pin = LockedMapping("mine", runtime.address, never)
    child = os.fork()
    if child == 0:  # in the child nothing may reach pytest
        try:
            pin.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LIBRARY = """
static int pending = 712, asked = 0;
int getLastError(void) { int error = pending; pending = 0; asked++; return error; }
int pendingError(void) { return pending; }
int timesAsked(void) { return asked; }
"""


@pytest.fixture
def library(tmp_path):
    """A runtime that holds a pending error, mapped into this process."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, path = tmp_path / "runtime.c", tmp_path / f"librt_{tmp_path.name}.so.13"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", path], check=True)
    return ctypes.CDLL(path)


def test_a_pending_error_is_cleared_in_the_copy_that_is_mapped(library, tmp_path):
    clear_pending_error(f"librt_{tmp_path.name}.so", "getLastError")
    assert library.pendingError() == 0
    assert library.timesAsked() == 1


class Refusing:
    """Answers as a runtime does that leaves an error behind."""

    def __init__(self):
        self.is_inside, self.calls = False, []

    @contextmanager
    def inside(self):
        self.is_inside = True
        yield
        self.is_inside = False

    def hold(self, address, nbytes, flags):
        assert self.is_inside
        self.calls.append((address, nbytes, flags))
        return 712


def test_a_runtime_is_called_by_its_names_and_leaves_no_error_behind(library, tmp_path):
    functions = Refusing()
    runtime = HostRuntime(
        getter="runtime",
        register="hold",
        unregister="drop",
        flags=2,
        clear_error=(f"librt_{tmp_path.name}.so", "getLastError"),
    )
    assert runtime.lock("mine", functions, 4096, 8192, inside=functions.inside) is None
    assert functions.calls == [(4096, 8192, 2)]
    assert library.pendingError() == 0


@pytest.mark.parametrize(
    ("name", "function"),
    [("libthatnobodyhas", "getLastError"), ("librt_", "thereIsNoSuchFunction")],
)
def test_nothing_to_clear_is_no_error(library, name, function):
    clear_pending_error(name, function)
    assert library.pendingError() == 712
