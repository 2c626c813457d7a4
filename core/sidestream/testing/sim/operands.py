"""The arguments of one operator call, as its kernel takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from sidestream.testing.sim.device import SimDevice
from sidestream.testing.sim.stream import SimStream
from sidestream.testing.sim.tensor import SimTensor

_HASHED_BY_TYPE: Final = (torch.Generator,)


class Operands:
    """One call's arguments, with the memory of device tensors in their place.

    Host tensors are copied: the kernel sees what they held at the time of the call.

    Raises:
        RuntimeError: Tensors of several devices, or of the host, where one device is needed.
        NotImplementedError: No tensor is on a simulated device.
    """

    __slots__ = ("_mixes_host", "_seen", "args", "device", "key", "kwargs", "stream", "tensors")
    #: The device of the device tensors, and the calling thread's stream there.
    device: SimDevice
    stream: SimStream

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], mixes_host: bool) -> None:
        self._mixes_host = mixes_host
        self._seen: SimDevice | None = None
        #: Every tensor as it was given, in order.
        self.tensors: list[torch.Tensor] = []
        #: All that decides the layout of the results.
        self.key: list[object] = []
        self.args = [self._take(value) for value in args]
        self.kwargs = {name: self._take_named(name, value) for name, value in kwargs.items()}
        if self._seen is None:
            raise NotImplementedError("The operator was given no tensor on a simulated device.")

    def _take_named(self, name: str, value: Any) -> Any:
        self.key.append(name)
        return self._take(value)

    def _take(self, value: Any) -> Any:
        kind = type(value)
        if kind is SimTensor:
            return self._take_device_tensor(value)
        if isinstance(value, torch.Tensor):
            return self._take_host_tensor(value)
        if kind is list or kind is tuple:
            self.key.append(len(value))
            return [self._take(item) for item in value]
        self.key.append(kind)  # 1, 1.0 and True are equal keys but give different results
        if not isinstance(value, _HASHED_BY_TYPE):
            self.key.append(value)
        return value

    def _take_device_tensor(self, tensor: SimTensor) -> torch.Tensor:
        if tensor.sim_device is not self._seen:
            self._enter(tensor.sim_device)
        tensor.allocation.used_by(self.stream)
        memory = tensor.memory
        self.tensors.append(tensor)
        self.key += (memory.dtype, memory.size(), memory.stride())
        return memory

    def _take_host_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and not self._mixes_host:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found a tensor of shape "
                f"{tuple(tensor.shape)} on {tensor.device} among tensors on a simulated device. "
                "Move it there with .to(device)."
            )
        self.tensors.append(tensor)
        self.key += ("host", tensor.dtype, tensor.size(), tensor.stride())
        return tensor.detach().clone()

    def _enter(self, device: SimDevice) -> None:
        if self._seen is not None:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self._seen.name} and {device.name}."
            )
        self._seen = self.device = device
        self.stream = device.current_stream
