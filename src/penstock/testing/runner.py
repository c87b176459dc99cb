"""The local runner: runs a whole topology in one thread, on a simulated clock.

Components, groupings, frames, workers and their hosts, the worker registry, commits and migration are the same
code as on Spark. Only two things differ: rows and control messages pass through memory, and the runner advances
the time. The order in which workers take their turns depends on the seed: two runs with the same seed are
identical, and another seed gives another possible order.
"""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pyarrow as pa

from penstock.clock import Clock, SimulatedClock
from penstock.control.migration import Segment
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.driver.commits import Commits
from penstock.driver.migration_controller import MigrationController
from penstock.driver.recovery import StateDirectory
from penstock.driver.registry import WorkerRegistry
from penstock.errors import PenstockError, SnapshotCorrupt
from penstock.faults import CrashPoint, die
from penstock.metrics.bus import MetricsBus
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol.commands import (
    ActivateSpouts,
    AssignWorker,
    CancelLeave,
    CloseTasks,
    Command,
    DeactivateSpouts,
    OpenTasks,
    PrepareToLeave,
    RouteWorker,
    SetMigrationRoutes,
)
from penstock.protocol.events import Hello, SlotFreed
from penstock.protocol.job import Job, make_job
from penstock.protocol.message_board import MessageBoard
from penstock.testing.doubles import CaptureBolt, FeederSpout
from penstock.testing.memory import MemoryTransport
from penstock.topology.builder import Topology
from penstock.topology.tuples import Tuple
from penstock.worker.archive import WorkerArchive
from penstock.worker.host import InlineJobs, WorkerHost
from penstock.worker.message_board import CoordinatorMessageBoard
from penstock.worker.phase import WorkerPhase
from penstock.worker.worker import Worker

_TURN = 0.0005
"""Least simulated seconds of a round, so that time passes even if a spout never pauses."""
_SLOWEST = 0.2
"""Fraction of rounds in which the slowest worker of an uneven runner takes a turn: it falls epochs behind."""
_START_ROUNDS = 1000
"""Rounds within which all tasks must be open; a start needs about as many as there are stages."""


