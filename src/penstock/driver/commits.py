"""Commits an epoch: the state, the spout positions and the sink output of an epoch become durable together or not
at all.

The commit of epoch n. The names in parentheses are the crash points of the fault tests:

1. The driver ends epoch n (``announced``). With exactly-once delivery it sends ``EndEpoch`` to the workers of the
   first stage; each of them snapshots the positions of its spout tasks and sends marker n to all workers of the
   next stage (``marked``). With at-least-once delivery it sends ``TakeSnapshot`` for the spouts, and another one
   for the bolts after all spouts have been snapshotted.
2. With exactly-once delivery, a worker waits for marker n from all workers of the previous stage and finishes all
   tuples of epoch n. Then it stores the dead letters of the epoch, asks its sinks to prepare their output of the
   epoch, snapshots the state of its tasks and forwards the marker (``snapshotted``).
   If the epoch takes longer than ``delivery.overtake_after``, or a change of the running topology waits for it,
   the driver sends ``EndEpoch`` to all workers, and the marker overtakes the tuples that wait: each worker does
   the rest of this step at once. What was overtaken, here or later by the marker of the previous stage, is
   written in step 3 (``worker.overtaking``).
3. Each worker writes its snapshot files to the state directory in the background (``written``), and then sends
   ``SnapshotWritten`` to the driver with the names of the files and the tokens of the prepared output
   (``reported``).
4. After all workers have reported (``collected``), the driver writes the manifest of epoch n, which lists those
   files and tokens. The epoch is committed from then on (``committed``).
5. The driver sends ``EpochCommitted`` to all workers (``notified``). It deletes old manifests, and the snapshots
   that no manifest refers to any more. The sinks publish their prepared output (``published``). When all have, the
   driver records the epoch in the folder ``published``.

If a process dies before the manifest is written, the next query run starts from epoch n - 1: sinks discard what
they prepared for epoch n, and its tuples are processed again. If a process dies afterwards, the next query run
starts from epoch n and publishes the tokens in its manifest again. Publishing a token twice has no effect.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping

from penstock.driver.epochs import (
    Abandon,
    EpochKeeper,
    Instruction,
    Overtake,
    SnapshotBolts,
    StartCommit,
    WriteManifest,
)
from penstock.errors import StateError, StateRemoved, Superseded
from penstock.faults import CrashPoint
from penstock.plan.model import Plan, WorkerId
from penstock.protocol.commands import Command, EndEpoch, EpochCommitted, TakeSnapshot
from penstock.protocol.events import EpochPublished, Event, SnapshotFailed, SnapshotWritten, SpoutsSnapshotted
from penstock.protocol.task_states import OvertakenTuples, SavedTask
from penstock.state import manifest as manifests
from penstock.state.generations import Ownership
from penstock.state.manifest import Manifest, OvertakenEntry, OvertakenFrames, TaskEntry
from penstock.state.store import StateStore, is_missing

log = logging.getLogger("penstock.commits")


_PUBLISHED = "published"
"""Folder in the state directory with one file per generation. A file holds the newest epoch of its generation that
all sinks have published."""


def read_published(store: StateStore, generation: int) -> int:
    """Return the newest epoch of a generation that is known to be published, or 0. Raises ``StateError`` if the
    store cannot be read."""
    try:
        return int(store.read(_published_file(generation)))
    except ValueError:
        return 0
    except StateError as error:
        if is_missing(error):
            return 0
        raise


def write_published(store: StateStore, generation: int, epoch: int) -> None:
    """Record that all sinks have published an epoch. Raises ``StateError`` if the store cannot be written."""
    store.write(_published_file(generation), str(epoch).encode())


def forget_published(store: StateStore, generation: int) -> None:
    """Remove the records of generations before ``generation`` that have no manifest any more."""
    needed = {_published_file(name.generation) for name in manifests.history(store)}
    for file in store.list(f"{_PUBLISHED}/"):
        if file < _published_file(generation) and file not in needed:
            store.remove(file)


def _published_file(generation: int) -> str:
    return f"{_PUBLISHED}/{generation:08d}"


_Origin = tuple[tuple[int, int], tuple[tuple[int, int], ...], Mapping[str, manifests.ScaledBolt]]
"""What all manifests of a generation have in common: ``base``, ``dead_letters`` and ``scaled``."""


class Commits:
    """Carries out the instructions of an ``EpochKeeper``: sends commands to workers and writes manifests.

    One object serves one query run. It is not thread-safe: callers make sure that only one thread uses it at a
    time.
    """

    def __init__(
        self,
        plan: Plan,
        delivery: str,
        interval: float,
        store: StateStore,
        owner: Ownership,
        committed: int,
        send: Callable[[Command, WorkerId | None], None],
        crash: CrashPoint,
        published: int = 0,
        overtake_after: float = math.inf,
    ) -> None:
        """``committed``: the epoch that the query run starts from. ``published``: the newest epoch that is known
        to be published at that time. Sinks may still have to publish the output that an earlier query run
        prepared, so it may be less than ``committed``. ``overtake_after``: see ``EpochKeeper``."""
        self.committed = committed
        """The newest epoch that has a manifest."""
        self.committed_at: float | None = None
        """Time of the newest commit on the monotonic clock. None if an earlier query run made it."""
        self._plan, self._delivery, self._store = plan, delivery, store
        self._owner, self._send, self._crash = owner, send, crash
        self._generation = owner.generation
        self._origin: _Origin | None = None
        """``base`` and ``dead_letters`` of this generation's manifests. None until its first manifest has been
        read."""
        self._last = False
        """Whether the last epoch of this query run has begun."""
        self._moves = 0
        """The number of the commit after which a worker moves to another process. 0 if there is none."""
        self._ended = committed
        """The newest epoch of frames that has ended. Without exactly-once delivery an epoch of frames ends only
        when a worker moves, so it lags behind the number of commits."""
        self._first_stage = [worker for worker in plan.worker_ids() if worker.stage == 0]
        self._keeper = EpochKeeper(
            plan.worker_ids(),
            self._first_stage,
            delivery == "exactly_once",
            committed,
            interval,
            published,
            overtake_after,
        )

    @property
    def published(self) -> int:
        """The newest epoch that all sinks are known to have published. 0 if there is none."""
        return self._keeper.published

    @property
    def newest(self) -> int:
        """The newest epoch that has begun."""
        return self._keeper.newest

    def tick(self, now: float) -> None:
        """Begin the next epoch if the interval has passed. Called periodically. Raises as
        ``start_commit`` does."""
        self._execute(self._keeper.tick(now))

    @property
    def idle(self) -> bool:
        """Whether no epoch is in progress."""
        return not self._keeper.any_open

    def next_move(self) -> tuple[int, int]:
        """Return the number of the next commit, and the epoch of frames that ends with it if a worker moves
        then."""
        commit = self.newest + 1
        return commit, commit if self._delivery == "exactly_once" else self._ended + 1

    def start_commit(
        self, now: float, last: bool = False, moves: bool = False, patience: float | None = None
    ) -> bool:
        """Begin the next epoch now. Returns False if too many epochs are in progress.

        ``last``: this is the last epoch of the query run. Workers write only what has changed, and the next query
        run removes old snapshots. ``moves``: a worker moves to another process with this commit. ``patience``: see
        ``EpochKeeper.start_commit``.
        """
        before = self.newest
        instructions = self._keeper.start_commit(now, patience)
        begun = self.newest > before
        self._last = self._last or (last and begun)
        if moves and begun:
            self._moves = self.newest
        self._execute(instructions)
        return begun

    def handle(self, worker: WorkerId, event: Event) -> None:
        """Handle a worker's event about an epoch. Raises ``Superseded`` or ``StateRemoved`` if the event completes
        an epoch that this driver may not commit any more."""
        match event:
            case SpoutsSnapshotted():
                self.spouts_snapshotted(worker, event.epoch)
            case SnapshotWritten():
                self.snapshot_written(worker, event.epoch, event.tasks, event.overtaken)
            case SnapshotFailed():
                self.snapshot_failed(worker, event.epoch, event.error)
            case EpochPublished():
                self.epoch_published(worker, event.epoch)

    def spouts_snapshotted(self, worker: WorkerId, epoch: int) -> None:
        self._execute(self._keeper.spouts_snapshotted(worker, epoch))

    def snapshot_written(
        self,
        worker: WorkerId,
        epoch: int,
        tasks: dict[str, SavedTask],
        overtaken: dict[str, OvertakenTuples] | None = None,
    ) -> None:
        self._execute(self._keeper.snapshot_written(worker, epoch, tasks, overtaken))

    def snapshot_failed(self, worker: WorkerId, epoch: int, error: str) -> None:
        self._execute(self._keeper.snapshot_failed(worker, epoch, error))

    def epoch_published(self, worker: WorkerId, epoch: int) -> None:
        before = self._keeper.published
        self._keeper.epoch_published(worker, epoch)
        if self._keeper.published > before:
            try:
                self._owner.check(self._store)  # writing would create a removed state directory anew
                write_published(self._store, self._generation, self._keeper.published)
            except StateError as error:
                log.warning(
                    "cannot record the published epoch, which a savepoint of the stopped topology needs: %s",
                    error,
                )

    def expects(self, epoch: int) -> bool:
        """Whether the epoch is in progress or committed. False for an epoch that was abandoned."""
        return epoch <= self.committed or self._keeper.is_open(epoch)

    def _execute(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, StartCommit):
                message = self._first_message(instruction.epoch)
                for worker in self._first_stage:
                    self._send(message, worker)
                self._crash("announced", instruction.epoch)
            elif isinstance(instruction, Overtake):
                last = self._last and instruction.epoch == self.newest
                self._send(EndEpoch(instruction.epoch, last, overtakes=True), None)
                self._crash("overtaken", instruction.epoch)
            elif isinstance(instruction, SnapshotBolts):
                self._send(TakeSnapshot(instruction.epoch, "bolts", self._last), None)
                if instruction.epoch == self._moves:  # with exactly-once delivery every epoch ends in this way
                    self._ended += 1
                    for worker in self._first_stage:
                        self._send(EndEpoch(self._ended), worker)
            elif isinstance(instruction, WriteManifest):
                self._commit(instruction)
            elif isinstance(instruction, Abandon):
                log.error(
                    "epoch %d was not committed: %s; the next commit will include it",
                    instruction.epoch,
                    "; ".join(instruction.errors),
                )

    def _first_message(self, epoch: int) -> Command:
        if self._delivery == "exactly_once":
            return EndEpoch(epoch, self._last)
        return TakeSnapshot(epoch, "spouts", self._last)

    def _commit(self, commit: WriteManifest) -> None:
        """Carry out steps 4 and 5. Raises ``Superseded`` if another driver has taken over, and ``StateRemoved`` if
        the state directory no longer exists. Other errors of the store are logged."""
        self._crash("collected", commit.epoch)
        outcome = "was not committed"
        try:
            self._check_owner()
            self._manifest(commit).write(self._store)
            outcome = "is committed, but the driver cannot confirm it"
            # The check is repeated because a driver that took over before the write may have missed this manifest,
            # which is then in no history. A driver that takes over from now on finds it and publishes its tokens.
            self._check_owner()
        except (Superseded, StateRemoved):
            raise
        except StateError as error:
            log.error("epoch %d %s: %s The next commit will include it.", commit.epoch, outcome, error)
            return
        self.committed, self.committed_at = commit.epoch, time.monotonic()
        self._crash("committed", commit.epoch)
        self._send(EpochCommitted(commit.epoch), None)
        self._crash("notified", commit.epoch)
        if self._last:
            return  # the next query run is waiting for this one to end
        try:
            manifests.prune(self._store, self._generation)
        except StateError as error:
            log.warning("old snapshots could not be removed: %s", error)

    def _check_owner(self) -> None:
        """Raise what ``Ownership.check`` raises, and ``Superseded`` if this driver started a later query run while
        this one waited for the store. The later query run processes the epoch again."""
        self._owner.check(self._store)
        if self._owner.generation != self._generation:
            raise Superseded(
                f"topology '{self._plan.topology}'",
                f"a later query run of this driver owns the state directory (generation {self._owner.generation}, "
                f"this one has {self._generation})",
                "The later run processes the epoch again.",
            )

    def _manifest(self, commit: WriteManifest) -> Manifest:
        entries = {key: TaskEntry(entry.parts, json.loads(entry.tokens)) for key, entry in commit.tasks.items()}
        base, dead_letters, scaled = self._find_origin()
        return Manifest(
            self._plan.topology,
            commit.epoch,
            self._delivery,
            self._generation,
            base,
            time.time(),
            entries,
            {component: len(tasks) for component, tasks in self._plan.tasks_of.items()},
            dead_letters,
            self._overtaken(commit.overtaken),
            scaled,
        )

    def _overtaken(self, tuples: dict[str, OvertakenTuples]) -> OvertakenFrames | None:
        if not tuples:
            return None
        streams = [
            (stream.component, stream.name, [(field.name, str(field.type)) for field in stream.fields])
            for stream in self._plan.streams
        ]
        tasks = {task.id: task.key for task in self._plan.tasks}
        entries = {key: OvertakenEntry(list(each.parts), list(each.streams)) for key, each in tuples.items()}
        return OvertakenFrames(streams, tasks, entries)

    def _find_origin(self) -> _Origin:
        if self._origin is None:
            own = [name for name in manifests.history(self._store) if name.generation == self._generation]
            first = Manifest.read(self._store, own[-1]) if own else None
            self._origin = ((0, 0), (), {}) if first is None else (first.base, first.dead_letters, first.scaled)
        return self._origin
