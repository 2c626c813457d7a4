"""Calls of a worker's methods: sent, awaited, and failed with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidestream.executor.futures import EngineFuture, fresh

if TYPE_CHECKING:
    from sidestream.executor.callbacks import CallbackThread
    from sidestream.executor.inflight import InflightTable
    from sidestream.transport.envelope import Delivery

#: Reads answers until something is so or time is out, where no thread does: (is_done, timeout_s);
#: tells whether that is so.
Attend = Callable[[Callable[[], bool], float | None], bool]


class PendingCall:
    """A call that is registered, and its answer."""

    def __init__(
        self, rpc_id: int, future: EngineFuture[Delivery], table: InflightTable, attend: Attend
    ) -> None:
        self.rpc_id = rpc_id
        self.future = future
        self._table = table
        self._attend = attend

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is answered, or failed; False if time ran out."""
        if not self._attend(self.future.done, timeout_s):
            with contextlib.suppress(TimeoutError):
                self.future.exception(timeout_s)
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for what the method returned.

        Raises:
            TimeoutError: No answer within ``timeout_s``; the call may still run.
            WorkerDiedError: The worker died.
            Whatever the method raised, with its remote traceback as cause.
        """
        if not self.future.done():
            self.future.refuse_to_block()
        if self._attend(self.future.done, timeout_s):
            timeout_s = 0.0
        try:
            delivery = self.future.result(timeout_s)
        except TimeoutError:
            self._table.forget_call(self.rpc_id)
            raise
        message, _ = delivery.open()
        if message.error is not None:
            raise message.error
        return message.result


class MethodCalls:
    """The calls that one worker has: part of the engine's table."""

    def __init__(self, table: InflightTable, callbacks: CallbackThread, attend: Attend) -> None:
        self._table = table
        self._callbacks = callbacks
        self._attend = attend

    def add(self) -> PendingCall:
        """Register a call before it is sent."""
        future: EngineFuture[Delivery] = EngineFuture(self._callbacks)
        return PendingCall(self._table.add_call(future, self), future, self._table, self._attend)

    def is_any_open(self) -> bool:
        """Tell whether somebody waits for one."""
        return self._table.has_calls(self)

    def fail(self, error: BaseException) -> None:
        """Fail what is open, each with a copy of ``error``: the worker will not answer."""
        for call in self._table.take_calls(self):
            if not call.done():
                call.set_exception(fresh(error))
