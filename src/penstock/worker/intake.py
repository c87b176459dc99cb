"""Receives the input of a worker. The intake is the only object of a worker that the reader thread may use."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pyarrow as pa

from penstock.clock import Clock
from penstock.control.signals import TaskMessage
from penstock.errors import PenstockError
from penstock.frames.header import Kind, MarkerFlag, unpack
from penstock.plan.model import WorkerId
from penstock.protocol.job import Job
from penstock.worker.alignment import Alignment
from penstock.worker.inbox import Inbox
from penstock.worker.link_meter import LinkMeter
from penstock.worker.outgoing import Relay
from penstock.worker.overload import OverloadDetectors
from penstock.worker.overtaking import Recording
from penstock.worker.parcel import Parcel
from penstock.worker.phase import WorkerPhase

_MOST_RELAYED = 16
"""Frames for later stages that may wait here without flow control. More would only hide that their stage is
overloaded."""
_MOST_RELAYED_FLOWING = 256
"""The same with flow control. The frames then leave in the next turn; the number is larger because a slow
``execute`` may delay that turn."""
_NOT_OPEN = (WorkerPhase.CREATED, WorkerPhase.STANDING_BY)


class Intake:
    """Puts arriving frames into inboxes, into the buffer for later epochs or into the relay, and observes
    overload. The reader thread calls ``offer``; both threads use ``observe``, ``take_message`` and
    ``has_messages``; the worker's loop calls all other methods."""

    def __init__(self, id: WorkerId, job: Job, clock: Clock, phase: WorkerPhase) -> None:
        settings, stages = job.settings, job.plan.stages
        flowing = settings.flow.mode != "none"
        overflow = settings.flow.overflow_bytes if flowing else 0
        self.phase = phase
        """The worker's phase. The loop writes it, and ``offer`` reads it."""
        self.inboxes: Mapping[int, Inbox] = {
            task: Inbox(settings.flow.inbox_capacity, overflow) for task in job.plan.routes.tasks_of(id)
        }
        self.upstream = stages[id.stage - 1].workers if id.stage else 0
        """Number of workers of the previous stage."""
        self.alignment = Alignment(self.upstream, 0 if phase is WorkerPhase.STANDING_BY else 1)
        self.relay = Relay(_MOST_RELAYED_FLOWING if flowing else _MOST_RELAYED)
        self.detectors = OverloadDetectors(job.plan, settings, clock, self.inboxes)
        self.last_epoch = 0
        """The last epoch of this query run, if a marker has announced it; otherwise 0."""
        self.links = LinkMeter()
        self.overtaken = 0
        """The newest epoch that is to end at once, as markers have announced; 0 if there is none."""
        self._id, self._clock = id, clock
        self._recordings: list[Recording] = []
        """The recordings that are not finished, oldest first."""
        self._arriving = threading.Lock()
        """Held while a frame is put away and while a recording begins, so that no frame is between the two."""
        self._warm: set[int] = set()
        self._ended: set[int] = set()

    # ---- the reader thread -----------------------------------------------------------------------------

    def offer(self, frame: pa.Buffer) -> bool:
        """Accept a frame that has arrived. Returns False if there is no room; the caller offers it again later.
        Raises ``PenstockError`` if the frame is not valid or not for this worker."""
        header = unpack(memoryview(frame))
        if self.phase is WorkerPhase.CLOSED:  # drops all frames, so that their senders are not blocked
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
            self._take_control(header.kind, header.source_worker, header.epoch, MarkerFlag(header.rows))
            return True
        inbox = self.inboxes.get(header.target_task)
        if inbox is None:
            raise PenstockError(
                f"worker {self._id}",
                f"a frame for task {header.target_task} arrived, but it runs tasks {list(self.inboxes)}",
            )
        parcel = Parcel(header, frame)
        with self._arriving:
            # The markers that end the recordings arrive behind this frame, so the reader must not wait for room.
            taken = self.alignment.hold(parcel) or inbox.offer(parcel, beyond_limit=bool(self._recordings))
            if header.epoch >= self.alignment.first:
                for recording in self._recordings:
                    recording.add_arrival(parcel)
        if self.phase not in _NOT_OPEN:
            self.observe()  # here too, because the loop may be inside a long ``execute``
        return taken

    def _take_control(self, kind: Kind | int, source: int, epoch: int, flags: MarkerFlag) -> None:
        if kind == Kind.WARM:
            self._warm.add(source)
        elif kind == Kind.PROBE:
            self.links.arrived(source, self._clock.monotonic())
        elif kind == Kind.LAST:
            self._ended.add(source)
        elif kind == Kind.MARKER:
            if MarkerFlag.LAST in flags:
                self.last_epoch = epoch
            if MarkerFlag.OVERTAKES in flags:
                self.overtaken = max(self.overtaken, epoch)
            self.alignment.marker(epoch, source)

    # ---- both ------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Show the length of each inbox to its overload detector."""
        self._note_behind()
        self.detectors.observe(self.alignment.ahead())

    def _note_behind(self) -> None:
        behind = self.alignment.behind()
        for task, inbox in self.inboxes.items():
            inbox.behind = behind[task]

    def take_message(self) -> TaskMessage | None:
        """Remove and return the oldest signal that is not posted yet; None if there is none. The caller holds a
        lock until it has posted the signal, because signals must stay in order."""
        messages = self.detectors.messages
        return messages.popleft() if messages else None

    @property
    def has_messages(self) -> bool:
        return bool(self.detectors.messages)

    # ---- the loop --------------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """True if a frame has arrived over every channel from the previous stage."""
        return len(self._warm) == self.upstream

    @property
    def ended(self) -> bool:
        """True if all workers of the previous stage have announced that they send no more frames to this slot."""
        return len(self._ended) == self.upstream

    def refill(self) -> None:
        """Move the buffered frames of the current epoch into the inboxes, as far as there is room."""
        self.alignment.refill(self.accept)
        self._note_behind()

    def accept(self, parcel: Parcel) -> bool:
        """Put a buffered parcel into its inbox. Returns False if there is no room."""
        return self.inboxes[parcel.header.target_task].offer_inside(parcel)

    def begin_recording(self, recording: Recording) -> None:
        """Add what waits for the worker's tasks to the recording of the current epoch, and from now on every frame
        of this epoch or an earlier one that arrives."""
        with self._arriving:
            for inbox in self.inboxes.values():
                for waiting in inbox.view():
                    recording.add_waiting(waiting)
            for view in self.alignment.views(recording.epoch):
                recording.add_waiting(view)
            self._recordings.append(recording)

    def end_recording(self, recording: Recording) -> None:
        """Add no more frames to the recording. Called when the marker has come from all senders."""
        with self._arriving:
            self._recordings.remove(recording)
            self.alignment.forget(recording.epoch)

    @property
    def may_refill(self) -> bool:
        """True if the inbox of the first buffered frame of the current epoch has room."""
        task = self.alignment.next_task
        return task is not None and self.inboxes[task].has_room

    def close(self) -> None:
        """Delete the temporary files."""
        self.alignment.close()
        for inbox in self.inboxes.values():
            inbox.close()
