"""The tasks of one worker. Their executors are opened, run and closed together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from penstock.acking.flights import FlightLog
from penstock.clock import Clock
from penstock.control.segments import Segment
from penstock.credentials import resolved_values
from penstock.errors import PenstockError
from penstock.plan.model import WorkerId
from penstock.protocol.job import Job
from penstock.state.values import TaskState
from penstock.topology.components import Component
from penstock.worker.bolts import BoltExecutor
from penstock.worker.executor import Executor
from penstock.worker.flight_tracking import FlightTracker, keeps_flights
from penstock.worker.sinks import SinkExecutor
from penstock.worker.snapshots import Restored
from penstock.worker.spouts import SpoutExecutor
from penstock.worker.task_pass import Level, TaskPass
from penstock.worker.tracking import Tracker
from penstock.worker.wiring import Surroundings, connect_inside, make_executor


class Tasks:
    """All executors of a worker. Used by the worker's loop only."""

    def __init__(self, id: WorkerId, job: Job, clock: Clock) -> None:
        self.is_open = False
        """True if ``open`` has succeeded, also after ``close``."""
        self.all: list[Executor[Any]] = []
        self.bolts: list[BoltExecutor[Any]] = []
        self.sinks: list[SinkExecutor] = []
        self.spouts: list[SpoutExecutor] = []
        self.inside_tracker: Tracker | None = None
        """The edge ids of tuples that bolts passed on inside the worker; None if acks are not tracked."""
        self.flights: FlightLog | None = None
        """None if the driver acks the tuples of the worker's spouts, or acks are not tracked."""
        self._pass = TaskPass((), (), (), clock.monotonic)
        self._id, self._job, self._clock = id, job, clock
        self._tasks = job.plan.routes.tasks_of(id)
        self._instances: dict[int, Component] = {}
        self._ticks_stopped = False

    # ---- life cycle ------------------------------------------------------------------------------------

    def load(self) -> None:
        """Create the component instances of the tasks. This imports their modules, which may take longer than
        everything else, so it is called while the worker still waits for other workers. Raises what the modules
        raise."""
        if not self._instances:
            self._instances = {
                task: self._job.instance(self._job.plan.task[task].component) for task in self._tasks
            }

    def open(
        self, around: Surroundings, restored: Mapping[str, Restored], restored_epoch: int, first: int
    ) -> None:
        """Create the executors and call the components' ``open`` or ``prepare``. ``restored``: the state of each
        task in the committed epoch ``restored_epoch``, by task key. ``first``: the epoch with which the tasks
        begin. Raises the errors of user code, with the name of the component."""
        self.load()
        conf = resolved_values(self._job.settings.conf, "setting conf")
        tracked = self._job.settings.delivery.guarantee == "at_least_once"
        if tracked and keeps_flights(self._job.plan, self._id, list(self._instances.values())):
            self.flights = FlightLog()
            around = replace(around, flights=self.flights)
        for task in self._tasks:
            state = TaskState()
            executor = make_executor(self._job, task, self._instances[task], around, state)
            initial = restored.get(executor.key, Restored())
            if initial.share is None:
                state.restore(initial.parts)
            else:
                state.inherit(initial.sources, initial.share)
            executor.report = around.report(executor.stats)
            if executor.dead_letters is not None:
                executor.dead_letters.begin(first)
            executor.open(conf)
            if isinstance(executor, SinkExecutor):
                executor.recover(initial.tokens, restored_epoch)
            self.all.append(executor)
        self._sort(around)
        self.is_open = True

    def activate(self) -> None:
        """Activate the spouts, and resume the ticks of bolts."""
        self._ticks_stopped = False
        for spout in self.spouts:
            spout.activate()

    def deactivate(self) -> None:
        """Deactivate the spouts."""
        for spout in self.spouts:
            spout.deactivate()

    @property
    def acked_spouts(self) -> list[SpoutExecutor]:
        """The spouts whose roots ackers know. Those of flights are known only here."""
        return self.spouts if self.flights is None else []

    def stop_ticks(self) -> None:
        """Run no ticks until ``activate`` is called."""
        self._ticks_stopped = True

    def close(self) -> list[PenstockError]:
        """Call ``close`` or ``cleanup`` of every component, even if one raises. Returns the errors."""
        errors: list[PenstockError] = []
        for executor in self.all:
            try:
                executor.close()
            except PenstockError as error:
                errors.append(error)
        return errors

    @property
    def most_targets(self) -> int:
        """The largest number of tasks in other workers to which one task of this worker sends; at least 1."""
        plan = self._job.plan
        components = {plan.task[task].component for task in self._tasks}
        return max(
            [1, *(sum(len(plan.tasks_of[to]) for to in plan.downstream_of[component]) for component in components)]
        )

    def _sort(self, around: Surroundings) -> None:
        self.bolts = [each for each in self.all if isinstance(each, BoltExecutor)]
        self.sinks = [each for each in self.all if isinstance(each, SinkExecutor)]
        self.spouts = [each for each in self.all if isinstance(each, SpoutExecutor)]
        if self._job.settings.delivery.guarantee == "at_least_once":
            self.inside_tracker = FlightTracker(0, "") if self.flights else Tracker(self._job.key, "")
        streams = connect_inside(self._job, self.all, around, self.inside_tracker)
        now = self._clock.monotonic
        plan = self._job.plan
        order = [
            component for stage in plan.stages for group in stage.fused_groups for component in group.components
        ]
        levels = []
        for component in order:
            bolts = [bolt for bolt in self.bolts if bolt.context.component == component]
            if bolts:
                levels.append(Level(bolts, streams.get(component, ()), now))
        of_spouts = [stream for spout in plan.spouts for stream in streams.get(spout, ())]
        self._pass = TaskPass(self.spouts, of_spouts, levels, now)

    @property
    def stateful(self) -> bool:
        """True if a task keeps state, implements ``before_snapshot``, or is a transactional sink."""
        return any(
            executor.context.state
            or isinstance(executor, SinkExecutor)
            or type(executor.component).before_snapshot is not Component.before_snapshot
            for executor in self.all
        )

    # ---- turns -----------------------------------------------------------------------------------------

    def run_bolts(self) -> bool:
        """See ``TaskPass.run_bolts``."""
        return self._pass.run_bolts()

    def run_spouts(self) -> bool:
        """See ``TaskPass.run_spouts``."""
        return self._pass.run_spouts()

    def run_ticks(self, allowed: bool) -> None:
        """Wake the sinks whose pause is over, and run the ticks that are due if ticks are ``allowed``."""
        for sink in self.sinks:
            if sink.wake_at is not None and sink.wake_at <= self._clock.monotonic():
                sink.wake()
        if self._ticks_stopped or not allowed:
            return
        for bolt in self.bolts:
            due = bolt.next_tick is not None and bolt.next_tick <= self._clock.monotonic()
            if due and not bolt.send_queues.held_back:  # otherwise the tick's output could not be sent
                bolt.tick()

    def waits(self, now: float, ticking: bool) -> list[float]:
        """Seconds until each time at which a task has something to do: rate limits of spouts, ticks (if
        ``ticking``), pauses of sinks and of dead letter stores. Infinity for none."""
        waits = [spout.wait() for spout in self.spouts]
        if ticking and not self._ticks_stopped:
            waits += [
                bolt.next_tick - now
                for bolt in self.bolts
                if bolt.next_tick is not None and not bolt.send_queues.held_back
            ]
        waits += [sink.wake_at - now for sink in self.sinks if sink.wake_at is not None]
        waits += [
            executor.dead_letters.wake_at - now
            for executor in self.all
            if executor.dead_letters is not None and executor.dead_letters.wake_at is not None
        ]
        return waits

    @property
    def busy(self) -> bool:
        """True if a bolt has work, whether or not it may run."""
        return any(bolt.busy for bolt in self.bolts)

    @property
    def may_run(self) -> bool:
        """True if a bolt has work and its results are accepted (see ``BoltExecutor.may_run``)."""
        return any(bolt.may_run for bolt in self.bolts)

    def may_emit(self) -> bool:
        """True if a spout may emit now. Also measures how long spouts are held back (see
        ``SpoutExecutor.update_room``)."""
        return any(spout.update_room() > 0 for spout in self.spouts)

    def flush(self, only_full: bool = False) -> None:
        """Pass on all tuples for tasks of this worker, and send those for other workers; ``only_full``: only full
        frames."""
        self._pass.pass_on()
        for executor in self.all:
            executor.flush(only_full)

    def has_unsent_rows(self) -> bool:
        """True if rows are emitted and not sent yet."""
        return any(executor.waiting() for executor in self.all)

    def settle_flights(self, flights: FlightLog) -> None:
        """Tell the spouts which of their messages have failed, and which are complete."""
        failed, complete = flights.take()
        spouts = {spout.context.task: spout for spout in self.spouts} if failed or complete else {}
        for message in failed:
            spouts[message.task].on_failed([message.number], message.component, message.error)
        for flight in complete:
            spouts[flight.task].on_complete(flight.numbers())

    # ---- commands --------------------------------------------------------------------------------------

    def set_rate(self, component: str, rate: float) -> None:
        """Set the tuples per second that all tasks of a spout may emit together."""
        for spout in self.spouts:
            if spout.context.component == component:
                spout.pace.set(rate / spout.context.parallelism, self._clock.monotonic())

    def hold_timeouts(self, held: bool) -> None:
        """While ``held``, no tuple times out; the driver does this while a sink is unavailable. Afterwards the
        timeout of every tuple starts again."""
        for spout in self.spouts:
            spout.hold_timeouts(held)
        for bolt in self.bolts:
            bolt.hold_timeouts(held)

    def set_migration_routes(self, component: str, routes: Mapping[int, int]) -> list[tuple[int, Segment]]:
        """Set the migration routes of a component: tuples for a key of ``routes`` go to its value, both of them
        tasks. Returns the segments that this ends, each with the task that sent it."""
        tasks = self._job.plan.tasks_of[component]
        return [
            (executor.context.task, segment)
            for executor in self.senders_to(component)
            for output in executor.outputs.values()
            for segment in output.reroute(tasks, routes)
        ]

    def senders_to(self, component: str) -> Collection[Executor[Any]]:
        downstream = self._job.plan.downstream_of
        return [each for each in self.all if component in downstream[each.context.component]]
