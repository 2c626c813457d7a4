"""The stream on which step mode prepares a request while others' steps are queued."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sidestream.errors import PlatformError
from sidestream.platforms.device import DeviceEvent, JoiningStream
from sidestream.platforms.platform import Platform
from sidestream.transport.failure import describe_error
from sidestream.worker.held_tensors import held_tensors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: More urgent than steps, where the device knows priorities: the host waits for this work, and
#: has queued those.
_PRIORITY: Final = -1


@dataclass
class Preparation:
    """What a block of :meth:`PrepareStream.block` does."""

    #: Whether it runs on a stream of its own.
    is_beside: bool
    #: What it made for later stages; these find the tensors in it whole.
    made: list[object] = field(default_factory=list)


class PrepareStream:
    """Has a request prepared beside the steps of others; used by the worker's main thread.

    Copies from the host and questions to the device wait for their own stream, and so no longer
    for all steps that are queued. What the thread queues next waits for them on the device. The
    current stream is used as it is where the device is idle, so that there is nothing to wait for,
    and where the pipeline or the platform can't do it.

    States: usable, then given up for good once one of the platform's waits has failed.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        record: Callable[[], DeviceEvent | None],
    ) -> None:
        """Make none yet. ``record`` records an event on the current stream; None: it is idle."""
        self._platform = platform
        self._device = device
        self._record = record
        self._is_usable = platform.is_asynchronous
        self._stream: JoiningStream | None = None
        # The end of what is queued on the current stream.
        self._queued: DeviceEvent | None = None
        # The end of what was done there for later requests too; None: the stream is behind it.
        self._needed: DeviceEvent | None = None
        # What was made where no stream could be made to wait for it: the allocator doesn't know
        # who reads it, so it is never freed.
        self._kept: list[torch.Tensor] = []

    def note_queued(self, end: DeviceEvent | None = None) -> None:
        """Note that something was queued on the current stream, up to ``end`` if that is known."""
        if self._is_usable:
            self._queued = self._record() if end is None else end

    def note_changed(self) -> None:
        """Note that what was queued so far may change what preparing reads, such as weights."""
        if self._is_usable and self._queued is not None:
            self._need_queued()

    def _need_queued(self) -> None:
        self._needed = self._queued = self._record()

    @contextmanager
    def block(self, *, may_be_beside: bool) -> Iterator[Preparation]:
        """Prepare a request in a block, beside what is queued unless that must not or need not be.

        Raises:
            PlatformError: The platform failed to make one stream wait for another, and the device
                no longer answers.
        """
        stream = self._enter() if may_be_beside and self._is_busy() else None
        preparation = Preparation(is_beside=stream is not None)
        try:
            yield preparation
        finally:
            if stream is not None:
                self._leave(stream, preparation.made)
            elif self._is_usable:
                # What it made beside the state, such as a table in a text encoder, and all before.
                self._need_queued()

    def _is_busy(self) -> bool:
        if not self._is_usable or self._queued is None:
            return False
        try:
            return not self._queued.query()
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's event
            # The current stream is right in any case.
            logger.debug("%r can't be asked: %s", self._queued, describe_error(error))
            return False

    def _enter(self) -> JoiningStream | None:
        try:
            stream = self._own_stream()
            if stream is None:
                return None
            if self._needed is not None:
                stream.wait_event(self._needed)
                self._needed = None
            stream.__enter__()
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's stream
            self._give_up(error)
            return None
        return stream

    def _own_stream(self) -> JoiningStream | None:
        if self._stream is None:
            stream = self._platform.side_stream(self._device, priority=_PRIORITY)
            if not isinstance(stream, JoiningStream):
                logger.debug(
                    "Platform %r has no join_current(): requests are prepared between the steps "
                    "of others.",
                    self._platform.name,
                )
                self._is_usable = False
                return None
            self._stream = stream
        return self._stream

    def _leave(self, stream: JoiningStream, made: list[object]) -> None:
        tensors = held_tensors(made, self._device.type)
        try:
            stream.__exit__(None, None, None)
            # Also behind what failed: it may have changed something that others read.
            stream.join_current(tensors)
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's stream
            self._kept = tensors
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Synchronize the device in place of a wait that failed, and do without from now on."""
        self._is_usable = False
        self._platform.synchronize_device(self._device)
        fault = self._platform.check_device(self._device)
        if fault is not None:
            raise PlatformError(fault.reason, platform=self._platform.name) from error
        logger.warning(
            "Platform %r failed to prepare a request beside the steps of others on %s (%s). "
            "Its device was synchronized instead: outputs stay correct, and requests are prepared "
            "between steps from now on.",
            self._platform.name,
            self._device,
            describe_error(error),
        )
