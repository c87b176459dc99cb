"""Ends epochs in a worker: waiting tuples are sent, sinks prepare, snapshots are taken, and the marker is sent to
the next stage.

With exactly-once delivery an epoch ends with every commit. Otherwise an epoch ends only when a worker moves to
another slot, and snapshots are taken when the driver asks for them.

An epoch ends in one of two ways. Usually it ends when the worker has processed all its tuples. If the driver asks
for it, the marker overtakes the tuples that wait: the epoch ends at once, and the snapshot includes what was
overtaken (``worker.overtaking``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.frames.header import Header, MarkerFlag
from penstock.plan.model import Plan
from penstock.protocol.commands import TakeSnapshot
from penstock.protocol.events import Event, SpoutsSnapshotted
from penstock.worker.departure import Departure
from penstock.worker.executor import Executor
from penstock.worker.flow_control import FlowControl
from penstock.worker.intake import Intake
from penstock.worker.outgoing import NO_FLAGS, Outgoing
from penstock.worker.overtaking import Recording
from penstock.worker.parcel import Parcel
from penstock.worker.sinks import SinkExecutor
from penstock.worker.snapshots import WorkerSnapshot
from penstock.worker.tasks import Tasks


class WorkerEpochs:
    """The epoch that the worker processes, and the steps at its end. Used by the worker's loop only."""

    def __init__(
        self, with_commits: bool, plan: Plan, intake: Intake, tasks: Tasks, flow: FlowControl, out: Outgoing
    ) -> None:
        """``with_commits``: every commit ends an epoch (exactly-once delivery)."""
        self._plan = plan
        self.departure = Departure()
        self.half_prepared = False
        """True while some sinks have prepared the epoch and another sink is unavailable. Bolts get no ticks
        meanwhile: the prepared sinks would write the tuples of a tick in their next transaction, but the state of
        this epoch would record them as emitted."""
        self._with_commits = with_commits
        self._intake, self._tasks, self._flow, self._out = intake, tasks, flow, out
        self._announced = 0
        """The newest epoch that the driver has asked this worker to end; 0 in later stages."""
        self._last = 0
        """The last epoch of this query run, if the driver has announced it; otherwise 0. The next query run waits
        for its snapshot, so that snapshot contains only changes, even if a full copy is due."""
        self._overtaken = 0
        """The newest epoch that the driver has asked to end at once; 0 if there is none."""
        self.stopped = False
        """The last epoch has ended, and what it overtook is left to the next query run: bolts and spouts do not
        run any more."""
        self._recordings: list[Recording] = []
        """The recordings that are not finished, oldest first."""
        self._snapshots: list[WorkerSnapshot] = []
        self._needs_full: set[str] = set()
        """Keys of tasks whose last snapshot could not be written. Their next snapshot must be full."""

    @property
    def number(self) -> int:
        """The epoch that the worker processes."""
        return self._intake.alignment.epoch

    @property
    def over(self) -> bool:
        """True if the driver has announced the end of the epoch (first stage) or its last tuple has arrived (later
        stages)."""
        return self._announced >= self._intake.alignment.epoch or self._intake.alignment.complete

    @property
    def waits_for_systems(self) -> bool:
        """True if the end of the epoch has to wait for a sink or for the store of dead letters."""
        if self._with_commits and any(sink.delays_epoch_end for sink in self._tasks.sinks):
            return True
        return any(
            each.dead_letters is not None and each.dead_letters.wake_at is not None for each in self._tasks.all
        )

    def announce(self, epoch: int, last: bool, overtakes: bool) -> None:
        """End the epoch as soon as possible. Called for ``EndEpoch``. Later stages get it only if the marker
        overtakes; usually they learn from the markers that the epoch has ended, and whether it is the last one of
        this query run."""
        if not self._intake.upstream:
            self._announced = max(self._announced, epoch)
        if last:
            self._last = epoch
        if overtakes:
            self._overtaken = max(self._overtaken, epoch)

    def relay_frames(self) -> None:
        """Send the frames that the worker relays to later stages, up to the epoch with which it leaves. Ends the
        recordings whose markers have all arrived."""
        alignment = self._intake.alignment
        # Looked at first: the frames that arrived before the last marker are in the relay by then.
        ended = [each for each in self._recordings if alignment.has_ended(each.epoch)]
        if self._intake.relay:
            send = self._relay_recorded if self._recordings else self._out.send
            self._intake.relay.release(send, alignment.first, self.departure.last_epoch)
        for recording in ended:
            self._recordings.remove(recording)
            self._intake.end_recording(recording)
            recording.finished = True

    def _relay_recorded(self, header: Header, frame: bytes | pa.Buffer) -> None:
        parcel = Parcel(header, frame if isinstance(frame, pa.Buffer) else pa.py_buffer(frame))
        for recording in self._recordings:
            recording.add_relayed(parcel)
        self._out.send(header, frame)

    @property
    def holds_tasks(self) -> bool:
        """True if bolts must not run although tuples wait."""
        return self.stopped or (self.half_prepared and self.overtakes)

    @property
    def overtakes(self) -> bool:
        """True if the marker of the epoch is to overtake what waits. A worker that leaves with this epoch
        processes all its tuples instead."""
        epoch = self.number
        if epoch > max(self._overtaken, self._intake.overtaken) or self.departure.commit_at(epoch) is not None:
            return False
        return self._with_commits and (bool(self._intake.upstream) or self._announced >= epoch)

    def try_to_overtake(self) -> bool:
        """End the epoch now if its marker is to overtake what waits. Returns True if no task may run in this turn:
        the epoch has ended, or some of its sinks have prepared it."""
        if not self.overtakes:
            return False
        if any(sink.delays_epoch_end or sink.unfinished() for sink in self._tasks.sinks):
            return self.half_prepared  # a parcel that an unavailable sink has taken in part cannot be stored
        epoch = self.number
        self.relay_frames()
        self._tasks.flush()
        if not self._prepare(epoch):
            return self.half_prepared
        recording = self._record(epoch)
        last = epoch in (self._last, self._intake.last_epoch)
        self._snapshot(epoch, self._tasks.all, last, recording)
        self._out.mark(epoch, MarkerFlag.OVERTAKES | (MarkerFlag.LAST if last else NO_FLAGS))
        self._intake.alignment.advance(self._intake.accept)
        self.relay_frames()  # nothing is missing if all markers are here, or in the first stage
        self.stopped = self.stopped or last
        return True

    def _record(self, epoch: int) -> Recording:
        """Begin to record what the marker of the epoch overtakes."""
        recording = Recording(epoch, self._plan)
        for bolt in self._tasks.bolts:
            unfinished = bolt.unfinished()
            if unfinished is not None:
                recording.add_executing(*unfinished)
        self._intake.begin_recording(recording)
        for view in self._flow.views():
            recording.add_waiting(view)
        self._recordings.append(recording)
        return recording

    def try_to_end(self) -> bool:
        """End the epoch if it is ``over`` and all its tuples are processed. Returns True if it is ``over``, even
        if it cannot end yet; the spouts do not run in this turn then."""
        if not self.over:
            return False
        self.relay_frames()  # frames that arrived before the last marker must leave before this worker's marker
        self._tasks.flush()
        if self._tasks.busy:
            return True  # the flush has given tuples to a fused bolt
        if not self._flow.release(everything=True):
            return True
        epoch = self.number
        commit = self.departure.commit_at(epoch)
        last = epoch == self._last or epoch == self._intake.last_epoch
        if self._with_commits:
            if not self._prepare(epoch):
                return True
            self._snapshot(epoch, self._tasks.all, last or commit is not None)
        elif commit is not None:
            for sink in self._tasks.sinks:
                sink.commit_and_leave()
            self._snapshot(commit, self._tasks.bolts, last=True)
        self._out.mark(epoch, MarkerFlag.LAST if last else NO_FLAGS)
        if commit is None:
            self._intake.alignment.advance(self._intake.accept)
            self._intake.alignment.forget(epoch)
        else:
            self.departure.finish()
        return True

    def _prepare(self, epoch: int) -> bool:
        """Store the epoch's dead letters and let the sinks prepare. Returns False if a sink or the store of dead
        letters is unavailable; the worker tries again in its next turn."""
        stored = [each.dead_letters.store() for each in self._tasks.all if each.dead_letters is not None]
        if not all(stored):
            return False
        ready = [sink.prepare_epoch(epoch) for sink in self._tasks.sinks]
        self.half_prepared = any(ready) and not all(ready)
        if not all(ready):
            return False
        for executor in self._tasks.all:
            executor.on_epoch_end(epoch)
            if executor.dead_letters is not None:
                executor.dead_letters.begin(epoch + 1)
        return True

    def resume(self) -> None:
        """Called when a move is cancelled: the worker continues with the frames that were buffered meanwhile."""
        had_left, commit = self.departure.left, self.departure.cancel()
        if commit is not None:
            self.snapshot_bolts(commit)
        self._intake.relay.requeue_set_aside()
        if had_left:
            self._intake.detectors.resume()
            self._intake.alignment.advance(self._intake.accept)

    # ---- snapshots -------------------------------------------------------------------------------------

    def take_snapshot(self, command: TakeSnapshot) -> list[Event] | None:
        """Carry out ``TakeSnapshot`` (at-least-once delivery). The driver asks for the bolts after all spouts have
        taken their snapshots: all tuples before the position in a spout's snapshot are processed by then, so the
        state of the bolts includes them."""
        if command.what == "bolts":
            self.snapshot_bolts(command.epoch, command.last)
            return None
        self._snapshot(command.epoch, self._tasks.spouts, command.last)
        return [SpoutsSnapshotted(command.epoch)]

    def snapshot_bolts(self, epoch: int, last: bool = False) -> None:
        """Take the snapshots of the bolts. If the worker is about to leave with this commit, it takes them when it
        leaves."""
        if not self.departure.postpones(epoch):
            self._snapshot(epoch, self._tasks.bolts, last)

    def take_snapshots(self) -> list[WorkerSnapshot]:
        """Remove and return the snapshots that are complete, oldest first."""
        count = 0
        for snapshot in self._snapshots:
            if snapshot.overtaken is not None and not snapshot.overtaken.finished:
                break  # they are written in order
            count += 1
        complete, self._snapshots = self._snapshots[:count], self._snapshots[count:]
        return complete

    def on_snapshot_failed(self, snapshot: WorkerSnapshot) -> None:
        """Called when a snapshot could not be written."""
        self._needs_full |= set(snapshot.snapshots)

    def _snapshot(
        self,
        epoch: int,
        executors: Sequence[Executor[Any]],
        last: bool = False,
        overtaken: Recording | None = None,
    ) -> None:
        snapshots = {each.key: each.snapshot(each.key in self._needs_full, not last) for each in executors}
        self._needs_full -= set(snapshots)
        sinks = [each for each in executors if isinstance(each, SinkExecutor)]
        tokens = {sink.key: [token for _, token in sink.tokens] for sink in sinks}
        self._snapshots.append(WorkerSnapshot(epoch, snapshots, tokens, overtaken))
