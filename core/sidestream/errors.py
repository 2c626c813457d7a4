"""The errors that sidestream raises.

::

    SidestreamError
      ConfigError (ValueError)                a setting is wrong: field, value, allowed
      MissingDependencyError (ImportError)    a package is not installed: package, install
      EngineClosedError (RuntimeError)        the engine no longer takes work
      InternalError                           a bug in sidestream
      PluginError                             plugin
        PluginLoadError                       entry_point
        PluginContractError                   hook
      PlatformError                           platform
        PlatformNotFoundError                 reasons: why each candidate was refused
        AmbiguousPlatformError                names
        DeviceLostError                       device
      RequestError                            request_id
        InvalidRequestError (ValueError)      the request can't be run or sent as it is
        QueueFullError                        limit
        ExecutionError                        the forward failed; the original is __cause__
        DeviceMemoryError                     the device had too little memory
        OutputTransferError                   the output could not reach the host
        RequestTimeoutError (TimeoutError)    timeout_s
        RequestAbortedError                   outcome, step: how far it had come
      WorkerError                             rank, pid
        WorkerStartError                      stage, stderr
        WorkerDiedError (BrokenExecutor)      signal, exit_code, request_ids
        WorkerHungError                       silent_s

Each pickles with its attributes. A failure in a worker arrives with the original exception as
``__cause__`` and, below that, the worker's traceback as a :class:`RemoteTraceback`.
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestream.request import AbortOutcome


def _rebuild(cls: type[SidestreamError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class SidestreamError(Exception):
    """Base of every error that sidestream raises on purpose.

    ::

        try:
            output = handle.result()
        except sidestream.RequestError as error:
            log.warning("request %s failed", error.request_id)
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls cls(*args), which loses keyword-only attributes.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


class ConfigError(SidestreamError, ValueError):
    """A setting has a value that it can't have."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} is not possible; allowed: {allowed}.")
        #: The setting's name.
        self.field = field
        #: The value that was given, as text (the value itself may not pickle).
        self.value = repr(value)
        #: What would have been accepted.
        self.allowed = allowed


class MissingDependencyError(SidestreamError, ImportError):
    """A package that this call needs is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(
            f"{needed_for} needs {package}, which is not installed. Install it: {install}"
        )
        self.package = package
        self.install = install


class EngineClosedError(SidestreamError, RuntimeError):
    """The engine was closed, or closed before this request could finish."""


class InternalError(SidestreamError):
    """An invariant of sidestream does not hold: a bug here, not in your code."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} This is a bug in sidestream, please report it.")


# --- plugins and platforms ----------------------------------------------------------------


class PluginError(SidestreamError):
    """A platform plugin is not usable."""

    def __init__(self, message: str, *, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginLoadError(PluginError):
    """A plugin could not be imported or registered; ``__cause__`` says why."""

    def __init__(self, message: str, *, plugin: str, entry_point: str) -> None:
        super().__init__(message, plugin=plugin)
        self.entry_point = entry_point


class PluginContractError(PluginError):
    """A plugin was imported but breaks the contract of a hook."""

    def __init__(self, message: str, *, plugin: str, hook: str) -> None:
        super().__init__(message, plugin=plugin)
        self.hook = hook


class PlatformError(SidestreamError):
    """A platform could not do what it was asked."""

    def __init__(self, message: str, *, platform: str) -> None:
        super().__init__(message)
        self.platform = platform


class PlatformNotFoundError(PlatformError):
    """No platform fits what was asked."""

    def __init__(
        self, message: str, *, platform: str, reasons: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, platform=platform)
        #: Why each candidate was refused, by its name.
        self.reasons = dict(reasons or {})


class AmbiguousPlatformError(PlatformError):
    """Several platforms are available and nothing says which one is meant."""

    def __init__(self, names: Sequence[str]) -> None:
        listed = " and ".join(repr(name) for name in names)
        super().__init__(
            f"Platforms {listed} are both available. Say which one: set SIDESTREAM_PLATFORM "
            "or EngineConfig(platform=...).",
            platform=", ".join(names),
        )
        self.names = tuple(names)


class DeviceLostError(PlatformError):
    """The device no longer answers correctly; its worker has to end."""

    def __init__(self, message: str, *, platform: str, device: str) -> None:
        super().__init__(message, platform=platform)
        self.device = device


# --- requests -----------------------------------------------------------------------------


class RequestError(SidestreamError):
    """One request failed; others are not touched."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        #: The id that the caller gave, or the one that the engine made.
        self.request_id = request_id


