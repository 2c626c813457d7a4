"""How an engine and its worker groups are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupHealth:
    """One worker group's state: running, restarting or failed; and why."""

    index: int
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Health:
    """Whether an engine can take work, and if not, why."""

    ok: bool
    reason: str = ""
    groups: tuple[GroupHealth, ...] = ()
