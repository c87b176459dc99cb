"""A worker: the tasks of one process, and the turn they take.

The driving side (a Spark task or the local runner) offers rows, asks for turns and moves the rows that come
out. Nothing here blocks, sleeps, or knows who drives.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.acking import ledger
from penstock.acking.lineage import Entries, Lineage
from penstock.clock import Clock
from penstock.control.migration import Segment
from penstock.credentials import resolved_values
from penstock.errors import PenstockError, SinkBusy, SinkRefused
from penstock.frames import codec
from penstock.frames.header import Header, Kind, unpack
from penstock.metrics.stats import TaskStats
from penstock.plan.model import WorkerId
from penstock.state.shares import Share
from penstock.state.values import TaskSnapshot, TaskState
from penstock.texts import MOST_ROWS, bounded_cell
from penstock.topology.components import Component, Failure
from penstock.worker.alignment import Alignment
from penstock.worker.bolts import BoltExecutor
from penstock.worker.departure import Departure
from penstock.worker.executor import Executor
from penstock.worker.flow_control import FlowControl
from penstock.worker.handover import HandoverState
from penstock.worker.inbox import Inbox
from penstock.worker.job import Job, Surroundings, make_executor
from penstock.worker.outgoing import Linger, Outgoing, Relay, Row
from penstock.worker.outputs import Send
from penstock.worker.parcel import Parcel
from penstock.worker.sinks import SinkExecutor
from penstock.worker.spouts import SpoutExecutor
from penstock.worker.tracking import FailedRoots

_MOST_RELAYED = 16  # frames; without flow control more only hides the pressure of the stage they are for
_MOST_RELAYED_FLOWING = 256  # with it they leave at the next turn, which a slow execute may put off
_ACK_PAUSE = 0.004  # seconds between two tallies of a worker that never pauses: each is a message to the acker


@dataclass(frozen=True)
class Restored:
    """What a task begins with: its state's parts, and what it had prepared in other systems. Where the number of
    its component's tasks has changed, its ``share`` of what the tasks before had."""

    parts: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    tokens: Sequence[Any] = ()
    sources: Mapping[int, Mapping[str, Sequence[bytes]]] = field(default_factory=dict)
    """The parts of the tasks before, by their number; instead of ``parts``."""
    share: Share | None = None


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of a worker's tasks at the end of an epoch, to be written and reported. By task key."""

    epoch: int
    snapshots: Mapping[str, TaskSnapshot]
    tokens: Mapping[str, list[Any]]


class Streams(dict[tuple[int, int], list[int]]):
    """Tuples and bytes so far by ⟨sender, receiver⟩, both tasks. Where both are in the worker, the bytes are those
    in memory and no network's."""

    def add(self, source: int, target: int, tuples: int, size: int) -> None:
        """Once a frame."""
        count = self.get((source, target))
        if count is None:
            count = self[source, target] = [0, 0]
        count[0] += tuples
        count[1] += size