@dataclass
class _LocalSlot:
    """A slot: its control connection, the rows that are in transit to it, and the host of its worker."""

    id: WorkerId
    transport: MemoryTransport
    channel: deque[pa.Buffer]
    host: WorkerHost | None = None


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
        self.plan: Plan = make_plan(topology)
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

    def _make_slot(self, id: WorkerId) -> _LocalSlot:
        return _LocalSlot(id, MemoryTransport(self.registry, Hello(id.stage, id.index, 0, 0, "local")), deque())

    def _start(self) -> None:
        state, settings = self._state, self._job.settings
        if state is not None:
            state.recover()
        self.registry.assign_slots({id: id for id in self._slots})
        if state is None:
            self.registry.open(0, 0, {})
        else:
            self.registry.open(state.generation, state.epoch, state.tasks())
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
            )

    def _make_host(self, slot: _LocalSlot, assignment: AssignWorker) -> WorkerHost:
        id = WorkerId(slot.id.stage, assignment.worker)
        crash = CrashPoint(
            "" if self._state is None else self._job.settings.lifecycle.crash_at, str(id), self._die
        )
        archive = WorkerArchive(self._job.archive, id, crash) if self._job.archive else None
        clock = self.clock_of(id)
        worker = Worker(id, self._job, clock, assignment, archive)

        def open_board(on_signal: Callable[[TaskMessage | TaskFlowState], None]) -> MessageBoard:
            return CoordinatorMessageBoard(slot.transport, on_signal, on_signal)

        return WorkerHost(worker, slot.transport, InlineJobs(), open_board, clock, crash)

    def clock_of(self, worker: WorkerId) -> Clock:
        """The clock of a worker's machine. A test may override this to simulate a wrong clock."""
        return self.clock

    # ---- operations --------------------------------------------------------------------------------------

    def commit(self) -> int:
        """End an epoch now, run until it is published, and return its number."""
        assert self.commits is not None, "commit needs a runner with a folder"
        if not self.commits.begin(self.clock.now()):
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
            wait = min((self._wait(slot) for slot in self._slots.values()), default=0.0)
            self.clock.advance(max(min(wait, end - self.clock.now()), _TURN))

    def run_until_idle(self, limit: float = 3600.0) -> None:
        """Run until no tuple is in flight. Ticks do not count as work. Raises ``TimeoutError`` after ``limit``
        simulated seconds, for example if a spout never pauses."""
        end = self.clock.now() + limit
        patience = 2 * _TURN if min(self._pace.values()) == 1.0 else 10 * _TURN / _SLOWEST
        while True:
            before = self._progress()
            self.run(patience)
            if self._progress() == before and not self._in_flight():
                return
            if self.clock.now() > end:
                raise TimeoutError(f"topology '{self.plan.topology}' is still busy after {limit} simulated s")

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
        for host in [slot.host for slot in self._slots.values() if slot.host is not None]:
            failed = host.failure is not None
            host.take_input()
            if not failed:
                self._check(host)

    # ---- moving a worker -----------------------------------------------------------------------------------

    def move(self, id: WorkerId, patience: float = 60.0) -> bool:
        """Move a worker to another slot while the others run. Returns False if it stays, because it did not stop
        within ``patience`` simulated seconds."""
        assert self.commits is not None and self._state is not None, "move needs a runner with a folder"
        registry, state = self.registry, self._state
        old_slot = registry.slot_of_worker[id]
        old, spare = registry.workers[id], WorkerId(id.stage, self.plan.stages[id.stage].workers + self._moves)
        old.left = None
        self._moves += 1
        self._slots[spare] = self._make_slot(spare)
        new = self._slots[spare].transport.connection
        self._moving = True
        try:
            registry.stand_by(id, spare)
            self._route(id, [old_slot.index, spare.index])
            registry.tell(old, PrepareToLeave(*self.commits.next_move()))
            self._run_until(lambda: self._commits().begin(self.clock.now(), moves=True))
            epoch, end = self.commits.newest, self.clock.now() + patience
            self._run_until(
                lambda: (old.left is not None and self._commits().published >= epoch) or self.clock.now() >= end
            )
            if old.left is None or self.commits.published < epoch:
                registry.tell(old, CancelLeave())
                registry.tell(new, CloseTasks())
                self._route(id, [old_slot.index])
                return False
            handover = old.left.handover
            registry.hand_over(id, spare)
            registry.tell(old, CloseTasks())
            self._run_until(lambda: old.closed)
            state.look()
            tasks = registry.share(id, state.tasks())
            registry.tell(new, OpenTasks(registry.nodes(), state.generation, handover.epoch, tasks, handover))
            for routes in self.migrations.current_routes():
                registry.tell(new, routes)
            self._run_until(lambda: new.ready)
            self._route(id, [spare.index])
            return True
        finally:
            self._moving = False

    def _route(self, id: WorkerId, slots: list[int]) -> None:
        """Let the previous stage send the worker's rows to these slots, and run until it does."""
        senders = [each for each in self.registry.workers if each.stage == id.stage - 1]
        for sender in senders:
            self.registry.send(RouteWorker(id.index, slots), sender)
        self._run_until(
            lambda: all(self.registry.workers[each].sending.get(id.index) == slots for each in senders)
        )

    def _run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.run(_TURN)

    def _commits(self) -> Commits:
        assert self.commits is not None
        return self.commits

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

    def _pace_of(self, slot: _LocalSlot) -> float:
        if slot.host is None:
            return 1.0
        worker = slot.host.worker
        return _SLOWEST if worker.phase is WorkerPhase.STANDING_BY else self._pace[worker.id]

    def _step(self, slot: _LocalSlot) -> None:
        """Run one step of the slot's worker, and put its rows into the channels of the next stage."""
        if slot.host is None and not self._assign(slot):
            slot.channel.clear()  # rows for a worker that has moved away
            return
        host = slot.host
        assert host is not None
        while slot.channel and host.worker.intake.offer(slot.channel[0]):
            slot.channel.popleft()
        for hop, frame in host.step():
            if frame is not None:
                self._slots[WorkerId(slot.id.stage + 1, hop)].channel.append(pa.py_buffer(frame))
        self._check(host)
        if host.worker.gone:
            host.close()
            slot.host = None
            slot.transport.send(SlotFreed())

    def _assign(self, slot: _LocalSlot) -> bool:
        """Create the worker that the driver has assigned to the slot. Returns False if there is none."""
        inbox = slot.transport.inbox
        while inbox and slot.host is None:
            command = inbox.popleft()
            if isinstance(command, AssignWorker):
                slot.host = self._make_host(slot, command)
        return slot.host is not None

    def _check(self, host: WorkerHost) -> None:
        if host.failure is not None:
            raise host.failure
        if self.registry.corrupt:
            raise SnapshotCorrupt(f"topology '{self.plan.topology}'", self.registry.corrupt)

    def _tell_all(self, command: Command) -> None:
        self.registry.send(command)
        self._deliver()

    def _deliver(self) -> None:
        """Let the workers handle the commands in their inboxes, without a turn."""
        for slot in self._slots.values():
            if slot.host is not None:
                slot.host.take_input()
                self._check(slot.host)

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
            for change in self.migrations.decide(self.clock.now(), self.bus.loads()):
                self._command(change, None)

    def _wait(self, slot: _LocalSlot) -> float:
        if slot.host is None:
            return math.inf
        return 0.0 if slot.channel or slot.transport.inbox else slot.host.wait()

    def _in_flight(self) -> bool:
        busy = any(slot.channel or slot.transport.inbox for slot in self._slots.values())
        return busy or any(worker.inspect().pending for worker in self.workers.values())

    def _progress(self) -> int:
        every = [stats for worker in self.workers.values() for stats in worker.inspect().stats.values()]
        return sum(stats.emitted + stats.acked + stats.failed for stats in every)
