"""A topology without Spark: the driver as it is, with an engine and workers in memory, on a simulated clock.

Workers answer what the driver tells them a moment later, as real ones do. A test makes them mute, has them die, or
has a step refused, and looks at what is left.
"""

import dataclasses
import itertools
import threading

from penstock import Delivery, Lifecycle, Placement, Settings, TopologyBuilder
from penstock.driver.commit_thread import CommitLoop
from penstock.driver.deployment import make_deployment
from penstock.driver.engine import Shortage
from penstock.driver.lifecycle import OVER, RUNNING
from penstock.driver.query_run import RunContext
from penstock.driver.registry import WorkerConnection, WorkerRegistry
from penstock.driver.supervisor import Supervisor
from penstock.errors import ControlRefused, StateError
from penstock.plan.model import WorkerId
from penstock.protocol import codec, wire
from penstock.protocol import events as m
from penstock.protocol.handover import FlowHandover, HandoverState
from penstock.testing import CaptureBolt, FeederSpout
from tests.unit.simulated import SimulatedWaiter

LATENCY = 0.01  # seconds until a worker answers


def topology(folder, guarantee, tasks=2, spare_slots=0):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"))
    builder.set_bolt("count", CaptureBolt(), tasks).fields_grouping("numbers", "x")
    settings = Settings(
        delivery=Delivery(guarantee, state_dir=str(folder)),
        placement=Placement(spare_slots=spare_slots),
        lifecycle=Lifecycle(start_timeout=20.0, drain_timeout=5.0, max_restarts=3),
    )
    return builder.build("words", settings)


class FakeWorker:
    """One task of the engine: the worker's end of a control connection, and the writer of the driver's end."""

    def __init__(self, world, registry, launch, slot, node):
        self.world, self.registry, self.launch, self.id = world, registry, launch, slot
        self.active = self.open = self.alive = False
        self.leaves = None
        hello = m.Hello(slot.stage, slot.index, launch.attempt, next(world.numbers), node)
        self.connection = WorkerConnection(hello, self)
        world.after(LATENCY, self._connect)

    def _connect(self):
        if self.world.mute:
            return
        try:
            self.registry.add(self.connection)
        except ControlRefused as error:  # the coordinator closes its connection
            self.world.refused.append(error)
            return
        self.alive = True
        self.say(m.ChannelsWarm())

    def say(self, *messages):
        for message in messages:
            self.world.after(LATENCY, lambda message=message: self._arrive(message))

    def _arrive(self, message):
        if self.alive and not self.world.mute:
            self.registry.handle(self.connection, message)

    def die(self):
        if self.alive:
            self.alive = self.active = self.open = False
            self.registry.connection_lost(self.connection)

    # ---- the writer ------------------------------------------------------------------------------------

    def write(self, data):
        message = codec.decode_command(data[wire.LENGTH.size :])
        self.world.after(0.0, lambda: self._hear(message))

    def close(self):
        self.alive = self.active = self.open = False

    def _hear(self, message):
        answer = getattr(self, f"_on_{type(message).__name__}", None)
        if self.alive and not self.world.mute and answer is not None:
            answer(message)

    # ---- what it does ----------------------------------------------------------------------------------

    def _on_AssignWorker(self, message):  # noqa: N802
        self.id = WorkerId(self.id.stage, message.worker)

    def _on_PrefetchState(self, message):  # noqa: N802
        self.say(m.StatePrefetched(message.epoch))

    def _on_OpenTasks(self, message):  # noqa: N802
        if self.launch.attempt in self.world.cannot_open:
            self.say(m.WorkerFailed("component 'count'", "its prepare() raised ValueError: no such table", ""))
        else:
            self.open = True
            self.say(m.TasksOpened(stateful=True))

    def _on_ActivateSpouts(self, message):  # noqa: N802
        assert self.open, "spouts emit only where tasks are open"
        self.active = self.id.stage == 0

    def _on_DeactivateSpouts(self, message):  # noqa: N802
        self.active = False

    def _on_HandOnUnfinished(self, message):  # noqa: N802
        self.say(m.UnfinishedHandedOn(0))

    def _on_RequestReport(self, message):  # noqa: N802
        self.say(m.WorkerReport(7, 7, 0, 0.0, 0, {}, probe=message.number))

    def _on_EndEpoch(self, message):  # noqa: N802
        """Markers pass through all stages."""
        for worker in self.world.workers_of(self.launch):
            worker.end_epoch(message.epoch)

    def end_epoch(self, epoch):
        if self.world.guarantee == "exactly_once" and self.open:
            self.say(m.SnapshotWritten(epoch, {}))
        if self.leaves == epoch:
            self.say(m.WorkerLeft(HandoverState(epoch, 0, [], [], [], FlowHandover({}, {}, []), {})))

    def _on_TakeSnapshot(self, message):  # noqa: N802
        if message.what == "spouts":
            self.say(m.SpoutsSnapshotted(message.epoch))
        self.say(m.SnapshotWritten(message.epoch, {}))

    def _on_EpochCommitted(self, message):  # noqa: N802
        self.say(m.EpochPublished(message.epoch))

    def _on_CloseTasks(self, message):  # noqa: N802
        self.open = self.active = False
        self.say(m.TasksClosed())

    def _on_RouteWorker(self, message):  # noqa: N802
        self.say(m.WorkerRouted(message.worker, message.slots))

    def _on_PrepareToLeave(self, message):  # noqa: N802
        self.leaves = message.epoch
        self.say(m.LeavePrepared(message.commit))

    def _on_CancelLeave(self, message):  # noqa: N802
        self.leaves = None


