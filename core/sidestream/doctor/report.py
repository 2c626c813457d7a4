"""What an examination found; as a tree of plain values it is the documented JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

#: Raised when a field of the JSON changes its meaning or goes; new fields may come without.
SCHEMA: Final = 1


class State(StrEnum):
    """How a thing is."""

    #: It was run, and works.
    USABLE = "usable"
    #: It says that it is there; it was not run, since only who names it gets it.
    AVAILABLE = "available"
    #: Not on this machine, which is no fault.
    ABSENT = "absent"
    #: It works, but not as well as it could.
    LIMITED = "limited"
    #: It is installed, or was asked for, and does not work.
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    #: What is wrong, as one of the words in docs/doctor.md; None: nothing.
    cause: str | None = None
    #: What was seen, a line each; never empty.
    evidence: tuple[str, ...]
    #: What to do, in one line; None: nothing.
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlatformFinding(Finding):
    """One platform plugin."""

    reference: str
    distribution: str | None
    device_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The platform that an engine would get."""

    #: None: there is none, and ``reason`` is the error.
    platform: str | None
    #: ``"argument"``, ``"variable"`` or ``"auto"``.
    by: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Route:
    """Copies from the device into one kind of host memory."""

    #: ``"pageable"``, ``"page-locked buffer"`` or ``"page-locked mapping"`` (what outputs take).
    memory: str
    bytes_per_s: float
    #: Seconds for one output.
    output_s: float
    #: Whether the call came back while the copy was running.
    is_asynchronous: bool


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Measured copies from a device to the host."""

    platform: str
    device: str
    output_bytes: int
    routes: tuple[Route, ...]

    @property
    def best(self) -> Route:
        """The route that outputs take: asynchronous if there is one, then the fastest."""
        return max(self.routes, key=lambda route: (route.is_asynchronous, -route.output_s))


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What asynchronous output changes for forwards of a given length."""

    forward_s: float
    copy_s: float
    #: More outputs a second than with the copy between two forwards: 0.05 is 5 %.
    gain: float
    is_worth_it: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole examination."""

    version: str
    python: str
    system: str
    selection: Selection
    torch: Finding
    platforms: tuple[PlatformFinding, ...]
    #: Packages that load themselves into torch, or change it.
    extensions: tuple[Finding, ...]
    #: What the operating system allows, and what the environment's variables do.
    limits: tuple[Finding, ...]
    copies: Copies | None
    worth: Worth | None
    #: Whether only ``selection.platform`` counts, since it was named.
    is_forced: bool

    @property
    def is_usable(self) -> bool:
        """Whether the selected platform works and nothing else that counts is broken."""
        chosen = [each for each in self.platforms if each.name == self.selection.platform]
        works = [each for each in chosen if each.state in (State.USABLE, State.LIMITED)]
        others = (
            self.limits if self.is_forced else (*self.limits, *self.platforms, *self.extensions)
        )
        return bool(works) and all(each.state is not State.BROKEN for each in (self.torch, *others))

    @property
    def exit_code(self) -> int:
        """0 usable, 1 broken."""
        return 0 if self.is_usable else 1

    def as_json(self) -> dict[str, Any]:
        """Give plain values, as documented in docs/doctor.md."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "is_usable": self.is_usable,
            "exit_code": self.exit_code,
        }
