"""A tensor on the simulated accelerator: shape and strides of its own, memory elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from sidestream.testing.sim.device import SimDevice
from sidestream.testing.sim.memory import Allocation, allocate


class SimTensor(torch.Tensor):
    """A tensor on a simulated device; operators on it only queue a kernel.

    ``memory`` is the CPU tensor that plays the device's memory: kernels on stream threads read and
    write it, and only they may. Make one with :func:`wrap` or :func:`empty`.
    """

    memory: torch.Tensor
    sim_device: SimDevice
    allocation: Allocation

    # Operators arrive in __torch_dispatch__ anyway; being asked twice would only cost time.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without its own cls
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        from sidestream.testing.sim.operators import run  # needs this class itself

        return run(func, args, kwargs or {})

    # --- what torch would answer from the memory that only the device may read -----------------

    def tolist(self) -> Any:
        """Copy to the host, which waits, and give nested lists."""
        return self.detach().cpu().tolist()

    def __format__(self, format_spec: str) -> str:
        return self.item().__format__(format_spec) if self.dim() == 0 else repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as any device does, unless ``force`` allows a copy to the host."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    def data_ptr(self) -> int:
        """Give the address in device memory: good to compare, not to read from."""
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Give the storage of the device's memory: good to compare, not to read from."""
        return self.memory.untyped_storage()

    def record_stream(self, s: Any) -> None:
        """Keep the memory from being reused before what stream ``s`` has queued by then is done."""
        self.allocation.record_stream(s)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        # nn.Module.to() moves a parameter this way; torch copies only its own half of the tensor.
        if not isinstance(other, SimTensor):
            raise RuntimeError(
                f"can't set the data of a tensor on {self.device} to one on {other.device}"
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.memory, self.allocation = other.memory, other.allocation
        self.sim_device = other.sim_device

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied: torch.Tensor = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            else:
                copied.requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        result: torch.Tensor = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"A tensor on {self.device} can't be pickled: its memory belongs to this process. "
            "Use Tensor.cpu() to copy it to host memory first."
        )

    def __repr__(  # type: ignore[override]  # torch leaves it untyped
        self, *, tensor_contents: object = None
    ) -> str:
        # Without the values: printing must not wait for the device.
        return f"SimTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def wrap(memory: torch.Tensor, device: SimDevice, allocation: Allocation) -> SimTensor:
    """Make a tensor of memory that belongs to ``allocation``."""
    tensor: SimTensor = torch.Tensor._make_wrapper_subclass(
        SimTensor,
        memory.size(),
        strides=memory.stride(),
        storage_offset=memory.storage_offset(),
        dtype=memory.dtype,
        device=device.torch_device,
    )
    tensor.memory, tensor.sim_device, tensor.allocation = memory, device, allocation
    if memory.is_conj():
        torch._C._set_conj(tensor, True)
    if memory.is_neg():
        torch._C._set_neg(tensor, True)
    return tensor


def empty(
    device: SimDevice, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> SimTensor:
    """Allocate a tensor full of poison.

    Raises:
        SimDeviceError: The device is in error.
        torch.OutOfMemoryError: The device has too little memory left.
    """
    device.raise_fault()
    memory, allocation = allocate(device, size, stride, dtype)
    return wrap(memory, device, allocation)
