"""One worker process, seen from the main process: spawn, watch, kill, reap."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from sidestream.errors import ConfigError, WorkerStartError
from sidestream.executor.result_channel import ResultChannel
from sidestream.transport.channel import Frame
from sidestream.transport.control_page import ControlPage
from sidestream.transport.failure import describe_error

if TYPE_CHECKING:
    from sidestream.worker.worker import WorkerSettings

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[2])

# -P keeps the caller's working directory off the path while sidestream itself is imported; the real
# path comes with the settings. No "-m": it would look for sidestream on the default path, where a
# caller that extended sys.path by hand has none.
_BOOT: Final = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from sidestream.worker.process import main; main(sys.argv[1:])"
)
_STDERR_TAIL_BYTES: Final = 4096
#: How long SIGTERM may take before SIGKILL follows.
_TERMINATE_S: Final = 0.2
#: How long SIGKILL may take; longer only in the kernel's uninterruptible sleep.
_KILL_S: Final = 5.0


class _Closable(Protocol):
    def close(self) -> object: ...


_C = TypeVar("_C", bound=_Closable)


class WorkerProcess:
    """A spawned worker and this process's ends of everything that it shares with it.

    ``rank_fds``: what the worker shares with others of its group; the caller's to close.

    States: alive, gone (the kernel reported its end), closed (no descriptor is left here).

    Raises:
        ConfigError: The pipeline's options can't be pickled.
        WorkerStartError: The operating system starts no process.
    """

    def __init__(self, settings: WorkerSettings, rank_fds: Sequence[int] = ()) -> None:
        self.settings = settings
        self._rank_fds = rank_fds
        self.rank = settings.rank
        self.exit_code: int | None = None
        self._start_body = _pack(settings)
        # Guards the reaping: the pump and a closing thread may both find the worker gone.
        # Reentrant, since a signal handler may close while its thread is in here.
        self._reaping = threading.RLock()
        self._is_reaped = False
        # Everything here that has descriptors; each closes once, however often it is told to.
        self._ends: list[_Closable] = []
        # Before there is anything that a child forked meanwhile would keep open.
        _processes().add(self)
        try:
            self._spawn()
        except OSError as error:
            raise WorkerStartError(
                f"Worker {self.rank} can't be spawned: {error}. It runs {sys.executable!r} and "
                "needs a free process and some free descriptors (ulimit -u, ulimit -n).",
                rank=self.rank,
                pid=None,
                stage="spawn",
            ) from error

    def _spawn(self) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            undo.callback(self.close)
            stdout = None if _is_stream(1) else subprocess.DEVNULL
            theirs.enter_context(low_numbers_taken())
            self.channel, worker_ends = ResultChannel.pair()
            self._own(self.channel)
            theirs.callback(worker_ends.close)
            self.control = self._own(ControlPage.create())
            lifeline, end = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, lifeline)
            self._own(io.FileIO(end, "w"))
            stderr = os.memfd_create("sidestream-stderr", os.MFD_CLOEXEC)
            self._stderr = self._own(io.FileIO(stderr))
            stderr_fd = os.dup(2) if _is_stream(2) else os.open(os.devnull, os.O_WRONLY)
            theirs.callback(os.close, stderr_fd)
            inherited = (
                worker_ends.messages.fileno(),
                worker_ends.releases.fileno(),
                lifeline,
                self.control.fileno(),
                stderr_fd,
                *self._rank_fds,
            )
            self.popen = self._popen(inherited, stdout)
            undo.callback(self._kill_unwatched)
            self.pid = self.popen.pid
            # Fails where the worker ended at once and the host's own child reaping was faster.
            self._pidfd = self._own(io.FileIO(os.pidfd_open(self.pid)))
            undo.pop_all()

    def _popen(self, inherited: Sequence[int], stdout: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=self._stderr,
            # A session of its own: no SIGINT from the terminal, and a group that can be killed.
            start_new_session=True,
            # A broken vendor package must not end a worker of another platform; the plugin imports
            # its own.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )

    def _own(self, end: _C) -> _C:
        self._ends.append(end)
        return end

    def _kill_unwatched(self) -> None:
        self.popen.kill()
        self.popen.wait()

    @property
    def pidfd(self) -> int:
        """Give the descriptor that becomes readable when the worker is gone."""
        return self._pidfd.fileno()

    def start_frame(self, rpc_id: int) -> Frame:
        """Make the first message: the module path and the settings."""
        return Frame(kind=0, rpc_id=rpc_id, body=self._start_body)

    def stderr_tail(self) -> str:
        """Give the end of what the worker printed while it started."""
        size = os.fstat(self._stderr.fileno()).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        tail = os.pread(self._stderr.fileno(), size - start, start)
        return tail.decode(errors="replace").strip()

    def echo_stderr(self) -> None:
        """Print what a worker that started well had printed."""
        text = self.stderr_tail()
        if text and sys.stderr is not None:
            # A host that closed its stderr, or whose reader is gone, has an engine all the same.
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr)

    def is_gone(self, timeout_s: float = 0.0) -> bool:
        """Wait for the worker's end; True also if it was reaped or closed before."""
        if self._is_reaped or self._pidfd.closed:
            return True
        poll = select.poll()
        try:
            poll.register(self.pidfd, select.POLLIN)
        except ValueError:  # closed just now
            return True
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> int | None:
        """Collect a worker that is gone, and kill what is left of its group.

        Gives its exit code, negative for a signal; None if the host's own child reaping got it,
        or if it is not gone.
        """
        with self._reaping:
            if self._is_reaped or self._pidfd.closed or not self.is_gone():
                return self.exit_code
            # Before the wait: the group's number may be given away once its leader is collected.
            self.signal_group(signal.SIGKILL)
            try:
                info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                info = None
            if info is not None:
                killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self.exit_code = -info.si_status if killed else info.si_status
            # Popen must not wait for a number that may be somebody else's by now.
            self.popen.returncode = 0 if self.exit_code is None else self.exit_code
            self._is_reaped = True
            return self.exit_code

    def end(self) -> None:
        """Terminate, then kill, then collect a worker that is not gone."""
        if self._pidfd.closed:
            return
        if not self.is_gone():
            self.signal_group(signal.SIGTERM)
            if not self.is_gone(_TERMINATE_S):
                self.signal_group(signal.SIGKILL)
                self.is_gone(_KILL_S)
        self.reap()

    def close(self) -> None:
        """Close this process's descriptors; a worker that is not gone is killed by that.

        Idempotent.
        """
        for end in self._ends:
            end.close()

    def abandon_in_child(self) -> None:
        """Close what a forked child inherited: an end that it holds would keep the worker alive."""
        for end in list(self._ends):
            # One that the parent was just closing is no reason to keep the others.
            with contextlib.suppress(OSError):
                end.close()
        if hasattr(self, "popen"):
            self.popen.returncode = 0  # not this process's child: nothing to wait for or warn of


def _pack(settings: WorkerSettings) -> bytes:
    try:
        packed = pickle.dumps(settings, protocol=5)
    except Exception as error:
        # A user's __reduce__ may raise anything.
        raise ConfigError(
            "pipeline_options",
            settings.options,
            f"what can be pickled for the worker ({describe_error(error)})",
        ) from error
    return pickle.dumps((list(sys.path), packed), protocol=5)


def _is_stream(fd: int) -> bool:
    """Tell a standard stream from another file that got its number in a host that has none."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


@contextlib.contextmanager
def low_numbers_taken() -> Iterator[None]:
    """Keep descriptors 0 to 2 taken.

    A host may have closed its standard streams; an end with such a number would become the
    worker's, which prints to it.
    """
    with contextlib.ExitStack() as stack:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            stack.callback(os.close, fd)
        os.close(fd)
        yield


@functools.cache
def _processes() -> weakref.WeakSet[WorkerProcess]:
    """Make the list of workers that forked children let go of.

    Once in a process: there is no way to take a fork handler back.
    """
    processes: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()

    def abandon() -> None:
        for process in list(processes):
            process.abandon_in_child()

    os.register_at_fork(after_in_child=abandon)
    return processes
