"""Step any diffusers pipeline: its own call, suspended at every denoising step.

The call runs in a greenlet, so in the same OS thread: the device, the current stream and the
memory allocator are the caller's. What a thread has only once and the library sets for the time
of a call is put aside while the call is suspended: the gradient mode, and the attributes that the
pipeline sets on itself. Schedulers and guiders count steps, so each call has copies of its own.
"""

from __future__ import annotations

import contextvars
import copy
import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.guiders import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from sidestream.errors import MissingDependencyError
from sidestream.models.step import StepState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import greenlet

    from sidestream.request import DiffusionRequest


@dataclass(kw_only=True, eq=False)
class SuspendedState(StepState):
    """A request whose call is suspended; dropping it ends the call without decoding."""

    call: SuspendedCall
    #: What the call has predicted and not been given back yet.
    predicted: Tensor | None = None


class GreenletSteps:
    """Four stages for an adapter with ``forward`` and a diffusers pipeline in ``pipeline``.

    An adapter inherits from this class to be steppable. The stages stop ``forward``: the first
    before the pipeline's first call of its transformer (or unet), the next two around
    ``scheduler.step``. They run in the thread that called the first of them. A pipeline that
    sets its timesteps more than once, as one that makes a video in parts does, is stepped through
    the first part, and the last stage does the rest.
    """

    #: A ``diffusers.DiffusionPipeline``.
    pipeline: Any

    def forward(self, requests: Sequence[DiffusionRequest]) -> Sequence[Any]:
        """Sample by a call of the pipeline."""
        raise NotImplementedError

    def prepare_encode(self, request: DiffusionRequest) -> StepState:
        """Run the call to its first denoising step.

        Raises:
            MissingDependencyError: greenlet is not installed.
        """

        def sample() -> Any:
            (payload,) = self.forward([request])
            if isinstance(payload, BaseException):
                raise payload
            return payload

        pipeline = self._pipeline_for(request)
        call = SuspendedCall(pipeline, sample)
        with _stop_before(_denoisers(pipeline)):
            predicted = call.resume()
        steps = 0 if call.finished else call.count_steps()
        return SuspendedState(request, steps, call=call, predicted=predicted)

    def _pipeline_for(self, request: DiffusionRequest) -> Any:
        """Give the pipeline that ``forward`` calls for ``request``."""
        return self.pipeline

    def denoise_step(self, state: StepState) -> Tensor:
        """Run the call to where it gives its prediction to the scheduler."""
        assert isinstance(state, SuspendedState)
        if state.predicted is None:
            state.predicted = state.call.resume()
        if state.call.finished:  # after fewer steps than it had announced
            return torch.empty(0)
        assert state.predicted is not None
        return state.predicted

    def step_scheduler(self, state: StepState, noise_pred: Tensor) -> None:
        """Run the scheduler's step."""
        assert isinstance(state, SuspendedState)
        if state.call.finished:
            state.num_steps = state.step
            return
        state.predicted = None
        state.call.resume(noise_pred)
        state.step += 1

    def post_decode(self, state: StepState) -> Any:
        """Run the call to its end."""
        assert isinstance(state, SuspendedState)
        stopped_with = state.predicted
        while not state.call.finished:
            stopped_with = state.call.resume(stopped_with)
        return state.call.payload


class SuspendedCall:
    """A call of a pipeline in a greenlet. Used, and better dropped, in one thread."""

    def __init__(self, pipeline: Any, sample: Callable[[], Any]) -> None:
        try:
            import greenlet
        except ImportError as error:
            raise MissingDependencyError(
                "greenlet",
                f"running {type(pipeline).__name__} step by step",
                'pip install "sidestream[diffusers]"',
            ) from error
        self.finished = False
        #: What the call returned.
        self.payload: Any = None
        self._pipeline = pipeline
        self._attributes = {**vars(pipeline), **_copies(pipeline)}
        # An earlier call left its own.
        self._attributes.pop("_num_timesteps", None)
        self._grad_enabled = torch.is_grad_enabled()
        self._greenlet: greenlet.greenlet = greenlet.greenlet(sample)
        self._greenlet.gr_context = contextvars.copy_context()

    def resume(self, value: Tensor | None = None) -> Tensor | None:
        """Let the call go on; give what it stops with, a prediction or None.

        Raises what the call raises.
        """
        import greenlet

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
        import greenlet

        if not self._greenlet or self.finished:
            return
        try:
            # Its finally clauses run as if it went on.
            with self._inside():
                self._greenlet.parent = greenlet.getcurrent()
                self._greenlet.throw()
        except greenlet.error:
            pass  # dropped in another thread: greenlet ends it when its own thread switches next

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
    import greenlet

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
