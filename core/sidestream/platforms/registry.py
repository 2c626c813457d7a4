"""Which platform plugins there are, what they say of themselves, and which one is meant.

Nothing here imports torch. A plugin that can't be used is recorded with its reason and never
keeps another from being used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from sidestream import __version__
from sidestream.errors import (
    AmbiguousPlatformError,
    ConfigError,
    PlatformError,
    PlatformNotFoundError,
    PluginError,
    PluginLoadError,
)
from sidestream.platforms.device import Probe
from sidestream.platforms.plugin import ENTRY_POINT_GROUP, ask_probe, implemented_hooks, load_hooks

logger = logging.getLogger(__name__)

#: More plugins than the installed ones: ``name=module[,name=module]``.
PLUGINS_VARIABLE: Final = "SIDESTREAM_PLUGINS"
#: The platform to use where none is named in code.
PLATFORM_VARIABLE: Final = "SIDESTREAM_PLATFORM"
#: The built-in platform that needs no plugin and whose name none may take.
NOOP_NAME: Final = "cpu"
NOOP_REFERENCE: Final = "sidestream.platforms.noop"


@dataclass(frozen=True)
class Candidate:
    """A plugin that is known by name and not imported yet."""

    name: str
    #: ``"module"`` or ``"module:attribute"``.
    reference: str
    #: Name and version of the distribution that brings it; None if it came by the variable.
    distribution: str | None


@dataclass(frozen=True)
class PluginRecord:
    """What was found out about one plugin: a probe, or the error that kept it from answering."""

    name: str
    reference: str
    distribution: str | None
    #: The hooks that it implements, in the order of the hook specification.
    hooks: tuple[str, ...] = ()
    probe: Probe | None = None
    error: PluginError | None = None

    @property
    def reason(self) -> str:
        """Say in one line why the platform is available, or why not."""
        if self.error is not None:
            return str(self.error).partition("\n")[0]
        return self.probe.reason if self.probe is not None else ""


class PlatformRegistry:
    """The plugins of this environment; each is imported when it is first asked about."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        noop = Candidate(NOOP_NAME, NOOP_REFERENCE, f"sidestream {__version__}")
        #: The built-in base first, then the others in the order of their discovery.
        self.candidates: Final = (noop, *candidates)

    @classmethod
    def discover(cls) -> PlatformRegistry:
        """List the installed plugins and those of ``SIDESTREAM_PLUGINS``; import none of them.

        Raises:
            ConfigError: ``SIDESTREAM_PLUGINS`` is not ``name=module[,name=module]``.
        """
        # pluggy's own loader stops at the first broken plugin and drops a repeated name silently.
        installed = [
            Candidate(entry.name, entry.value, _distribution(entry))
            for entry in entry_points(group=ENTRY_POINT_GROUP)
        ]
        return cls([*installed, *_candidates_of_variable(os.environ.get(PLUGINS_VARIABLE, ""))])

    @cached_property
    def records(self) -> tuple[PluginRecord, ...]:
        """Every plugin, imported and probed; a repeated name is a record with an error."""
        first: dict[str, Candidate] = {}
        records = []
        for candidate in self.candidates:
            holder = first.setdefault(candidate.name, candidate)
            if holder is candidate:
                records.append(_examine(candidate))
            elif holder.reference != candidate.reference:
                records.append(_record_of_repetition(candidate, holder))
        return tuple(records)

    def select(self, name: str | None = None, *, device_type: str | None = None) -> PluginRecord:
        """Choose a platform: by name, else by ``SIDESTREAM_PLATFORM``, else the available one.

        A named plugin is the only one imported, and its answer that it is unavailable is ignored:
        whoever names it wants to see the real error. With ``device_type`` (and no name) only
        platforms of that torch device type count, also those that never win by themselves.

        Raises:
            PlatformNotFoundError: The name is unknown, or no platform has that device type.
            AmbiguousPlatformError: Several are available.
            PluginError: The named plugin can't be imported or breaks the contract.
            PlatformError: ``SIDESTREAM_PLATFORM`` names a platform of another device type.
        """
        name = name or os.environ.get(PLATFORM_VARIABLE) or None
        if name is None:
            return self._available(device_type)
        record = self._named(name)
        probe = record.probe
        if device_type is not None and probe is not None and probe.device_type != device_type:
            raise PlatformError(
                f"Platform {name!r} (asked for by {PLATFORM_VARIABLE}) has devices of type "
                f"{probe.device_type!r}, but a {device_type!r} device was given. Unset the "
                "variable, or give a device of that platform.",
                platform=name,
            )
        return record

    def _named(self, name: str) -> PluginRecord:
        for candidate in self.candidates:
            if candidate.name == name:
                record = _examine(candidate)
                if record.error is not None:
                    raise record.error
                return record
        known = sorted({candidate.name for candidate in self.candidates})
        raise PlatformNotFoundError(
            f"No platform is named {name!r}; known: {', '.join(known)}. A plugin of your own is "
            f"added by {PLUGINS_VARIABLE}=name=module.",
            platform=name,
        )

    def _available(self, device_type: str | None) -> PluginRecord:
        for record in self.records:
            if record.error is not None:
                logger.warning("%s", record.error)
        found = [record for record in self.records if _is_eligible(record, device_type)]
        if len(found) == 1:
            return found[0]
        if found:
            raise AmbiguousPlatformError([record.name for record in found])
        others = {record.name: record.reason for record in self.records if record.name != NOOP_NAME}
        listed = "; ".join(f"{name}: {reason}" for name, reason in others.items())
        if device_type is not None:
            raise PlatformNotFoundError(
                f"No available platform has devices of type {device_type!r}. {listed}",
                platform=device_type,
                reasons=others,
            )
        logger.info("No accelerator is available, the platform is %r. %s", NOOP_NAME, listed)
        return self.records[0]


def _examine(candidate: Candidate) -> PluginRecord:
    name, reference, distribution = candidate.name, candidate.reference, candidate.distribution
    hooks: tuple[str, ...] = ()
    try:
        manager = load_hooks(name, reference)
        hooks = implemented_hooks(manager)
        probe = ask_probe(name, manager)
    except PluginError as error:
        return PluginRecord(name, reference, distribution, hooks, error=error)
    return PluginRecord(name, reference, distribution, hooks, probe)


def _record_of_repetition(candidate: Candidate, holder: Candidate) -> PluginRecord:
    error = PluginLoadError(
        f"Plugin {candidate.name!r} ({candidate.reference}, from "
        f"{candidate.distribution or PLUGINS_VARIABLE}) repeats the name of {holder.reference} "
        f"(from {holder.distribution or PLUGINS_VARIABLE}), which is kept. Uninstall or rename "
        "one of them.",
        plugin=candidate.name,
        entry_point=candidate.reference,
    )
    return PluginRecord(candidate.name, candidate.reference, candidate.distribution, error=error)


def _is_eligible(record: PluginRecord, device_type: str | None) -> bool:
    probe = record.probe
    if probe is None or not probe.available:
        return False
    return probe.auto if device_type is None else probe.device_type == device_type


def _candidates_of_variable(value: str) -> Sequence[Candidate]:
    candidates = []
    for item in filter(None, (part.strip() for part in value.split(","))):
        name, _, reference = (part.strip() for part in item.partition("="))
        if not name or not reference:
            raise ConfigError(PLUGINS_VARIABLE, value, "name=module[,name=module]")
        candidates.append(Candidate(name, reference, None))
    return candidates


def _distribution(entry: EntryPoint) -> str | None:
    return None if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
