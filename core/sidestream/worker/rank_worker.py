"""The worker of one rank of a tensor-parallel group: the same forward on all, outputs from rank 0.

::

    rank 0                                    ranks 1, 2, ...
    Execute: take a place                     Execute
             say which requests run ────────> hear it
             forward                          forward
               after each step: look at         after each step: hear that
               the aborts, say so ──────────>
             hear how it ended <───────────── say how it ended
             COMPUTE_DONE, hand outputs over  let go of the outputs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Never

from sidestream.errors import ExecutionError
from sidestream.protocol import AsyncDiffusionOutput, AsyncOutputKind, Execute, number_of
from sidestream.transport.control_page import ControlPage
from sidestream.transport.failure import describe_error, detach_frames
from sidestream.worker.exits import EXIT_SPLIT
from sidestream.worker.ranks import Follower, Leader, Link, LinkLost, Outcome, Settled, join_ranks
from sidestream.worker.warm_up import measured_nbytes
from sidestream.worker.worker import Worker, WorkerPort, WorkerSettings, decode_request

if TYPE_CHECKING:
    from sidestream.worker.pipeline import Payload
    from sidestream.worker.sink import OutputSink

#: How long a rank that has to end by another one's fault waits for the main process to end it.
_END_S: Final = 10.0
#: How long outputs of earlier forwards may take to come out before rank 0 ends itself.
_DRAIN_S: Final = 2.0


def make_worker(
    settings: WorkerSettings, port: WorkerPort, control: ControlPage, rank_fds: Sequence[int]
) -> Worker:
    """Make the worker of a process; ``rank_fds``: what it shares with the others of its group.

    First the file to meet at, then a socket to each other rank, for rank 0, or to rank 0.
    """
    if not rank_fds:
        return Worker(settings, port, control)
    store_fd, *link_fds = rank_fds
    links = [Link(fd) for fd in link_fds]
    if settings.tensor_parallel_rank == 0:
        return LeadingWorker(settings, port, control, store_fd, Leader(links))
    return FollowingWorker(settings, port, control, store_fd, Follower(links[0]))


class _RankWorker(Worker):
    """What all ranks have in common."""

    def __init__(
        self,
        settings: WorkerSettings,
        port: WorkerPort,
        control: ControlPage,
        store_fd: int,
        ranks: Leader | Follower,
    ) -> None:
        super().__init__(settings, port, control)
        self._store_fd = store_fd
        self._ranks = ranks

    def run(self) -> None:
        """Take commands until ``Shutdown``, or until another rank is gone."""
        try:
            super().run()
        except LinkLost:
            self._await_end()

    def _join_group(self) -> None:
        settings = self.settings
        self._progress("ranks")
        join_ranks(
            self.platform.distributed_backend() or "gloo",
            self.device,
            settings.tensor_parallel_rank,
            settings.tensor_parallel_size,
            self._store_fd,
        )

    def _forward(self, command: Execute, numbers: Sequence[int]) -> list[Payload]:
        try:
            payloads = super()._forward(command, numbers)
        except BaseException as error:
            is_stopped = self._running is not None and self._running.stopped_at is not None
            self._settle(Outcome.STOPPED if is_stopped else Outcome.FAILED, command, error)
            raise
        self._settle(Outcome.DONE, command, None)
        return payloads

    def _settle(self, outcome: Outcome, command: Execute, error: BaseException | None) -> None:
        """See to it that a forward ended alike on all ranks, else end as the group has to."""
        settled = self._ranks.settle(outcome)
        if settled is Settled.ELSEWHERE:
            self._await_end()
        if settled is Settled.ALONE:
            assert error is not None
            self._failed_alone(command, error)

    def _await_end(self) -> Never:
        """Wait for the main process to end this rank: it hears of what another one did."""
        self._ranks.await_end(_END_S)
        os._exit(EXIT_SPLIT)

    def _failed_alone(self, command: Execute, error: BaseException) -> None:
        """Hear that the other ranks did not fail where this one did."""
        raise NotImplementedError

    def _end_group(self, said: str) -> Never:
        """Have the main process end the group; what this rank still had to say was sent."""
        words = f"lost: Rank {self.settings.rank} failed alone: {said}"
        self._port.send(AsyncDiffusionOutput(kind=AsyncOutputKind.PROGRESS, result=words))
        os._exit(EXIT_SPLIT)


class LeadingWorker(_RankWorker):
    """Rank 0: it answers."""

    _ranks: Leader
    _is_split = False

    def _take_place(self, command: Execute) -> Execute | None:
        rest = super()._take_place(command)
        self._ranks.begin(command.rpc_id, () if rest is None else rest.output_ids)
        return rest

    def _given_up(self) -> frozenset[int]:
        aborted = super()._given_up()
        self._ranks.share_aborts(aborted)
        return aborted

    def _failed_alone(self, command: Execute, error: BaseException) -> None:
        self._is_split = True

    def _refuse(self, command: Execute, error: BaseException) -> None:
        super()._refuse(command, error)
        if self._is_split:
            if self._outputs.thread is not None:
                self._outputs.thread.drain(_DRAIN_S)
            self._end_group(describe_error(error))


class FollowingWorker(_RankWorker):
    """Another rank: it computes."""

    _ranks: Follower

    def _warm_up(self, sink: OutputSink[Any]) -> None:
        # Every rank takes part; only rank 0 has outputs to make memory for.
        if self.settings.warm_up is not None:
            request = decode_request(self.settings.warm_up)
            measured_nbytes(self.pipeline, request, self.platform, self.device)

    def close(self) -> None:
        """Stay until rank 0 has brought its outputs out: sums may need this rank until then."""
        self._ranks.await_end(_END_S)
        super().close()

    def _execute(self, command: Execute) -> None:
        command = _only(command, self._ranks.hear_begin(command.rpc_id))
        if not command.output_ids:
            return
        try:
            self._forward(command, [number_of(name) for name in command.output_ids])
        except BaseException as error:  # noqa: BLE001 - boundary: the forward; the loop goes on
            running, self._running = self._running, None
            if running is None or running.stopped_at is None:
                # Rank 0 answers with its own; here it may show that the device is lost.
                self._outputs.fail(error, lambda _reason: None)
            detach_frames(error)
            return
        self._running = None
        self._control.forwards += 1

    def _given_up(self) -> frozenset[int]:
        return self._ranks.hear_aborts()

    def _failed_alone(self, command: Execute, error: BaseException) -> None:
        said = describe_error(error.__cause__ or error)
        reason = ExecutionError(f"The forward failed on rank {self.settings.rank} alone: {said}")
        reason.__cause__ = error
        self._send_error(reason, rpc_id=command.rpc_id)
        self._end_group(said)


def _only(command: Execute, names: Sequence[str]) -> Execute:
    """Leave what rank 0 runs of a command."""
    kept = [i for i, name in enumerate(command.output_ids) if name in names]
    return replace(
        command,
        output_ids=tuple(command.output_ids[i] for i in kept),
        attempts=tuple(command.attempts[i] for i in kept),
        requests=tuple(command.requests[i] for i in kept),
    )
