"""What goes into an engine: requests and their sampling parameters; how one ended, and when."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sidestream.errors import ConfigError

#: ``uint8``: channels last, to be shown. ``float``: 0 to 1, channels first. ``latent``: undecoded.
OutputType = Literal["uint8", "float", "latent"]

_OUTPUT_TYPES = ("uint8", "float", "latent")
_POSITIVE_INTS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "num_outputs_per_prompt",
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request.

    None means: what the checkpoint's ``generation_config.json`` says, else the pipeline's own
    default. Sizes are in pixels.

    Raises:
        ConfigError: A size or count is not a positive integer, or ``output_type`` is unknown.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    #: Noise comes from a CPU generator with this seed, so it is the same on every device.
    seed: int | None = None
    #: Output j of a request is drawn with ``seed + j``.
    num_outputs_per_prompt: int | None = None
    output_type: OutputType | None = None
    #: Passed to the pipeline untouched.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ConfigError(f"SamplingParams.{name}", value, "a positive integer or None")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ConfigError("SamplingParams.seed", self.seed, "an integer or None")
        if self.output_type is not None and self.output_type not in _OUTPUT_TYPES:
            raise ConfigError(
                "SamplingParams.output_type",
                self.output_type,
                ", ".join(map(repr, _OUTPUT_TYPES)) + " or None",
            )

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill the fields that are None from ``defaults``; unknown names are ignored."""
        names = {f.name for f in dataclasses.fields(self)} - {"extra"}
        missing = {
            name: value
            for name, value in defaults.items()
            if name in names and getattr(self, name) is None
        }
        return dataclasses.replace(self, **missing) if missing else self


@dataclass(frozen=True)
class DiffusionRequest:
    """One prompt and how to sample it.

    ``inputs`` holds images and tensors by the pipeline's own argument names. ``request_id`` is
    the caller's: it may repeat, be empty or hold a slash, since the engine uses ids of its own.
    """

    prompt: str
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    inputs: Mapping[str, Any] | None = None


class AbortOutcome(enum.StrEnum):
    """How far a request came that somebody gave up."""

    #: It never ran.
    NEVER_STARTED = "never-started"
    #: Its forward ended early, behind the step that the result names; nothing was decoded.
    STOPPED = "stopped"
    #: It had run, or its batch went on without it; its output was dropped and not copied.
    DETACHED = "detached"
    #: It was done before: its output is there, or it failed by something else.
    ALREADY_OUT = "already-out"
    #: A worker has it and was told; what becomes of it is not known yet.
    REQUESTED = "requested"


@dataclass(frozen=True)
class AbortResult:
    """What an abort came to; ``step`` is the number of steps done, when it was stopped."""

    outcome: AbortOutcome
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputTimings:
    """When things happened to one output.

    Points in time are seconds of ``time.monotonic()``, which is one clock for all processes of a
    machine; None where the platform can't tell. Forward and copy are the device's times where its
    events can be timed, else the host's.
    """

    submitted_at: float | None = None
    dispatched_at: float | None = None
    forward_started_at: float | None = None
    forward_ended_at: float | None = None
    copy_started_at: float | None = None
    copy_ended_at: float | None = None
    #: Seconds of the copy in which its worker ran a later forward; None where nobody could tell.
    copy_hidden_s: float | None = None
    #: The pump had the message.
    ready_at: float | None = None
    #: Bytes that were moved for this output.
    nbytes: int = 0
    #: Where the bytes travelled: slot, one-shot, inline or host (same process).
    carrier: str = ""

    @property
    def forward_s(self) -> float | None:
        """Give the duration of the forward in seconds."""
        return _span(self.forward_started_at, self.forward_ended_at)

    @property
    def copy_s(self) -> float | None:
        """Give the duration of the copy to the host in seconds."""
        return _span(self.copy_started_at, self.copy_ended_at)

    @property
    def copy_hidden_share(self) -> float | None:
        """Give the share of the copy in which a later forward ran, 0 to 1."""
        if not self.copy_s or self.copy_hidden_s is None:
            return None
        return min(1.0, self.copy_hidden_s / self.copy_s)

    @property
    def queued_s(self) -> float | None:
        """Give the time from submit to dispatch in seconds."""
        return _span(self.submitted_at, self.dispatched_at)

    @property
    def total_s(self) -> float | None:
        """Give the time from submit to readable output in seconds."""
        return _span(self.submitted_at, self.ready_at)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
