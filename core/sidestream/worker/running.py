"""The forward that a pipeline is in, and how it ends early."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestream.request import DiffusionRequest


class ForwardStopped(BaseException):
    """Ends a forward that nobody waits for any more.

    No ``Exception``: a pipeline that guards its steps by ``except Exception`` must not go on.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"Every request of this forward was aborted; it ended at step {step}.")
        #: How many steps were done.
        self.step = step


class RunningForward:
    """A forward from its start to its last step."""

    def __init__(
        self, rpc_id: int, numbers: Iterable[int], requests: Sequence[DiffusionRequest]
    ) -> None:
        self.rpc_id = rpc_id
        self._numbers = frozenset(numbers)
        self._steps = requests[0].sampling_params.num_inference_steps
        #: Behind which step it was stopped, if it was.
        self.stopped_at: int | None = None

    def stop_if_unwanted(self, aborted: frozenset[int], step: int) -> None:
        """End it from within, behind ``step``, if all of its requests are aborted.

        Raises:
            ForwardStopped: They are.
        """
        if self._numbers <= aborted:
            self.stopped_at = step
            raise ForwardStopped(step)

    def is_last(self, done: int) -> bool:
        """Tell whether one step is left after ``done``."""
        return self._steps is not None and done == self._steps - 1
