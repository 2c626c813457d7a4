"""A call of a diffusers pipeline that stops at every denoising step, in a greenlet.

A greenlet runs in the OS thread that resumes it: the device, the current stream and the memory
allocator are the caller's. What a thread has only once and the library sets for the time of a
call is put aside while the call is suspended: the gradient mode, and the attributes that the
pipeline sets on itself. Schedulers and guiders count steps, so each call has copies of its own.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import greenlet
import torch
from diffusers.guiders import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class SuspendedCall:
    """A call of a pipeline in a greenlet. Used, and better dropped, in one thread."""

    def __init__(self, pipeline: Any, sample: Callable[[], Any]) -> None:
        self.finished = False
        #: What the call returned.
        self.payload: Any = None
        self._pipeline = pipeline
        self._attributes = {**vars(pipeline), **_copies(pipeline)}
        # An earlier call left its own.
        self._attributes.pop("_num_timesteps", None)
        self._grad_enabled = torch.is_grad_enabled()
        self._thread = threading.get_ident()
        self._greenlet = greenlet.greenlet(sample)
        self._greenlet.gr_context = contextvars.copy_context()

    def resume_to_first_step(self) -> Tensor | None:
        """Start the call; it stops before its first step, or with the first prediction."""
        with _stop_before(_denoisers(self._pipeline)):
            return self.resume()

    def resume(self, value: Tensor | None = None) -> Tensor | None:
        """Let the call go on; give what it stops with, a prediction or None.

        Raises what the call raises.
        """
        with self._inside():
            self._greenlet.parent = greenlet.getcurrent()
            try:
                result = self._greenlet.switch(value) if self._greenlet else self._greenlet.switch()
            finally:
                self.finished = self._greenlet.dead
        if self.finished:
            self.payload = result
            return None
        return result  # type: ignore[no-any-return]

    def count_steps(self) -> int:
        """Tell how many steps the suspended call is going to make."""
        announced = self._attributes.get("_num_timesteps")
        return announced or len(self._attributes["scheduler"].timesteps)

    def __del__(self) -> None:
        # Another thread can't; greenlet ends the call when its own thread switches next.
        if threading.get_ident() != self._thread or not self._greenlet:
            return
        with self._inside():  # the call's finally clauses run as if it went on
            self._greenlet.parent = greenlet.getcurrent()
            self._greenlet.throw()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Make the thread and the pipeline for a while what the suspended call takes them for."""
        attributes = vars(self._pipeline)
        outside, outside_grad_enabled = dict(attributes), torch.is_grad_enabled()
        _replace(attributes, self._attributes)
        torch.set_grad_enabled(self._grad_enabled)
        try:
            yield
        finally:
            self._attributes, self._grad_enabled = dict(attributes), torch.is_grad_enabled()
            _replace(attributes, outside)
            torch.set_grad_enabled(outside_grad_enabled)


def _replace(attributes: dict[str, Any], others: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(others)


def _copies(pipeline: Any) -> dict[str, Any]:
    """Copy the components that hold a request's state; the scheduler's copy suspends the call."""
    copies = {
        name: copy.deepcopy(component)
        for name, component in pipeline.components.items()
        if isinstance(component, SchedulerMixin | BaseGuidance)
    }
    copies["scheduler"] = _suspending(copies["scheduler"])
    return copies


def _suspending(scheduler: Any) -> Any:
    """Make ``scheduler.step`` stop the call before and after it; gives ``scheduler``."""
    kind = type(scheduler)

    @functools.wraps(kind.step)  # pipelines look at its parameters
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Some pipelines copy the scheduler, for the sound of a video; that is not another step.
        if self._suspends_as != id(self):
            return kind.step(self, *args, **kwargs)
        if args:
            args = (_stop(args[0]), *args[1:])
        else:
            kwargs["model_output"] = _stop(kwargs["model_output"])
        result = kind.step(self, *args, **kwargs)
        _stop(None)
        return result

    scheduler.__class__ = type(
        kind.__name__, (kind,), {"step": step, "__module__": kind.__module__}
    )
    scheduler._suspends_as = id(scheduler)
    return scheduler


def _stop(value: Tensor | None) -> Any:
    """Suspend the call that runs; gives what it is resumed with."""
    here = greenlet.getcurrent()
    assert here.parent is not None
    return here.parent.switch(value)


def _denoisers(pipeline: Any) -> list[torch.nn.Module]:
    return [
        component
        for name, component in pipeline.components.items()
        if name.startswith(("transformer", "unet")) and isinstance(component, torch.nn.Module)
    ]


@contextmanager
def _stop_before(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Suspend a call before the forward of any of ``modules``, for the time of the block."""
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args: _stop(None)) for module in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
