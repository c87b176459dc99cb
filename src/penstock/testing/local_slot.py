"""A slot of the local runner. Its control messages and rows pass through memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from penstock.clock import Clock
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.driver.registry import WorkerRegistry
from penstock.faults import CrashPoint
from penstock.plan.model import WorkerId
from penstock.protocol.commands import AssignWorker
from penstock.protocol.events import Hello, SlotFreed
from penstock.protocol.job import Job
from penstock.protocol.message_board import MessageBoard
from penstock.testing.memory import MemoryTransport
from penstock.worker.archive import WorkerArchive
from penstock.worker.host import InlineJobs, WorkerHost
from penstock.worker.message_board import CoordinatorMessageBoard
from penstock.worker.outgoing import Row
from penstock.worker.worker import Worker


class LocalSlot:
    """Runs one worker after the other, like a slot on Spark. In between it is empty."""

    def __init__(
        self,
        id: WorkerId,
        job: Job,
        registry: WorkerRegistry,
        clock_of: Callable[[WorkerId], Clock],
        crash_of: Callable[[WorkerId], CrashPoint],
    ) -> None:
        """``clock_of`` and ``crash_of`` return the clock and the crash point of a worker."""
        self.id = id
        self.transport = MemoryTransport(registry, Hello(id.stage, id.index, 0, 0, "local"))
        self.channel: deque[pa.Buffer] = deque()
        """Frames on their way to the slot."""
        self.host: WorkerHost | None = None
        self._job, self._clock_of, self._crash_of = job, clock_of, crash_of

    def step(self) -> list[Row]:
        """Run one step of the slot's worker, and return its rows. Raises the error of a worker that fails."""
        if self.host is None and not self._assign():
            self.channel.clear()  # frames for a worker that has moved away are not needed
            return []
        host = self.host
        assert host is not None
        while self.channel and host.worker.intake.offer(self.channel[0]):
            self.channel.popleft()
        rows = host.step()
        self.check()
        if host.worker.gone:
            host.close()
            self.host = None
            self.transport.send(SlotFreed())
        return rows

    def deliver(self) -> None:
        """Let the worker handle the commands in its inbox, without a turn."""
        if self.host is not None:
            self.host.take_input()
            self.check()

    def check(self) -> None:
        """Raise the error of the worker, if it has failed."""
        if self.host is not None and self.host.failure is not None:
            raise self.host.failure

    @property
    def busy(self) -> bool:
        """Whether frames or commands are on their way to the worker."""
        return bool(self.channel or self.transport.inbox)

    def wait(self) -> float:
        """Seconds until the next step is due."""
        if self.host is None:
            return math.inf
        return 0.0 if self.busy else self.host.wait()

    def _assign(self) -> bool:
        """Create the worker that the driver has assigned to this slot. Returns whether there is one."""
        inbox = self.transport.inbox
        while inbox and self.host is None:
            command = inbox.popleft()
            if isinstance(command, AssignWorker):
                self.host = self._make_host(command)
        return self.host is not None

    def _make_host(self, assignment: AssignWorker) -> WorkerHost:
        id, job = WorkerId(self.id.stage, assignment.worker), self._job
        clock, crash = self._clock_of(id), self._crash_of(id)
        archive = WorkerArchive(job.archive, id, crash) if job.archive else None
        worker = Worker(id, job, clock, assignment, archive)

        def open_board(on_signal: Callable[[TaskMessage | TaskFlowState], None]) -> MessageBoard:
            return CoordinatorMessageBoard(self.transport, on_signal, on_signal)

        return WorkerHost(worker, self.transport, InlineJobs(), open_board, clock, crash)
