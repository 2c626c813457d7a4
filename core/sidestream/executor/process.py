"""One worker process, seen from the main process: spawn, watch, kill, reap."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidestream.executor.pump import ResultChannel
from sidestream.transport.channel import Frame
from sidestream.transport.control_page import ControlPage

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


class WorkerProcess:
    """A spawned worker and this process's ends of everything that it shares with it.

    States: alive, gone (the kernel reported its end), closed (no descriptor is left here).
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.channel, worker_ends = ResultChannel.pair()
        self.control = ControlPage.create()
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._stderr = os.memfd_create("sidestream-stderr", os.MFD_CLOEXEC)
        stderr_fd = os.dup(2) if _is_open(2) else os.open(os.devnull, os.O_WRONLY)
        inherited = (
            worker_ends.messages.fileno(),
            worker_ends.releases.fileno(),
            lifeline,
            self.control.fileno(),
            stderr_fd,
        )
        # Guards the reaping: the pump and a closing thread may both find the worker gone.
        self._reaping = threading.Lock()
        self.exit_code: int | None = None
        self._is_reaped = False
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stderr=self._stderr,
                # A session of its own: no SIGINT from the terminal, and a group that can be killed.
                start_new_session=True,
                # A broken vendor package must not end a worker of another platform; the plugin
                # imports its own.
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            )
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            worker_ends.close()
            os.close(lifeline)
            os.close(stderr_fd)
        self.pid = self.popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        _close_in_forked_children(self)

    def start_frame(self, rpc_id: int) -> Frame:
        """Make the first message: the module path and the settings."""
        body = pickle.dumps((list(sys.path), pickle.dumps(self.settings)), protocol=5)
        return Frame(kind=0, rpc_id=rpc_id, body=body)

    def stderr_tail(self) -> str:
        """Give the end of what the worker printed while it started."""
        size = os.fstat(self._stderr).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        return os.pread(self._stderr, size - start, start).decode(errors="replace").strip()

    def echo_stderr(self) -> None:
        """Print what a worker that started well had printed."""
        text = self.stderr_tail()
        if text and sys.stderr is not None:
            print(text, file=sys.stderr)

    def is_gone(self, timeout_s: float = 0.0) -> bool:
        """Wait for the worker's end; True also if it was reaped before."""
        if self._is_reaped:
            return True
        import select

        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> int | None:
        """Collect a worker that is gone, and kill what is left of its group.

        Gives its exit code, negative for a signal; None if the host's own child reaping got it.
        """
        with self._reaping:
            if self._is_reaped:
                return self.exit_code
            # Before the wait: the group's number may be given away once its leader is collected.
            self.signal_group(signal.SIGKILL)
            try:
                info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            except ChildProcessError:
                info = None
            if info is not None:
                killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self.exit_code = -info.si_status if killed else info.si_status
            # Popen must not wait for a number that may be somebody else's by now.
            self.popen.returncode = 0 if self.exit_code is None else self.exit_code
            self._is_reaped = True
            return self.exit_code

    def end(self, timeout_s: float) -> None:
        """Wait for the end, then terminate, then kill."""
        deadline = time.monotonic() + timeout_s
        if not self.is_gone(deadline - time.monotonic()):
            self.signal_group(signal.SIGTERM)
            if not self.is_gone(0.2):
                self.signal_group(signal.SIGKILL)
                self.is_gone(5.0)
        self.reap()

    def close(self) -> None:
        """Close this process's descriptors; the worker must be reaped. Idempotent."""
        if self._lifeline >= 0:
            os.close(self.pidfd)
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self.channel.close()
        self.control.close()
        os.close(self._stderr)
        os.close(self._lifeline)
        self._lifeline = -1

    def abandon_in_child(self) -> None:
        """Close what a forked child inherited: an end that it holds would keep the worker alive."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            os.close(self.pidfd)
            self._lifeline = -1
            self.channel.messages.close()
            self.channel.releases.close()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


_alive: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _abandon_all() -> None:
    for process in list(_alive):
        process.abandon_in_child()


def _close_in_forked_children(process: WorkerProcess) -> None:
    # The hook can't be unregistered, so there is one for all, made with the first worker.
    if not _registered:
        os.register_at_fork(after_in_child=_abandon_all)
        _registered.append(True)
    _alive.add(process)


_registered: list[bool] = []
