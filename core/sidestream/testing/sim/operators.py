"""Runs torch operators on simulated devices: shapes at once, values later on a stream.

A call allocates its results, full of poison, and queues one kernel that runs the CPU's own
operator on the memory behind the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from sidestream.testing.sim.device import SimDevice, device_at
from sidestream.testing.sim.lane import Kernel
from sidestream.testing.sim.layout import (
    Kind,
    Layout,
    NewTensor,
    SameTensor,
    Trait,
    find_layout,
    study,
)
from sidestream.testing.sim.memory import adopt
from sidestream.testing.sim.operands import Operands
from sidestream.testing.sim.tensor import SimTensor, empty, wrap
from sidestream.testing.sim.transfer import copy_, read, to_copy

_CPU: Final = torch.device("cpu")


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that was called with at least one tensor on a simulated device.

    Raises:
        NotImplementedError: It is a collective of torch.distributed.
        SimDeviceError: The device is in error.
        RuntimeError: The operands don't fit together.
        ValueError: The operator would resize a tensor in place.
    """
    if func.namespace == "c10d":
        raise NotImplementedError(
            f"torch.distributed has no backend for device type 'sim' ({func}); sum a copy on the "
            "CPU."
        )
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    if func is _aten.histc.default and not args[0].is_floating_point():
        # Devices count integers; the CPU has no kernel for it.
        return run(func, (args[0].float(), *args[1:]), kwargs).to(args[0].dtype)
    trait = study(func)
    if trait.kind is Kind.DECOMPOSE:
        return func.decompose(*args, **kwargs)
    operands = Operands(args, kwargs, trait.mixes_host)
    if trait.kind is Kind.VIEW:
        return _view(func, operands)
    if trait.kind is Kind.RESHAPE:
        return _reshape(func, operands)
    if trait.kind is Kind.WAIT:
        return _wait(func, operands)
    layout = find_layout(func, trait, operands, args, kwargs)
    if layout is None:
        return _wait(func, operands)
    return _launch(func, trait, layout, operands)


def _launch(func: Any, trait: Trait, layout: Layout, operands: Operands) -> Any:
    device = operands.device
    args, kwargs = operands.args, operands.kwargs
    where = kwargs.get("device")
    if where is not None:
        kwargs["device"] = _CPU
        if where.type == "cpu" or where.type == "meta":
            return _make_elsewhere(func, where, operands)
        device = device_at(where.index)
    if trait.takes_generator:
        kwargs["generator"] = _generator(kwargs.get("generator"), device)
    results: list[Any] = []
    new: list[tuple[int, torch.Tensor]] = []
    for leaf in layout.leaves:
        if isinstance(leaf, NewTensor):
            tensor = empty(device, leaf.size, leaf.stride, leaf.dtype)
            new.append((len(results), tensor.memory))
            results.append(tensor)
        elif isinstance(leaf, SameTensor):
            results.append(_refuse_host(func, operands.tensors[leaf.index]))
        else:
            results.append(leaf)
    if trait.kind is not Kind.EMPTY:
        kernel = _kernel(func, args, kwargs, new, lone=layout.spec is None)
        device.current_stream.launch(Kernel(func, kernel))
    return results[0] if layout.spec is None else tree_unflatten(results, layout.spec)


def _kernel(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    new: Sequence[tuple[int, torch.Tensor]],
    *,
    lone: bool,
) -> Callable[[], object]:
    if not new:
        return lambda: func(*args, **kwargs)
    if lone:
        target = new[0][1]
        return lambda: target.copy_(func(*args, **kwargs))

    def kernel() -> None:
        values = tree_leaves(func(*args, **kwargs))
        for index, target in new:
            target.copy_(values[index])

    return kernel


def _make_elsewhere(func: Any, where: torch.device, operands: Operands) -> Any:
    """Run an operator such as ``empty_like(x, device="cpu")``, which reads nothing of ``x``."""
    shapes = tree_map_only(torch.Tensor, lambda t: t.to("meta"), operands.args)
    return func(*shapes, **{**operands.kwargs, "device": where})


def _wait(func: Any, operands: Operands) -> Any:
    device, args, kwargs = operands.device, operands.args, operands.kwargs
    result = read(operands.stream, str(func), lambda: func(*args, **kwargs))
    return tree_map_only(torch.Tensor, lambda t: wrap(t, device, adopt(device, t)), result)


def _view(func: Any, operands: Operands) -> Any:
    viewed = next(tensor for tensor in operands.tensors if isinstance(tensor, SimTensor))
    if torch.is_inference_mode_enabled() and not viewed.is_inference():
        # Such as a weight's transpose: a view of a normal tensor is normal in any mode.
        with torch.inference_mode(mode=False):
            return _wrap_views(func, operands, viewed)
    return _wrap_views(func, operands, viewed)


def _wrap_views(func: Any, operands: Operands, viewed: SimTensor) -> Any:
    device, allocation = viewed.sim_device, viewed.allocation
    result = func(*operands.args, **operands.kwargs)
    if isinstance(result, torch.Tensor):
        return wrap(result, device, allocation)
    return [wrap(view, device, allocation) for view in result]


def _reshape(func: Any, operands: Operands) -> torch.Tensor:
    """Run an operator such as ``unsqueeze_``: on a view, whose shape the tensor then takes."""
    tensor, memory = operands.tensors[0], operands.args[0]
    assert isinstance(tensor, SimTensor)
    shadow = memory.to("meta")
    nbytes = shadow.untyped_storage().nbytes()
    func(shadow, *operands.args[1:], **operands.kwargs)
    if shadow.untyped_storage().nbytes() != nbytes:
        raise ValueError(f"{func} would resize the memory of a tensor on {tensor.device}.")
    view = memory.as_strided(shadow.size(), shadow.stride(), memory.storage_offset())
    tensor.data = wrap(view, tensor.sim_device, tensor.allocation)
    return tensor


def _refuse_host(func: Any, tensor: torch.Tensor) -> SimTensor:
    if isinstance(tensor, SimTensor):
        return tensor
    raise RuntimeError(
        f"{func} would write the result of a simulated device into a tensor on {tensor.device}; "
        "copy it there with copy_() instead."
    )


def _generator(given: torch.Generator | None, device: SimDevice) -> Any:
    if given is None:
        return device.generator
    raise RuntimeError(
        f"Expected a generator on {device.name}, which has none but its default; found one on "
        f"{given.device}. Draw on the CPU and move the result with .to(device)."
    )


def _item(tensor: SimTensor) -> Any:
    memory, stream = tensor.memory, tensor.sim_device.current_stream
    tensor.allocation.used_by(stream)
    return read(stream, "item", memory.item)


_aten: Final = torch.ops.aten
_SPECIAL: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.copy_.default: copy_,
    _aten._to_copy.default: to_copy,
    _aten._local_scalar_dense.default: _item,
    _aten.is_pinned.default: lambda tensor, device=None: False,
}
