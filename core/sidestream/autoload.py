"""torch loads vendors' packages along with itself; sidestream's own first import of it does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Final

AUTOLOAD_VARIABLE: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
#: What torch loads along with itself has an entry point here.
BACKEND_GROUP: Final = "torch.backends"


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


def hide_other_backends() -> None:
    """Make the packages that torch would have loaded, and nobody has imported, seem not installed.

    transformers imports torch_npu wherever it is installed. A broken one then keeps any pipeline
    from being loaded, and a whole one takes torch's one place for devices from outside. Call it in
    a process of a platform's own, once the platform has imported what it needs.
    """
    for entry in entry_points(group=BACKEND_GROUP):
        # With None there an import raises ModuleNotFoundError, and find_spec() finds nothing.
        sys.modules.setdefault(entry.module.partition(".")[0], None)  # type: ignore[arg-type]