class FakeQuery:
    """Implements ``driver.engine.Query``."""

    def __init__(self, launch, workers):
        self.launch, self.workers, self.ended = launch, workers, ""

    def is_active(self):
        return not self.ended

    def why_ended(self):
        return self.ended

    def stop(self):
        self._end("it was stopped")

    def lose(self):
        """As when one of its processes is killed."""
        self._end("a task was lost")

    def _end(self, why):
        self.ended = self.ended or why
        for worker in self.workers:
            worker.die()


class FakeEngine:
    """Implements ``driver.engine.Engine``: so many nodes with so many task slots each."""

    def __init__(self, world, nodes=2, slots=20):
        self.world, self.slots = world, slots
        self.names = [str(number) for number in range(nodes)]
        self.held, self.queries, self.nodes_away, self.closed = {}, [], 0, False

    def nodes_settled(self):
        return True

    def reserve(self, holder, slots, elsewhere=0):
        free = self.free_slots() + elsewhere
        if holder not in self.held and free < slots:
            return Shortage(free, self.total(), "memory", final=True)
        self.held.setdefault(holder, slots)
        return None

    def free(self, holder):
        self.held.pop(holder, None)

    def free_slots(self):
        return self.total() - sum(self.held.values())

    def total(self):
        return self.slots * len(self.names)

    def cores(self):
        return self.total()

    def shared_with_others(self, holders):
        return not set(self.held) <= set(holders)

    def launch(self, launch):
        registry = self.world.server.registries[launch.attempt]
        nodes = itertools.cycle(f"host/{name}" for name in self.names)
        slots = [WorkerId(stage, index) for stage, count in enumerate(launch.slots) for index in range(count)]
        workers = [FakeWorker(self.world, registry, launch, slot, next(nodes)) for slot in slots]
        self.queries.append(FakeQuery(launch, workers))
        return self.queries[-1]

    def exit_status(self, pid, patience):
        return -9

    def nodes(self):
        return list(self.names)

    def can_release_nodes(self):
        return True

    def release_nodes(self, nodes):
        for node in nodes:
            self.names.remove(node.rpartition("/")[2])
            self.nodes_away += 1

    def take_nodes_back(self):
        count, self.nodes_away = self.nodes_away, 0
        if count:
            self.world.after(1.0, lambda: self._join(count))

    def _join(self, count):
        self.names += [f"new-{next(self.world.numbers)}" for _ in range(count)]

    def pickle(self, value):
        return b""

    def user_modules(self):
        return None

    def warning(self):
        return ""

    def last_log_lines(self):
        return "nothing"

    def close(self):
        self.closed = True


class FakeServer:
    """The driver's end of the connections, without a network."""

    def __init__(self):
        self.changed = threading.Condition()
        self.address, self.secret, self.registries, self.running = ("memory", 1), b"", {}, False

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def begin(self, attempt, plan, bus, key, *more):
        made = WorkerRegistry(attempt, plan, bus, key, self.changed, lambda call: call(), *more)
        self.registries[attempt] = made
        return made

    def end(self, registry):
        self.registries.pop(registry.attempt, None)
        registry.dismiss()


class SimulatedCommits:
    """Implements ``CommitShell``: the loop has its turns while somebody waits."""

    def __init__(self, world, loop: CommitLoop):
        self._waiter, self.loop = world.waiter, loop

    def start(self):
        self._waiter.pumps.append(self._turn)

    def stop(self):
        self.loop.stop()
        self._turn()

    def _turn(self):
        running = True
        while running and not self.loop.events.empty():
            running = self.loop.turn(self._waiter.now())
        if running:
            running = self.loop.turn(self._waiter.now())
        if not running and self._turn in self._waiter.pumps:
            self._waiter.pumps.remove(self._turn)
            self.loop.finish()


