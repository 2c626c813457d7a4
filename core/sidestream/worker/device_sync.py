"""Waits for a device: by events, and by synchronizing all of it where those fail."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sidestream.errors import DeviceLostError, DeviceMemoryError, PlatformError
from sidestream.platforms.device import DeviceEvent, SideStream
from sidestream.platforms.platform import Platform
from sidestream.transport.failure import describe_error

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class DeviceSync:
    """Records and awaits events of one device; any thread.

    No wait is ever left out: where recording or waiting fails, the device is synchronized instead,
    and one warning says so.
    """

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._platform = platform
        self._device = device
        # Guards _has_warned: the forward's thread and the one that copies may fail at once.
        self._warning = threading.Lock()
        self._has_warned = False

    def record(self) -> DeviceEvent | None:
        """Record an event on the current stream; None after synchronizing the device instead.

        Raises:
            DeviceLostError: That failed too.
        """
        try:
            return self._platform.record_device_event(self._device, timing=True)
        except Exception as error:  # noqa: BLE001 - boundary: a plugin
            self._fall_back("recording an event", error)
            return None

    def order(self, stream: SideStream, event: DeviceEvent) -> None:
        """Make later work on ``stream`` come behind ``event``.

        Raises:
            DeviceLostError: Neither that nor synchronizing the device worked.
        """
        try:
            stream.wait_event(event)
        except Exception as error:  # noqa: BLE001 - boundary: a vendor's stream
            self._fall_back("waiting for an event", error)

    def wait(self, event: DeviceEvent | None) -> None:
        """Block until the device passed ``event``; None: it was synchronized already.

        Raises:
            DeviceLostError: It did not, and does not answer.
        """
        if event is None:
            return
        try:
            if event.wait():
                return
            raise PlatformError(
                "wait() without a time-out came back before the event", platform=self._platform.name
            )
        except Exception as error:  # boundary: a vendor's event
            self._fall_back("waiting for a copy", error)
            if _is_incomplete(event):
                # Work can be lost without an error: then the device is idle, and never got here.
                raise self._lost(
                    "an event is incomplete although the device says that it is idle"
                ) from error

    def drain(self) -> None:
        """Block until the device is idle.

        Raises:
            PlatformError: It can't be synchronized.
        """
        self._platform.synchronize_device(self._device)

    def diagnose(self, error: BaseException) -> BaseException:
        """Give the fault of the device in place of ``error``, if the device is lost."""
        import torch

        if isinstance(error, DeviceLostError):
            return error
        if isinstance(error, DeviceMemoryError | torch.OutOfMemoryError):
            # A device that says so works, and the check might find no memory either.
            return error
        fault = self._platform.check_device(self._device)
        if fault is None:
            return error
        lost = self._lost(fault.reason)
        lost.__cause__ = error
        return lost

    def _fall_back(self, doing: str, error: Exception) -> None:
        """Synchronize the device in place of a wait that failed; warn once."""
        try:
            self._platform.synchronize_device(self._device)
        except Exception as fatal:
            raise self._lost(describe_error(fatal)) from fatal
        fault = self._platform.check_device(self._device)
        if fault is not None:
            raise self._lost(fault.reason) from error
        with self._warning:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            logger.warning(
                "Platform %r failed at %s on %s (%s). Its device is synchronized instead: outputs "
                "stay correct and no longer overlap.",
                self._platform.name,
                doing,
                self._device,
                describe_error(error),
            )

    def _lost(self, reason: str) -> DeviceLostError:
        return DeviceLostError(
            f"Device {self._device} of platform {self._platform.name!r} is lost: {reason}",
            platform=self._platform.name,
            device=str(self._device),
        )


def _is_incomplete(event: DeviceEvent) -> bool:
    try:
        return not event.query()
    except Exception as error:  # noqa: BLE001 - boundary: a vendor's event, which has failed before
        logger.debug("%r can't be asked: %s", event, error)
        return False
