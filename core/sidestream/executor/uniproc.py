"""The executor without a worker process: the forward runs on a thread of this one.

For notebooks, debuggers and whoever has one device and no wish for processes. A crash of the
pipeline takes the process with it, and its Python shares the interpreter with yours.
"""

from __future__ import annotations

import ctypes
import math
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import (
    DeviceLostError,
    EngineClosedError,
    InternalError,
    WorkerHungError,
    WorkerStartError,
)
from sidestream.executor.base import Executor
from sidestream.executor.callbacks import CallbackThread
from sidestream.executor.flight import Flight
from sidestream.executor.inflight import InflightTable
from sidestream.protocol import AsyncDiffusionOutput, AsyncOutputKind, Command, Shutdown
from sidestream.request import OutputTimings
from sidestream.transport.control_page import ControlPage
from sidestream.transport.envelope import Delivery, LocalDelivery
from sidestream.transport.failure import describe_error
from sidestream.worker.sink import HostSink, OutputLabel, OutputSink
from sidestream.worker.worker import Worker, WorkerSettings

if TYPE_CHECKING:
    import torch

    from sidestream.platforms.platform import Platform

#: How often a waiting start looks whether the pipeline still makes progress.
_START_POLL_S: Final = 0.2
#: How long an interrupted forward may take to end.
_INTERRUPT_S: Final = 1.0


class LocalPort:
    """A worker's connection within one process: objects instead of messages."""

    def __init__(self, executor: UniprocExecutor) -> None:
        self._executor = executor
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def receive(self) -> Command:
        """Block for a command."""
        return self.commands.get()

    def send(self, message: AsyncDiffusionOutput) -> None:
        """Deliver an envelope; futures resolve here, callbacks run elsewhere."""
        self._executor.on_message(LocalDelivery(message))

    def device_bound(self) -> None:
        """Do nothing: what may be imported in this process is not ours to say."""

    def make_sink(self, platform: Platform, device: torch.device) -> OutputSink[Any]:
        """Make a sink of page-locked memory."""
        return HostSink(platform, device, deliver=self._deliver, fail=self._fail)

    def device_lost(self, error: DeviceLostError) -> None:
        """Take no more work for this device."""
        self._executor.on_device_lost(error)

    def _deliver(self, label: OutputLabel, tree: Any, timings: OutputTimings, nbytes: int) -> None:
        message = AsyncDiffusionOutput(
            kind=label.kind,
            rpc_id=label.rpc_id,
            async_output_id=label.output_id,
            attempt=label.attempt,
            output=tree,
            timings=timings,
        )
        self._executor.on_message(
            LocalDelivery(message, nbytes=nbytes, post_process=label.post_process)
        )

    def _fail(self, label: OutputLabel, error: BaseException) -> None:
        self.send(
            AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY,
                rpc_id=label.rpc_id,
                async_output_id=label.output_id,
                attempt=label.attempt,
                error=error,
            )
        )


