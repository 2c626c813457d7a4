"""A worker process's side of its connection, and its life from first to last line.

A worker never outlives its main process: the lifeline is a pipe whose other end only the main
process holds, and whose hang-up the kernel turns into SIGKILL for the worker's whole process group.
So it works in a forward that holds the GIL, and for helpers that the pipeline started.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sidestream.protocol import AsyncDiffusionOutput, AsyncOutputKind
from sidestream.transport.channel import Channel, ChannelClosed, Frame
from sidestream.transport.control_page import ControlPage
from sidestream.transport.failure import FAILED, error_body
from sidestream.worker.exits import EXIT_FAILED, EXIT_START_FAILED

if TYPE_CHECKING:
    from sidestream.worker.worker import WorkerSettings

logger = logging.getLogger(__name__)

#: How long threads of a pipeline may take to end with their worker.
_JOIN_THREADS_S: Final = 1.0
_F_SETSIG: Final = 10  # not in the fcntl module; from <fcntl.h> of Linux


def serve(
    message_fd: int,
    release_fd: int,
    lifeline_fd: int,
    control_fd: int,
    stderr_fd: int,
    *rank_fds: int,
) -> int:
    """Run a worker over inherited descriptors until it is told to end; gives the exit code.

    ``rank_fds``: what it shares with the other ranks of its group, if it is in one.
    """
    hold_lifeline(lifeline_fd)
    # Programs that the pipeline starts have no use for them.
    for fd in (message_fd, release_fd, lifeline_fd, control_fd, stderr_fd, *rank_fds):
        os.set_inheritable(fd, False)
    messages = Channel(socket.socket(fileno=message_fd))
    releases = Channel(socket.socket(fileno=release_fd))
    releases.set_blocking(False)
    control = ControlPage.attach(control_fd)
    try:
        frame = messages.receive()
    except ChannelClosed:
        return 0
    assert frame is not None  # the channel blocks
    sys_path, packed_settings = pickle.loads(frame.body)
    sys.path[:] = sys_path
    start_id = frame.rpc_id
    # A sign of life before the slow imports, which may also fail: then main is told why.
    messages.send(Frame(kind=AsyncOutputKind.PROGRESS, body=b"import"))
    try:
        with _uncollected():
            from sidestream.worker.port import ChannelPort
            from sidestream.worker.rank_worker import make_worker

        settings: WorkerSettings = pickle.loads(packed_settings)
        port = ChannelPort(messages, releases, settings.slot_budget_bytes)
        worker = make_worker(settings, port, control, rank_fds)
        worker.start()
    except BaseException as error:  # noqa: BLE001 - boundary: start-up; main raises it there
        kind = AsyncOutputKind.RPC_RESULT | FAILED
        messages.send(Frame(kind=kind, rpc_id=start_id, body=error_body(error)))
        return EXIT_START_FAILED
    # What was printed while starting went to a buffer for the error message; from here on it goes
    # where the main process's goes.
    os.dup2(stderr_fd, 2)
    os.close(stderr_fd)
    port.send(
        AsyncDiffusionOutput(
            kind=AsyncOutputKind.RPC_RESULT, rpc_id=start_id, result=worker.describe()
        )
    )
    try:
        worker.run()
    except ChannelClosed:
        logger.debug("Worker %d: the main process is gone.", settings.rank)
    return 0


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector off what is imported, now and later.

    It finds nothing there, and a full collection of torch's objects takes a forward 0.1 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def hold_lifeline(fd: int) -> None:
    """Have the kernel kill this process group when the pipe's other end is closed."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    # The end may have been closed before O_ASYNC was set: then no signal comes.
    try:
        if os.read(fd, 1) == b"":
            os._exit(0)
    except BlockingIOError:
        pass


def main(arguments: list[str]) -> None:
    """Serve on the descriptors named by ``arguments``, then end without running exit handlers.

    Daemon threads may be inside a vendor's library, which does not survive an ordered exit while it
    works; everything that matters was sent by then.
    """
    code = EXIT_FAILED
    try:
        code = serve(*(int(argument) for argument in arguments))
        _join_threads()
    except BaseException:  # noqa: BLE001 - boundary: this process; threads must not keep it
        traceback.print_exc()
    # The reader of either may be gone, which is nothing to end by.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _join_threads() -> None:
    """Give the threads that a pipeline started a moment to end."""
    deadline = time.monotonic() + _JOIN_THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
