"""The executor of a tensor-parallel group: several workers that share one copy of the model."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from sidestream.errors import WorkerStartError
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.holding import holds_any
from sidestream.executor.inflight import InflightTable
from sidestream.executor.multiproc import MultiprocExecutor
from sidestream.executor.process import WorkerProcess, low_numbers_taken
from sidestream.executor.result_channel import ResultChannel
from sidestream.protocol import AsyncOutputKind, Call, Command
from sidestream.transport.channel import Frame
from sidestream.transport.envelope import Delivery, encode_command
from sidestream.worker.exits import EXIT_SPLIT
from sidestream.worker.worker import WorkerSettings

#: How long ranks whose group is being ended may take until that is said of all of them.
_LINGER_S: Final = 0.5


class TensorParallelExecutor(MultiprocExecutor):
    """Runs one model on several workers, its ranks: they start, live and end as one.

    Every command goes to every rank, in one order; rank 0 decides what of it runs and answers, see
    ``worker/ranks.py``. When a rank dies or fails alone, all are ended, and that is the reason.
    """

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        *,
        dispatch_depth: int,
        start_timeout_s: float,
        hang_timeout_s: float = math.inf,
        table: InflightTable | None = None,
        callbacks: CallbackThread | None = None,
    ) -> None:
        """``settings``: of each rank, from 0 on."""
        super().__init__(
            settings[0],
            dispatch_depth=dispatch_depth,
            start_timeout_s=start_timeout_s,
            hang_timeout_s=hang_timeout_s,
            table=table,
            callbacks=callbacks,
        )
        self._all_settings = settings
        # Guards the order of commands, which has to be the same for all ranks. Reentrant, since a
        # signal handler may send while its thread is in here.
        self._ordering = threading.RLock()
        # By what a forward failed on one rank alone, by the forward; used on the pump.
        self._failed_alone: dict[int, tuple[WorkerProcess, Delivery]] = {}
        # The rank that the group ends because of; used on the pump.
        self._culprit: WorkerProcess | None = None

    @property
    def size(self) -> int:
        """Give the number of workers that share one copy of the model."""
        return len(self._all_settings)

    def is_held(self) -> bool:
        """Tell whether the caller is a signal handler that interrupted its thread in here."""
        return super().is_held() or holds_any(self._ordering)

    # --- start --------------------------------------------------------------------------------

    def _make_processes(self) -> list[WorkerProcess]:
        processes: list[WorkerProcess] = []
        try:
            with _rank_fds(self.size) as fds:
                for settings, own in zip(self._all_settings, fds, strict=True):
                    processes.append(WorkerProcess(settings, own))
        except BaseException as error:
            for process in processes:
                process.end()
                process.close()
            if isinstance(error, OSError):
                raise WorkerStartError(
                    f"The ranks of a group can't be connected: {error}. They need some free "
                    "descriptors (ulimit -n).",
                    rank=self._settings.rank,
                    pid=None,
                    stage="spawn",
                ) from error
            raise
        return processes

    # --- commands -----------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        frame = encode_command(command)
        with self._ordering:
            for process in self._processes:
                self._pump.send(process.channel, frame)

    def _send_calls(self, ranks: Sequence[int], calls: Sequence[Call]) -> None:
        with self._ordering:
            for rank, call in zip(ranks, calls, strict=True):
                self._pump.send(self._processes[rank].channel, encode_command(call))

    # --- the pump -----------------------------------------------------------------------------

    def _on_message(self, channel: ResultChannel, delivery: Delivery) -> None:
        process = next(one for one in self._processes if one.channel is channel)
        is_result = delivery.kind == AsyncOutputKind.RPC_RESULT
        if process is not self.process and is_result and self.load.is_executing(delivery.rpc_id):
            # That forward has no answer yet, and gets none: this rank is about to end the group.
            self._failed_alone[delivery.rpc_id] = process, delivery
            return
        super()._on_message(channel, delivery)
        if self._last_words and self._culprit is None:
            # It ends by itself. The others first: they would take its end for their own failure.
            self._culprit = process
            self._kill()

    def _on_unsent(self, channel: ResultChannel, frame: Frame, error: Exception) -> None:
        is_shared = self.load.is_executing(frame.rpc_id)
        super()._on_unsent(channel, frame, error)
        if is_shared:  # the other ranks have it, or will
            self._last_words = f"A command could not be sent to all ranks: {error}"
            self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process is not self._culprit and not process.is_gone():
                process.signal_group(signal.SIGKILL)

    def _on_exit(self, process: WorkerProcess) -> None:
        if self._culprit is None:
            self._culprit = self._first_gone(process)
        self._kill()
        deadline = time.monotonic() + _LINGER_S
        for one in self._processes:
            if one.is_gone(deadline - time.monotonic()):
                # What it sent before it died counts.
                self._pump.remove(one.channel)
                one.reap()
        self._fail_what_failed_alone(self._culprit)
        self._declare_dead(self._culprit, self._culprit.exit_code)
        if all(one.is_gone() for one in self._processes):
            self._exited.set()

    def _first_gone(self, process: WorkerProcess) -> WorkerProcess:
        """Give the rank that ended before the others had to; ``process`` is known to be gone."""
        gone = [process, *(one for one in self._processes if one is not process and one.is_gone())]
        return next((one for one in gone if one.reap() != EXIT_SPLIT), process)

    def _fail_what_failed_alone(self, culprit: WorkerProcess) -> None:
        for process, delivery in self._failed_alone.values():
            if process is culprit or culprit.exit_code == EXIT_SPLIT:
                self._on_delivery(delivery)
            else:
                delivery.discard()  # it failed because the other one had
        self._failed_alone.clear()


@contextlib.contextmanager
def _rank_fds(size: int) -> Iterator[list[list[int]]]:
    """Make what ranks share, and give each one's descriptors, see ``make_worker``.

    None of it has a name: nobody else can take part, and nothing is left of it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(low_numbers_taken())
        store = os.memfd_create("sidestream-ranks", os.MFD_CLOEXEC)
        stack.callback(os.close, store)
        fds = [[store] for _ in range(size)]
        for rank in range(1, size):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end, owner in zip(ends, (0, rank), strict=True):
                stack.enter_context(end)
                fds[owner].append(end.fileno())
        yield fds
