"""The local runner: a whole topology in one thread, on a simulated clock.

Components, groupings, frames and the slots' own code are those that run on Spark; only the transport differs:
rows pass through queues instead of Spark's shuffle. The order in which slots take their turns is drawn from
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
from penstock.coordinator.commits import Commits
from penstock.coordinator.messages import Announce, Committed, CutState, Message, Reroute
from penstock.coordinator.migrations import Migrations
from penstock.coordinator.recovery import StateDirectory
from penstock.errors import PenstockError, SinkBusy, StateError
from penstock.faults import CrashPoint, die
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, SlotId
from penstock.plan.planner import make_plan
from penstock.runtime.archive import SlotArchive
from penstock.runtime.job import make_job
from penstock.runtime.memo import Memo
from penstock.runtime.slot import Restored, Slot
from penstock.testing.doubles import CaptureBolt, FeederSpout
from penstock.topology.builder import Topology
from penstock.topology.components import Failure
from penstock.topology.tuples import Tuple

_TURN = 0.0005  # simulated seconds a round of turns takes: time passes even for a spout that never pauses
_SLOWEST = 0.2  # the share of rounds in which the slowest slot of an uneven runner takes its turn


class LocalRunner:
    """Runs a topology. Every task has an instance of its own, as on Spark; ``component`` reaches them.

    With a ``folder`` for the state, epochs are committed there, and another runner goes on from it, with another
    number of tasks if need be. ``die`` is what the setting ``crash_at`` does; a test may raise instead. ``uneven``
    gives each slot a speed of its own, drawn from the seed, so that they drift apart as processes do: some are
    epochs ahead of others.
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
            job = replace(job, letters=f"memory://penstock-local-{uuid.uuid4().hex}")
        self._later: deque[tuple[SlotId, int]] = deque()
        self._reroutes = 0
        self._acker = ledger.Acker(job.key)
        self._random = random.Random(seed)
        self._job = job
        self._slots = {id: Slot(id, job, self.clock) for id in self.plan.slot_ids()}
        self._moving: dict[SlotId, tuple[Slot, deque[pa.Buffer]]] = {}
        """Slots that take over from those of the same name, and copies of what those are sent."""
        self._pace = {id: self._random.uniform(_SLOWEST, 1.0) if uneven else 1.0 for id in self._slots}
        self._channels: dict[SlotId, deque[pa.Buffer]] = {id: deque() for id in self._slots}
        self.migrations = Migrations(self.plan, topology.settings)
        """What was decided about data migration."""
        self._interval = topology.settings.migration_interval if topology.settings.migration else math.inf
        self._looked = self.clock.now()
        self._archives: dict[SlotId, SlotArchive] = {}
        self._unpublished: dict[SlotId, int] = {}
        self._sinks_away = False
        self.commits: Commits | None = None
        """Where epochs are committed; None without a folder."""
        self._open_slots(topology, die)
        self.activate()

    def _open_slots(self, topology: Topology, die: Callable[[], NoReturn]) -> None:
        everywhere = dict.fromkeys(self._slots, "local")
        state, spec = self._state, topology.settings.crash_at
        if state is None:
            for slot in self._slots.values():
                slot.open(everywhere)
            return
        state.recover()
        self._crash = {id: CrashPoint(spec, str(id), die) for id in self._slots}
        for id, slot in self._slots.items():
            slot.open(everywhere, self._restored(id, state), state.epoch, generation=state.generation)
        self.commits = Commits(
            self.plan,
            topology.settings.delivery,
            topology.settings.epoch_interval,
            state.store,
            state.owner,
            state.epoch,
            self._command,
            CrashPoint(spec, "driver", die),
        )

    def _restored(self, id: SlotId, state: StateDirectory) -> dict[str, Restored]:
        archive = self._archives[id] = SlotArchive(state.store.url, id, state.generation, self._crash[id])
        keys = {self.plan.task[task].key for task in self.plan.routes.tasks_of(id)}
        return archive.restore({key: entry for key, entry in state.tasks().items() if key in keys})

    def move(self, id: SlotId, patience: float = 60.0) -> bool:
        """Have a slot go on in another process, as on Spark (``spark.moving``), while the others run. False: it
        did not leave in time, and stays."""
        assert self.commits is not None and self._state is not None, "give the runner a folder"
        old, new = self._slots[id], Slot(id, self._job, self.clock, takes_over=True)
        self._moving[id] = new, deque()
        old.leave(*self.commits.next_move())
        while not self.commits.begin(self.clock.now(), moves=True):
            self.run(_TURN)
        epoch, end = self.commits.newest, self.clock.now() + patience
        while not (old.left and self.commits.published >= epoch):
            if self.clock.now() >= end:
                del self._moving[id]
                old.stay()
                return False
            self.run(_TURN)
        memo = old.memo()
        memo = Memo(memo.epoch, json.loads(json.dumps(memo.data)))
        old.close()
        self._pass_acks(old)
        self._state.look()
        new.open(
            dict.fromkeys(self._slots, "local"),
            self._restored(id, self._state),
            memo=memo,
            generation=self._state.generation,
        )
        _, self._channels[id] = self._moving.pop(id)
        self._slots[id] = new
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
        for slot in self._slots.values():
            slot.activate()

    def deactivate(self) -> None:
        for slot in self._slots.values():
            slot.deactivate()

    def run(self, seconds: float) -> None:
        """Let so much simulated time pass."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self._round()
            wait = min((self._wait(id) for id in self._slots), default=0.0)
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
            for slot in self._slots.values()
            for executor in slot.executors
            if executor.context.component == component
        }
        if not found:
            raise KeyError(f"no component '{component}'; there are {', '.join(self.plan.tasks_of)}")
        return [found[task] for task in sorted(found)]

    def stats(self, component: str) -> list[TaskStats]:
        """The counters of a component's tasks, lowest task first."""
        every = {task: stats for slot in self._slots.values() for task, stats in slot.stats().items()}
        return [every[task] for task in self.plan.tasks_of[component]]

    @property
    def errors(self) -> list[PenstockError]:
        """What user code has raised so far, newest last in each slot."""
        return [error for slot in self._slots.values() for error in slot.errors]

    def close(self) -> None:
        """Call ``close`` and ``cleanup`` everywhere."""
        for slot in self._slots.values():
            slot.close()

    def _round(self) -> None:
        order = list(self._slots)
        self._random.shuffle(order)
        for id in order:
            if self._pace[id] < 1.0 and self._random.random() >= self._pace[id]:
                continue
            slot, channel = self._slots[id], self._channels[id]
            while channel and slot.offer(channel[0]):
                channel.popleft()
            for hop, frame in slot.turn():
                if frame is not None:
                    self._send(SlotId(id.stage + 1, hop), pa.py_buffer(frame))
            if id in self._moving and self._random.random() < _SLOWEST:  # its channels are others', and drift
                taker, copies = self._moving[id]
                while copies and taker.offer(copies[0]):
                    copies.popleft()
            self._pass_acks(slot)
            self._pass_messages(slot)
            self._keep(id, slot)
            if slot.fatal is not None:
                raise slot.fatal
        away = any(slot.sinks_away for slot in self._slots.values())
        if away != self._sinks_away:
            self._sinks_away = away
            for slot in self._slots.values():
                slot.hold_timeouts(away)
        if not self.migrations.idle and self.clock.now() - self._looked >= self._interval:
            self._looked = self.clock.now()
            every = {task: replace(s) for slot in self._slots.values() for task, s in slot.stats().items()}
            for change in self.migrations.look(self._looked, every):
                self._command(change, None)

    def _send(self, to: SlotId, frame: pa.Buffer) -> None:
        self._channels[to].append(frame)
        if to in self._moving:
            self._moving[to][1].append(frame)

    def reroute(self, component: str, routes: Mapping[int, int]) -> None:
        """Migrate data by hand: what is bound for the task with the index on the left goes to the one on the
        right; nothing on the left, and every task gets its own again."""
        tasks = self.plan.tasks_of[component]
        self._reroutes += 1
        for slot in self._slots.values():
            slot.reroute(component, {tasks[a]: tasks[b] for a, b in routes.items()}, self._reroutes)

    @property
    def segments(self) -> list[Segment]:
        """The migrated segments that have ended."""
        return [segment for slot in self._slots.values() for _, segment in slot.segments]

    def _pass_acks(self, slot: Slot) -> None:
        """What the slot has to say to the acker, and the acker to the spouts."""
        failed, tally = slot.take_acks()
        for spout, number in slot.settled_below().items():
            self._acker.settled_below(int(spout), number)
        for roots in failed:
            failure = Failure(roots.component, roots.error)
            for task, numbers in self._acker.close(roots.first, roots.length).items():
                self._slots[self.plan.routes.slot_of[task]].settle(task, numbers, failure)
        if tally is not None:
            for task, numbers in self._acker.apply(*ledger.unpack(tally)).items():
                self._slots[self.plan.routes.slot_of[task]].settle(task, numbers, None)

    def _pass_messages(self, slot: Slot) -> None:
        """What its tasks have to say to those that send to them, and the answers."""
        flow = slot.flow
        while flow.messages:
            message = flow.messages.popleft()
            sender = self._slots[self.plan.routes.slot_of[message.target]].flow
            sender.receive(message)
            while sender.states:
                state = sender.states.popleft()
                for each in self._slots.values():
                    each.flow.heard(state)

    def _command(self, message: Message, to: SlotId | None) -> None:
        """What the coordinator would send to slots."""
        for id, slot in self._slots.items():
            if to not in (None, id):
                continue
            if isinstance(message, Announce):
                slot.announce(message.epoch, message.last)
            elif isinstance(message, CutState) and message.what == "spouts":
                slot.cut_spouts(message.epoch, message.last)
                self._later.append((id, message.epoch))
            elif isinstance(message, CutState):
                slot.cut_bolts(message.epoch, message.last)
            elif isinstance(message, Reroute):
                routes = {int(heavy): light for heavy, light in message.routes.items()}
                slot.reroute(message.component, routes, message.version)
            elif isinstance(message, Committed):
                slot.committed(message.epoch)
                self._unpublished[id] = message.epoch
                self._publish(id, slot)

    def _publish(self, id: SlotId, slot: Slot) -> None:
        """Sinks that are away are asked again at the next turn."""
        assert self.commits is not None
        epoch = self._unpublished[id]
        try:
            slot.publish_sinks(epoch)
        except SinkBusy:
            return
        del self._unpublished[id]
        self._crash[id]("published", epoch)
        self.commits.told(id, epoch)

    def _keep(self, id: SlotId, slot: Slot) -> None:
        """Write and report what the slot cut."""
        commits = self.commits
        if id in self._unpublished:
            self._publish(id, slot)
        while self._later and commits is not None:
            commits.cut(*self._later.popleft())
        while slot.cuts:
            cut = slot.cuts.popleft()
            if commits is None:
                continue  # nothing survives this runner
            self._crash[id]("cut" if id.stage else "marked", cut.epoch)
            try:
                tasks = self._archives[id].write(slot, cut)
            except StateError as error:
                commits.failed(id, cut.epoch, str(error))
                continue
            commits.snapped(id, cut.epoch, tasks)
            self._crash[id]("reported", cut.epoch)
        if commits is not None and not self._moving:
            commits.tick(self.clock.now())

    def _wait(self, id: SlotId) -> float:
        return 0.0 if self._channels[id] else self._slots[id].idle_for()

    def _in_flight(self) -> bool:
        return any(self._channels.values()) or any(slot.pending() for slot in self._slots.values())

    def _progress(self) -> int:
        every = [stats for slot in self._slots.values() for stats in slot.stats().values()]
        return sum(stats.emitted + stats.acked + stats.failed for stats in every)
