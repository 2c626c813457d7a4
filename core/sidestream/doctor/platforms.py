"""One finding a platform plugin, from the answers of child processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from sidestream.doctor.causes import Cause, cause_by_error, cause_of
from sidestream.doctor.questions import Questions
from sidestream.doctor.report import Finding, PlatformFinding, State
from sidestream.doctor.vendors import VENDORS, Vendor, hiding_variable, inaccessible, nodes_of
from sidestream.platforms.registry import NOOP_NAME, PLUGINS_VARIABLE, Candidate

_NOTHING_TO_DO: Final = (
    "Nothing, unless this machine has such a device: then what the evidence says."
)
_COPIES_BLOCK: Final = Cause(
    "copies-block",
    "Outputs are right, and the host waits for each copy: the plugin gets no page-locked memory; "
    "see its README, and the limit of page-locks below.",
)
_AVAILABLE_ADVICE: Final = "It is used, and tested here, only when named: --platform {name}."


@dataclass(frozen=True)
class Examined:
    """A plugin's finding, and the copies measured on its device, as plain values."""

    finding: PlatformFinding
    device: str = ""
    routes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """Looks at one plugin after the other; may be called by several threads."""

    questions: Questions
    #: The platform that was named; it is run whatever its probe says.
    named: str | None
    device_index: int
    output_bytes: int
    #: Whether torch can be imported at all.
    torch: Future[Finding]
    #: Whether the vendors' packages can be loaded, by module.
    extensions: Mapping[str, Future[Finding]]

    def examine(self, candidate: Candidate, holder: Candidate) -> Examined:
        """Import, probe and, if there is a device, run the plugin; ``holder`` has its name."""
        if holder is not candidate:
            return Examined(_repetition(candidate, holder))
        found = _Maker(candidate)
        answer = self.questions.ask("probe", candidate.name, candidate.reference)
        probe = answer.result
        if probe is None:
            # Not by the text alone: a plugin may import a vendor's package at its top.
            cause = cause_by_error(answer) or cause_of(answer)
            return Examined(found(State.BROKEN, cause, answer.evidence))
        found.device_type = probe["device_type"]
        torch = self.torch.result()
        # Without any torch a probe has said so already, and what to install.
        if torch.state is State.BROKEN and (probe["available"] or candidate.name == self.named):
            why = (probe["reason"], *torch.evidence)
            cause = Cause(torch.cause or "failed", torch.advice or "")
            return Examined(found(State.BROKEN, cause, why))
        if candidate.name == NOOP_NAME:
            return Examined(found(State.USABLE, None, (probe["reason"],)))
        is_named = candidate.name == self.named
        if is_named or (probe["available"] and probe["auto"]):
            return self._run(candidate, found, probe["reason"])
        if probe["available"]:
            advice = Cause("", _AVAILABLE_ADVICE.format(name=candidate.name))
            return Examined(found(State.AVAILABLE, advice, (probe["reason"],)))
        return Examined(self._absent(candidate.name, found, probe["reason"]))

    def _run(self, candidate: Candidate, found: _Maker, reason: str) -> Examined:
        arguments = (str(self.device_index), str(self.output_bytes))
        answer = self.questions.ask("device", candidate.name, candidate.reference, *arguments)
        extra = self._said_by_management(VENDORS.get(candidate.name))
        result = answer.result
        if result is None:
            why = (*answer.evidence, f"its probe: {reason}", *extra)
            return Examined(found(State.BROKEN, cause_of(answer), why))
        seen = [reason]
        if result["routes"]:
            tested = f"tested in {1e3 * result['tested_s']:.0f} ms"
            seen.append(f"{result['device']}: streams, events and copies {tested}")
        if result["memory_bytes"]:
            free, total = (size / (1 << 30) for size in result["memory_bytes"])
            seen.append(f"{free:.1f} of {total:.1f} GiB of its memory are free")
        blocks = bool(result["routes"]) and not any(
            route["is_asynchronous"] for route in result["routes"]
        )
        state, cause = (State.LIMITED, _COPIES_BLOCK) if blocks else (State.USABLE, None)
        finding = found(state, cause, (*seen, *extra))
        return Examined(finding, result["device"], result["routes"])

    def _absent(self, name: str, found: _Maker, reason: str) -> PlatformFinding:
        vendor = VENDORS.get(name)
        if vendor is None:
            return found(State.ABSENT, Cause("absent", _NOTHING_TO_DO), (reason,))
        nodes = nodes_of(vendor)
        evidence = (reason, *self._said_by_management(vendor))
        loaded = self.extensions.get(vendor.extension or "")
        if loaded is not None and (package := loaded.result()).state is State.BROKEN:
            cause = Cause(package.cause or "failed", package.advice or "")
            return found(State.BROKEN, cause, (*package.evidence, *evidence))
        hidden = hiding_variable(vendor)
        if hidden is not None and (nodes or hidden in reason):
            advice = f"Unset {hidden}, or name devices in it."
            return found(State.ABSENT, Cause("hidden", advice), evidence)
        if closed := inaccessible(nodes):
            seen = (f"{', '.join(closed)} can't be opened by this user", *evidence)
            # The probe looks at nodes last: where it stumbles over one, all else is installed.
            state = State.BROKEN if any(node in reason for node in closed) else State.ABSENT
            return found(state, Cause("no-access", f"{vendor.groups.capitalize()}."), seen)
        if nodes:
            seen = (*evidence, f"the hardware is here: {', '.join(nodes)}")
            advice = "Do what the evidence says: the device is here and can't be used."
            return found(State.ABSENT, Cause("runtime-missing", advice), seen)
        return found(State.ABSENT, Cause("absent", _NOTHING_TO_DO), evidence)

    def _said_by_management(self, vendor: Vendor | None) -> tuple[str, ...]:
        if vendor is None or vendor.management is None or not is_installed(vendor.management):
            return ()
        answer = self.questions.ask("management", vendor.management)
        return (
            f"{vendor.management}: {answer.result['text'] if answer.result else answer.failure}",
        )


class _Maker:
    """Fills in what is the same in every finding of one plugin."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate: Final = candidate
        self.device_type: str | None = None

    def __call__(
        self, state: State, cause: Cause | None, evidence: tuple[str, ...]
    ) -> PlatformFinding:
        return PlatformFinding(
            name=self._candidate.name,
            reference=self._candidate.reference,
            distribution=self._candidate.distribution,
            device_type=self.device_type,
            state=state,
            cause=(cause.word or None) if cause else None,
            evidence=evidence,
            advice=(cause.advice or None) if cause else None,
        )


def _repetition(candidate: Candidate, holder: Candidate) -> PlatformFinding:
    origin = candidate.distribution or PLUGINS_VARIABLE
    seen = (
        f"{candidate.reference} (from {origin}) repeats the name of {holder.reference} (from "
        f"{holder.distribution or PLUGINS_VARIABLE}), which is kept"
    )
    cause = Cause(
        "duplicate-name", f"Uninstall or rename one of the two plugins {candidate.name!r}."
    )
    return _Maker(candidate)(State.BROKEN, cause, (seen,))


def is_installed(module: str) -> bool:
    """Tell whether a module could be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent or a leftover in sys.modules that is no module
        return False
