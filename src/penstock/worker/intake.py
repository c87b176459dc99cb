"""Where a worker's input arrives. The only object of a worker that another thread than its loop may use."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from penstock.clock import Clock
from penstock.control.signals import TaskMessage
from penstock.errors import PenstockError
from penstock.frames.header import Kind, unpack
from penstock.plan.model import WorkerId
from penstock.protocol.job import Job
from penstock.worker.alignment import Alignment
from penstock.worker.inbox import Inbox
from penstock.worker.outgoing import Relay
from penstock.worker.overload import OverloadDetectors
from penstock.worker.parcel import Parcel
from penstock.worker.phase import WorkerPhase

_MOST_RELAYED = 16  # frames; without flow control more only hides the pressure of the stage that they are for
_MOST_RELAYED_FLOWING = 256  # with it they leave at the next turn, which a slow execute may delay
_NOT_OPEN = (WorkerPhase.CREATED, WorkerPhase.STANDING_BY)


class Intake:
    """Takes the frames that arrive, and detects overload. ``offer`` is called by the reader thread, everything
    else by the worker's loop; ``take_message`` by both."""

    def __init__(self, id: WorkerId, job: Job, clock: Clock, phase: WorkerPhase) -> None:
        settings, stages = job.settings, job.plan.stages
        flowing = settings.flow.mode != "none"
        overflow = settings.flow.overflow_bytes if flowing else 0
        self.phase = phase
        """The worker's, for ``offer``; written by the loop only."""
        self.inboxes: Mapping[int, Inbox] = {
            task: Inbox(settings.flow.inbox_capacity, overflow) for task in job.plan.routes.tasks_of(id)
        }
        self.upstream = stages[id.stage - 1].workers if id.stage else 0
        """Workers of the stage before."""
        self.alignment = Alignment(self.upstream, 0 if phase is WorkerPhase.STANDING_BY else 1)
        self.relay = Relay(_MOST_RELAYED_FLOWING if flowing else _MOST_RELAYED)
        self.detectors = OverloadDetectors(job.plan, settings, clock, self.inboxes)
        self.last_epoch = 0
        """The epoch after which another query run takes over, as the markers say; 0: none."""
        self._id = id
        self._warm: set[int] = set()
        self._ended: set[int] = set()

    # ---- the reader thread -----------------------------------------------------------------------------

    def offer(self, frame: pa.Buffer) -> bool:
        """Take a frame that has arrived. False: there is no room; offer it again later."""
        header = unpack(memoryview(frame))
        if self.phase is WorkerPhase.CLOSED:  # takes nothing more, and holds nobody up
            if header.kind == Kind.LAST:
                self._ended.add(header.source_worker)
            return True
        if header.target_stage > self._id.stage:
            return self.relay.offer(header, frame, self.phase.shares_input)
        if header.target_stage < self._id.stage:
            raise PenstockError(
                f"worker {self._id}",
                f"a frame for stage {header.target_stage} arrived, which is not a later stage",
            )
        if header.kind != Kind.DATA:
            self._take_control(header.kind, header.source_worker, header.epoch, last=bool(header.rows))
            return True
        inbox = self.inboxes.get(header.target_task)
        if inbox is None:
            raise PenstockError(
                f"worker {self._id}",
                f"a frame for task {header.target_task} arrived, but it runs tasks {list(self.inboxes)}",
            )
        parcel = Parcel(header, frame)
        taken = self.alignment.hold(parcel) or inbox.offer(parcel)
        if self.phase not in _NOT_OPEN:
            self.observe()  # here too, because the loop may be inside a long execute
        return taken

    def _take_control(self, kind: Kind | int, source: int, epoch: int, last: bool) -> None:
        if kind == Kind.WARM:
            self._warm.add(source)
        elif kind == Kind.LAST:
            self._ended.add(source)
        elif kind == Kind.MARKER:
            if last:
                self.last_epoch = epoch
            self.alignment.marker(epoch, source)

    # ---- both ------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Look for overload."""
        self._note_behind()
        self.detectors.observe(self.alignment.ahead())

    def _note_behind(self) -> None:
        behind = self.alignment.behind()
        for task, inbox in self.inboxes.items():
            inbox.behind = behind[task]

    def take_message(self) -> TaskMessage | None:
        """The oldest signal that has not been posted. The caller holds a lock until it has posted it, because
        signals must stay in order."""
        messages = self.detectors.messages
        return messages.popleft() if messages else None

    @property
    def has_messages(self) -> bool:
        return bool(self.detectors.messages)

    # ---- the loop --------------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """Every channel from the stage before has been used."""
        return len(self._warm) == self.upstream

    @property
    def ended(self) -> bool:
        """All workers of the stage before have said that they send nothing more here."""
        return len(self._ended) == self.upstream

    def refill(self) -> None:
        """Move what was held for the present epoch into the inboxes, as far as there is room."""
        self.alignment.refill(self.accept)
        self._note_behind()

    def accept(self, parcel: Parcel) -> bool:
        """Put a parcel that was held into its inbox, if there is room."""
        return self.inboxes[parcel.header.target_task].offer_inside(parcel)

    @property
    def may_refill(self) -> bool:
        """A held frame of the present epoch has room in its inbox."""
        task = self.alignment.next_task
        return task is not None and self.inboxes[task].has_room

    def close(self) -> None:
        """Delete what waits on disk."""
        self.alignment.close()
        for inbox in self.inboxes.values():
            inbox.close()
