"""What was measured on: versions, device, load of the machine."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sidestream
from sidestream.bench.series import Session


def about(session: Session) -> dict[str, Any]:
    """Say what a reader of the figures needs to know."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "sidestream": sidestream.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "platform": session.platform.name,
        "device": session.device_name,
        "cores": len(os.sched_getaffinity(0)),
        # Of the last minute: what else ran here.
        "load": os.getloadavg()[0],
        "command": " ".join([_program(), *sys.argv[1:]]),
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "sidestream" if name == "main.py" else name