class InvalidRequestError(RequestError, ValueError):
    """A request can't be run, or sent to a worker, as it is."""


class QueueFullError(RequestError):
    """Too many requests are waiting."""

    def __init__(self, *, limit: int, request_id: str | None = None) -> None:
        super().__init__(
            f"Request {request_id!r} was refused: {limit} requests are waiting already "
            "(max_queued_requests). Take results first, or raise the limit.",
            request_id=request_id,
        )
        self.limit = limit


class ExecutionError(RequestError):
    """The pipeline's forward failed; ``__cause__`` is what it raised."""


class DeviceMemoryError(RequestError):
    """The device had too little memory for this request; ``__cause__`` is what was raised."""


class OutputTransferError(RequestError):
    """The forward succeeded, but its output could not be brought to the caller."""


class RequestTimeoutError(RequestError, TimeoutError):
    """A request's deadline passed before its output was ready."""

    def __init__(self, message: str, *, timeout_s: float, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.timeout_s = timeout_s


class RequestAbortedError(RequestError):
    """The request was given up before its output was ready."""

    def __init__(
        self, *, outcome: AbortOutcome, step: int | None = None, request_id: str | None = None
    ) -> None:
        how = outcome.replace("-", " ") + ("" if step is None else f" at step {step}")
        super().__init__(f"The request was aborted: {how}.", request_id=request_id)
        #: How far it had come.
        self.outcome = outcome
        #: How many denoising steps were done, when it was stopped between two.
        self.step = step


# --- workers ------------------------------------------------------------------------------


class WorkerError(SidestreamError):
    """A worker is not usable."""

    def __init__(self, message: str, *, rank: int, pid: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid


class WorkerStartError(WorkerError):
    """A worker did not come up; ``__cause__`` is what it raised, if it could say so."""

    def __init__(
        self, message: str, *, rank: int, pid: int | None, stage: str, stderr: str = ""
    ) -> None:
        super().__init__(message, rank=rank, pid=pid)
        #: What the worker was doing: spawn, platform, pipeline.
        self.stage = stage
        #: The end of what the worker had printed.
        self.stderr = stderr


class WorkerDiedError(WorkerError, BrokenExecutor):
    """A worker's process ended while it was needed."""

    def __init__(
        self,
        *,
        rank: int,
        pid: int | None,
        exit_code: int | None,
        request_ids: Sequence[str] = (),
        hint: str = "",
    ) -> None:
        killed = exit_code is not None and exit_code < 0
        name = signal_name(-exit_code) if exit_code is not None and killed else None
        if exit_code is None:
            how = "ended with unknown status (the host process reaps its children itself)"
        elif killed:
            how = f"was killed by {name}"
        else:
            how = f"exited with code {exit_code}"
        flying = f" while {len(request_ids)} request(s) were in flight" if request_ids else ""
        likely = (
            " The kernel's out-of-memory killer is the usual cause, see 'dmesg'."
            if name == "SIGKILL"
            else ""
        )
        tail = f" {hint}" if hint else ""
        super().__init__(
            f"Worker {rank} (pid {pid}) {how}{flying}.{likely}{tail}", rank=rank, pid=pid
        )
        #: The signal's name, if one ended the worker.
        self.signal = name
        #: The exit code; negative for a signal, None when it can't be known.
        self.exit_code = exit_code
        #: The requests that were with the worker.
        self.request_ids = tuple(request_ids)


class WorkerHungError(WorkerError):
    """A worker gave no sign of progress for too long."""

    def __init__(self, message: str, *, rank: int, pid: int | None, silent_s: float) -> None:
        super().__init__(message, rank=rank, pid=pid)
        self.silent_s = silent_s


class RemoteTraceback(Exception):
    """The traceback of another process, as text; stands at the end of a ``__cause__`` chain."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def signal_name(number: int) -> str:
    """Name a signal: ``9`` gives ``"SIGKILL"``; an unknown one is ``"signal 63"``."""
    try:
        return _signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
