"""The start of worker processes: how far it is, and why it failed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import WorkerDiedError, WorkerStartError
from sidestream.transport.failure import describe_error
from sidestream.worker.exits import EXIT_START_FAILED

if TYPE_CHECKING:
    from sidestream.executor.calls import PendingCall
    from sidestream.executor.process import WorkerProcess

#: How often a waiting start looks whether the worker still makes progress.
_POLL_S: Final = 0.2
#: How long a worker whose start failed may take to end; its last words are complete then.
_LAST_WORDS_S: Final = 2.0


class WorkerStart:
    """Waits until all processes of a group are ready, or one says or shows why it is not."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: how long no worker may make any progress."""
        self._timeout_s = timeout_s
        #: What the worker that spoke last is about to do; set on the pump.
        self.stage = "spawn"
        #: When a worker said something; set on the pump.
        self.moved_at = time.monotonic()

    def wait(
        self, processes: Sequence[WorkerProcess], starts: Sequence[PendingCall]
    ) -> Mapping[str, Any]:
        """Wait for each one's answer; gives what the first one says of itself.

        Raises:
            WorkerStartError: One failed, or was silent for too long.
        """
        for process, started in zip(processes, starts, strict=True):
            while not started.wait(_POLL_S):
                silent_s = time.monotonic() - self.moved_at
                if silent_s > self._timeout_s:
                    raise self._error(
                        process,
                        f"gave no sign of progress for {silent_s:.0f} s "
                        f"(start_timeout_s={self._timeout_s:g})",
                    )
        ends = [_open(started) for started in starts]
        if all(end.error is None for end in ends):
            return ends[0].worker
        # One that fails takes the others along; the first one's reason is the reason.
        first = min((end for end in ends if end.error is not None), key=lambda end: end.at)
        process, error = processes[ends.index(first)], first.error
        assert error is not None
        if isinstance(error, WorkerDiedError):
            process = next(one for one in processes if one.rank == error.rank)
            raise self._error(process, str(error)) from error
        process.is_gone(_LAST_WORDS_S)
        raise self._error(process, describe_error(error)) from error

    def _error(self, process: WorkerProcess, what: str) -> WorkerStartError:
        text = process.stderr_tail()
        printed = f"\nThe worker printed:\n{text}" if text else ""
        return WorkerStartError(
            f"Worker {process.rank} (pid {process.pid}) did not start; at stage "
            f"{self.stage!r}: {what}{printed}",
            rank=process.rank,
            pid=process.pid,
            stage=self.stage,
            stderr=text,
        )


@dataclass(frozen=True)
class _End:
    """How a start ended, and when as far as that tells which rank's reason is the reason."""

    at: float
    error: BaseException | None = None
    worker: Mapping[str, Any] = field(default_factory=dict)


def _open(started: PendingCall) -> _End:
    try:
        delivery = started.future.result(0.0)
    except WorkerDiedError as died:
        # Before all others; but whoever said why it ends has said it better.
        return _End(math.inf if died.exit_code == EXIT_START_FAILED else -math.inf, died)
    message, _ = delivery.open()
    if message.error is not None:
        return _End(delivery.received_at, message.error)
    return _End(delivery.received_at, worker=message.result)
