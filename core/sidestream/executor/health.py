"""How an engine and its worker groups are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankHealth:
    """One worker process: its number among all of the engine, its device's, and its own."""

    rank: int
    device_index: int
    pid: int
    is_alive: bool


@dataclass(frozen=True)
class GroupHealth:
    """One worker group's state: running, restarting or failed; and why."""

    index: int
    state: str
    reason: str = ""
    #: The processes that share its copy of the model; none where it runs in this one.
    ranks: tuple[RankHealth, ...] = ()


@dataclass(frozen=True)
class Health:
    """Whether an engine can take work, and if not, why."""

    ok: bool
    reason: str = ""
    groups: tuple[GroupHealth, ...] = ()
