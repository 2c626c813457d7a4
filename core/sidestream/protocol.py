"""The messages between the main process and its workers.

Commands go down (:data:`Command`), :class:`AsyncDiffusionOutput` comes up: one envelope for
everything, routed by its kind. The main process makes every id and registers whoever waits for it
before it sends, so no message can name an id that was never issued; one for an id that is gone is
released undecoded and counted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sidestream.request import OutputTimings


class AsyncOutputKind(enum.IntEnum):
    """What an envelope says."""

    #: The forward is queued on the device; the worker takes the next command.
    COMPUTE_DONE = 1
    #: One request's output is readable by the main process, or failed on its way.
    OUTPUT_READY = 2
    #: A call's return value, or the error of a call or of a forward.
    RPC_RESULT = 3
    #: A sign of life: a stage of the start-up, or that a forward is at its last step.
    PROGRESS = 4
    #: A part of one request's output is readable; more of it is to come.
    CHUNK_READY = 5


@dataclass(frozen=True, kw_only=True)
class AsyncDiffusionOutput:
    """The one envelope of the result channel.

    ``result`` holds a call's return value or a start-up stage's name, ``output`` a payload tree.
    ``error`` excludes both.
    """

    kind: AsyncOutputKind
    rpc_id: int = 0
    async_output_id: str | None = None
    #: Which run of the request this is about; a lower one than the current is stale.
    attempt: int = 0
    result: Any = None
    output: Any = None
    error: BaseException | None = None
    timings: OutputTimings = field(default_factory=OutputTimings)


@dataclass(frozen=True, kw_only=True)
class Execute:
    """Run one forward over ``requests``; ``output_ids`` names each one's output."""

    rpc_id: int
    output_ids: tuple[str, ...]
    #: Which run of each request this is, in the order of ``output_ids``.
    attempts: tuple[int, ...]
    #: Packed requests, in that order too.
    requests: tuple[bytes, ...]


class StepStage(enum.IntEnum):
    """What a worker does in one call of step mode."""

    #: Make the state of new requests; their bytes come along.
    PREPARE = 1
    #: Take one denoising step in one forward; after the last one, decode.
    DENOISE = 2
    #: Let go of the states of requests that were given up, and decode nothing.
    DROP = 3


@dataclass(frozen=True, kw_only=True)
class ExecuteStep:
    """Advance requests by one stage (``execute_stepwise``); the worker keeps their states.

    Answered by an RPC_RESULT, once it is queued on the device, that holds a :class:`StepResult` a
    request. What else there is to say of a request comes in messages of its own.
    """

    rpc_id: int
    stage: StepStage
    output_ids: tuple[str, ...]
    #: Which run of each request this is, in the order of ``output_ids``.
    attempts: tuple[int, ...]
    #: Packed requests, in that order too; only to prepare them.
    requests: tuple[bytes, ...] = ()


class StepFate(enum.IntEnum):
    """Where a request is after a step."""

    #: The worker keeps its state for the next one.
    KEPT = 1
    #: It was the last step: the state is gone, the output is on its way or was sent.
    OUT = 2
    #: It was given up or failed: the state is gone, and an OUTPUT_READY said why.
    GONE = 3


class StepResult(NamedTuple):
    """What one call of step mode came to for one request."""

    #: The number of its output, see :func:`number_of`.
    number: int
    fate: int
    #: Steps done, of how many.
    step: int
    num_steps: int
    #: Requests with equal numbers may share the next forward; None: it is stepped alone.
    share: int | None = None


def number_of(output_id: str) -> int:
    """Give the number of an output, which is what the table of aborted requests holds.

    Ids are ``out-{number}``, in a batch ``{batch_id}/out-{number}``; 0 for any other.
    """
    digits = output_id.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a method of the worker, else of its pipeline, on the worker's main thread."""

    rpc_id: int
    method: str
    #: Packed ``(args, kwargs)``.
    arguments: bytes


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """Finish what was taken, then end."""


Command = Execute | ExecuteStep | Call | Shutdown


@dataclass(frozen=True)
class RunnerOutput:
    """What ``execute_model`` answers once a forward is queued: where its outputs will appear."""

    async_output_ids: tuple[str, ...]
    #: Keeps the outputs' futures findable while the answer is held.
    held: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def async_output_id(self) -> str:
        """Give the id of a lone request's output."""
        return self.async_output_ids[0]
