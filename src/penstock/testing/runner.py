"""The local runner: a whole topology in one thread, on a simulated clock.

Components, groupings, frames and the workers' own code are those that run on Spark; only the transport differs:
rows pass through queues instead of Spark's shuffle. The order in which workers take their turns is drawn from
the seed, so two runs with one seed are the same, and another seed is another legal order.
"""

from __future__ import annotations

import json
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pyarrow as pa

from penstock.acking import ledger
from penstock.clock import SimulatedClock
from penstock.control.migration import Segment
from penstock.driver.commits import Commits
from penstock.driver.migration_controller import MigrationController
from penstock.driver.recovery import StateDirectory
from penstock.errors import PenstockError, SinkBusy, StateError
from penstock.faults import CrashPoint, die
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol.messages import EndEpoch, EpochCommitted, Message, SetMigrationRoutes, TakeSnapshot
from penstock.testing.doubles import CaptureBolt, FeederSpout
from penstock.topology.builder import Topology
from penstock.topology.components import Failure
from penstock.topology.tuples import Tuple
from penstock.worker.archive import WorkerArchive
from penstock.worker.handover import HandoverState
from penstock.worker.job import make_job
from penstock.worker.worker import Restored, Worker

_TURN = 0.0005  # simulated seconds a round of turns takes: time passes even for a spout that never pauses
_SLOWEST = 0.2  # the share of rounds in which the slowest worker of an uneven runner takes its turn


