"""Schedulers whose steps don't make the host wait for the device, with the same results."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

SchedulerT = TypeVar("SchedulerT")


def quiet(scheduler: SchedulerT) -> SchedulerT:
    """Keep a diffusers scheduler from waiting where it need not; gives ``scheduler``.

    For runs that begin at the first timestep. Two waits go: that of the first step, which looks
    for its timestep on the device, and those of multistep solvers, which copy the coefficients of
    every step. What a scheduler reads back from the device still waits.
    """
    kind: Any = type(scheduler)
    members: dict[str, Any] = {"step": _queuing(kind.step), "__module__": kind.__module__}
    if hasattr(kind, "set_begin_index"):
        members["set_timesteps"] = _beginning_at_0(kind.set_timesteps)
    scheduler.__class__ = type(kind.__name__, (kind,), members)
    return scheduler


def _beginning_at_0(set_timesteps: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_timesteps)  # pipelines look at its parameters
    def beginning(self: Any, *args: Any, **kwargs: Any) -> Any:
        set_timesteps(self, *args, **kwargs)
        self.set_begin_index(0)

    return beginning


def _queuing(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def queuing(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _QueuedConstants():
            return step(self, *args, **kwargs)

    return queuing


class _QueuedConstants(TorchFunctionMode):
    """Lets copies of the host's numbers to a device be queued instead of waited for.

    They are a few bytes, which a driver takes over in the call, so nobody can change them before
    they are there.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to and args[0].device.type == "cpu" and len(args) < 4:
            kwargs.setdefault("non_blocking", True)
        elif func is torch.tensor and kwargs.get("device") is not None and _is_of_host(args[0]):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device, non_blocking=True)
        return func(*args, **kwargs)


def _is_of_host(numbers: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(numbers))