class UniprocExecutor(Executor):
    """Runs its worker on a daemon thread of this process.

    At shutdown a forward that takes too long is interrupted between two of its bytecodes; one that
    does not come back from native code is left to its thread.
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
    ) -> None:
        super().__init__(
            dispatch_depth,
            hang_timeout_s=hang_timeout_s,
            is_stepwise=settings.step_execution,
            table=table,
            callbacks=callbacks,
        )
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._stage = "spawn"
        self._last_progress = 0.0
        self._control = ControlPage.create()
        self._adopt(self._control)
        self._port = LocalPort(self)
        self._worker = Worker(settings, self._port, self._control)
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sidestream-forward", daemon=True)
        # In place of join() and is_alive(): a join that Ctrl-C interrupts takes its thread for
        # ended, in some Pythons.
        self._is_over = threading.Event()
        # Whether it has nothing more to do but to end.
        self._is_leaving = False
        # The thread lives on after shutdown, and closes the control page when it ends.
        self._is_left = False

    def start(self) -> None:
        """Load the pipeline on the forward's own thread."""
        self._last_progress = time.monotonic()
        try:
            self._thread.start()
            error = self._await_start()
            if error is not None:
                raise self._start_error(describe_error(error)) from error
            self.worker = self._worker.describe()
        except BaseException:
            # Also KeyboardInterrupt: nothing may be left but the thread of a load that hangs.
            self.shutdown(timeout_s=0.0)
            raise

    def _await_start(self) -> BaseException | None:
        while True:
            try:
                return self._ready.get(timeout=_START_POLL_S)
            except queue.Empty:
                silent_s = time.monotonic() - self._last_progress
                if silent_s > self._start_timeout_s:
                    raise self._start_error(
                        f"gave no sign of progress for {silent_s:.0f} s "
                        f"(start_timeout_s={self._start_timeout_s:g}); its thread is left behind"
                    ) from None

    def _start_error(self, what: str) -> WorkerStartError:
        return WorkerStartError(
            f"The pipeline did not start; at stage {self._stage!r}: {what}",
            rank=self._settings.rank,
            pid=None,
            stage=self._stage,
        )

    def has_started(self, flight: Flight) -> bool:
        """Tell whether the worker has begun with a flight that it has."""
        return flight.is_computed or self._control.running >= flight.rpc_id

    def _end_hung(self, silent_s: float) -> None:
        self._break(
            WorkerHungError(
                "The thread that runs forwards had work and gave no sign of progress for "
                f"{silent_s:.0f} s (hang_timeout_s={self._hang_timeout_s:g}). It can't be ended; a "
                "worker process can (executor='multiproc').",
                rank=self._settings.rank,
                pid=None,
                silent_s=silent_s,
            )
        )

    def _ask_to_end(self) -> None:
        self._control.shutdown = True
        self._port.commands.put(Shutdown())

    def _await_end(self, timeout_s: float) -> None:
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._is_over.wait(timeout_s)

    def _force_end(self) -> None:
        # Before the interruption, which would be the running request's error otherwise.
        self._fail_all(EngineClosedError("The engine was closed before this could finish."))
        is_running = self._thread.ident is not None and not self._is_over.is_set()
        if is_running and threading.current_thread() is not self._thread:
            self._interrupt()
        with self._lock:
            self._is_left = is_running and not self._is_over.is_set()
            if not self._is_left:
                self._control.close()

    def _interrupt(self) -> None:
        # Not just left running: a daemon thread that comes back from torch while the interpreter
        # ends takes the process down with SIGABRT.
        # But on its way out it ends by itself, and interrupted it might never give a lock back.
        if not self._is_leaving:
            thread_id = ctypes.c_ulong(self._thread.ident or 0)
            interruption = ctypes.py_object(EngineClosedError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, interruption)
        self._is_over.wait(_INTERRUPT_S)

    def on_message(self, delivery: LocalDelivery) -> None:
        """Route an envelope; called on the forward's thread and on the output thread."""
        self._on_delivery(delivery)

    def on_device_lost(self, error: DeviceLostError) -> None:
        """Fail what is open and refuse what is new."""
        self._break(error)

    def _on_progress(self, delivery: Delivery) -> None:
        self._last_progress = time.monotonic()
        self._stage = str(delivery.open()[0].result)

    def _send(self, command: Command) -> None:
        self._port.commands.put(command)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - boundary: this thread
            reason = InternalError(f"The thread that runs forwards ended by {error!r}.")
            reason.__cause__ = error
            self._break(reason)
        finally:
            self._is_leaving = True
            with self._lock:
                self._is_over.set()
                if self._is_left:
                    self._control.close()

    def _work(self) -> None:
        try:
            self._worker.start()
        except BaseException as error:  # noqa: BLE001 - boundary: start() raises it in its caller
            self._is_leaving = True
            self._ready.put(error)
            return
        self._ready.put(None)
        self._worker.run()
