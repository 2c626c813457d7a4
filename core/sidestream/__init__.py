"""Moves finished images and videos off the accelerator while the next one is being made.

Importing this package imports no torch and no vendor package; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sidestream.config import EngineConfig as EngineConfig
    from sidestream.config import PipelineConfig as PipelineConfig
    from sidestream.request import DiffusionRequest as DiffusionRequest
    from sidestream.request import SamplingParams as SamplingParams

_HOMES: Final = {
    "DiffusionEngine": "sidestream.engine",
    "RequestHandle": "sidestream.engine",
    "EngineConfig": "sidestream.config",
    "PipelineConfig": "sidestream.config",
    "DiffusionRequest": "sidestream.request",
    "SamplingParams": "sidestream.request",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
