"""A slot: the tasks of one process, and the turn they take.

The driving side (a Spark task or the local runner) offers rows, asks for turns and moves the rows that come
out. Nothing here blocks, sleeps, or knows who drives.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.frames import codec
from penstock.frames.header import Header, Kind, unpack
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Edge, Plan, SlotId
from penstock.runtime.executors import BoltExecutor, Executor, SpoutExecutor
from penstock.runtime.inbox import Inbox, Parcel
from penstock.runtime.outputs import Connection, StreamOutput
from penstock.settings import Settings
from penstock.topology.components import BaseBolt, BaseSpout, Component, Context
from penstock.topology.groupings import Direct, Targets

_MOST_RELAYED = 16  # frames; more only hides the pressure of the stage they are for

Row = tuple[int, bytes | pa.Buffer | None]
"""The slot of the next stage, and a frame; None is a nudge: Spark hands a row on when it sees the next."""


@dataclass(frozen=True)
class Job:
    """All a slot needs to know; the same object goes to every slot."""

    plan: Plan
    settings: Settings
    components: Mapping[str, bytes]
    """Each component's instance, pickled: every task unpickles one of its own."""
    ticks: Mapping[str, float]

    def instance(self, component: str) -> Component:
        made = pickle.loads(self.components[component])
        assert isinstance(made, Component)
        return made


