"""Tell of the steps of a diffusers pipeline's call while it runs."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sidestream.models.pipeline import StepHook


@contextmanager
def reporting_steps(
    pipeline: Any, accepted: Mapping[str, Any], on_step: StepHook | None
) -> Iterator[dict[str, Any]]:
    """Call ``on_step`` behind each step of a call; gives the arguments that it takes for that."""
    if on_step is None:
        yield {}
        return
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        on_step(done)

    if "callback_on_step_end" in accepted:

        def ended(
            _pipeline: Any, _step: int, _time: Any, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            report()
            return tensors

        yield {"callback_on_step_end": ended}
        return
    # Some pipelines have no callback; all of them step their scheduler.
    scheduler, step = pipeline.scheduler, pipeline.scheduler.step

    @functools.wraps(step)  # pipelines look at its parameters
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        report()
        return result

    scheduler.step = reporting
    try:
        yield {}
    finally:
        del scheduler.step
