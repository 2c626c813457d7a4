"""Futures that only the engine resolves.

An answer is resolved by the pump and decoded in the first thread that asks for it: rebuilding a
tree or an exception may run a user's code, which the pump never does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sidestream.output import DiffusionOutput

if TYPE_CHECKING:
    from sidestream.executor.callbacks import CallbackThread
    from sidestream.transport.envelope import Delivery

T = TypeVar("T")


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
        # From here on cancel() answers False: a request is given up by abort, not by its futures.
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Have ``fn(self)`` called on the callback thread once this is done."""
        self._wanted()
        super().add_done_callback(lambda future: self._callbacks.post(lambda: fn(future)))

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: It did not come within ``timeout`` seconds.
            RuntimeError: Called from a done-callback while it is not done.
        """
        self._before_blocking()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None; raises as :meth:`result` does."""
        self._before_blocking()
        return super().exception(timeout)

    def _before_blocking(self) -> None:
        if self.done():
            return
        if self._callbacks.is_current():
            raise RuntimeError(
                "A done-callback may not wait for another result: it would block the thread that "
                "runs all callbacks. Hand the work to a thread of your own."
            )
        self._wanted()

    def _wanted(self) -> None:
        if self._on_wait is not None:
            self._on_wait()


class Answer:
    """An envelope that is opened by the first thread that asks; the same object for all."""

    def __init__(self, delivery: Delivery, decode: Callable[[Delivery], DiffusionOutput]) -> None:
        # Guards the opening: two threads may ask at once, the slot's lease is taken once.
        self._lock = threading.Lock()
        self._delivery: Delivery | None = delivery
        self._decode: Callable[[Delivery], DiffusionOutput] | None = decode
        self._output: DiffusionOutput | None = None
        self._error: BaseException | None = None

    def open(self) -> tuple[DiffusionOutput | None, BaseException | None]:
        """Give the output or its error."""
        with self._lock:
            delivery, self._delivery = self._delivery, None
            decode, self._decode = self._decode, None
            if delivery is not None and decode is not None:
                try:
                    self._output = decode(delivery)
                except BaseException as error:  # noqa: BLE001 - boundary: every asker gets it
                    self._error = error
            return self._output, self._error


class StageFuture(EngineFuture[None]):
    """A signal: it says that a request came this far, or why it did not; keeps no output."""

    _failure: Answer | None = None

    def reach(self) -> None:
        """Resolve it, unless it is; pump thread."""
        if not self.done():
            self.set_result(None)

    def miss(self, failure: Answer) -> None:
        """Resolve it with an error that is not decoded yet; pump thread."""
        if not self.done():
            self._failure = failure
            self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        """Wait until the request came this far."""
        super().result(timeout)
        if self._failure is not None and (error := self._failure.open()[1]) is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None."""
        error = super().exception(timeout)
        return self._failure.open()[1] if error is None and self._failure is not None else error


class OutputFuture(EngineFuture[DiffusionOutput]):
    """The future of one output."""

    _answer: Answer | None = None

    def deliver(self, answer: Answer) -> None:
        """Resolve it with an envelope that is opened on demand; pump thread."""
        self._answer = answer
        placeholder: Any = None  # result() replaces it by what the envelope holds
        self.set_result(placeholder)

    def result(self, timeout: float | None = None) -> DiffusionOutput:
        """Wait for the output and decode it here."""
        super().result(timeout)
        assert self._answer is not None
        output, error = self._answer.open()
        if error is not None:
            raise error
        assert output is not None
        return output

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None."""
        error = super().exception(timeout)
        return self._answer.open()[1] if error is None and self._answer is not None else error
