"""Gives torch the device type "sim", through its experimental Python backend.

Everything that depends on that experiment is in this file.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Final

import torch

from sidestream.errors import MissingDependencyError, PlatformError
from sidestream.testing.sim.device import DEVICE_COUNT, DEVICES, SimDevice, device_at
from sidestream.testing.sim.event import PLATFORM
from sidestream.testing.sim.operators import run
from sidestream.testing.sim.stream import CURRENT, SimStream
from sidestream.testing.sim.tensor import SimTensor, empty
from sidestream.testing.sim.transfer import copy_

_UNNAMED: Final = "privateuseone"
_EXIT_TIMEOUT_S: Final = 5.0
#: Factories that torch would run as their out= form on an empty tensor, which they resize.
_WHOLE_FACTORIES: Final = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "logspace",
    "randperm",
    "range",
    "range.step",
)


class _DeviceModule:
    """``torch.sim``: what torch asks of a device type's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return any(device.is_forsaken for device in DEVICES)

    def device_count(self) -> int:
        return DEVICE_COUNT

    def current_device(self) -> int:
        return CURRENT.device_index

    def set_device(self, device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        CURRENT.device_index = device_at(index).index

    def current_stream(self, device: torch.device | int | None = None) -> SimStream:
        return self._find(device).current_stream

    def synchronize(self, device: torch.device | int | None = None) -> None:
        self._find(device).synchronize()

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Give none: models may switch autocast off, and torch warns who switches it on."""
        return []

    def manual_seed(self, seed: int) -> None:
        DEVICES[CURRENT.device_index].seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for device in DEVICES:
            device.seed(seed)

    @staticmethod
    def _find(device: torch.device | int | None) -> SimDevice:
        return device_at(device.index if isinstance(device, torch.device) else device)


class _Registration:
    """Whether this process has the device type; done once, by the first who needs it."""

    def __init__(self) -> None:
        # Held while registering: two threads may touch their first device at the same time.
        self._lock: Final = threading.Lock()
        # Empty until all is done. Torch drops the operators when their libraries are collected.
        self._libraries: list[Any] = []
        self._pid = 0

    def ensure(self) -> None:
        if self._libraries:
            return
        with self._lock:
            if not self._libraries:
                _register_device_type()
                libraries = [*_register_factories(), *_register_rules()]
                for device in DEVICES:
                    device.torch_device = torch.device(PLATFORM, device.index)
                    device.generator = torch.Generator()
                    device.seed()
                os.register_at_fork(after_in_child=_forsake_child)
                self._pid = os.getpid()
                atexit.register(self._end_threads)
                self._libraries = libraries  # last: other threads go by it without the lock

    def _end_threads(self) -> None:
        # Daemon threads inside torch while the interpreter goes down would crash it.
        if os.getpid() == self._pid:
            for device in DEVICES:
                device.abandon(_EXIT_TIMEOUT_S)


_REGISTRATION: Final = _Registration()


def register() -> None:
    """Make ``torch.device("sim")`` work in this process; idempotent.

    Raises:
        MissingDependencyError: This torch can't take a device type written in Python.
        PlatformError: The process has another PrivateUse1 device type, such as npu.
    """
    _REGISTRATION.ensure()


def _register_device_type() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _UNNAMED:
        raise PlatformError(
            f"Can't register device type '{PLATFORM}': this process has '{taken}', and torch takes "
            "one PrivateUse1 device type a process. Use a process of its own for each.",
            platform=PLATFORM,
        )
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise MissingDependencyError(
            "torch>=2.10", f"platform '{PLATFORM}'", 'pip install "torch>=2.10"'
        ) from error
    _setup_privateuseone_for_python_backend(rename=PLATFORM, backend_module=_DeviceModule())


def _register_factories() -> list[Any]:
    library: Any = torch.library.Library  # torch doesn't say its types
    aten = library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    # torch.tensor() copies, and reads numbers, with __torch_dispatch__ switched off.
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_local_scalar_dense", _item, "PrivateUse1")
    for name in _WHOLE_FACTORIES:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, _whole(func), "PrivateUse1")
    # Whatever else reaches the device without a tensor of it, such as tril_indices().
    others = library("_", "IMPL")
    others.fallback(_make_on_host, "PrivateUse1")
    return [aten, others]


def _register_rules() -> list[Any]:
    """Take aten's operators before torch asks whether a tensor is a DTensor.

    Asking imports torch.distributed.tensor and with it sympy: a second in every process. What has
    no rule arrives in ``__torch_dispatch__`` all the same, only after that import. Gradients and
    ``out=`` have none: they are half of the operators, and no pipeline calls them.
    """
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not ("backward" in name or name.endswith("out")):
            torch.library.register_torch_dispatch(name, SimTensor, _dispatch, lib=aten)
    return [aten]


def _dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return run(func, args, kwargs or {})


def _empty(
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> SimTensor:
    shape = torch.empty(
        size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
    )
    return _empty_strided(
        shape.size(), shape.stride(), dtype=shape.dtype, device=device, pin_memory=pin_memory
    )


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> SimTensor:
    if pin_memory:
        raise RuntimeError(f"Only memory of the host can be pinned, not memory of {device}.")
    where = device_at(None if device is None else device.index)
    return empty(where, size, stride, dtype or torch.get_default_dtype())


def _copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, src, non_blocking)


def _item(tensor: torch.Tensor) -> Any:
    return run(torch.ops.aten._local_scalar_dense.default, (tensor,), {})


def _whole(func: Any) -> Any:
    return lambda *args, **kwargs: _make_on_host(func, *args, **kwargs)


def _make_on_host(func: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
    if any(isinstance(value, torch.Tensor) for value in args) or device is None:
        raise NotImplementedError(f"{func} is not there for device type '{PLATFORM}'.")
    made = func(*args, device=torch.device("cpu"), **kwargs)
    # A device makes these itself, without a wait.
    return made.to(torch.device(PLATFORM, device_at(device.index).index), non_blocking=True)


def _forsake_child() -> None:
    for device in DEVICES:
        device.forsake_child()
