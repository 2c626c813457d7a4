"""Which requests of one worker take the next denoising step."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sidestream.protocol import StepFate, StepStage


class Steppable(Protocol):
    """What the scheduler needs to know of a request."""

    #: Unique in its engine.
    key: str


T = TypeVar("T", bound=Steppable)


@dataclass(frozen=True)
class StepCall(Generic[T]):
    """One call of a worker: a stage, and the requests that it is for."""

    stage: StepStage
    items: tuple[T, ...]


class _Phase(enum.Enum):
    #: In the call that prepares it.
    JOINING = enum.auto()
    #: Its state waits for a step, or is in one.
    STEPPING = enum.auto()
    #: Nobody wants it; its state has to go.
    GIVEN_UP = enum.auto()
    #: Its state is gone, its output still on the device.
    LEAVING = enum.auto()


@dataclass
class _Resident(Generic[T]):
    item: T
    phase: _Phase = _Phase.JOINING
    share: Hashable | None = None


class StepScheduler(Generic[T]):
    """Lets the requests that have device memory of one worker take steps in turn.

    Pure policy for one thread: no clock, no I/O, one call at a time. Requests join and leave
    between two calls. Who has waited longest leads the next step, and those that may share its
    forward take it too, longest waiting first: so all get on at one pace, none starves, and a short
    request is not held up by a long one; a bound of one resident runs them one after the other.
    """

    def __init__(self, max_resident: int, max_batch_size: int = 1) -> None:
        self._max_resident = max_resident
        self._max_batch_size = max_batch_size
        # In the order of their turns.
        self._residents: OrderedDict[str, _Resident[T]] = OrderedDict()
        self._call: StepCall[T] | None = None
        # Members of the call whose output came before the call's answer.
        self._early: set[str] = set()

    def __len__(self) -> int:
        """Count the requests with device memory: states, and outputs on their way."""
        return len(self._residents)

    def __contains__(self, key: str) -> bool:
        return key in self._residents

    def items(self) -> list[T]:
        """List them, next turn first."""
        return [resident.item for resident in self._residents.values()]

    @property
    def is_busy(self) -> bool:
        """Tell whether a call is out."""
        return self._call is not None

    @property
    def has_room(self) -> bool:
        """Tell whether one more may have device memory."""
        return len(self._residents) < self._max_resident

    def give_up(self, key: str) -> None:
        """Have a request's state dropped by the next call; nothing where it has none any more."""
        resident = self._residents.get(key)
        if resident is not None and resident.phase is not _Phase.LEAVING:
            resident.phase = _Phase.GIVEN_UP

    def next(self, newcomer: Callable[[], T | None] = lambda: None) -> StepCall[T] | None:
        """Give the next call; None: one is out, or there is nothing to do.

        ``newcomer`` gives a request that joins, if there is one; it is asked once there is room.
        """
        if self._call is None:
            self._call = self._drop() or self._join(newcomer) or self._step()
            return self._call
        return None

    def answer(self, results: Iterable[tuple[str, StepFate, Hashable | None]]) -> None:
        """End the call with what became of each of its members: key, fate and share key."""
        for key, fate, share in results:
            resident = self._residents.get(key)
            if resident is None:
                continue
            if fate is StepFate.GONE or (fate is StepFate.OUT and key in self._early):
                del self._residents[key]
            elif fate is StepFate.OUT:
                resident.phase = _Phase.LEAVING
            else:
                resident.share = share
                if resident.phase is _Phase.JOINING:
                    resident.phase = _Phase.STEPPING
        self._call = None
        self._early.clear()

    def leave(self, key: str) -> None:
        """Hear that a request's output has left the device."""
        resident = self._residents.get(key)
        if resident is None:
            return
        if resident.phase is _Phase.LEAVING:
            del self._residents[key]
        elif self._call is not None and resident.item in self._call.items:
            self._early.add(key)

    def _drop(self) -> StepCall[T] | None:
        # First, whatever else waits: what is given up holds memory.
        dropped = [r.item for r in self._residents.values() if r.phase is _Phase.GIVEN_UP]
        return StepCall(StepStage.DROP, tuple(dropped)) if dropped else None

    def _join(self, newcomer: Callable[[], T | None]) -> StepCall[T] | None:
        # Before the others' next step, which it might share; to prepare takes less than a step.
        item = newcomer() if self.has_room else None
        if item is None:
            return None
        self._residents[item.key] = _Resident(item)
        return StepCall(StepStage.PREPARE, (item,))

    def _step(self) -> StepCall[T] | None:
        members = self._members()
        for member in members:
            self._residents.move_to_end(member.item.key)
        return StepCall(StepStage.DENOISE, tuple(r.item for r in members)) if members else None

    def _members(self) -> list[_Resident[T]]:
        members: list[_Resident[T]] = []
        for resident in self._residents.values():
            if resident.phase is not _Phase.STEPPING:
                continue
            if not members or (resident.share is not None and resident.share == members[0].share):
                members.append(resident)
            if len(members) == self._max_batch_size:
                break
        return members
