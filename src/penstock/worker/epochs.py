"""Ends epochs in a worker: waiting tuples are sent, sinks prepare, snapshots are taken, and the marker is sent to
the next stage.

With exactly-once delivery an epoch ends with every commit. Otherwise an epoch ends only when a worker moves to
another slot, and snapshots are taken when the driver asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.protocol.commands import TakeSnapshot
from penstock.protocol.events import Event, SpoutsSnapshotted
from penstock.worker.departure import Departure
from penstock.worker.executor import Executor
from penstock.worker.flow_control import FlowControl
from penstock.worker.intake import Intake
from penstock.worker.outgoing import Outgoing
from penstock.worker.sinks import SinkExecutor
from penstock.worker.snapshots import WorkerSnapshot
from penstock.worker.tasks import Tasks


class WorkerEpochs:
    """The epoch that the worker processes, and the steps at its end. Used by the worker's loop only."""

    def __init__(self, with_commits: bool, intake: Intake, tasks: Tasks, flow: FlowControl, out: Outgoing) -> None:
        """``with_commits``: every commit ends an epoch (exactly-once delivery)."""
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

    def announce(self, epoch: int, last: bool) -> None:
        """End the epoch as soon as possible. Called for ``EndEpoch``, in the first stage only. Later stages learn
        from the markers that the epoch has ended, and whether it is the last one of this query run."""
        self._announced = epoch
        if last:
            self._last = epoch

    def relay_frames(self) -> None:
        """Send the frames that the worker relays to later stages, up to the epoch with which it leaves."""
        if self._intake.relay:
            self._intake.relay.release(self._out.send, self._intake.alignment.first, self.departure.last_epoch)

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
        self._out.mark(epoch, last)
        if commit is None:
            self._intake.alignment.advance(self._intake.accept)
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
        """Remove and return the snapshots taken since the last call, oldest first."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def on_snapshot_failed(self, snapshot: WorkerSnapshot) -> None:
        """Called when a snapshot could not be written."""
        self._needs_full |= set(snapshot.snapshots)

    def _snapshot(self, epoch: int, executors: Sequence[Executor[Any]], last: bool = False) -> None:
        snapshots = {each.key: each.snapshot(each.key in self._needs_full, not last) for each in executors}
        self._needs_full -= set(snapshots)
        sinks = [each for each in executors if isinstance(each, SinkExecutor)]
        tokens = {sink.key: [token for _, token in sink.tokens] for sink in sinks}
        self._snapshots.append(WorkerSnapshot(epoch, snapshots, tokens))
