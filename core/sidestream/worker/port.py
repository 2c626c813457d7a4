"""A worker process's connection to its executor, over two inherited sockets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sidestream.autoload import hide_other_backends
from sidestream.errors import DeviceLostError
from sidestream.protocol import AsyncDiffusionOutput, AsyncOutputKind, Command, Shutdown
from sidestream.transport.channel import Channel, ChannelClosed
from sidestream.transport.envelope import decode_command, encode_message
from sidestream.worker.exits import EXIT_DEVICE_LOST
from sidestream.worker.sink import OutputSink, SlotSink

if TYPE_CHECKING:
    import torch

    from sidestream.platforms.platform import Platform


class ChannelPort:
    """A worker's connection over its two inherited sockets."""

    def __init__(self, messages: Channel, releases: Channel, slot_budget_bytes: int) -> None:
        self._messages = messages
        self._releases = releases
        self._slot_budget_bytes = slot_budget_bytes

    def receive(self) -> Command:
        """Block for a command; a closed connection means shutdown."""
        while True:
            try:
                frame = self._messages.receive()
            except ChannelClosed:
                return Shutdown()
            assert frame is not None  # the channel blocks
            if frame.body_error is None:
                return decode_command(frame)
            self.send(
                AsyncDiffusionOutput(
                    kind=AsyncOutputKind.RPC_RESULT,
                    rpc_id=frame.rpc_id,
                    attempt=frame.attempt,
                    error=frame.body_error,
                )
            )

    def send(self, message: AsyncDiffusionOutput) -> None:
        """Send an envelope; any thread."""
        self._messages.send(encode_message(message))

    def device_bound(self) -> None:
        """Keep libraries from importing another vendor's package in this process."""
        hide_other_backends()

    def make_sink(self, platform: Platform, device: torch.device) -> OutputSink[Any]:
        """Make a sink of shared slots."""
        return SlotSink(
            self._messages,
            self._releases,
            platform,
            device,
            budget_bytes=self._slot_budget_bytes,
        )

    def device_lost(self, error: DeviceLostError) -> None:
        """Say why, then end at once: nothing on this device can be trusted or waited for."""
        try:
            self.send(AsyncDiffusionOutput(kind=AsyncOutputKind.PROGRESS, result=f"lost: {error}"))
        finally:
            os._exit(EXIT_DEVICE_LOST)
