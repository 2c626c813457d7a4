"""What can be wrong with a simulated device because a test asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sidestream.testing.sim.event import CHANGED

_MEMORY_BYTES: Final = 16 << 30


class SimDeviceError(RuntimeError):
    """A call reached a device that is in error, or failed because a test asked for it."""


@dataclass(kw_only=True)
class Faults:
    """What a device shall do wrong from now on; a test sets it, from any thread."""

    #: So many of the next ``record_event`` and ``record_device_event`` calls raise.
    fail_next_records: int = 0
    #: So many of the next ``SimStream.wait_event`` calls raise.
    fail_next_waits: int = 0
    #: The next recorded event is never reached.
    next_event_never_fires: bool = False
    #: Copies to the host are lost without an error: events are reached, the host keeps old bytes.
    drop_copies: bool = False
    #: ``pin_host_memory`` and ``pinned_buffer`` answer None.
    refuse_page_locking: bool = False
    #: Memory of the device; an allocation past it raises ``torch.OutOfMemoryError``.
    memory_bytes: int = _MEMORY_BYTES

    def take(self, name: str) -> bool:
        """Use one of the failures that were asked for, if any is left."""
        with CHANGED:
            left = getattr(self, name)
            if left:
                setattr(self, name, left - 1 if left is not True else False)
            return bool(left)
