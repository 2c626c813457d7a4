"""What a worker does about requests that were given up: sees their marks, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from sidestream.errors import RequestAbortedError
from sidestream.protocol import Execute, number_of
from sidestream.request import AbortOutcome
from sidestream.transport.control_page import ControlPage
from sidestream.worker.sink import OutputLabel


class Aborts:
    """The marks of one control page.

    ``answer(label, error)`` tells the main process what became of a request; by then what is said
    has to be true of its memory and place.
    """

    def __init__(
        self, control: ControlPage, answer: Callable[[OutputLabel, RequestAbortedError], None]
    ) -> None:
        self._control = control
        self._answer = answer

    def leave_out(self, command: Execute) -> Execute:
        """Answer for the requests of a command that need not run; gives the rest of it."""
        aborted = self._control.aborts()
        if not aborted:
            return command
        gone = [i for i, name in enumerate(command.output_ids) if number_of(name) in aborted]
        self._answer_all(command, gone, AbortOutcome.NEVER_STARTED)
        rest = [i for i in range(len(command.output_ids)) if i not in gone]
        return replace(
            command,
            output_ids=tuple(command.output_ids[i] for i in rest),
            attempts=tuple(command.attempts[i] for i in rest),
            requests=tuple(command.requests[i] for i in rest),
        )

    def answer_stopped(self, command: Execute, step: int) -> None:
        """Answer for the requests of a forward that ended behind ``step``."""
        members = range(len(command.output_ids))
        self._answer_all(command, members, AbortOutcome.STOPPED, step)

    def answer(self, label: OutputLabel, outcome: AbortOutcome, step: int | None = None) -> None:
        """Answer for one request."""
        self._answer(label, RequestAbortedError(outcome=outcome, step=step))

    def reason(self, label: OutputLabel) -> RequestAbortedError | None:
        """Give why an output need not be copied, if it need not; any thread."""
        if number_of(label.output_id) in self._control.aborts():
            return RequestAbortedError(outcome=AbortOutcome.DETACHED)
        return None

    def _answer_all(
        self,
        command: Execute,
        indices: Iterable[int],
        outcome: AbortOutcome,
        step: int | None = None,
    ) -> None:
        for index in indices:
            label = OutputLabel(
                output_id=command.output_ids[index],
                rpc_id=command.rpc_id,
                attempt=command.attempts[index],
            )
            self.answer(label, outcome, step)
