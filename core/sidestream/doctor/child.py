"""What runs in a child process: one question about a plugin, torch or an extension.

The answer goes to a descriptor of its own, a JSON object a line: ``{"stage": ...}`` before each
step that may be the last one, then ``{"result": ...}`` or ``{"error": ...}``. What the vendors'
packages print goes elsewhere.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final

from sidestream.autoload import BACKEND_GROUP

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

Stage = Callable[[str], None]


def main(fd: int, question: str, arguments: list[str]) -> None:
    """Answer ``question`` on ``fd`` and end at once: exit handlers of a vendor may hang."""
    answers = os.fdopen(fd, "w", buffering=1, encoding="utf-8")

    def say(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")

    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    try:
        result = _QUESTIONS[question](lambda stage: say(stage=stage), *arguments)
    except BaseException as error:  # noqa: BLE001 - boundary: this process exists to see it
        say(error=_chain(error))
    else:
        say(result=result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _select(stage: Stage, name: str) -> dict[str, Any]:
    """Choose a platform as an engine does: with every plugin in this one process."""
    from sidestream.platforms.registry import PlatformRegistry

    stage("choosing a platform, which imports every plugin")
    record = PlatformRegistry.discover().select(name or None)
    return {"platform": record.name, "reason": record.reason}


def _probe(stage: Stage, name: str, reference: str) -> dict[str, Any]:
    """Import a plugin, check its hooks and ask its probe."""
    from sidestream.platforms.plugin import ask_probe, load_hooks

    stage(f"importing {reference}")
    manager = load_hooks(name, reference)
    stage("asking the probe")
    return dataclasses.asdict(ask_probe(name, manager))


def _torch(stage: Stage) -> dict[str, Any]:
    """Import torch, with the extensions that the environment lets in."""
    stage("importing torch")
    began = time.monotonic()
    import torch

    version = torch.version
    return {
        "version": str(torch.__version__),
        "path": os.path.dirname(torch.__file__),
        "import_s": time.monotonic() - began,
        "built_for": {
            vendor: str(found)
            for vendor in ("cuda", "hip", "xpu")
            if (found := getattr(version, vendor, None)) is not None
        },
    }


def _extension(stage: Stage, name: str, module: str) -> dict[str, Any]:
    """Load what torch would load by itself, or import a module; torch first, alone."""
    stage("importing torch")
    import torch  # noqa: F401

    stage(f"importing {module}")
    for entry in entry_points(group=BACKEND_GROUP, name=name):
        entry.load()()
        return {"loaded_by": entry.value}
    importlib.import_module(module)
    return {"loaded_by": "import"}


def _management(stage: Stage, module: str) -> dict[str, Any]:
    """Ask a vendor's management library for the driver and the number of devices."""
    from sidestream.doctor.management import LIBRARIES

    stage(f"asking {module}")
    return {"text": LIBRARIES[module](importlib.import_module(module))}


def _device(
    stage: Stage, name: str, reference: str, index: str, output_bytes: str
) -> dict[str, Any]:
    """Use a device as a worker does, and measure copies from it."""
    from sidestream.doctor.copies import measure
    from sidestream.platforms.platform import load_plugin
    from sidestream.platforms.self_test import self_test

    stage("importing the plugin and torch")
    platform = load_plugin(name, reference)
    device = platform.device(int(index))
    stage(f"using {device} first")
    platform.set_device(device)
    stage(f"testing streams, events and copies of {device}")
    began = time.monotonic()
    self_test(platform, device)
    tested_s = time.monotonic() - began
    stage(f"checking {device} by a sentinel")
    fault = platform.check_device(device)
    if fault is not None:
        raise RuntimeError(fault.reason)
    memory = platform.memory_info(device)
    stage(f"measuring copies from {device}")
    return {
        "device": str(device),
        "tested_s": tested_s,
        "memory_bytes": memory,
        "routes": measure(platform, device, int(output_bytes)) if platform.is_asynchronous else [],
    }


def _chain(error: BaseException) -> list[dict[str, str]]:
    """Give an error and its causes, the outermost first."""
    links: list[dict[str, str]] = []
    link: BaseException | None = error
    while link is not None and len(links) < 10:
        links.append({"type": type(link).__name__, "message": str(link)})
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


_QUESTIONS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "select": _select,
    "probe": _probe,
    "torch": _torch,
    "extension": _extension,
    "management": _management,
    "device": _device,
}