class Slot:
    """The tasks of one slot. ``offer`` may be called from another thread than the rest."""

    def __init__(self, id: SlotId, job: Job, clock: Clock) -> None:
        self.id = id
        self.errors: deque[PenstockError] = deque(maxlen=32)
        """The newest user errors, for the driver; the counts are in the stats."""
        self.fatal: PenstockError | None = None
        self.published: dict[int, list[list[Any]]] = {}
        self.frames_sent = 0
        self._job, self._plan, self._settings, self._clock = job, job.plan, job.settings, clock
        self._tasks = job.plan.routes.tasks_of(id)
        self._inboxes = {task: Inbox(job.settings.inbox_capacity) for task in self._tasks}
        self._relay: deque[tuple[Header, pa.Buffer]] = deque()
        self._out: list[Row] = []
        self.executors: list[Executor[Any]] = []
        self._bolts: list[BoltExecutor] = []
        self._levels: list[list[BoltExecutor]] = []
        """The bolts by component, those furthest down a chain first."""
        self._spouts: list[SpoutExecutor] = []
        self._sequence: dict[tuple[int, int, int], int] = {}
        self._schemas = [
            codec.declared_schema([(f.name, f.type) for f in stream.fields]) for stream in self._plan.streams
        ]
        self._slot_of = dict(job.plan.routes.slot_of)
        self._warm: set[int] = set()
        self._dirty: dict[int, float] = {}
        self._oldest: float | None = None
        self._spout_emitted = False

    # ---- life cycle ------------------------------------------------------------------------------------

    def open(self, nodes: Mapping[SlotId, str] | None = None) -> None:
        """Make the tasks and call their ``open``/``prepare``. Raises what user code raised, blamed."""
        nodes = nodes or {}
        for task in self._tasks:
            executor = self._make_executor(task, nodes)
            executor.report = self._note_error(executor.stats)
            executor.open(self._settings.conf)
            self.executors.append(executor)
        self._bolts = [executor for executor in self.executors if isinstance(executor, BoltExecutor)]
        levels: dict[str, list[BoltExecutor]] = {}
        for bolt in self._bolts:
            levels.setdefault(bolt.context.component, []).append(bolt)
        order = [component for stage in self._plan.stages for chain in stage.chains for component in chain]
        self._levels = [levels[component] for component in reversed(order) if component in levels]
        self._spouts = [executor for executor in self.executors if isinstance(executor, SpoutExecutor)]

    def warm_up(self) -> list[Row]:
        """A frame over every channel to the next stage."""
        if self.id.stage + 1 == len(self._plan.stages):
            return []
        rows: list[Row] = []
        for slot in range(self._plan.stages[self.id.stage + 1].slots):
            rows += [(slot, Header(Kind.WARM, self.id.stage + 1, slot, *_pair(self.id)).pack()), (slot, None)]
        return rows

    @property
    def warm(self) -> bool:
        """Every channel from the stage before has been used."""
        return self.id.stage == 0 or len(self._warm) == self._plan.stages[self.id.stage - 1].slots

    def activate(self) -> None:
        for spout in self._spouts:
            spout.activate()

    def deactivate(self) -> None:
        for spout in self._spouts:
            spout.deactivate()

    def close(self) -> None:
        """Call every task's ``close``/``cleanup``; all of them, also when one raises."""
        for executor in self.executors:
            try:
                executor.close()
            except PenstockError as error:
                self.errors.append(error)

    # ---- rows in ---------------------------------------------------------------------------------------

    def offer(self, frame: pa.Buffer) -> bool:
        """Take a frame that has arrived, or say no because there is no room: offer it again later."""
        header = unpack(memoryview(frame))
        if header.target_stage < self.id.stage:
            raise PenstockError(
                f"slot {self.id}", "frames go to later stages", f"one for stage {header.target_stage}"
            )
        if header.target_stage > self.id.stage:
            if len(self._relay) >= _MOST_RELAYED:
                return False
            self._relay.append((header, frame))
            return True
        if header.kind == Kind.WARM:
            self._warm.add(header.source_slot)
            return True
        inbox = self._inboxes.get(header.target_task)
        if inbox is None:
            raise PenstockError(
                f"slot {self.id}", f"runs tasks {list(self._tasks)}", f"a frame for task {header.target_task}"
            )
        return inbox.offer(Parcel(header, frame))

    # ---- turns -----------------------------------------------------------------------------------------

    def turn(self) -> list[Row]:
        """Do a moment's work and return the rows to send, in order."""
        while self._relay:
            header, frame = self._relay.popleft()
            self._send_row(SlotId(header.target_stage, header.target_slot), frame)
        self._run_ticks()
        self._spout_emitted = not self._run_bolts() and self._run_spouts()
        if self._spout_emitted or self._bolts or self._dirty or self._holds_rows():
            idle = not self._spout_emitted and not self._relay and not any(bolt.busy for bolt in self._bolts)
            self._flush(idle)
            self._note_waiting()
            self._nudge(idle)
        rows, self._out = self._out, []
        return rows

    def idle_for(self) -> float:
        """Seconds the driver may wait before the next turn unless a row or a command comes; 0 for none."""
        if self._relay or any(bolt.busy for bolt in self._bolts):
            return 0.0
        pause = 0.0 if self._spout_emitted else self._settings.spout_pause
        if self._oldest is None and not self._dirty and not self._bolts and self._spouts:
            return pause if any(spout.active for spout in self._spouts) else 1.0  # asked every millisecond
        now = self._clock.monotonic()
        waits = [1.0]
        waits += [bolt.next_tick - now for bolt in self._bolts if bolt.next_tick is not None]
        if any(spout.active for spout in self._spouts):
            waits.append(pause)
        if self._oldest is not None:
            waits.append(self._oldest + self._settings.linger - now)
        if self._dirty:
            waits.append(min(self._dirty.values()) + self._settings.linger - now)
        return max(0.0, min(waits))

    def _run_bolts(self) -> bool:
        """Run the receivers of what is handed over within the slot first, and their senders only when they
        have nothing left: so a chain holds no more than one batch between two of its components."""
        for tasks in self._levels:
            worked = [bolt.run() for bolt in tasks]
            if any(worked):
                return True
        return False

    def _run_spouts(self) -> bool:
        emitted = [spout.run() for spout in self._spouts]
        return any(emitted)

    def _run_ticks(self) -> None:
        for bolt in self._bolts:
            if bolt.next_tick is not None and bolt.next_tick <= self._clock.monotonic():
                bolt.tick()

    # ---- rows out --------------------------------------------------------------------------------------

    def _flush(self, idle: bool) -> None:
        """Send full frames always, the rest when it is due. A bolt with nothing more to do sends at once: its
        input came in frames already. A spout's tuples wait for company as long as the linger says. A slot
        that never pauses waits longer: it has tuples enough, and each frame costs every hop."""
        linger = self._settings.linger if idle else self._settings.busy_linger
        at_once = idle and not any(spout.active for spout in self._spouts)
        due = self._oldest is not None and self._clock.monotonic() - self._oldest >= linger
        for executor in self.executors:
            executor.flush(only_full=not (at_once or due))

    def _holds_rows(self) -> bool:
        return any(executor.waiting() for executor in self.executors)

    def _note_waiting(self) -> None:
        if not self._holds_rows():
            self._oldest = None
        elif self._oldest is None:
            self._oldest = self._clock.monotonic()

    def _nudge(self, idle: bool) -> None:
        """Follow the last frame to a slot by an empty row when nothing else does: at once when the slot has
        nothing to do, else when no frame has gone that way for the length of the linger."""
        if not self._dirty:
            return
        limit = self._clock.monotonic() - self._settings.linger
        for slot in [slot for slot, sent in self._dirty.items() if idle or sent <= limit]:
            self._out.append((slot, None))
            del self._dirty[slot]

    def _send_row(self, target: SlotId, frame: bytes | pa.Buffer) -> None:
        hop = self._plan.next_hop(self.id, target)
        self._out.append((hop, frame))
        self._dirty[hop] = self._clock.monotonic()

    def _sender(self, source_task: int) -> Callable[[int, int, pa.RecordBatch, float], int]:
        def send(stream: int, task: int, batch: pa.RecordBatch, born: float) -> int:
            target = self._slot_of[task]
            key = (source_task, task, stream)
            header = Header(
                Kind.DATA, target.stage, target.slot, self.id.stage, self.id.slot, task, source_task, stream
            )
            if target == self.id:
                self._inboxes[task].put(Parcel(header._replace(rows=batch.num_rows, born=born), batch))
                return int(batch.nbytes)
            sequence = self._sequence.get(key, 0)
            self._sequence[key] = sequence + 1
            header = header._replace(born=born, sequence=sequence, route=self._plan.routes.version)
            frame = codec.encode(header, batch, self._schemas[stream])
            self.frames_sent += 1
            self._send_row(target, frame)
            return len(frame)

        return send

    # ---- reports ---------------------------------------------------------------------------------------

    def stats(self) -> dict[int, TaskStats]:
        """The counters of each task, queue lengths brought up to date."""
        for bolt in self._bolts:
            bolt.stats.queued = bolt.queued
        return {executor.context.task: executor.stats for executor in self.executors}

    def frames_done(self) -> int:
        """Frames from other slots executed to the end."""
        return sum(bolt.frames_done for bolt in self._bolts)

    def pending(self) -> int:
        """Tuples held here: in inboxes, under execution, emitted and not sent; and frames to relay."""
        held = sum(bolt.queued + bool(bolt.busy) for bolt in self._bolts)
        return held + sum(executor.waiting() for executor in self.executors) + len(self._relay)

    def _note_error(self, stats: TaskStats) -> Callable[[Exception], None]:
        def note(error: Exception) -> None:
            assert isinstance(error, PenstockError)
            stats.errors += 1
            stats.last_error = str(error)
            self.errors.append(error)
            if self._settings.on_error == "stop" and self.fatal is None:
                self.fatal = error

        return note

    # ---- making tasks ----------------------------------------------------------------------------------

    def _make_executor(self, task: int, nodes: Mapping[SlotId, str]) -> Executor[Any]:
        plan = self._plan
        component = plan.task[task].component
        stats = TaskStats()
        context = Context(
            plan.topology,
            component,
            task,
            plan.task[task].index,
            plan.tasks_of,
            nodes.get(self.id, ""),
            self._publisher(task),
        )
        outputs = {
            stream.name: StreamOutput(
                number,
                stream,
                [self._connect(task, edge, nodes) for edge in plan.edges_from(number)],
                self._settings.frame_bytes,
                self._sender(task),
                stats,
                self._note_error(stats),
                self._clock.now,
            )
            for number, stream in plan.streams_of(component)
        }
        instance = self._job.instance(component)
        if isinstance(instance, BaseSpout):
            return SpoutExecutor(instance, context, outputs, stats, self._clock)
        assert isinstance(instance, BaseBolt)
        return BoltExecutor(
            instance,
            context,
            outputs,
            stats,
            self._clock,
            self._inboxes[task],
            plan.streams,
            self._job.ticks.get(component),
        )

    def _connect(self, task: int, edge: Edge, nodes: Mapping[SlotId, str]) -> Connection:
        tasks = self._plan.tasks_of[edge.target]
        if isinstance(edge.grouping, Direct):
            return Connection(None, tasks, str(edge.grouping))
        slots = [self._slot_of[target] for target in tasks]
        node = nodes.get(self.id)
        targets = Targets(
            tasks,
            task,
            tuple(position for position, slot in enumerate(slots) if slot == self.id),
            tuple(position for position, slot in enumerate(slots) if node and nodes.get(slot) == node),
            self._settings.seed,
        )
        return Connection(edge.grouping.router(targets), tasks, type(edge.grouping).__name__)

    def _publisher(self, task: int) -> Callable[[Sequence[Sequence[Any]]], None]:
        def publish(rows: Sequence[Sequence[Any]]) -> None:
            self.published[task] = [list(row) for row in rows]

        return publish


def _pair(slot: SlotId) -> tuple[int, int]:
    return slot.stage, slot.slot


def pickle_components(components: Mapping[str, Component], dumps: Callable[[Any], bytes]) -> dict[str, bytes]:
    """The components' bytes for a ``Job``, with an error that names the one that cannot travel."""
    from penstock.errors import TopologyError

    result = {}
    for id, component in components.items():
        try:
            result[id] = dumps(component)
        except Exception as error:  # pickling runs user code, which may raise anything
            raise TopologyError(
                f"component '{id}'",
                "must be picklable: it travels to the processes that run it",
                f"{type(error).__name__}: {error}",
                "Open connections, files and locks in open() or prepare(), not in __init__.",
            ) from error
    return result
