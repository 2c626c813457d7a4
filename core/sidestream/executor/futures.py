"""Futures that only the engine resolves.

An answer is resolved by the pump and decoded in the first thread that asks for it: rebuilding a
tree or an exception may run a user's code, which the pump never does.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sidestream.errors import OutputTransferError
from sidestream.output import DiffusionOutput

if TYPE_CHECKING:
    from sidestream.executor.callbacks import CallbackThread
    from sidestream.transport.envelope import Delivery

T = TypeVar("T")

#: How often whoever waits looks again. Only after a rare interruption is there something to see.
_LOOK_S: Final = 5.0


class EngineFuture(Future[T], Generic[T]):
    """A future that can't be canceled and whose callbacks run on a thread of their own.

    A call that would block inside a done-callback raises at once, since the thread that it would
    block is the one that runs all callbacks. ``on_wait`` hears that somebody waits.
    """

    def __init__(
        self, callbacks: CallbackThread, on_wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._on_wait = on_wait
        self._answer: Answer | None = None
        self._waiters = _Waiters(self, callbacks)
        # From here on cancel() answers False: a request is given up by abort, not by its futures.
        self.set_running_or_notify_cancel()

    # --- whoever waits ------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: It did not come within ``timeout`` seconds.
            RuntimeError: Called from a done-callback while it is not done.
        """
        error = self.exception(timeout)
        if error is None:
            return super().result(0)
        try:
            # Without the frames of those who asked before: an error that many futures share would
            # collect them, and all that is local to them.
            raise error.with_traceback(None)
        finally:
            del error, self  # a frame that an exception in it refers to is a cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None; raises as :meth:`result` does."""
        if not self.done():
            if timeout is None or timeout > 0:
                self.refuse_to_block()
            self.want()
        error = self._await(timeout)
        if self._answer is None:
            return error
        # What stands in these fields until then is a placeholder.
        self._result, self._exception = self._answer.open()
        return self._exception

    def _await(self, timeout: float | None) -> BaseException | None:
        """Wait as the class above does, but look again now and then.

        A signal handler that resolves it, just when this thread has seen that it is not, wakes
        nobody: this thread does not sleep yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_S if deadline is None else min(deadline - time.monotonic(), _LOOK_S)
            try:
                return super().exception(left)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline and not self.done():
                    raise

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Have ``fn(self)`` called on the callback thread once this is done."""
        self.want()
        callbacks = self._callbacks
        callbacks.expect()
        super().add_done_callback(lambda future: callbacks.post(partial(_call_back, future, fn)))

    def refuse_to_block(self) -> None:
        """Raise ``RuntimeError`` if the caller is a done-callback."""
        self._callbacks.refuse_to_block()

    def want(self) -> None:
        """Hear that somebody waits, or is about to."""
        if self._on_wait is not None:
            self._on_wait()

    # --- the engine ---------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Resolve it with an error, unless it is: a closing engine and its pump may both try."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)

    def _reach_unopened(self, answer: Answer) -> None:
        if self.done():
            return
        self._answer = answer
        placeholder: Any = None
        try:
            if answer.failed:
                # An exception here too: wait(return_when=FIRST_EXCEPTION) looks at nothing else.
                self.set_exception(_Unopened())
            else:
                self.set_result(placeholder)
        except InvalidStateError:
            self._answer = None


class StageFuture(EngineFuture[None]):
    """A signal: it says that a request came this far, or why it did not; keeps no output."""

    def reach(self) -> None:
        """Resolve it, unless it is; pump thread."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(None)

    def miss(self, failure: Answer) -> None:
        """Resolve it with an error that is not decoded yet; pump thread."""
        self._reach_unopened(failure)


class OutputFuture(EngineFuture[DiffusionOutput]):
    """The future of one output."""

    def deliver(self, answer: Answer) -> None:
        """Resolve it with an envelope that is opened on demand; pump thread."""
        self._reach_unopened(answer)


class Answer:
    """An envelope that is opened by the first thread that asks; the same object for all."""

    def __init__(self, delivery: Delivery, decode: Callable[[Delivery], DiffusionOutput]) -> None:
        #: Whether it holds an error.
        self.failed = delivery.failed
        # Guards the opening: two threads may ask at once, the slot's lease is taken once.
        self._lock = threading.Lock()
        self._delivery: Delivery | None = delivery
        self._decode: Callable[[Delivery], DiffusionOutput] | None = decode
        self._output: DiffusionOutput | None = None
        self._error: BaseException | None = None

    def open(self) -> tuple[Any, BaseException | None]:
        """Give the output or its error.

        Raises:
            KeyboardInterrupt: It came to this thread in the middle of the first opening; whoever
                asks next gets an ``OutputTransferError``.
        """
        with self._lock:
            delivery, self._delivery = self._delivery, None
            decode, self._decode = self._decode, None
            if delivery is not None and decode is not None:
                self._open(delivery, decode)
            return self._output, self._error

    def _open(self, delivery: Delivery, decode: Callable[[Delivery], DiffusionOutput]) -> None:
        try:
            self._output = decode(delivery)
        except KeyboardInterrupt as error:
            # What was begun can't be opened again.
            self._error = OutputTransferError(
                f"The output {delivery.async_output_id!r} is lost: KeyboardInterrupt came while it "
                "was being rebuilt."
            )
            self._error.__cause__ = error
            if threading.current_thread() is threading.main_thread():
                raise
        except BaseException as error:  # noqa: BLE001 - boundary: every asker gets it
            # Without the frames of the decoding, which keep what it decodes.
            self._error = error.with_traceback(None)


class _Unopened(Exception):
    """Stands for an error that nobody has asked for yet."""


class _Waiters(list[Any]):
    """Where ``concurrent.futures.wait`` and ``as_completed`` enter that they wait.

    They would block as ``result`` does, and are refused in the same place.
    """

    def __init__(self, future: Future[Any], callbacks: CallbackThread) -> None:
        super().__init__()
        self._future = weakref.ref(future)
        self._callbacks = callbacks

    def append(self, waiter: Any) -> None:
        future = self._future()
        if future is not None and not future.done():
            self._callbacks.refuse_to_block()
        super().append(waiter)


def fresh(error: BaseException) -> BaseException:
    """Copy an error that many will raise: each raise adds its frames to the one it raises."""
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin


def _call_back(future: Future[Any], fn: Callable[[Future[Any]], object]) -> None:
    # Opened first: the asyncio of newer Pythons reads the fields of a done future by itself, and
    # on the thread of its loop, which a user's class that is rebuilt must not keep busy.
    future.exception()
    fn(future)
