"""Which locks the calling thread is in the middle of."""

from __future__ import annotations

import threading


def holds_any(*locks: threading.Condition | threading.RLock) -> bool:
    """Tell whether the calling thread holds one of these reentrant locks, or conditions on one.

    A signal handler runs in the middle of whatever its thread did: there, waiting for a thread that
    needs one of them would be waiting for itself.
    """
    return any(map(_holds, locks))


def _holds(lock: threading.Condition | threading.RLock) -> bool:
    condition = lock if isinstance(lock, threading.Condition) else threading.Condition(lock)
    try:
        condition.notify(0)  # nobody; but it raises where the lock is not the caller's
    except RuntimeError:
        return False
    return True
