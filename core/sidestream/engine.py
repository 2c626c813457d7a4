"""The engine: requests in, finished outputs out, the device kept busy in between."""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import random
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from sidestream.config import EngineConfig, is_duration
from sidestream.errors import EngineClosedError, InvalidRequestError
from sidestream.handle import RequestHandle, abort_result, flight_of
from sidestream.request import AbortResult, DiffusionRequest, SamplingParams
from sidestream.scheduler.batch import batch_key

if TYPE_CHECKING:
    from sidestream.executor.flight import Flight
    from sidestream.executor.groups import WorkerGroups
    from sidestream.executor.health import Health
    from sidestream.output import DiffusionOutput, RequestEvent

_MAX_SEED: Final = (1 << 63) - 1
#: How long a running forward may take to finish when the process wants to end.
_EXIT_TIMEOUT_S: Final = 2.0

PromptOrRequest = str | DiffusionRequest


class DiffusionEngine:
    """Runs diffusion requests on one device and brings their outputs to this process.

    ::

        with DiffusionEngine(EngineConfig(model="digits")) as engine:
            for output in engine.generate(["a handwritten 7", "three"], seed=0):
                output.images[0].save(f"{output.request_id}.png")

    All methods may be called from any thread. States: running (once constructed), broken (its
    worker died; new work is refused with the cause), closed.

    Raises:
        ConfigError: A setting is not possible, or the model can't be found.
        MissingDependencyError: torch, or what the model needs, is not installed.
        PlatformError: The platform that was asked for is not usable.
        WorkerStartError: The worker did not come up; ``__cause__`` and the text say why.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Here and not above: these modules import torch, which `import sidestream` must not. The
        # platform first: it does so without what loads itself along, and knows whose torch to
        # install if there is none.
        from sidestream.platforms.platform import load_platform

        self.platform = load_platform(config.platform)
        from sidestream.executor.factory import make_groups
        from sidestream.loop import EngineLoop
        from sidestream.models.registry import find_source
        from sidestream.step_loop import StepLoop

        self.config = config
        self._source = find_source(config.model, config.pipeline)
        self.executor: WorkerGroups = make_groups(config, self.platform, self._source)
        make_loop = StepLoop if config.step_execution else EngineLoop
        self._loop: EngineLoop = make_loop(config, self.executor)
        try:
            self.executor.start()
            self._loop.start()
            _open_engines().add(self)
        except BaseException:
            # Also KeyboardInterrupt, and no room for a thread: the caller gets no engine to close.
            self.executor.shutdown(timeout_s=0.0)
            raise

    @classmethod
    def from_pretrained(cls, model: str | Path, **config: Any) -> DiffusionEngine:
        """Make an engine for a checkpoint: a folder, a hub id, or a built-in name."""
        return cls(EngineConfig(model=model, **config))

    # --- requests -----------------------------------------------------------------------------

    def submit(self, request: DiffusionRequest, *, timeout_s: float | None = None) -> RequestHandle:
        """Queue one request and return at once.

        The request is packed here: what it holds may be changed afterwards. Without a seed it gets
        one here. Its output has to be ready within ``timeout_s`` from now, the queue included;
        None: the config's ``request_timeout_s``, ``math.inf``: any time.

        Raises:
            InvalidRequestError: The request can't be sent to a worker; names what is wrong. Or
                ``timeout_s`` is no duration.
            QueueFullError: ``max_queued_requests`` are waiting.
            EngineClosedError, WorkerDiedError: The engine takes no more work.
        """
        self.executor.check_process()
        self._loop.check_open()
        if not isinstance(request, DiffusionRequest):
            raise InvalidRequestError(
                f"submit() takes a DiffusionRequest, not {type(request).__name__}; "
                "generate() takes prompts too."
            )
        if timeout_s is None:
            timeout_s = self.config.request_timeout_s
        elif not is_duration(timeout_s):
            raise InvalidRequestError(
                f"timeout_s={timeout_s!r} is not possible; allowed: seconds, 0 or more, or None.",
                request_id=request.request_id,
            )
        params = request.sampling_params.with_defaults(self._source.defaults)
        if params.seed is None:
            params = replace(params, seed=random.randint(0, _MAX_SEED))
        request = replace(request, sampling_params=params)
        flight = self.executor.make_flight(request, want=self._loop.want)
        flight.batch_key = batch_key(request)
        if timeout_s is not None and timeout_s < math.inf:
            flight.timeout_s = timeout_s
            flight.due_at = flight.submitted_at + timeout_s
        self._loop.add(flight)
        return RequestHandle(flight, self, self._loop.abort)

    def generate(
        self,
        prompts: PromptOrRequest | Sequence[PromptOrRequest],
        *,
        seed: int | None = None,
        **params: Any,
    ) -> list[DiffusionOutput]:
        """Run prompts or requests and give their outputs in input order.

        ``params`` are fields of :class:`SamplingParams`, for the prompts among the inputs; prompt i
        gets ``seed + i``. Waits for room where ``submit`` would raise.

        Raises:
            RequestError: The first request, in input order, that failed; the others are aborted.
        """
        return list(
            self.imap(_requests(prompts, seed, params), window=self.config.max_queued_requests)
        )

    async def agenerate(
        self,
        prompts: PromptOrRequest | Sequence[PromptOrRequest],
        *,
        seed: int | None = None,
        **params: Any,
    ) -> list[DiffusionOutput]:
        """Run prompts or requests without blocking the event loop; as :meth:`generate`.

        When the task is canceled, or one request fails, the others are aborted.
        """
        self.executor.check_process()
        handles: list[RequestHandle] = []
        try:
            for request in _requests(prompts, seed, params):
                await asyncio.to_thread(self._loop.wait_for_room)
                handles.append(self.submit(request))
            return [await handle for handle in handles]
        except BaseException:
            # Also CancelledError, and GeneratorExit of a task that nobody holds any more.
            self._abort_later(handles)
            raise

    def imap(
        self, requests: Iterable[PromptOrRequest], *, window: int = 16
    ) -> Iterator[DiffusionOutput]:
        """Yield outputs in input order and keep none of them, for long runs.

        At most ``window`` requests are under way at a time; the next ones are taken from the
        iterable when outputs are. What is under way when the iteration ends early is aborted.

        Raises:
            RequestError: The request whose turn it is failed; the iteration ends.
        """
        self.executor.check_process()
        handles: deque[RequestHandle] = deque()
        try:
            for request in requests:
                if isinstance(request, str):
                    request = DiffusionRequest(request)
                while len(handles) >= window:
                    yield _take_first(handles)
                self._loop.wait_for_room()
                handles.append(self.submit(request))
            while handles:
                yield _take_first(handles)
        finally:
            self._abort_later(handles)

    def abort(
        self,
        requests: RequestHandle | str | Iterable[RequestHandle | str],
        *,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> list[AbortResult]:
        """Give requests up, by handle or by ``request_id``; one result each, in that order.

        Ids are the caller's and may repeat: one stands for all requests of that id that are not
        out, in the order of submission, and for nothing if there is none. Everybody is told before
        anybody is waited for; ``timeout_s`` is for all together. Otherwise as
        :meth:`RequestHandle.abort`.

        Raises:
            InvalidRequestError: Something else was given, or another engine's; nothing was aborted.
            TimeoutError: A worker did not answer within ``timeout_s``; it is asked all the same.
            EngineClosedError: In a forked child.
        """
        self.executor.check_process()
        if isinstance(requests, RequestHandle | str) or not isinstance(requests, Iterable):
            requests = [requests]
        flights = [flight for request in requests for flight in self._find(request)]
        for flight in flights:
            self._loop.abort(flight)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results = []
        for flight in flights:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            results.append(abort_result(flight, wait, left_s))
        return results

    def _find(self, request: RequestHandle | str) -> list[Flight]:
        if isinstance(request, RequestHandle):
            return [flight_of(request, self)]
        if isinstance(request, str):
            return [flight for flight in self._loop.flights() if flight.request_id == request]
        raise InvalidRequestError(
            f"abort() takes handles and request ids, not {type(request).__name__}."
        )

    def _abort_later(self, handles: Iterable[RequestHandle]) -> None:
        # Not here: a generator or task may be closed by the garbage collector, inside any lock.
        self._loop.abort_later([flight_of(handle, self) for handle in handles])

    def step(self, request: DiffusionRequest) -> list[DiffusionOutput]:
        """Run one request to its end and give its output, as a list of one."""
        return [self.add_req_and_wait_for_response(request)]

    def add_req_and_wait_for_response(self, request: DiffusionRequest) -> DiffusionOutput:
        """Submit a request and wait for its output."""
        return self.submit(request).result()

    def step_streaming(
        self, request: DiffusionRequest, *, timeout_s: float | None = None
    ) -> Iterator[RequestEvent]:
        """Submit a request with the first event that is asked for, and yield all of them.

        As :meth:`RequestHandle.events`; parts of the output come with ``streaming_output=True``.
        The request is aborted when the iteration ends early.

        Raises:
            RequestError, WorkerDiedError, EngineClosedError: As :meth:`submit`, or what the request
                ended by.
        """
        handle = self.submit(request, timeout_s=timeout_s)
        try:
            yield from handle.events()
        finally:
            if not handle.done():
                self._abort_later([handle])

    # --- state --------------------------------------------------------------------------------

    def health(self) -> Health:
        """Say whether the engine takes work, and if not, why; costs no message."""
        return self.executor.check_health()

    def stats(self) -> dict[str, Any]:
        """Count requests, outputs and bytes since the start."""
        return {
            **self._loop.counts(),
            **self.executor.table.counts(),
            "restarts": self.executor.restarts,
        }

    def describe(self) -> str:
        """Say what waits for what: the queue, each worker group, each request that is not done."""
        health = self.health()
        lines = [
            f"engine on {self.platform.name} ({self.config.executor}), health: "
            f"{'ok' if health.ok else health.reason}",
            self._describe_mode(),
            f"queue: {self._loop.why_waiting()}",
        ]
        for group in health.groups:
            reason = f" ({group.reason})" if group.reason else ""
            lines.append(f"group {group.index}: {group.state}{reason}")
            lines += [
                f"  rank {rank.rank}: pid {rank.pid} on device {rank.device_index}"
                f"{'' if rank.is_alive else ', ended'}"
                for rank in group.ranks
            ]
        lines += [
            f"  {flight.request_id!r} ({flight.output_id}): {flight.state}"
            for flight in self._loop.flights()
        ]
        return "\n".join(lines)

    def _describe_mode(self) -> str:
        config = self.config
        mode = "step" if config.step_execution else "request"
        if not config.copies_in_background:
            copies = "synchronous"
        elif not self.executor.worker.get("output_thread"):
            copies = "synchronous, as this platform has no streams, or none to rely on"
        else:
            copies = "final step only" if config.step_execution else "on"
        has_pump = config.executor == "multiproc" and config.starts_pump
        has_thread = bool(self.executor.worker.get("output_thread"))
        return (
            f"mode: {mode}; async output: {copies}; pump: {_started(has_pump)}; worker's output "
            f"thread: {_started(has_thread)}"
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or in flight; False if time ran out."""
        self.executor.check_process()
        return self._loop.drain(timeout_s)

    # --- end ----------------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse what is new, fail what is queued, let what runs finish, end the worker.

        A forward that takes longer than ``timeout_s`` is ended by force. Idempotent: a second
        caller waits for the first. Outputs that were taken stay valid. Nothing in a forked child,
        which owns none of this. A signal handler that interrupted its thread just where others
        would have to wait for it only begins the end; it comes once the handler returned.
        """
        if self.executor.is_in_child:
            return
        if self._loop.is_held():
            self._loop.end_later(EngineClosedError("The engine is closed."), timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            self._loop.stop(timeout_s)
        finally:
            self.executor.shutdown(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> DiffusionEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After Ctrl-C or sys.exit() nobody is there for what still runs.
        if error is None or isinstance(error, Exception):
            self.close()
        else:
            self.close(_EXIT_TIMEOUT_S)

    def __del__(self) -> None:
        # The loop's thread holds everything but this object; without this, an engine that was
        # forgotten would keep its worker until exit. Nothing that blocks: this may run in any lock.
        if hasattr(self, "_loop") and not self.executor.is_in_child:
            self._loop.end_later(EngineClosedError("The engine was dropped without close()."))


def _started(is_started: bool) -> str:
    return "started" if is_started else "not started"


def _take_first(handles: deque[RequestHandle]) -> DiffusionOutput:
    # It stays among them while it is waited for: Ctrl-C there has to abort it, too.
    output = handles[0].result()
    handles.popleft()
    return output


def _requests(
    prompts: PromptOrRequest | Sequence[PromptOrRequest], seed: int | None, params: dict[str, Any]
) -> list[DiffusionRequest]:
    if isinstance(prompts, str | DiffusionRequest):
        prompts = [prompts]
    sampling = SamplingParams(**params)
    return [
        prompt
        if isinstance(prompt, DiffusionRequest)
        else DiffusionRequest(
            prompt, sampling if seed is None else replace(sampling, seed=seed + index)
        )
        for index, prompt in enumerate(prompts)
    ]


@functools.cache
def _open_engines() -> weakref.WeakSet[DiffusionEngine]:
    """Make the list of engines that are closed when the interpreter ends."""
    engines: weakref.WeakSet[DiffusionEngine] = weakref.WeakSet()
    atexit.register(_close_all, engines)
    return engines


def _close_all(engines: weakref.WeakSet[DiffusionEngine]) -> None:
    # One deadline for all: what the first one waits for is time that the others had too.
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for engine in list(engines):
        try:
            engine.close(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            # Ctrl-C again: the worker was ended by force on the way here, the others follow.
            deadline = 0.0
