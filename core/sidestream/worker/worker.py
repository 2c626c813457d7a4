"""The worker's main thread: takes commands, queues forwards, hands outputs over.

::

    main process            worker main thread                     output thread
    Execute ──────────────> take a place, forward, record event
            <── COMPUTE_DONE (the device may still compute)
                            hand (tensors, event) over ──────────> wait, copy, wait
                            take the next command                  give the place back
            <────────────────────────────────────────── OUTPUT_READY

The envelope goes out before the hand-over and on the same channel, so no output overtakes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from sidestream.config import PipelineConfig
from sidestream.errors import (
    DeviceLostError,
    EngineClosedError,
    ExecutionError,
    InvalidRequestError,
    RequestError,
)
from sidestream.platforms.platform import Platform, load_plugin
from sidestream.platforms.self_test import trusted
from sidestream.protocol import (
    AsyncDiffusionOutput,
    AsyncOutputKind,
    Call,
    Command,
    Execute,
    ExecuteStep,
    Shutdown,
    number_of,
)
from sidestream.request import DiffusionRequest, OutputTimings
from sidestream.transport.channel import ChannelClosed
from sidestream.transport.control_page import ControlPage
from sidestream.transport.failure import describe_error, detach_frames, without_causes
from sidestream.transport.packing import unpack_bytes
from sidestream.worker.forwards import Forward
from sidestream.worker.handover import HandOver
from sidestream.worker.pipeline import LoadedPipeline, Payload, resolve_dtype
from sidestream.worker.place import Place, Places
from sidestream.worker.prepare_stream import PrepareStream
from sidestream.worker.running import RunningForward
from sidestream.worker.sink import OutputLabel, OutputSink
from sidestream.worker.stages import Stages
from sidestream.worker.stepping import Stepper
from sidestream.worker.warm_up import declared_nbytes, measured_nbytes, reserve_outputs

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: How often a worker that waits for a place looks at the control page.
_PLACE_POLL_S: Final = 0.05
#: Methods of the worker that a Call may name; all others are the pipeline's.
_OWN_METHODS: Final = ("ping", "drain_async_outputs", "describe")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What one worker needs to know; picklable."""

    platform: str
    #: Import reference of the platform's plugin.
    plugin: str
    device_index: int
    #: ``"package.module:Class"``.
    pipeline: str
    model: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    #: Among all workers of the engine; each group has its own copy of the model.
    rank: int = 0
    #: Among the workers that share one copy of the model, and how many they are.
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    #: What to do where the platform's streams or events are not right.
    on_platform_fault: Literal["refuse", "synchronous"] = "refuse"
    async_output: bool = True
    max_pending_outputs: int = 2
    #: Run denoising steps, and no whole forwards.
    step_execution: bool = False
    #: In step mode, bring out parts of outputs.
    sends_chunks: bool = False
    #: Say when a forward is at its last step, for the next batch to be bound then.
    announce_last_step: bool = False
    slot_budget_bytes: int = 512 << 20
    #: Requests that may share a forward.
    max_batch_size: int = 1
    #: A packed request to run before the worker is ready; None: none.
    warm_up: bytes | None = None


class WorkerPort(Protocol):
    """A worker's connection to its executor."""

    def receive(self) -> Command:
        """Block until there is a command; ``Shutdown`` also when the executor is gone."""
        ...

    def send(self, message: AsyncDiffusionOutput) -> None:
        """Send an envelope that carries no output; any thread."""
        ...

    def device_bound(self) -> None:
        """Take note that the platform has imported all that it needs."""
        ...

    def make_sink(self, platform: Platform, device: torch.device) -> OutputSink[Any]:
        """Make the sink of this worker's outputs."""
        ...

    def device_lost(self, error: DeviceLostError) -> None:
        """Report that the device is lost and end the worker; any thread."""
        ...


