"""torch loads vendors' packages along with itself; sidestream's own first import of it does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

AUTOLOAD_VARIABLE: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@contextmanager
def without_autoload() -> Iterator[None]:
    """Let a first ``import torch`` in the block load no vendor's package.

    One that is broken would make the import raise, or abort the process, also for who wants
    another platform; the chosen plugin imports its own. The variable has its value back after the
    block. Does nothing once torch is imported.
    """
    if "torch" in sys.modules:
        yield
        return
    before = os.environ.get(AUTOLOAD_VARIABLE)
    os.environ[AUTOLOAD_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD_VARIABLE, None)
        else:
            os.environ[AUTOLOAD_VARIABLE] = before
