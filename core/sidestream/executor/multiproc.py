"""The executor with worker processes: survives whatever happens to them."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from sidestream.errors import (
    EngineClosedError,
    InternalError,
    RequestError,
    WorkerDiedError,
    WorkerHungError,
)
from sidestream.executor.base import FORCE_S, Executor
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.caller_pump import CallerPump, ReadingTurn
from sidestream.executor.calls import PendingCall
from sidestream.executor.flight import Flight
from sidestream.executor.futures import fresh
from sidestream.executor.health import Health, RankHealth
from sidestream.executor.inflight import InflightTable
from sidestream.executor.process import WorkerProcess
from sidestream.executor.pump import ResultPump, ResultPumpThread
from sidestream.executor.result_channel import ResultChannel
from sidestream.executor.worker_start import WorkerStart
from sidestream.protocol import Command, Shutdown
from sidestream.transport.channel import Frame
from sidestream.transport.envelope import Delivery, encode_command
from sidestream.worker.worker import WorkerSettings

#: How long a worker that closed its connection may take to be gone: it is ending.
_LINGER_S: Final = 0.5
#: How long it may take to hear of a death that is known.
_NOTICE_S: Final = 1.0


class MultiprocExecutor(Executor):
    """Runs its worker in a process of its own, watched through a process descriptor.

    Several processes where subclasses make them: they start, live and end as one, and the first of
    them answers.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        dispatch_depth: int,
        start_timeout_s: float,
        hang_timeout_s: float = math.inf,
        table: InflightTable | None = None,
        callbacks: CallbackThread | None = None,
        turn: ReadingTurn | None = None,
    ) -> None:
        """Read answers on a thread of its own, or with ``turn`` on those of who waits for one."""
        super().__init__(
            dispatch_depth,
            hang_timeout_s=hang_timeout_s,
            is_stepwise=settings.step_execution,
            table=table,
            callbacks=callbacks,
        )
        self._settings = settings
        self._start = WorkerStart(start_timeout_s)
        self._last_words = ""
        self._hung: WorkerHungError | None = None
        self._processes: list[WorkerProcess] = []
        self._exited = threading.Event()
        make_pump = ResultPumpThread if turn is None else partial(CallerPump, turn)
        self._pump: ResultPump = make_pump(
            (),
            self._on_message,
            on_closed=self._on_closed,
            on_unsent=self._on_unsent,
            on_failed=self._on_pump_failed,
        )

    @property
    def process(self) -> WorkerProcess:
        """Give the process of the worker that answers.

        Raises:
            EngineClosedError: There is none: not started, or shut down.
        """
        if not self._processes:
            raise EngineClosedError("The executor has no worker: not started, or shut down.")
        return self._processes[0]

    def start(self) -> None:
        """Spawn the worker and wait until it is ready."""
        self._start.moved_at = time.monotonic()
        try:
            starts = self._spawn()
            self.worker = self._start.wait(self._processes, starts)
        except BaseException:
            # Also KeyboardInterrupt: nothing may be left of a start that was given up.
            self.shutdown(timeout_s=0.0)
            raise
        for process in self._processes:
            process.echo_stderr()

    def _spawn(self) -> list[PendingCall]:
        """Start the processes; gives the calls that they answer when they are ready."""
        with self._ending:
            if self._closed is not None:
                raise fresh(self._closed)
            self._processes = self._make_processes()
            self._adopt(self.process.control)
            self._pump.start()
            starts = []
            for process in self._processes:
                started = self.calls.add()
                self._pump.add(process.channel)
                self._pump.watch(process.pidfd, partial(self._on_exit, process))
                self._pump.send(process.channel, process.start_frame(started.rpc_id))
                starts.append(started)
            return starts

    def _make_processes(self) -> list[WorkerProcess]:
        return [WorkerProcess(self._settings)]

    def has_started(self, flight: Flight) -> bool:
        """Tell whether the worker has begun with a flight that it has."""
        # Commands run in order; what it had done with before is out, or computed, or stepped on.
        return flight.is_computed or self.process.control.running >= flight.rpc_id

    def ranks(self) -> tuple[RankHealth, ...]:
        """Say which worker processes there are."""
        return tuple(
            RankHealth(
                process.rank, process.settings.device_index, process.pid, not process.is_gone()
            )
            for process in self._processes
        )

    def _kill(self) -> None:
        """End all processes at once, the one that answers first: no other's end may reach it."""
        for process in self._processes:
            if not process.is_gone():
                process.signal_group(signal.SIGKILL)

    def _end_hung(self, silent_s: float) -> None:
        process = self._most_behind()
        self._hung = WorkerHungError(
            f"Worker {process.rank} (pid {process.pid}) was ended: it had work and gave no sign of "
            f"progress for {silent_s:.0f} s (hang_timeout_s={self._hang_timeout_s:g}). Where a "
            "forward takes longer between two steps, raise that limit.",
            rank=process.rank,
            pid=process.pid,
            silent_s=silent_s,
        )
        self._kill()
        # Not only once it is gone: a driver that hangs may keep it for ever.
        self._break(self._hung)

    def _most_behind(self) -> WorkerProcess:
        """Give the process that got on least: the others may be waiting for it."""
        return min(self._processes, key=lambda process: process.control.forward_heartbeat)

    def _ask_to_end(self) -> None:
        for process in self._processes:
            process.control.shutdown = True
        if self._processes:
            self._send(Shutdown())

    def _await_end(self, timeout_s: float) -> None:
        # The pump goes on meanwhile: it takes in what the worker still has to say. One that is not
        # ready yet has nothing to finish.
        if not self._processes:
            return
        timeout_s = timeout_s if self.worker else 0.0
        deadline = time.monotonic() + timeout_s
        if not self._attend(self._exited.is_set, timeout_s):
            for process in self._processes:
                process.is_gone(deadline - time.monotonic())

    def _force_end(self) -> None:
        if self._processes:
            for process in self._processes:
                process.end()
            if self._pump.is_alive() and not self._attend(self._exited.is_set, FORCE_S):
                self._exited.wait(FORCE_S)
        self._pump.stop(FORCE_S)
        self._fail_all(EngineClosedError("The engine was closed before this could finish."))
        for process in self._processes:
            process.close()

    def check_health(self) -> Health:
        """Say whether work would be done; no message is sent for it."""
        is_open = self._broken is None and self._closed is None and not self.is_in_child
        if is_open and any(process.is_gone() for process in self._processes):
            # Where no thread reads, nobody may have noticed yet.
            self._attend(lambda: self._broken is not None, _NOTICE_S)
        return super().check_health()

    def _attend(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._pump.attend(is_done, timeout_s)

    def _send(self, command: Command) -> None:
        self._pump.send(self.process.channel, encode_command(command))

    # --- the pump -----------------------------------------------------------------------------

    def _on_message(self, _channel: ResultChannel, delivery: Delivery) -> None:
        self._start.moved_at = time.monotonic()
        self._on_delivery(delivery)

    def _on_progress(self, delivery: Delivery) -> None:
        stage = str(delivery.open()[0].result)
        if stage.startswith("lost: "):
            self._last_words = stage.removeprefix("lost: ")
        else:
            self._start.stage = stage

    def _on_unsent(self, _channel: ResultChannel, frame: Frame, error: Exception) -> None:
        reason = RequestError(f"There is no memory to send this to its worker: {error}")
        reason.__cause__ = error
        call = self.table.take_call(frame.rpc_id)
        if call is not None:
            call.set_exception(reason)
        else:
            self.answers.fail_forward(frame.rpc_id, reason)

    def _on_closed(self, channel: ResultChannel, reason: Exception) -> None:
        # As a rule the worker is ending, and the process descriptor says so next. One that lives on
        # can't be reached any more; blocking here costs nothing, it has no other messages.
        process = next(one for one in self._processes if one.channel is channel)
        if not process.is_gone(_LINGER_S):
            self._last_words = f"It was ended because its connection was lost: {reason}"
            process.signal_group(signal.SIGKILL)

    def _on_pump_failed(self, error: BaseException) -> None:
        reason = InternalError(f"The thread that reads answers ended by {error!r}.")
        reason.__cause__ = error
        self._break(reason)
        self._kill()

    # The end of a socket is no proof of a worker's death (a process that it forked may hold it, and
    # it may be gone before): the process descriptor is.
    def _on_exit(self, process: WorkerProcess) -> None:
        # What the worker sent before it died counts; then death is declared.
        self._pump.remove(process.channel)
        self._declare_dead(process, process.reap())
        self._exited.set()

    def _declare_dead(self, process: WorkerProcess, exit_code: int | None) -> None:
        self._break(
            self._hung
            or WorkerDiedError(
                rank=process.rank,
                pid=process.pid,
                exit_code=exit_code,
                request_ids=[flight.request_id for flight in self.load.flights()],
                hint=self._last_words,
            )
        )