class Worker:
    """The tasks of one worker. ``offer`` may be called from another thread than the rest."""

    def __init__(self, id: WorkerId, job: Job, clock: Clock, takes_over: bool = False) -> None:
        """``takes_over``: of another that still runs; until it opens it gets copies of what that one gets."""
        self.id = id
        self.errors: deque[PenstockError] = deque(maxlen=32)
        """The newest user errors, for the driver; the counts are in the stats."""
        self.fatal: PenstockError | None = None
        self.published: dict[int, list[list[Any]]] = {}
        self.frames_sent = 0
        self.streams = Streams()
        self._job, self._plan, self._settings, self._clock = job, job.plan, job.settings, clock
        self._tasks = job.plan.routes.tasks_of(id)
        flowing = job.settings.flow.mode != "none"
        overflow = job.settings.flow.overflow_bytes if flowing else 0
        self._inboxes = {task: Inbox(job.settings.flow.inbox_capacity, overflow) for task in self._tasks}
        self._out = Outgoing(id, job.plan, clock, job.settings.transport.linger)
        self.flow = FlowControl(job.plan, job.settings, clock, self._inboxes, self._out.send, id)
        """Send queues and overload detectors of the tasks."""
        self._relay = Relay(_MOST_RELAYED_FLOWING if flowing else _MOST_RELAYED)
        self._instances: dict[int, Component] = {}
        self.executors: list[Executor[Any]] = []
        self._bolts: list[BoltExecutor[Any]] = []
        self._sinks: list[SinkExecutor] = []
        self._levels: list[list[BoltExecutor[Any]]] = []
        """The bolts by component, those furthest down a fused group first."""
        self._spouts: list[SpoutExecutor] = []
        self.sequence: dict[tuple[int, int, int], int] = {}
        """Of the next frame, by sender, receiver (tasks) and stream."""
        self._schemas = [
            codec.declared_schema([(f.name, f.type) for f in stream.fields]) for stream in self._plan.streams
        ]
        self._worker_of = dict(job.plan.routes.worker_of)
        self._version = job.plan.routes.version
        self.segments: deque[tuple[int, Segment]] = deque()
        """Migrated segments that have ended, with the task that sent them; for the report."""
        self._warm: set[int] = set()
        self._linger = Linger(job.settings, max([1, *(self._targets(task) for task in self._tasks)]))
        self._spout_emitted = self._resting = False
        self._epochs = job.settings.delivery.guarantee == "exactly_once"
        """Every commit is the end of an epoch."""
        upstream = job.plan.stages[id.stage - 1].workers if id.stage else 0
        self._alignment = Alignment(upstream, 0 if takes_over else 1)
        self._takes_over, self._is_open = takes_over, False
        self._departure = Departure()
        self._announced = 0
        self._last = 0
        """The epoch after which another start of the topology goes on: its snapshot is waited for, and so holds
        changes only."""
        self._half_prepared = False
        """Some sinks have prepared the epoch and another is away. No tick meanwhile: what it emits would be in the
        next transaction of theirs, and in the state of this epoch as emitted."""
        self._tallies: list[Entries] = []
        self._tally_sent = 0.0
        self.snapshots: deque[WorkerSnapshot] = deque()
        """To be written and reported by the driving side, oldest first."""
        self.needs_full_snapshot: set[str] = set()
        """Keys of tasks whose last snapshot could not be written: the next must hold everything."""

    # ---- life cycle ------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make the instances of the tasks' components. Their modules are imported for that, which may take longer
        than all the rest: better while the worker still waits for others. Raises what that raises."""
        if not self._instances:
            self._instances = {t: self._job.instance(self._plan.task[t].component) for t in self._tasks}

    def open(
        self,
        nodes: Mapping[WorkerId, str] | None = None,
        restored: Mapping[str, Restored] | None = None,
        epoch: int = 0,
        handover: HandoverState | None = None,
        generation: int = 0,
    ) -> None:
        """Make the tasks and call their ``open``/``prepare``, with the state of the last committed ``epoch``, by
        task key. ``handover state``: of the worker it takes over. ``generation``: of the state directory, as this
        start claimed it. Raises what user code raised, blamed."""
        self.load()
        around = Surroundings(
            self.id, nodes or {}, self._clock, self._sender, self._note_error, self._publisher, generation
        )
        if handover is None:
            self._alignment.begin(epoch + 1, self._accept)
        conf = resolved_values(self._settings.conf, "setting conf")
        for task in self._tasks:
            state = TaskState()
            executor = make_executor(
                self._job, task, self._instances[task], around, self._inboxes[task], state, self.flow
            )
            initial = (restored or {}).get(executor.key, Restored())
            if initial.share is None:
                state.restore(initial.parts)
            else:
                state.inherit(initial.sources, initial.share)
            executor.report = self._note_error(executor.stats)
            if executor.given_up is not None:
                executor.given_up.begin((epoch if handover is None else handover.epoch) + 1)
            executor.open(conf)
            if isinstance(executor, SinkExecutor):
                executor.recover(initial.tokens, epoch)
            self.executors.append(executor)
        self._bolts = [executor for executor in self.executors if isinstance(executor, BoltExecutor)]
        self._sinks = [executor for executor in self.executors if isinstance(executor, SinkExecutor)]
        levels: dict[str, list[BoltExecutor[Any]]] = {}
        for bolt in self._bolts:
            levels.setdefault(bolt.context.component, []).append(bolt)
        order = [component for stage in self._plan.stages for group in stage.fused_groups for component in group]
        self._levels = [levels[component] for component in reversed(order) if component in levels]
        self._spouts = [executor for executor in self.executors if isinstance(executor, SpoutExecutor)]
        if handover is not None:
            handover.restore(self)
            self._alignment.take_over(handover.epoch + 1, self._accept)
        self._is_open = True

    # ---- moving to another process ---------------------------------------------------------------------

    def prepare_to_leave(self, commit: int, epoch: int) -> None:
        """When the epoch ends, snapshot the state for this commit, and do nothing more."""
        self._departure.request(commit, epoch)

    def cancel_leave(self) -> None:
        """It is not to leave after all: go on, with what has been held meanwhile."""
        had_left, commit = self.left, self._departure.cancel()
        if commit is not None:
            self.snapshot_bolts(commit)
        self._relay.requeue_set_aside()
        if had_left:
            self.flow.resume_signals()
            self._alignment.advance(self._accept)

    @property
    def left(self) -> bool:
        """It does nothing more: all that comes is held, for another to do, or for itself where it stays."""
        return self._departure.left

    def handover(self) -> HandoverState:
        """What who takes over needs besides the state, once it has left."""
        assert self.left
        return HandoverState.of(self, self._alignment.epoch)

    def warm_up(self) -> list[Row]:
        """A frame over every channel to the next stage."""
        return self._out.warm_up()

    @property
    def stateful(self) -> bool:
        """A task keeps state, has something to do at a snapshot, or writes to another system in transactions."""
        return any(
            executor.context.state
            or isinstance(executor, SinkExecutor)
            or type(executor.component).before_snapshot is not Component.before_snapshot
            for executor in self.executors
        )

    @property
    def warm(self) -> bool:
        """Every channel from the stage before has been used."""
        return self.id.stage == 0 or len(self._warm) == self._plan.stages[self.id.stage - 1].workers

    def activate(self) -> None:
        self._resting = False
        for spout in self._spouts:
            spout.activate()

    def deactivate(self) -> None:
        for spout in self._spouts:
            spout.deactivate()

    def rest(self) -> None:
        """Another start is about to take over: no more ticks. ``activate`` takes it back."""
        self._resting = True

    def close(self) -> None:
        """Call every task's ``close``/``cleanup``; all of them, also when one raises."""
        for executor in self.executors:
            try:
                executor.close()
            except PenstockError as error:
                self.errors.append(error)
        self.flow.close()
        self._alignment.close()
        for inbox in self._inboxes.values():
            inbox.close()

    # ---- rows in ---------------------------------------------------------------------------------------

    def offer(self, frame: pa.Buffer) -> bool:
        """Take a frame that has arrived, or say no because there is no room: offer it again later."""
        header = unpack(memoryview(frame))
        if header.target_stage < self.id.stage:
            raise PenstockError(
                f"worker {self.id}", f"a frame for stage {header.target_stage} arrived, which is not a later stage"
            )
        if header.target_stage > self.id.stage:
            return self._relay.offer(header, frame, self._between)
        if header.kind == Kind.WARM:
            self._warm.add(header.source_worker)
            return True
        if header.kind == Kind.MARKER:
            if header.rows:
                self._last = header.epoch
            self._alignment.marker(header.epoch, header.source_worker)
            return True
        inbox = self._inboxes.get(header.target_task)
        if inbox is None:
            raise PenstockError(
                f"worker {self.id}",
                f"a frame for task {header.target_task} arrived, but it runs tasks {list(self._tasks)}",
            )
        parcel = Parcel(header, frame)
        taken = self._alignment.hold(parcel) or inbox.offer(parcel)
        if self._is_open:
            self._observe()  # here too: the main loop may be in a long execute
        return taken

    @property
    def _between(self) -> bool:
        """Two have this worker's input at the moment: what is for the one that goes on waits here, whatever it is,
        and who sends it must not, for the marker that ends this comes behind it."""
        return self.left or self._departure.requested or (self._takes_over and not self._is_open)

    # ---- turns -----------------------------------------------------------------------------------------

    def turn(self) -> list[Row]:
        """Do a moment's work and return the rows to send, in order."""
        if self.left:
            return []
        self._relay_frames()
        self._alignment.refill(self._accept)
        self._note_behind()
        self._run_ticks()
        for spout in self._spouts:
            spout.expire()
        self.flow.release()
        self._spout_emitted = not self._run_bolts() and not self._epoch_ends() and self._run_spouts()
        if self._spout_emitted or self._bolts or self._out or self._holds_rows():
            idle = not self._spout_emitted and not self._relay and not any(bolt.may_run for bolt in self._bolts)
            self._flush(idle)
            self._out.nudge(idle)
        self._observe()
        return self._out.take()

    def idle_for(self) -> float:
        """Seconds the driver may wait before the next turn unless a row or a command comes; 0 for none."""
        if self.left:
            return 1.0
        if self._relay or any(bolt.may_run for bolt in self._bolts):
            return 0.0
        stores = [executor.given_up for executor in self.executors if executor.given_up is not None]
        wakes = [store.wake_at for store in stores if store.wake_at is not None]
        waits_for_stores = self._waits_for_sinks or bool(wakes)
        if self._epoch_over and not any(bolt.busy for bolt in self._bolts) and not waits_for_stores:
            return 0.0
        waiting = self._alignment.next_task
        if waiting is not None and self._inboxes[waiting].has_room:
            return 0.0
        pause = 0.0 if self._spout_emitted else self._settings.transport.spout_pause
        only_spouts = not self._linger.waiting and not self._out and not self._bolts
        if only_spouts and any(spout.room > 0 for spout in self._spouts):
            return pause  # asked every millisecond
        now = self._clock.monotonic()
        waits = [1.0, self.flow.wait(), *(spout.wait() for spout in self._spouts)]
        ticking = [] if self._no_ticks else [b for b in self._bolts if b.next_tick and not b.send_queues.held_back]
        waits += [bolt.next_tick - now for bolt in ticking if bolt.next_tick is not None]
        waits += [sink.wake_at - now for sink in self._sinks if sink.wake_at is not None]
        waits += [wake_at - now for wake_at in wakes]
        emits = any(spout.room > 0 for spout in self._spouts)  # behind wait(): room found since then is not missed
        if emits:
            waits.append(pause)
        return max(0.0, min(*waits, self._linger.wait(now, emits), self._out.wait()))

    def _targets(self, task: int) -> int:
        """How many tasks in other workers a task sends to."""
        plan = self._plan
        return sum(len(plan.tasks_of[target]) for target in plan.downstream_of[plan.task[task].component])

    def _accept(self, parcel: Parcel) -> bool:
        return self._inboxes[parcel.header.target_task].offer_inside(parcel)

    def _observe(self) -> None:
        self._note_behind()
        self.flow.observe(self._alignment.ahead())

    def _note_behind(self) -> None:
        behind = self._alignment.behind()
        for task, inbox in self._inboxes.items():
            inbox.behind = behind[task]

    def _relay_frames(self) -> None:
        if self._relay:
            self._relay.release(self._out.send, self._alignment.first, self._departure.last_epoch)

    def _run_bolts(self) -> bool:
        """Run the receivers of what is handed over within the worker first, and their senders only when they
        have nothing left: so a fused group holds no more than one batch between two of its components."""
        for tasks in self._levels:
            worked = [bolt.run() for bolt in tasks]
            if any(worked):
                return True
        return False

    def _run_spouts(self) -> bool:
        emitted = [spout.run() for spout in self._spouts]
        return any(emitted)

    @property
    def _waits_for_sinks(self) -> bool:
        return self._epochs and any(sink.waits for sink in self._sinks)

    @property
    def _no_ticks(self) -> bool:
        return self._resting or self._half_prepared

    def _run_ticks(self) -> None:
        for sink in self._sinks:
            if sink.wake_at is not None and sink.wake_at <= self._clock.monotonic():
                sink.wake()
        if self._no_ticks:
            return
        for bolt in self._bolts:
            due = bolt.next_tick is not None and bolt.next_tick <= self._clock.monotonic()
            if due and not bolt.send_queues.held_back:  # what it emits must be able to leave
                bolt.tick()

    # ---- rows out --------------------------------------------------------------------------------------

    def _flush(self, idle: bool) -> None:
        """Send full frames always, the rest when it is due."""
        now = self._clock.monotonic()
        emits = idle and any(spout.room > 0 for spout in self._spouts)  # not asked for nothing: that is counted
        due = self._linger.over(now, idle, emits)
        if due and self._holds_rows():
            self._linger.sent(now)
        for executor in self.executors:
            executor.flush(only_full=not due)
        self._linger.note(now, self._holds_rows())

    def _holds_rows(self) -> bool:
        return any(executor.waiting() for executor in self.executors)

    def _sender(self, source_task: int) -> Send:
        def send(stream: int, task: int, batch: pa.RecordBatch, born: float, lineage: Lineage | None) -> int:
            target = self._worker_of[task]
            key = (source_task, task, stream)
            header = Header(
                Kind.DATA, target.stage, target.index, self.id.stage, self.id.index, task, source_task, stream
            )
            if target == self.id:
                self._inboxes[task].put(Parcel(header._replace(rows=batch.num_rows, born=born), batch, lineage))
                self.streams.add(source_task, task, batch.num_rows, int(batch.nbytes))
                return int(batch.nbytes)
            sequence = self.sequence.get(key, 0)
            self.sequence[key] = sequence + 1
            epoch = self._alignment.epoch
            header = header._replace(born=born, sequence=sequence, route=self._version, epoch=epoch)
            packed = b"" if lineage is None else lineage.pack()
            frame = codec.encode(header, batch, self._schemas[stream], packed)
            self.frames_sent += 1
            self.flow.send_queue(source_task, task).send(header._replace(rows=batch.num_rows), frame)
            self.streams.add(source_task, task, batch.num_rows, len(frame))
            return len(frame)

        return send

    def reroute(self, component: str, routes: Mapping[int, int], version: int) -> None:
        """Tuples bound for a task on the left go to the one on the right from now on (migration)."""
        if version < self._version:
            return  # told late
        self._version = version
        tasks = self._plan.tasks_of[component]
        for executor in self.executors:
            source = executor.context.task
            if component not in self._plan.downstream_of[executor.context.component]:
                continue
            for output in executor.outputs.values():
                self.segments.extend((source, segment) for segment in output.reroute(tasks, routes))
            self.flow.exclude_tasks(source, component, tuple(routes))

    def set_rate(self, component: str, rate: float) -> None:
        """The tasks of a spout may emit so many tuples a second from now on, all together."""
        for spout in self._spouts:
            if spout.context.component == component:
                spout.pace.set(rate / spout.context.parallelism, self._clock.monotonic())

    def hold_timeouts(self, held: bool) -> None:
        """While a sink is away no tuple times out; then each has its whole time again."""
        for spout in self._spouts:
            spout.hold_timeouts(held)
        for bolt in self._bolts:
            bolt.hold_timeouts(held)

    @property
    def sinks_unavailable(self) -> bool:
        """A sink of this worker takes nothing."""
        now = self._clock.monotonic()
        return any(sink.unavailable_for(now) for sink in self._sinks)

    # ---- acks (at least once) --------------------------------------------------------------------------

    def take_acks(self) -> tuple[list[FailedRoots], bytes | None]:
        """What is to be told to the acker, in this order. A task's tally leaves when nothing it emitted waits:
        so what it emitted is in it together with the acks of what that stems from."""
        failed: list[FailedRoots] = []
        for executor in self.executors:
            tracker = executor.tracker
            if tracker is None:
                continue
            if tracker.failed:
                failed += tracker.failed
                tracker.failed = []
            if tracker.tally and not executor.waiting():
                self._tallies += tracker.tally.take()
        if not self._tallies:
            return failed, None
        now = self._clock.monotonic()
        if now - self._tally_sent < _ACK_PAUSE and any(bolt.busy for bolt in self._bolts):
            return failed, None
        self._tally_sent = now
        tallies, self._tallies = self._tallies, []
        return failed, ledger.pack(tallies)

    def settle(self, task: int, numbers: npt.NDArray[np.int64], failure: Failure | None) -> None:
        """The acker's word on a spout task's roots."""
        for spout in self._spouts:
            if spout.context.task == task:
                spout.settle(numbers, failure)

    # ---- epochs ----------------------------------------------------------------------------------------

    def announce(self, epoch: int, last: bool = False) -> None:
        """To the first stage: end the epoch as soon as may be. ``last``: another start waits for it, so nothing is
        written that was written before; the markers tell the later stages."""
        self._announced = epoch
        if last:
            self._last = epoch

    def snapshot_spouts(self, epoch: int, last: bool = False) -> None:
        """At least once, first: what spouts need not read again is done with everywhere."""
        self._snapshot(epoch, self._spouts, last)

    def snapshot_bolts(self, epoch: int, last: bool = False) -> None:
        """At least once, when all spouts are snapshotted: the bolts' state holds all of that. Where the worker is
        about to leave, they are snapshotted when it does."""
        if not self._departure.postpones(epoch):
            self._snapshot(epoch, self._bolts, last)

    def on_committed(self, epoch: int) -> None:
        for executor in self.executors:
            executor.on_committed(epoch)

    def publish_sinks(self, epoch: int) -> None:
        """Make visible what the sinks prepared. May block: called from the thread that writes snapshots."""
        failed: PenstockError | None = None
        for sink in self._sinks:
            try:
                sink.publish(epoch)
            except SinkRefused:
                raise
            except PenstockError as error:  # the others need not wait for it
                failed = error
        if failed is not None:
            raise failed

    def _epoch_ends(self) -> bool:
        """Where the epoch's last tuple has come and all of them are done with, send what waits, snapshot the
        tasks' state and pass the marker on. True: an end is under way, and the spouts wait for it."""
        if not self._epoch_over:
            return False
        alignment = self._alignment
        self._relay_frames()  # what came before the last marker must leave before ours
        for executor in self.executors:
            executor.flush()
        if any(bolt.busy for bolt in self._bolts):
            return True  # a fused bolt has got work by that
        if not self.flow.release(everything=True):
            return True
        epoch = alignment.epoch
        leaves_with = self._departure.commit_at(epoch)
        if self._epochs:
            if not self._store_dead_letters():
                return True
            ready = [sink.prepare_epoch(epoch) for sink in self._sinks]
            self._half_prepared = any(ready) and not all(ready)
            if not all(ready):
                return True
            for executor in self.executors:
                executor.on_epoch_end(epoch)
                if executor.given_up is not None:
                    executor.given_up.begin(epoch + 1)
            self._snapshot(epoch, self.executors, epoch == self._last or leaves_with is not None)
        elif leaves_with is not None:
            for sink in self._sinks:
                sink.commit_and_leave()
            self._snapshot(leaves_with, self._bolts, last=True)
        self._out.mark(epoch, epoch == self._last)
        if leaves_with is None:
            alignment.advance(self._accept)
        else:
            self._departure.finish()
        return True

    def _store_dead_letters(self) -> bool:
        """What was given up in the epoch is stored before the epoch is committed. False: not yet."""
        stored = [executor.given_up.store() for executor in self.executors if executor.given_up is not None]
        return all(stored)

    @property
    def _epoch_over(self) -> bool:
        """The end of the epoch was announced, and maybe that of the next one too; or its last tuple has come."""
        return self._announced >= self._alignment.epoch or self._alignment.complete

    def _snapshot(self, epoch: int, executors: Sequence[Executor[Any]], last: bool = False) -> None:
        snapshots = {
            executor.key: executor.snapshot(executor.key in self.needs_full_snapshot, not last)
            for executor in executors
        }
        self.needs_full_snapshot -= set(snapshots)
        sinks = [executor for executor in executors if isinstance(executor, SinkExecutor)]
        # Copied in one step: the thread that publishes takes from it meanwhile.
        tokens = {sink.key: [token for _, token in list(sink.tokens)] for sink in sinks}
        self.snapshots.append(WorkerSnapshot(epoch, snapshots, tokens))

    # ---- reports ---------------------------------------------------------------------------------------

    def stats(self) -> dict[int, TaskStats]:
        """The counters of each task, queue lengths brought up to date; none before it is open."""
        if not self._is_open:
            return {}
        for bolt in self._bolts:
            bolt.stats.queued = bolt.queued
            bolt.stats.overflowing = bolt.inbox.overflowing
            bolt.stats.capacity = bolt.inbox.capacity
            bolt.stats.peak, bolt.stats.demand = self.flow.pressure(bolt.context.task)
            inside, size = bolt.arrived_inside
            bolt.stats.arrived, bolt.stats.arrived_bytes = inside + bolt.inbox.behind, size
        now = self._clock.monotonic()
        for sink in self._sinks:
            sink.stats.away = sink.unavailable_for(now)
        for executor in self.executors:
            executor.stats.limit = self.flow.rate(executor.context.task)
            since = executor.calling_since  # read once: the loop sets it meanwhile
            executor.stats.in_call = 0.0 if since is None else self._clock.monotonic() - since
            if isinstance(executor, SpoutExecutor):
                executor.stats.limit = min(executor.stats.limit, executor.pace.rate)
                executor.stats.lag = executor.lag()
            with contextlib.suppress(RuntimeError):  # the task adds a state under our eyes: next time
                state = executor.context.state
                executor.stats.state_keys, executor.stats.state_bytes = state.counted, state.bytes
        return {executor.context.task: executor.stats for executor in self.executors}

    def frames_done(self) -> int:
        """Frames from other workers executed to the end."""
        return sum(bolt.frames_done for bolt in self._bolts)

    def pending(self) -> int:
        """Tuples held here: in inboxes, under execution, emitted and not sent, not acked; and frames to relay."""
        held = sum(bolt.queued + bool(bolt.busy) for bolt in self._bolts)
        held += sum(spout.pending.count for spout in self._spouts if spout.pending is not None)
        held += self._alignment.held + self.flow.held
        return held + sum(executor.waiting() for executor in self.executors) + len(self._relay)

    def settled_below(self) -> dict[str, int]:
        """Of each spout task that waits for acks: all its messages with a smaller number are settled."""
        return {
            str(spout.context.task): spout.pending.oldest for spout in self._spouts if spout.pending is not None
        }

    def _note_error(self, stats: TaskStats, may_stop: bool = True) -> Callable[[Exception], None]:
        def note(error: Exception) -> None:
            assert isinstance(error, PenstockError)
            stats.errors += 1
            stats.last_error = str(error)
            self.errors.append(error)
            stops = may_stop and self._settings.delivery.on_error == "stop" and not isinstance(error, SinkBusy)
            if stops and self.fatal is None:
                self.fatal = error

        return note

    def _publisher(self, task: int) -> Callable[[Sequence[Sequence[Any]]], None]:
        def publish(rows: Sequence[Sequence[Any]]) -> None:
            self.published[task] = [[bounded_cell(cell) for cell in row[:MOST_ROWS]] for row in rows[:MOST_ROWS]]

        return publish
