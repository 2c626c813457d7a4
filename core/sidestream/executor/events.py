"""What happened to one request, kept until somebody asks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidestream.output import DiffusionOutput, EventKind, RequestEvent

if TYPE_CHECKING:
    from sidestream.executor.futures import Answer, StageFuture


class EventLog:
    """The events of one request in order, each given once.

    Whoever reads messages writes, any thread takes. Steps that nobody has taken are kept as two
    numbers, parts of outputs undecoded. A request that runs again after its worker's death repeats
    itself; what was told is not told again.
    """

    def __init__(self, make_future: Callable[[], StageFuture]) -> None:
        self._make_future = make_future
        # Guards all below. Futures are resolved outside it.
        self._lock = threading.Lock()
        self._step = 0
        #: In the current run.
        self._step_of_run = 0
        self._num_steps: int | None = None
        self._chunks = 0
        #: Parts that came in the current run.
        self._chunks_of_run = 0
        self._is_computed = False
        self._is_over = False
        self._has_told_end = False
        # A number: the step up to which there is something to tell; an answer: a part.
        self._entries: deque[int | Answer | EventKind] = deque()
        self._told_step = 0
        self._told_chunks = 0
        self._change: StageFuture | None = None

    # --- whoever reads messages -----------------------------------------------------------------

    def advance(self, step: int, num_steps: int) -> None:
        """Hear how many steps are done, of how many."""
        with self._lock:
            self._num_steps = num_steps
            self._step_of_run = step
            if step <= self._step:
                return
            self._step = step
            if self._entries and isinstance(self._entries[-1], int):
                self._entries[-1] = step
            else:
                self._entries.append(step)
        self._notify()

    def finish_step(self) -> None:
        """Hear that the current step is done, before its answer is here."""
        if self._num_steps is not None:
            self.advance(self._step_of_run + 1, self._num_steps)

    def add_chunk(self, answer: Answer) -> bool:
        """Hear of the next part of the output; False: an earlier run had brought it."""
        with self._lock:
            self._chunks_of_run += 1
            if self._chunks_of_run <= self._chunks:
                return False
            self._chunks = self._chunks_of_run
            self._entries.append(answer)
        self._notify()
        return True

    def computed(self) -> None:
        """Hear that the last of the work is queued on the device."""
        with self._lock:
            if self._is_computed:
                return
            self._is_computed = True
            self._entries.append(EventKind.COMPUTE_DONE)
        self._notify()

    def restart(self) -> None:
        """Hear that the request will run again from its beginning."""
        with self._lock:
            self._step_of_run = 0
            self._chunks_of_run = 0

    def end(self) -> None:
        """Hear that the output is readable, or that the request failed."""
        with self._lock:
            self._is_over = True
        self._notify()

    # --- any thread ---------------------------------------------------------------------------

    def take(self) -> RequestEvent | None:
        """Take the next event; None: there is none yet, or only the end is left.

        Raises:
            OutputTransferError: A part can't be rebuilt in this process.
        """
        with self._lock:
            if not self._entries:
                return None
            entry = self._entries[0]
            if isinstance(entry, int):
                self._told_step += 1
                if self._told_step == entry:
                    self._entries.popleft()
                return self._event(EventKind.STEP, self._told_step)
            self._entries.popleft()
            if isinstance(entry, EventKind):
                return self._event(entry, self._told_step or None)
            index, self._told_chunks = self._told_chunks, self._told_chunks + 1
            step, num_steps = self._told_step or None, self._num_steps
        output, error = entry.open()
        if error is not None:
            raise error
        return RequestEvent(
            kind=EventKind.CHUNK, step=step, num_steps=num_steps, chunk=index, output=output
        )

    def take_end(self, output: DiffusionOutput) -> RequestEvent | None:
        """Make the last event, once."""
        with self._lock:
            if self._has_told_end:
                return None
            self._has_told_end = True
            step, num_steps = self._told_step or None, self._num_steps
        return RequestEvent(kind=EventKind.OUTPUT, step=step, num_steps=num_steps, output=output)

    @property
    def progress(self) -> str:
        """Say how far it is; empty where no steps are counted."""
        return "" if self._num_steps is None else f"step {self._step} of {self._num_steps}"

    def change(self) -> StageFuture:
        """Give a future that is reached when there is something to take, or was."""
        with self._lock:
            if self._change is None:
                self._change = self._make_future()
            change = self._change
            if self._entries or self._is_over:
                self._change = None
            else:
                return change
        change.reach()
        return change

    def _event(self, kind: EventKind, step: int | None) -> RequestEvent:
        return RequestEvent(kind=kind, step=step, num_steps=self._num_steps)

    def _notify(self) -> None:
        with self._lock:
            change, self._change = self._change, None
        if change is not None:
            change.reach()
