"""Evidence that a device still copies correctly, or no longer does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from sidestream.platforms.device import DeviceFault, SideStream

if TYPE_CHECKING:
    import torch

SENTINEL_BYTES: Final = 4096
#: A healthy device answers in well under a millisecond; one that others keep busy, later.
_TIMEOUT_S: Final = 10.0
_POISON: Final = 0xEE


def check_by_sentinel(
    device: torch.device,
    stream: SideStream,
    outbound: torch.Tensor | None,
    inbound: torch.Tensor | None,
) -> DeviceFault | None:
    """Send random bytes to ``device`` and back by ``stream``, over a copy there, and compare.

    ``outbound`` and ``inbound`` are page-locked and of ``SENTINEL_BYTES``: a copy from or to
    pageable memory waits without a deadline. None where the platform has no such memory.
    """
    import torch

    # Random: memory that is reused still holds the bytes of the check before.
    sent = torch.frombuffer(bytearray(os.urandom(SENTINEL_BYTES)), dtype=torch.uint8)
    outbound = torch.empty_like(sent) if outbound is None else outbound
    inbound = torch.empty_like(sent) if inbound is None else inbound
    outbound.copy_(sent)
    inbound.fill_(_POISON)
    with stream:
        arrived = torch.empty_like(sent, device=device)
        arrived.copy_(outbound, non_blocking=True)
        doubled = torch.empty_like(arrived)
        doubled.copy_(arrived)
        inbound.copy_(doubled, non_blocking=True)
        done = stream.record_event()
    if not done.wait(_TIMEOUT_S):
        return DeviceFault(
            reason=f"{device} did not finish a copy of {SENTINEL_BYTES} bytes in {_TIMEOUT_S:g} s"
        )
    wrong = int((inbound != sent).sum())
    if wrong:
        return DeviceFault(
            reason=f"{device} returned {wrong} of {SENTINEL_BYTES} bytes changed, without an error"
        )
    return None
