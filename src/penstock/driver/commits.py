"""Commits: how the effects of an epoch on state, positions and sinks come to hold together or not at all.

The commit of epoch n, in steps; whatever dies between two of them, recovery finds one of two pictures:

1. The coordinator announces the end of n (``announced``). Exactly once each spout task snapshots its state and
   sends marker n down every edge (``marked``); at least once spouts are snapshotted first, and bolts when all
   spouts are.
2. Exactly once a worker that has got marker n from all workers of the stage before, and is done with all tuples of
   n, snapshots its tasks' state, lets its sinks prepare, and passes the marker on (``snapshotted``).
3. Each worker writes what was snapshotted in the background (``written``) and reports it (``reported``).
4. When all have reported (``collected``), the manifest of n is written: the commit point (``committed``).
5. The workers are told (``notified``); sinks make visible what they prepared (``published``), and snapshots that
   no manifest needs any more go.

Before the manifest is there, a restart begins at n - 1: what sinks prepared for n is dropped, and all is done
again. After it, a restart begins at n, and its tokens are committed again, which does nothing a second time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.driver.epochs import Abandon, Begin, Commit, EpochKeeper, Instruction, SnapshotBolts
from penstock.errors import StateError, StateRemoved, Superseded
from penstock.faults import CrashPoint
from penstock.plan.model import Plan, WorkerId
from penstock.protocol.commands import Command, EndEpoch, EpochCommitted, TakeSnapshot
from penstock.protocol.events import EpochPublished, Event, SnapshotFailed, SnapshotWritten, SpoutsSnapshotted
from penstock.protocol.task_states import SavedTask
from penstock.state import manifest as manifests
from penstock.state.generations import Ownership
from penstock.state.manifest import Manifest, TaskEntry
from penstock.state.store import StateStore, is_missing

log = logging.getLogger("penstock.commits")


_PUBLISHED = "published"
"""A folder with a file for each generation: the newest epoch of its own that all sinks have made visible."""


def read_published(store: StateStore, generation: int) -> int:
    """The newest epoch of a generation that is known to be published; 0: none."""
    try:
        return int(store.read(_published(generation)))
    except ValueError:
        return 0
    except StateError as error:
        if is_missing(error):
            return 0
        raise


def write_published(store: StateStore, generation: int, epoch: int) -> None:
    store.write(_published(generation), str(epoch).encode())


def forget_published(store: StateStore, generation: int) -> None:
    """Remove the records of generations that no manifest is of."""
    needed = {_published(name.generation) for name in manifests.history(store)}
    for file in store.list(f"{_PUBLISHED}/"):
        if file < _published(generation) and file not in needed:
            store.remove(file)


def _published(generation: int) -> str:
    return f"{_PUBLISHED}/{generation:08d}"


class Commits:
    """Carries out what the keeper decides. Called by one thread at a time."""

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
    ) -> None:
        self.committed = committed
        """The newest epoch that has a manifest."""
        self.committed_at: float | None = None
        """When the newest epoch was committed, on the monotonic clock; None: by an earlier query run."""
        self._plan, self._delivery, self._store = plan, delivery, store
        self._owner, self._send, self._crash = owner, send, crash
        self._generation = owner.generation
        self._origin: tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
        """``base`` and ``dead_letters`` of this generation's manifests, from its first one once that was read."""
        self._last = False
        """The last epoch of this query run has begun."""
        self._moves = 0
        """The commit with which a worker leaves for another process."""
        self._ended = committed
        """Other than exactly once: the epoch of frames that ended last; it does with such a commit only."""
        self._first_stage = [worker for worker in plan.worker_ids() if worker.stage == 0]
        self._keeper = EpochKeeper(
            plan.worker_ids(),
            self._first_stage,
            delivery == "exactly_once",
            committed,
            interval,
        )

    @property
    def published(self) -> int:
        """The newest epoch that all sinks have made visible."""
        return self._keeper.published

    @property
    def newest(self) -> int:
        """The epoch begun last."""
        return self._keeper.newest

    def tick(self, now: float) -> None:
        self._obey(self._keeper.tick(now))

    @property
    def idle(self) -> bool:
        """No epoch is under way."""
        return not self._keeper.any_open

    def next_move(self) -> tuple[int, int]:
        """The commit that is begun next, and the epoch of frames that ends with it if a worker leaves then."""
        commit = self.newest + 1
        return commit, commit if self._delivery == "exactly_once" else self._ended + 1

    def begin(self, now: float, last: bool = False, moves: bool = False) -> bool:
        """End an epoch now. The ``last`` one of this query run writes changes only, and leaves cleaning up to
        whoever takes over; with one that ``moves`` a worker leaves. False: too many are under way."""
        instructions = self._keeper.begin(now)
        self._last = self._last or (last and bool(instructions))
        if moves and instructions:
            self._moves = self.newest
        self._obey(instructions)
        return bool(instructions)

    def handle(self, worker: WorkerId, event: Event) -> None:
        """What a worker says of an epoch."""
        match event:
            case SpoutsSnapshotted():
                self.spouts_snapshotted(worker, event.epoch)
            case SnapshotWritten():
                self.snapshot_written(worker, event.epoch, event.tasks)
            case SnapshotFailed():
                self.snapshot_failed(worker, event.epoch, event.error)
            case EpochPublished():
                self.epoch_published(worker, event.epoch)

    def spouts_snapshotted(self, worker: WorkerId, epoch: int) -> None:
        self._obey(self._keeper.spouts_snapshotted(worker, epoch))

    def snapshot_written(self, worker: WorkerId, epoch: int, tasks: dict[str, SavedTask]) -> None:
        self._obey(self._keeper.snapshot_written(worker, epoch, tasks))

    def snapshot_failed(self, worker: WorkerId, epoch: int, error: str) -> None:
        self._obey(self._keeper.snapshot_failed(worker, epoch, error))

    def epoch_published(self, worker: WorkerId, epoch: int) -> None:
        before = self._keeper.published
        self._keeper.epoch_published(worker, epoch)
        if self._keeper.published > before:
            try:
                write_published(self._store, self._generation, self._keeper.published)
            except StateError as error:
                log.warning("a savepoint at rest will not know what was published: %s", error)

    def expects(self, epoch: int) -> bool:
        """The epoch is under way or committed; not so one that was given up."""
        return epoch <= self.committed or self._keeper.is_open(epoch)

    def _obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Begin):
                message = self._first_message(instruction.epoch)
                for worker in self._first_stage:
                    self._send(message, worker)
                self._crash("announced", instruction.epoch)
            elif isinstance(instruction, SnapshotBolts):
                self._send(TakeSnapshot(instruction.epoch, "bolts", self._last), None)
                if instruction.epoch == self._moves:  # exactly once markers are sent with each
                    self._ended += 1
                    for worker in self._first_stage:
                        self._send(EndEpoch(self._ended), worker)
            elif isinstance(instruction, Commit):
                self._commit(instruction)
            elif isinstance(instruction, Abandon):
                log.error(
                    "epoch %d is not committed: %s; it will be with the next",
                    instruction.epoch,
                    "; ".join(instruction.errors),
                )

    def _first_message(self, epoch: int) -> Command:
        if self._delivery == "exactly_once":
            return EndEpoch(epoch, self._last)
        return TakeSnapshot(epoch, "spouts", self._last)

    def _commit(self, commit: Commit) -> None:
        """Steps 4 and 5. Raises ``Superseded`` where another driver has taken over, ``StateRemoved`` where the
        directory is gone."""
        self._crash("collected", commit.epoch)
        try:
            self._check_owner()
            self._manifest(commit).write(self._store)
            # Checked again: a driver that takes over from now on finds this manifest, and publishes what it
            # promises. One that did before may not have found it; then this manifest is in no history.
            self._check_owner()
        except (Superseded, StateRemoved):
            raise
        except StateError as error:
            log.error("epoch %d is not committed: %s It will be with the next.", commit.epoch, error)
            return
        self.committed, self.committed_at = commit.epoch, time.monotonic()
        self._crash("committed", commit.epoch)
        self._send(EpochCommitted(commit.epoch), None)
        self._crash("notified", commit.epoch)
        if self._last:
            return  # somebody waits to take over
        try:
            manifests.prune(self._store, self._generation)
        except StateError as error:
            log.warning("old snapshots stay: %s", error)

    def _check_owner(self) -> None:
        """Raises as ``Ownership.check`` does, and where a later query run of this driver has begun while the store
        stalled here: that one does the epoch again."""
        self._owner.check(self._store)
        if self._owner.generation != self._generation:
            raise Superseded(
                f"topology '{self._plan.topology}'",
                f"this query run has generation {self._generation}, and a later run of this "
                f"driver has {self._owner.generation}",
            )

    def _manifest(self, commit: Commit) -> Manifest:
        entries = {key: TaskEntry(entry.parts, entry.tokens) for key, entry in commit.tasks.items()}
        base, dead_letters = self._find_origin()
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
        )

    def _find_origin(self) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
        if self._origin is None:
            own = [name for name in manifests.history(self._store) if name.generation == self._generation]
            first = Manifest.read(self._store, own[-1]) if own else None
            self._origin = ((0, 0), ()) if first is None else (first.base, first.dead_letters)
        return self._origin