class World:
    """One topology, its driver and all around it."""

    def __init__(self, folder, guarantee="exactly_once", spare_slots=0, nodes=2, start=True):
        self.guarantee, self.folder = guarantee, folder
        self.waiter, self.numbers = SimulatedWaiter(), itertools.count(100)
        self.mute = False
        """Nobody answers any more."""
        self.refused = []
        """Why workers were refused."""
        self.cannot_open = set()
        """Attempts whose ``prepare`` raises."""
        self.server, self.engine = FakeServer(), FakeEngine(self, nodes)
        form = topology(folder, guarantee, spare_slots=spare_slots)
        deployment = make_deployment(form, self.engine, None, nodes)
        context = RunContext(
            self.server, self.engine, self.waiter.clock, lambda loop: SimulatedCommits(self, loop)
        )
        self.supervisor = Supervisor(deployment, self.engine, self.server, None, context, self.waiter)
        if start:
            self.supervisor.start()

    def after(self, seconds, event):
        self.waiter.after(seconds, event)

    def workers_of(self, launch):
        return next(query.workers for query in self.engine.queries if query.launch is launch)

    # ---- what is there ---------------------------------------------------------------------------------

    def emitting(self):
        """Attempts whose spouts emit."""
        return {
            query.launch.attempt
            for query in self.engine.queries
            for worker in query.workers
            if worker.active and worker.alive
        }

    def owners(self):
        """Attempts that commit epochs."""
        runs = self.supervisor.runs
        return {runs.current.number} if runs.current.epochs.running else set()

    def query_of(self, attempt):
        return next(query for query in self.engine.queries if query.launch.attempt == attempt)

    # ---- what happens ----------------------------------------------------------------------------------

    def turn_until(self, condition, seconds=400.0):
        """The supervisor has its turns until the condition holds."""
        deadline = self.waiter.now() + seconds
        while not condition():
            assert self.waiter.now() < deadline, f"never so: {self.supervisor.lifecycle.phase}"
            self.supervisor.turn()

    def settle(self):
        """Until nothing is under way any more: neither a change nor a restart, nor a query that is to be
        stopped."""
        life = self.supervisor.lifecycle
        seen, quiet_since = None, self.waiter.now()

        def quiet():
            nonlocal seen, quiet_since
            now = (life.phase, self.supervisor.runs.current.number, self.mute)
            if now != seen or life.phase not in RUNNING or self.mute:
                seen, quiet_since = now, self.waiter.now()
            return life.phase in OVER or self.waiter.now() > quiet_since + 10.0

        self.turn_until(quiet, seconds=1000.0)

    def check(self):
        """What must hold whatever happened."""
        life, runs = self.supervisor.lifecycle, self.supervisor.runs
        life.validate()
        if life.phase in OVER:
            assert self.emitting() == set()
            assert self.engine.held == {}, "all slots are given back"
            assert (self.engine.closed, self.server.running) == (True, False)
            assert not self.waiter.pumps, "nobody commits"
            assert not any(query.is_active() for query in self.engine.queries)
            return
        current = runs.current
        assert self.emitting() == {current.number}, f"exactly one run emits: {self.emitting()}"
        assert set(self.engine.held) == {id(current.deployment)}
        assert set(self.server.registries) == {current.number}
        active = [query.launch.attempt for query in self.engine.queries if query.is_active()]
        assert active == [current.number]
        assert len(self.waiter.pumps) <= 1, "one owner of the state"


class DriverDied(BaseException):
    """The process of the driver is gone: nothing is undone."""


class Fault:
    """Something goes wrong in or after a step of a change of one kind, once."""

    def __init__(self, world, kind, step, what):
        self._world, self._kind, self._step = world, kind, step
        self.struck = False
        runner = world.supervisor.runner
        self._reached, self._carry_out = runner.reached, runner._carry_out
        if what == "refused":
            runner._carry_out = self._refuse
        else:
            runner.reached = self._strike
            self._fault = getattr(self, f"_{what}")

    def _hits(self, step):
        change = self._world.supervisor.runner.change
        if self.struck or change.kind != self._kind or step != self._step:
            return False
        self.struck = True
        return True

    def _strike(self, change, step):
        self._reached(change, step)
        if self._hits(step):
            self._fault(change)

    def _refuse(self, step, cancelled, stop):
        if self._hits(step.name):

            def refuse(do=step.do):
                if self._kind == "shutdown":  # what does not end cannot be given back either
                    do()
                raise StateError("store", "it does not fit")

            step = dataclasses.replace(step, do=refuse)
        return self._carry_out(step, cancelled, stop)

    def _old_lost(self, change):
        self._world.engine.queries[0].lose()

    def _newest_lost(self, change):
        self._world.engine.queries[-1].lose()

    def _mute(self, change):
        self._world.mute = True
        self._world.after(60.0, self._speak)

    def _speak(self):
        """Whoever was silent for so long is not there any more."""
        self._world.mute = False
        for query in self._world.engine.queries:
            query.lose()

    def _killed(self, change):
        self._world.supervisor.ask_to_end(drain=True)

    def _driver_died(self, change):
        raise DriverDied