class LocalRunner:
    """Runs a topology. Every task has an instance of its own, as on Spark; ``component`` reaches them.

    With a ``folder`` for the state, epochs are committed there, and another runner goes on from it, with another
    number of tasks if need be. ``die`` is what the setting ``lifecycle.crash_at`` does; a test may raise instead.
    ``uneven`` gives each worker a speed of its own, drawn from the seed, so that they drift apart as processes do:
    some are epochs ahead of others.
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

        self.plan: Plan = make_plan(topology)
        self.clock = clock or SimulatedClock()
        self._state = None if folder is None else StateDirectory(self.plan, topology, folder)
        job = make_job(topology, self.plan, "" if self._state is None else self._state.store.url, dumps)
        if self._state is None:  # then nothing is written to the user's state directory either
            job = replace(job, dead_letters=f"memory://penstock-local-{uuid.uuid4().hex}")
        self._later: deque[tuple[WorkerId, int]] = deque()
        self._reroutes = 0
        self._acker = ledger.Acker(job.key)
        self._random = random.Random(seed)
        self._job = job
        self._workers = {id: Worker(id, job, self.clock) for id in self.plan.worker_ids()}
        self._moving: dict[WorkerId, tuple[Worker, deque[pa.Buffer]]] = {}
        """Workers that take over from those of the same name, and copies of what those are sent."""
        self._pace = {id: self._random.uniform(_SLOWEST, 1.0) if uneven else 1.0 for id in self._workers}
        self._channels: dict[WorkerId, deque[pa.Buffer]] = {id: deque() for id in self._workers}
        self.migrations = MigrationController(self.plan, topology.settings)
        """What was decided about data migration."""
        self._interval = topology.settings.migration.interval if topology.settings.migration.enabled else math.inf
        self._looked = self.clock.now()
        self._archives: dict[WorkerId, WorkerArchive] = {}
        self._unpublished: dict[WorkerId, int] = {}
        self._sinks_away = False
        self.commits: Commits | None = None
        """Where epochs are committed; None without a folder."""
        self._open_workers(topology, die)
        self.activate()

    def _open_workers(self, topology: Topology, die: Callable[[], NoReturn]) -> None:
        everywhere = dict.fromkeys(self._workers, "local")
        state, spec = self._state, topology.settings.lifecycle.crash_at
        if state is None:
            for worker in self._workers.values():
                worker.open(everywhere)
            return
        state.recover()
        self._crash = {id: CrashPoint(spec, str(id), die) for id in self._workers}
        for id, worker in self._workers.items():
            worker.open(everywhere, self._restored(id, state), state.epoch, generation=state.generation)
        self.commits = Commits(
            self.plan,
            topology.settings.delivery.guarantee,
            topology.settings.delivery.epoch_interval,
            state.store,
            state.owner,
            state.epoch,
            self._command,
            CrashPoint(spec, "driver", die),
        )

    def _restored(self, id: WorkerId, state: StateDirectory) -> dict[str, Restored]:
        archive = self._archives[id] = WorkerArchive(state.store.url, id, state.generation, self._crash[id])
        keys = {self.plan.task[task].key for task in self.plan.routes.tasks_of(id)}
        return archive.restore({key: entry for key, entry in state.tasks().items() if key in keys})

    def move(self, id: WorkerId, patience: float = 60.0) -> bool:
        """Have a worker go on in another process, as on Spark (``spark.moving``), while the others run. False: it
        did not leave in time, and stays."""
        assert self.commits is not None and self._state is not None, "give the runner a folder"
        old, new = self._workers[id], Worker(id, self._job, self.clock, takes_over=True)
        self._moving[id] = new, deque()
        old.prepare_to_leave(*self.commits.next_move())
        while not self.commits.begin(self.clock.now(), moves=True):
            self.run(_TURN)
        epoch, end = self.commits.newest, self.clock.now() + patience
        while not (old.left and self.commits.published >= epoch):
            if self.clock.now() >= end:
                del self._moving[id]
                old.cancel_leave()
                return False
            self.run(_TURN)
        handover = old.handover()
        handover = HandoverState(handover.epoch, json.loads(json.dumps(handover.data)))
        old.close()
        self._pass_acks(old)
        self._state.look()
        new.open(
            dict.fromkeys(self._workers, "local"),
            self._restored(id, self._state),
            handover=handover,
            generation=self._state.generation,
        )
        _, self._channels[id] = self._moving.pop(id)
        self._workers[id] = new
        return True

    def commit(self) -> int:
        """End an epoch now and run until it is committed; returns its number."""
        assert self.commits is not None, "give the runner a folder"
        if not self.commits.begin(self.clock.now()):
            raise RuntimeError("epochs are under way already")
        epoch = self.commits.newest
        while self.commits.published < epoch:
            self.run(_TURN)
        return epoch

    def activate(self) -> None:
        for worker in self._workers.values():
            worker.activate()

    def deactivate(self) -> None:
        for worker in self._workers.values():
            worker.deactivate()

    def run(self, seconds: float) -> None:
        """Let so much simulated time pass."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self._round()
            wait = min((self._wait(id) for id in self._workers), default=0.0)
            self.clock.advance(max(min(wait, end - self.clock.now()), _TURN))

    def run_until_idle(self, limit: float = 3600.0) -> None:
        """Run until no tuple is on its way. Ticks do not count as work. Raises after ``limit`` seconds of
        simulated time: a spout that never pauses would keep the topology busy for ever."""
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
        """Give a ``FeederSpout`` rows to emit: row i goes to its task i mod tasks."""
        spouts = self.component(component)
        rows = list(rows)
        for index, spout in enumerate(spouts):
            assert isinstance(spout, FeederSpout)
            spout.feed(rows[index :: len(spouts)])

    def captured(self, component: str) -> list[Tuple]:
        """What the tasks of a ``CaptureBolt`` got, task by task."""
        result: list[Tuple] = []
        for bolt in self.component(component):
            assert isinstance(bolt, CaptureBolt)
            result += bolt.tuples
        return result

    def component(self, component: str) -> list[Any]:
        """The instances of a component, lowest task first."""
        found = {
            executor.context.task: executor.component
            for worker in self._workers.values()
            for executor in worker.executors
            if executor.context.component == component
        }
        if not found:
            raise KeyError(f"no component '{component}'; there are {', '.join(self.plan.tasks_of)}")
        return [found[task] for task in sorted(found)]

    def stats(self, component: str) -> list[TaskStats]:
        """The counters of a component's tasks, lowest task first."""
        every = {task: stats for worker in self._workers.values() for task, stats in worker.stats().items()}
        return [every[task] for task in self.plan.tasks_of[component]]

    @property
    def errors(self) -> list[PenstockError]:
        """What user code has raised so far, newest last in each worker."""
        return [error for worker in self._workers.values() for error in worker.errors]

    def close(self) -> None:
        """Call ``close`` and ``cleanup`` everywhere."""
        for worker in self._workers.values():
            worker.close()

    def _round(self) -> None:
        order = list(self._workers)
        self._random.shuffle(order)
        for id in order:
            if self._pace[id] < 1.0 and self._random.random() >= self._pace[id]:
                continue
            worker, channel = self._workers[id], self._channels[id]
            while channel and worker.offer(channel[0]):
                channel.popleft()
            for hop, frame in worker.turn():
                if frame is not None:
                    self._send(WorkerId(id.stage + 1, hop), pa.py_buffer(frame))
            if id in self._moving and self._random.random() < _SLOWEST:  # its channels are others', and drift
                taker, copies = self._moving[id]
                while copies and taker.offer(copies[0]):
                    copies.popleft()
            self._pass_acks(worker)
            self._pass_messages(worker)
            self._keep(id, worker)
            if worker.fatal is not None:
                raise worker.fatal
        away = any(worker.sinks_unavailable for worker in self._workers.values())
        if away != self._sinks_away:
            self._sinks_away = away
            for worker in self._workers.values():
                worker.hold_timeouts(away)
        if not self.migrations.idle and self.clock.now() - self._looked >= self._interval:
            self._looked = self.clock.now()
            every = {task: replace(s) for worker in self._workers.values() for task, s in worker.stats().items()}
            for change in self.migrations.decide(self._looked, every):
                self._command(change, None)

    def _send(self, to: WorkerId, frame: pa.Buffer) -> None:
        self._channels[to].append(frame)
        if to in self._moving:
            self._moving[to][1].append(frame)

    def reroute(self, component: str, routes: Mapping[int, int]) -> None:
        """Migrate data by hand: what is bound for the task with the index on the left goes to the one on the
        right; nothing on the left, and every task gets its own again."""
        tasks = self.plan.tasks_of[component]
        self._reroutes += 1
        for worker in self._workers.values():
            worker.reroute(component, {tasks[a]: tasks[b] for a, b in routes.items()}, self._reroutes)

    @property
    def segments(self) -> list[Segment]:
        """The migrated segments that have ended."""
        return [segment for worker in self._workers.values() for _, segment in worker.segments]

    def _pass_acks(self, worker: Worker) -> None:
        """What the worker has to say to the acker, and the acker to the spouts."""
        failed, tally = worker.take_acks()
        for spout, number in worker.settled_below().items():
            self._acker.settled_below(int(spout), number)
        for roots in failed:
            failure = Failure(roots.component, roots.error)
            for task, numbers in self._acker.close(roots.first, roots.length).items():
                self._workers[self.plan.routes.worker_of[task]].settle(task, numbers, failure)
        if tally is not None:
            for task, numbers in self._acker.apply(*ledger.unpack(tally)).items():
                self._workers[self.plan.routes.worker_of[task]].settle(task, numbers, None)

    def _pass_messages(self, worker: Worker) -> None:
        """What its tasks have to say to those that send to them, and the answers."""
        flow = worker.flow
        while flow.messages:
            message = flow.messages.popleft()
            sender = self._workers[self.plan.routes.worker_of[message.target]].flow
            sender.on_message(message)
            while sender.states:
                state = sender.states.popleft()
                for each in self._workers.values():
                    each.flow.on_state(state)

    def _command(self, message: Message, to: WorkerId | None) -> None:
        """What the coordinator would send to workers."""
        for id, worker in self._workers.items():
            if to not in (None, id):
                continue
            if isinstance(message, EndEpoch):
                worker.announce(message.epoch, message.last)
            elif isinstance(message, TakeSnapshot) and message.what == "spouts":
                worker.snapshot_spouts(message.epoch, message.last)
                self._later.append((id, message.epoch))
            elif isinstance(message, TakeSnapshot):
                worker.snapshot_bolts(message.epoch, message.last)
            elif isinstance(message, SetMigrationRoutes):
                routes = {int(heavy): light for heavy, light in message.routes.items()}
                worker.reroute(message.component, routes, message.version)
            elif isinstance(message, EpochCommitted):
                worker.on_committed(message.epoch)
                self._unpublished[id] = message.epoch
                self._publish(id, worker)

    def _publish(self, id: WorkerId, worker: Worker) -> None:
        """Sinks that are away are asked again at the next turn."""
        assert self.commits is not None
        epoch = self._unpublished[id]
        try:
            worker.publish_sinks(epoch)
        except SinkBusy:
            return
        del self._unpublished[id]
        self._crash[id]("published", epoch)
        self.commits.epoch_published(id, epoch)

    def _keep(self, id: WorkerId, worker: Worker) -> None:
        """Write and report what the worker snapshot."""
        commits = self.commits
        if id in self._unpublished:
            self._publish(id, worker)
        while self._later and commits is not None:
            commits.spouts_snapshotted(*self._later.popleft())
        while worker.snapshots:
            snapshot = worker.snapshots.popleft()
            if commits is None:
                continue  # nothing survives this runner
            self._crash[id]("snapshotted" if id.stage else "marked", snapshot.epoch)
            try:
                tasks = self._archives[id].write(worker, snapshot)
            except StateError as error:
                commits.snapshot_failed(id, snapshot.epoch, str(error))
                continue
            commits.snapshot_written(id, snapshot.epoch, tasks)
            self._crash[id]("reported", snapshot.epoch)
        if commits is not None and not self._moving:
            commits.tick(self.clock.now())

    def _wait(self, id: WorkerId) -> float:
        return 0.0 if self._channels[id] else self._workers[id].idle_for()

    def _in_flight(self) -> bool:
        return any(self._channels.values()) or any(worker.pending() for worker in self._workers.values())

    def _progress(self) -> int:
        every = [stats for worker in self._workers.values() for stats in worker.stats().values()]
        return sum(stats.emitted + stats.acked + stats.failed for stats in every)
