"""The local runner: runs a whole topology in one thread, on a simulated clock.

The runner drives the same components, groupings, frames, workers, hosts, worker registry, commits and migration
as Spark does. It differs in these points: rows and control messages pass through memory, background jobs run
inline, and the clock advances only when the runner advances it. There is no supervisor, so it does not restart,
replace, scale or place the topology. The seed determines the order in which workers take their turns: two runs
with one seed are equal, and another seed gives another legal order.
"""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pyarrow as pa

from penstock.clock import Clock, SimulatedClock
from penstock.control.segments import Segment
from penstock.driver.commits import Commits
from penstock.driver.migration_controller import MigrationController
from penstock.driver.recovery import StateDirectory
from penstock.driver.registry import WorkerRegistry
from penstock.errors import PenstockError, SnapshotCorrupt
from penstock.faults import CrashPoint, die
from penstock.metrics.bus import MetricsBus
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Fit, Plan, WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol.commands import (
    ActivateSpouts,
    CloseTasks,
    Command,
    DeactivateSpouts,
    SetMigrationRoutes,
)
from penstock.protocol.job import Job, make_job
from penstock.testing.doubles import CaptureBolt, FeederSpout
from penstock.testing.local_move import LocalMove
from penstock.testing.local_slot import LocalSlot
from penstock.topology.builder import Topology
from penstock.topology.tuples import Tuple
from penstock.worker.phase import WorkerPhase
from penstock.worker.spouts import SpoutExecutor
from penstock.worker.worker import Worker

_TURN = 0.0005
"""Least simulated seconds of a round, so that time passes even if a spout never pauses."""
_SLOWEST = 0.2
"""Fraction of rounds in which the slowest worker of an uneven runner takes a turn: it falls epochs behind."""
_START_ROUNDS = 1000
"""Rounds within which all tasks must be open; a start needs about as many as there are stages."""


