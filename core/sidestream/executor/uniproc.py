"""The executor without a worker process: the forward runs on a thread of this one.

For notebooks, debuggers and whoever has one device and no wish for processes. A crash of the
pipeline takes the process with it, and its Python shares the interpreter with yours.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from sidestream.errors import DeviceLostError, EngineClosedError, WorkerStartError
from sidestream.executor.base import Executor
from sidestream.protocol import AsyncDiffusionOutput, AsyncOutputKind, Command, Shutdown
from sidestream.request import OutputTimings
from sidestream.transport.control_page import ControlPage
from sidestream.transport.envelope import Delivery, LocalDelivery
from sidestream.worker.sink import HostSink, OutputLabel, OutputSink
from sidestream.worker.worker import Worker, WorkerSettings

if TYPE_CHECKING:
    import torch

    from sidestream.platforms.platform import Platform


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

    def make_sink(self, platform: Platform, device: torch.device) -> OutputSink[Any]:
        """Make a sink of page-locked memory."""
        return HostSink(platform, device, deliver=self._deliver, fail=self._fail)

    def device_lost(self, error: DeviceLostError) -> None:
        """Take no more work for this device."""
        self._executor.on_device_lost(error)

    def _deliver(self, label: OutputLabel, tree: Any, timings: OutputTimings, nbytes: int) -> None:
        message = AsyncDiffusionOutput(
            kind=AsyncOutputKind.OUTPUT_READY,
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
    """Runs its worker on a daemon thread of this process."""

    def __init__(self, settings: WorkerSettings, *, dispatch_depth: int) -> None:
        super().__init__(dispatch_depth)
        self._settings = settings
        self._control = ControlPage.create()
        self._port = LocalPort(self)
        self._worker = Worker(settings, self._port, self._control)
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sidestream-forward", daemon=True)

    def start(self) -> None:
        """Load the pipeline on the forward's own thread."""
        self._thread.start()
        error = self._ready.get()
        if error is not None:
            self._thread.join()
            self._control.close()
            raise WorkerStartError(
                f"The pipeline did not start: {type(error).__name__}: {error}",
                rank=0,
                pid=None,
                stage="pipeline",
            ) from error

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let the running forward finish; one that takes longer is left to its daemon thread."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = EngineClosedError("The engine is closed.")
        self._control.shutdown = True
        self._port.commands.put(Shutdown())
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._fail_all(EngineClosedError("The engine was closed before this could finish."))
        self.callbacks.close()
        if not self._thread.is_alive():
            self._control.close()

    def on_message(self, delivery: LocalDelivery) -> None:
        """Route an envelope; called on the forward's thread and on the output thread."""
        self._on_delivery(delivery)

    def on_device_lost(self, error: DeviceLostError) -> None:
        """Fail what is open and refuse what is new."""
        self._break(error)

    def _on_progress(self, delivery: Delivery) -> None:
        """Do nothing: start() waits for the thread itself."""

    def _send(self, command: Command) -> None:
        self._port.commands.put(command)

    def _run(self) -> None:
        try:
            self._worker.start()
        except BaseException as error:  # noqa: BLE001 - boundary: start() raises it in its caller
            self._ready.put(error)
            return
        self._ready.put(None)
        self._worker.run()
