"""The end of an epoch in a worker: what waits is sent, sinks prepare, snapshots are taken, and the marker goes on.

Exactly once an epoch ends with every commit, otherwise only when a worker moves to another slot; then snapshots
are taken on command.
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
    """Which epoch the worker works on, and what happens at its end. Used by the worker's loop only."""

    def __init__(self, with_commits: bool, intake: Intake, tasks: Tasks, flow: FlowControl, out: Outgoing) -> None:
        """``with_commits``: every commit is the end of an epoch (exactly once)."""
        self.departure = Departure()
        self.half_prepared = False
        """Some sinks have prepared the epoch and another is away. No ticks meanwhile: what they emit would be in
        the next transaction of those sinks, and in the state of this epoch as emitted."""
        self._with_commits = with_commits
        self._intake, self._tasks, self._flow, self._out = intake, tasks, flow, out
        self._announced = 0
        """The newest epoch that the driver has told the first stage to end."""
        self._last = 0
        """The epoch after which another query run takes over. It waits for the snapshot, so that holds changes
        only."""
        self._snapshots: list[WorkerSnapshot] = []
        self._needs_full: set[str] = set()
        """Keys of tasks whose last snapshot could not be written: the next one must hold everything."""

    @property
    def number(self) -> int:
        """The epoch that the worker works on."""
        return self._intake.alignment.epoch

    @property
    def over(self) -> bool:
        """The driver has announced the end of the epoch, or the last tuple of it has arrived."""
        return self._announced >= self._intake.alignment.epoch or self._intake.alignment.complete

    @property
    def waits_for_systems(self) -> bool:
        """The end of the epoch has to wait for a sink or for the store of dead letters."""
        if self._with_commits and any(sink.waits for sink in self._tasks.sinks):
            return True
        return any(each.given_up is not None and each.given_up.wake_at is not None for each in self._tasks.all)

    def announce(self, epoch: int, last: bool) -> None:
        """The first stage is to end the epoch as soon as it can. The markers tell the later stages, also whether
        it is the last one of this query run."""
        self._announced = epoch
        if last:
            self._last = epoch

    def relay_frames(self) -> None:
        """Send frames for later stages on, up to the epoch with which the worker leaves."""
        if self._intake.relay:
            self._intake.relay.release(self._out.send, self._intake.alignment.first, self.departure.last_epoch)

    def try_to_end(self) -> bool:
        """End the epoch if its last tuple has arrived and all of them are done. True: an end is under way, and the
        spouts wait for it."""
        if not self.over:
            return False
        self.relay_frames()  # what came before the last marker must leave before our marker
        self._tasks.flush()
        if self._tasks.busy:
            return True  # a fused bolt has got work by that
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
        """Store the epoch's dead letters and let the sinks prepare. False: a system is away; try again later."""
        stored = [each.given_up.store() for each in self._tasks.all if each.given_up is not None]
        if not all(stored):
            return False
        ready = [sink.prepare_epoch(epoch) for sink in self._tasks.sinks]
        self.half_prepared = any(ready) and not all(ready)
        if not all(ready):
            return False
        for executor in self._tasks.all:
            executor.on_epoch_end(epoch)
            if executor.given_up is not None:
                executor.given_up.begin(epoch + 1)
        return True

    def resume(self) -> None:
        """The worker does not leave after all: continue with what was held meanwhile."""
        had_left, commit = self.departure.left, self.departure.cancel()
        if commit is not None:
            self.snapshot_bolts(commit)
        self._intake.relay.requeue_set_aside()
        if had_left:
            self._intake.detectors.resume()
            self._intake.alignment.advance(self._intake.accept)

    # ---- snapshots -------------------------------------------------------------------------------------

    def take_snapshot(self, command: TakeSnapshot) -> list[Event] | None:
        """At least once, on command: of the spouts first, because what they need not read again is done
        everywhere; of the bolts when the snapshots of all spouts are taken, because their state holds all of
        that."""
        if command.what == "bolts":
            self.snapshot_bolts(command.epoch, command.last)
            return None
        self._snapshot(command.epoch, self._tasks.spouts, command.last)
        return [SpoutsSnapshotted(command.epoch)]

    def snapshot_bolts(self, epoch: int, last: bool = False) -> None:
        """If the worker is about to leave with this commit, this is done when it leaves."""
        if not self.departure.postpones(epoch):
            self._snapshot(epoch, self._tasks.bolts, last)

    def take_snapshots(self) -> list[WorkerSnapshot]:
        """Those taken since the last call, oldest first."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def on_snapshot_failed(self, snapshot: WorkerSnapshot) -> None:
        """It could not be written."""
        self._needs_full |= set(snapshot.snapshots)

    def _snapshot(self, epoch: int, executors: Sequence[Executor[Any]], last: bool = False) -> None:
        snapshots = {each.key: each.snapshot(each.key in self._needs_full, not last) for each in executors}
        self._needs_full -= set(snapshots)
        sinks = [each for each in executors if isinstance(each, SinkExecutor)]
        tokens = {sink.key: [token for _, token in sink.tokens] for sink in sinks}
        self._snapshots.append(WorkerSnapshot(epoch, snapshots, tokens))