class LocalRunner:
    """Runs a topology. Every task has its own component instance, as on Spark; ``component`` returns them.

    With a ``folder``, epochs are committed to that state directory, and another runner can continue from it,
    also with another number of tasks. ``die`` is called at the crash point of the setting
    ``lifecycle.crash_at``; a test may raise instead. ``uneven`` gives each worker its own speed, which depends
    on the seed, so that workers drift apart as processes do and some are epochs ahead of others.
    """

    def __init__(
        self,
        topology: Topology,
        seed: int = 0,
        clock: SimulatedClock | None = None,
        folder: str | None = None,
        die: Callable[[], NoReturn] = die,
        uneven: bool = False,
    ) -> None:
        from penstock.spark.pickling import dumps

        settings = topology.settings
        self.plan: Plan = make_plan(topology, Fit(settings.workers.count or None))
        self.clock = clock or SimulatedClock()
        self._state = None if folder is None else StateDirectory(self.plan, topology, folder)
        job = make_job(topology, self.plan, "" if self._state is None else self._state.store.url, dumps)
        if self._state is None:  # without a folder nothing may be written to the user's state directory
            job = replace(job, dead_letters=f"memory://penstock-local-{uuid.uuid4().hex}")
        self._job: Job = job
        self._die, self._random = die, random.Random(seed)
        self.bus = MetricsBus(self.plan, self.clock.monotonic)
        """The reports of the workers."""
        self.registry = WorkerRegistry(
            0, self.plan, self.bus, job.key, threading.Condition(), lambda call: call(), placed=True
        )
        self._slots = {id: self._make_slot(id) for id in self.plan.worker_ids()}
        self._pace = {id: self._random.uniform(_SLOWEST, 1.0) if uneven else 1.0 for id in self._slots}
        self.migrations = MigrationController(self.plan, settings)
        """Decides about data migration, and has the decisions so far."""
        self._migration_interval = settings.migration.interval if settings.migration.enabled else math.inf
        self._migration_due, self._probe = self.clock.now() + self._migration_interval, 0
        self._routes_version = self.plan.routes.version
        self._moves = 0
        self._moving = False
        self.commits: Commits | None = None
        """Commits the epochs; None without a folder."""
        self._start()
        self.activate()

    def _make_slot(self, id: WorkerId) -> LocalSlot:
        crash_at = "" if self._state is None else self._job.settings.lifecycle.crash_at
        return LocalSlot(
            id,
            self._job,
            self.registry,
            self.clock_of,
            lambda worker: CrashPoint(crash_at, str(worker), self._die),
        )

    def _start(self) -> None:
        state, settings = self._state, self._job.settings
        if state is not None:
            state.recover()
        self.registry.assign_slots({id: id for id in self._slots})
        if state is None:
            self.registry.open(0, 0, {})
        else:
            self.registry.open(state.generation, state.epoch, state.tasks(), state.waiting())
        for _ in range(_START_ROUNDS):
            for slot in list(self._slots.values()):
                self._step(slot)
            if all(worker.ready for worker in self.registry.workers.values()):
                break
        else:
            raise TimeoutError(f"topology '{self.plan.topology}' did not start within {_START_ROUNDS} rounds")
        if state is not None:
            self.commits = Commits(
                self.plan,
                settings.delivery.guarantee,
                settings.delivery.epoch_interval,
                state.store,
                state.owner,
                state.epoch,
                self._command,
                CrashPoint(settings.lifecycle.crash_at, "driver", self._die),
                state.published,
                settings.delivery.overtake_after,
            )

    def clock_of(self, worker: WorkerId) -> Clock:
        """The clock of a worker's machine. A test may override this to simulate a wrong clock."""
        return self.clock

    # ---- operations --------------------------------------------------------------------------------------

    def commit(self) -> int:
        """End an epoch now, run until it is published, and return its number."""
        assert self.commits is not None, "commit needs a runner with a folder"
        if not self.commits.start_commit(self.clock.now()):
            raise RuntimeError("another epoch is being committed")
        epoch = self.commits.newest
        while self.commits.published < epoch:
            self.run(_TURN)
        return epoch

    def activate(self) -> None:
        """Let the spouts emit tuples."""
        self._tell_all(ActivateSpouts())

    def deactivate(self) -> None:
        """Stop the spouts from emitting tuples."""
        self._tell_all(DeactivateSpouts())

    def reroute(self, component: str, routes: Mapping[int, int]) -> None:
        """Set migration routes by hand: tuples for a task index on the left go to the one on the right. Empty
        routes end the migration."""
        tasks = self.plan.tasks_of[component]
        self._routes_version += 1
        changed = {tasks[heavy]: tasks[light] for heavy, light in routes.items()}
        self._tell_all(SetMigrationRoutes(component, changed, self._routes_version))

    def run(self, seconds: float) -> None:
        """Run for this many simulated seconds. Raises the error of a worker that fails."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self._round()
            wait = min((slot.wait() for slot in self._slots.values()), default=0.0)
            self.clock.advance(max(min(wait, end - self.clock.now()), _TURN))

    def run_until_idle(self, limit: float = 3600.0) -> None:
        """Run until no tuple is in flight. Ticks do not count as work. Raises ``TimeoutError`` after ``limit``
        simulated seconds, for example if a spout never pauses."""
        end = self.clock.now() + limit
        patience = 2 * _TURN if min(self._pace.values()) == 1.0 else 10 * _TURN / _SLOWEST
        while True:
            before = self._progress()
            self.run(patience)
            self._round()  # the wait of a spout may have ended at this very moment
            if self._progress() == before and not self._in_flight() and not self._spouts_wait():
                return
            if self.clock.now() > end:
                raise TimeoutError(f"topology '{self.plan.topology}' is still busy after {limit} simulated s")

    def _spouts_wait(self) -> bool:
        """Whether a spout waits until its rate limit, or that of a send queue, permits more tuples."""
        return any(
            0 < executor.wait() < math.inf
            for worker in self.workers.values()
            for executor in worker.inspect().executors
            if isinstance(executor, SpoutExecutor) and executor.active
        )

    def feed(self, component: str, rows: Iterable[Sequence[Any]]) -> None:
        """Give rows to a ``FeederSpout`` to emit: row i goes to the task with index i modulo the number of
        tasks."""
        spouts = self.component(component)
        rows = list(rows)
        for index, spout in enumerate(spouts):
            assert isinstance(spout, FeederSpout)
            spout.feed(rows[index :: len(spouts)])

    def captured(self, component: str) -> list[Tuple]:
        """The tuples that the tasks of a ``CaptureBolt`` have received, task by task."""
        result: list[Tuple] = []
        for bolt in self.component(component):
            assert isinstance(bolt, CaptureBolt)
            result += bolt.tuples
        return result

    def component(self, component: str) -> list[Any]:
        """The instances of a component, lowest task first. Raises ``KeyError`` if it does not exist."""
        found = {
            executor.context.task: executor.component
            for worker in self.workers.values()
            for executor in worker.inspect().executors
            if executor.context.component == component
        }
        if not found:
            raise KeyError(f"component '{component}' does not exist; there are {', '.join(self.plan.tasks_of)}")
        return [found[task] for task in sorted(found)]

    def stats(self, component: str) -> list[TaskStats]:
        """The counters of a component's tasks, lowest task first."""
        every = {task: stats for worker in self.workers.values() for task, stats in worker.inspect().stats.items()}
        return [every[task] for task in self.plan.tasks_of[component]]

    @property
    def errors(self) -> list[PenstockError]:
        """The errors reported so far, worker by worker, newest last."""
        return [error for worker in self.workers.values() for error in worker.inspect().errors]

    def report(self) -> None:
        """Let all workers report to ``bus`` now."""
        self.registry.probe()
        self._deliver()

    @property
    def segments(self) -> list[Segment]:
        """The migrated segments that have ended."""
        self.report()
        return [segment for _, segment in self.bus.segments()]

    @property
    def workers(self) -> dict[WorkerId, Worker]:
        """The workers that run the tasks, without those that stand by or have left."""
        hosts = {id: self._slots[slot].host for id, slot in self.registry.slot_of_worker.items()}
        return {id: host.worker for id, host in hosts.items() if host is not None}

    def close(self) -> None:
        """Close all tasks. The error of a worker that failed earlier is not raised again."""
        self.registry.send(CloseTasks())
        for slot in self._slots.values():
            if slot.host is not None and slot.host.failure is not None:
                slot.host.take_input()
            else:
                slot.deliver()

    def move(self, id: WorkerId, patience: float = 60.0) -> bool:
        """Move a worker to another slot while the others run. Returns False if it stays, because it did not stop
        within ``patience`` simulated seconds."""
        assert self.commits is not None and self._state is not None, "give the runner a folder"
        self._moves += 1
        spare = WorkerId(id.stage, self.plan.stages[id.stage].workers + self._moves)
        self._slots[spare] = self._make_slot(spare)
        self._moving = True
        try:
            move = LocalMove(id, spare, self.registry, self.commits, self._state, self.clock, self._run_until)
            return move.carry_out(patience, self.migrations.current_routes())
        finally:
            self._moving = False

    def _run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.run(_TURN)

    # ---- rounds --------------------------------------------------------------------------------------------

    def _round(self) -> None:
        order = list(self._slots.values())
        self._random.shuffle(order)
        for slot in order:
            pace = self._pace_of(slot)
            if pace == 1.0 or self._random.random() < pace:
                self._step(slot)
                self._commit()
        self._migrate()

    def _pace_of(self, slot: LocalSlot) -> float:
        if slot.host is None:
            return 1.0
        worker = slot.host.worker
        return _SLOWEST if worker.phase is WorkerPhase.STANDING_BY else self._pace[worker.id]

    def _step(self, slot: LocalSlot) -> None:
        """Run one step of the slot's worker, and put its rows into the channels of their target slots."""
        for hop, frame in slot.step():
            if frame is not None:
                self._slots[WorkerId(slot.id.stage + 1, hop)].channel.append(pa.py_buffer(frame))
        if self.registry.corrupt:
            raise SnapshotCorrupt(f"topology '{self.plan.topology}'", self.registry.corrupt)
        failure = self.registry.failure
        if failure is not None:  # a message could not be sent; the slot has raised all other errors
            raise PenstockError(failure.where, failure.problem, failure.hint)

    def _tell_all(self, command: Command) -> None:
        self.registry.send(command)
        self._deliver()

    def _deliver(self) -> None:
        """Let the workers handle the commands in their inboxes, without a turn."""
        for slot in self._slots.values():
            slot.deliver()

    def _command(self, command: Command, to: WorkerId | None) -> None:
        """Called by ``Commits`` to send a command to one worker, or to all if ``to`` is None."""
        self.registry.send(command, to)

    def _commit(self) -> None:
        """Pass the workers' events to ``Commits``, and begin an epoch if one is due."""
        commits, events = self.commits, self.registry.epoch_events
        while not events.empty():
            event = events.get()
            if commits is not None and event:
                commits.handle(*event)
        if commits is not None and not self._moving:
            commits.tick(self.clock.now())

    def _migrate(self) -> None:
        """At every migration interval, request reports; decide when all have arrived."""
        if self.migrations.idle:
            return
        if not self._probe and self.clock.now() >= self._migration_due:
            self._migration_due = self.clock.now() + self._migration_interval
            self._probe = self.registry.probe()
        if self._probe and self.registry.answered(self._probe):
            self._probe = 0
            for change in self.migrations.decide(self.clock.now(), self.bus.loads(), self.bus.load().links):
                self._command(change, None)

    def _in_flight(self) -> bool:
        busy = any(slot.busy for slot in self._slots.values())
        return busy or any(worker.inspect().pending for worker in self.workers.values())

    def _progress(self) -> int:
        every = [stats for worker in self.workers.values() for stats in worker.inspect().stats.values()]
        return sum(stats.emitted + stats.acked + stats.failed for stats in every)
