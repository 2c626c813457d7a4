"""What a vendor's management library says: it needs no torch and opens no context on a device.

Runs in a child only. Each function gets the imported module and describes driver and devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Final


def _nvml(pynvml: Any) -> str:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    names = {
        _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
        for index in range(count)
    }
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    return f"NVML: driver {driver}, {count} device(s): {', '.join(sorted(names)) or 'none'}"


def _mtml(pymtml: Any) -> str:
    pymtml.nvmlInit()
    driver = _text(pymtml.nvmlSystemGetDriverVersion())
    return f"MTML: driver {driver}, {pymtml.nvmlDeviceGetCount()} device(s)"


def _level_zero(pyzes: Any) -> str:
    code = pyzes.zesInit(0)
    if code != pyzes.ZE_RESULT_SUCCESS:
        raise RuntimeError(f"zesInit answered {code:#x}")
    count = ctypes.c_uint32(0)
    code = pyzes.zesDriverGet(ctypes.byref(count), None)
    if code != pyzes.ZE_RESULT_SUCCESS:
        raise RuntimeError(f"zesDriverGet answered {code:#x}")
    return f"Level Zero Sysman: {count.value} driver(s)"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


#: By the name of the module.
LIBRARIES: Final[Mapping[str, Callable[[Any], str]]] = {
    "pynvml": _nvml,
    "pymtml": _mtml,
    "pyzes": _level_zero,
}
