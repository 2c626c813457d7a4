"""What torch's profiler saw a device copy."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_to_host_copies(profile: torch.profiler.profile) -> list[tuple[str, int]]:
    """Give the copies from device to host in a profile that has ended, as (kind, bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        (event["name"], event["args"].get("bytes", 0))
        for event in events
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]
    ]