class Worker:
    """Runs the commands of one executor on one device, on the thread that made it.

    States: made, started (platform, pipeline and output thread are up), closed.
    """

    def __init__(self, settings: WorkerSettings, port: WorkerPort, control: ControlPage) -> None:
        self.settings = settings
        self._port = port
        self._control = control
        self._places = Places(settings.max_pending_outputs)
        self._outputs = HandOver(control, port.device_lost)
        self._running: RunningForward | None = None
        self._stepper: Stepper | None = None

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the device, test its streams, load the pipeline, start the output thread.

        Raises:
            SidestreamError, or whatever the pipeline's ``load`` raises.
        """
        self._progress("platform")
        self.platform = load_plugin(self.settings.platform, self.settings.plugin)
        self.device = self.platform.device(self.settings.device_index)
        self.platform.set_device(self.device)
        self._port.device_bound()
        self.platform = trusted(self.platform, self.device, self.settings.on_platform_fault)
        self._join_group()
        self._progress("pipeline")
        config = PipelineConfig(
            model=self.settings.model,
            device=self.device,
            dtype=resolve_dtype(self.settings.dtype, self.device),
            options=self.settings.options,
            rank=self.settings.tensor_parallel_rank,
            world_size=self.settings.tensor_parallel_size,
        )
        self.pipeline = LoadedPipeline.load(self.settings.pipeline, config)
        if self.settings.step_execution:
            self._stepper = self._make_stepper()
        elif hasattr(self.pipeline.pipeline, "on_step"):
            self.pipeline.pipeline.on_step = self._on_step
        self._progress("output")
        sink = self._port.make_sink(self.platform, self.device)
        self._warm_up(sink)
        self._outputs.start(
            self.platform, self.device, sink, in_background=self.settings.async_output
        )

    def _join_group(self) -> None:
        """Meet the other ranks of a group; a lone worker has none."""

    def _warm_up(self, sink: OutputSink[Any]) -> None:
        settings = self.settings
        if settings.warm_up is None:
            nbytes = declared_nbytes(self.pipeline)
        else:
            request = decode_request(settings.warm_up)
            nbytes = measured_nbytes(self.pipeline, request, self.platform, self.device)
        # Those on the device, as many with the reader, and one whose return is on its way.
        least = settings.max_batch_size * (settings.max_pending_outputs + 1) + 1
        reserve_outputs(sink, nbytes, least)

    def run(self) -> None:
        """Take commands until ``Shutdown``, then bring out what is pending."""
        while True:
            command = self._port.receive()
            match command:
                case Execute():
                    self._execute(command)
                case ExecuteStep():
                    assert self._stepper is not None  # sent only in step mode
                    self._stepper.execute(command)
                case Call():
                    self._call(command)
                case Shutdown():
                    break
            del command  # it holds the request's inputs
        self.close()

    def close(self) -> None:
        """Drop states, bring out pending outputs and end the output thread; idempotent."""
        if self._stepper is not None:
            self._stepper.close()
        self._outputs.close()

    def _make_stepper(self) -> Stepper:
        return Stepper(
            Stages(self.pipeline),
            self._outputs,
            self._control,
            self._places,
            PrepareStream(
                self.platform, self.device, record=lambda: self._outputs.transfer.record()
            ),
            send=self._port.send,
            decode_request=decode_request,
            post_process=self.pipeline.post_process,
            sends_chunks=self.settings.sends_chunks,
        )

    # --- what a Call may name -----------------------------------------------------------------

    def ping(self) -> str:
        """Answer, to show that the main thread takes commands."""
        return "pong"

    def drain_async_outputs(self) -> None:
        """Wait until every output handed over so far has left the device."""
        self._outputs.drain()

    def describe(self) -> dict[str, Any]:
        """Say what this worker is and holds."""
        return {
            "platform": self.platform.name,
            "device": str(self.device),
            "pipeline": self.settings.pipeline,
            "supports_request_batch": self.pipeline.supports_request_batch,
            "output_thread": self._outputs.thread is not None,
            "states": None if self._stepper is None else len(self._stepper),
            "places_free": self._places.free(),
            "slots": self._outputs.transfer.sink.stats,
        }

    # --- commands -----------------------------------------------------------------------------

    def _execute(self, command: Execute) -> None:
        rest = self._take_place(command)
        if rest is None:
            self._refuse(command, EngineClosedError("The engine closed before this ran."))
            return
        command = rest
        if not command.output_ids:
            self._send_computed(command)
            return
        place = Place(len(command.output_ids), self._places, self._outputs.count_output)
        numbers = [number_of(output_id) for output_id in command.output_ids]
        forward: Forward | None = None
        try:
            forward = self._outputs.begin_forward(
                is_shared=len(numbers) > 1, accuse=partial(self._accuse, command)
            )
            payloads = self._forward(command, numbers)
            ended_at = time.monotonic()
        except BaseException as error:  # noqa: BLE001 - boundary: the forward; the loop goes on
            running, self._running = self._running, None
            place.give_back()
            if forward is not None:
                forward.end()
            if running is not None and running.stopped_at is not None:
                detach_frames(error)  # before the answer: they hold the forward's tensors
                self._outputs.aborts.answer_stopped(command, running.stopped_at)
                self._send_computed(command)
            else:
                self._outputs.fail(error, partial(self._refuse, command), forward)
            return
        self._running = None
        self._send_computed(command)
        timings = OutputTimings(forward_started_at=forward.started_at, forward_ended_at=ended_at)
        for index in range(len(payloads)):
            label = OutputLabel(
                output_id=command.output_ids[index],
                rpc_id=command.rpc_id,
                attempt=command.attempts[index],
                post_process=self.pipeline.post_process,
            )
            # Popped, so that nothing here keeps what the output thread lets go of.
            self._outputs.hand_over(label, payloads.pop(0), forward, timings, place.output_done)
        forward.end()

    def _forward(self, command: Execute, numbers: Sequence[int]) -> list[Payload]:
        """Run the pipeline over a command's requests, whose numbers are ``numbers``."""
        requests = [decode_request(data) for data in command.requests]
        self._running = RunningForward(command.rpc_id, numbers, requests)
        self._control.running = command.rpc_id
        return self.pipeline.forward(requests)

    def _call(self, command: Call) -> None:
        try:
            args, kwargs = unpack_bytes(command.arguments)
            owner = self if command.method in _OWN_METHODS else self.pipeline.pipeline
            target: Callable[..., Any] = getattr(owner, command.method)
            try:
                result = target(*args, **kwargs)
            finally:
                if self._stepper is not None and owner is not self:
                    self._stepper.note_call()
            message = AsyncDiffusionOutput(
                kind=AsyncOutputKind.RPC_RESULT, rpc_id=command.rpc_id, result=result
            )
            self._port.send(message)
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001 - boundary: a user's method, or its result
            reason = error
            if not isinstance(error, Exception):
                # Raised as it is in the caller, a SystemExit would end the main process.
                reason = ExecutionError(
                    f"Method {command.method!r} ended by {describe_error(error)}"
                )
                reason.__cause__ = error
            detach_frames(reason)
            self._send_error(reason, rpc_id=command.rpc_id)

    def _send_computed(self, command: Execute) -> None:
        self._port.send(
            AsyncDiffusionOutput(kind=AsyncOutputKind.COMPUTE_DONE, rpc_id=command.rpc_id)
        )
        self._control.forwards += 1

    # --- failures -----------------------------------------------------------------------------

    def _accuse(self, command: Execute, error: DeviceLostError) -> None:
        """Answer for the one request of a forward that the device failed in; any thread."""
        # Both ways: it may have been on this side of its COMPUTE_DONE or the other, and an answer
        # that nobody waits for is passed over.
        self._refuse(command, error)
        label = OutputLabel(
            output_id=command.output_ids[0], rpc_id=command.rpc_id, attempt=command.attempts[0]
        )
        self._outputs.fail_output(label, error)

    def _refuse(self, command: Execute, error: BaseException) -> None:
        if not isinstance(error, RequestError | EngineClosedError):
            reason = ExecutionError(f"The forward failed: {describe_error(error)}")
            reason.__cause__ = error
            error = reason
        self._send_error(error, rpc_id=command.rpc_id)

    def _send_error(self, error: BaseException, *, rpc_id: int) -> None:
        message = AsyncDiffusionOutput(kind=AsyncOutputKind.RPC_RESULT, rpc_id=rpc_id, error=error)
        try:
            self._port.send(message)
        except MemoryError:
            self._port.send(replace(message, error=without_causes(error)))

    # --- places and progress ------------------------------------------------------------------

    def _take_place(self, command: Execute) -> Execute | None:
        """Wait for a place and give what then is left of a command.

        Without a place if nothing is left of it; None when the engine closes.
        """
        while not self._control.shutdown:
            command = self._outputs.aborts.leave_out(command)
            if not command.output_ids:
                return command
            if self._places.take(_PLACE_POLL_S):
                command = self._outputs.aborts.leave_out(command)
                if not command.output_ids:
                    self._places.give_back()
                return command
        return None

    def _on_step(self, step: int) -> None:
        self._control.steps += 1
        running = self._running
        if running is None:
            return
        running.stop_if_unwanted(self._given_up(), step)
        if self.settings.announce_last_step and running.is_last(step):
            self._port.send(
                AsyncDiffusionOutput(kind=AsyncOutputKind.PROGRESS, rpc_id=running.rpc_id)
            )

    def _given_up(self) -> frozenset[int]:
        """Give the numbers of the requests that were given up, once behind each step."""
        return self._control.aborts()

    def _progress(self, stage: str) -> None:
        self._port.send(AsyncDiffusionOutput(kind=AsyncOutputKind.PROGRESS, result=stage))


def decode_request(data: bytes) -> DiffusionRequest:
    """Rebuild a packed request.

    Raises:
        InvalidRequestError: It can't be rebuilt here, or is something else.
    """
    try:
        request = unpack_bytes(data)
    except BaseException as error:
        # Classes of its inputs run their own code, and may be missing here.
        raise InvalidRequestError(
            f"A request can't be rebuilt in its worker: {describe_error(error)}"
        ) from error
    if not isinstance(request, DiffusionRequest):
        raise InvalidRequestError(
            f"A worker received {type(request).__name__} in place of a DiffusionRequest."
        )
    return request
