"""A page-locked buffer between a device and memory that can't be page-locked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from sidestream.errors import SidestreamError
from sidestream.platforms.platform import Platform

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Staging:
    """Takes one output at a time, on the thread that copies outputs.

    Holds one buffer, which grows to the largest output so far. A copy into memory that is not
    page-locked would stop the host in the driver, and with some the device too.
    """

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._platform = platform
        self._device = device
        self._buffer: torch.Tensor | None = None
        self._is_impossible = False

    def place_before(self, destination: torch.Tensor) -> torch.Tensor:
        """Give page-locked memory as large as ``destination``, or that itself if there is none.

        1-D uint8 both; what was given before is overwritten.
        """
        nbytes = destination.numel()
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._grow(nbytes)
        return destination if self._buffer is None else self._buffer[:nbytes]

    def empty_into(self, destination: torch.Tensor) -> None:
        """Copy what the device has written to its place, which was given before."""
        assert self._buffer is not None
        # Not torch.copy_: 2.2 times slower between host memories. Both release the GIL.
        np.copyto(destination.numpy(), self._buffer[: destination.numel()].numpy())

    def _grow(self, nbytes: int) -> None:
        self._buffer = None  # before the next: both at once may be too much
        if self._is_impossible:
            return
        try:
            self._buffer = self._platform.pinned_buffer(self._device, nbytes)
        except SidestreamError as error:
            logger.debug("No staging buffer of %d bytes: %s", nbytes, error)
            return
        self._is_impossible = self._buffer is None
