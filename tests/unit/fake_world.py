"""A topology without Spark: the driver as it is, with an engine and workers in memory, on a simulated clock.

Workers answer what the driver tells them a moment later, as real ones do. A test makes them mute, has them die, or
has a step refused, and looks at what is left.
"""

import threading

from penstock import Settings, TopologyBuilder
from penstock.driver.engine import Shortage
from penstock.driver.registry import WorkerConnection, WorkerRegistry
from penstock.plan.model import WorkerId
from penstock.protocol import events as m
from penstock.testing import CaptureBolt, FeederSpout

LATENCY = 0.01  # seconds until a worker answers


class CountBolt(CaptureBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("x")


def topology(folder, guarantee="exactly_once", count=2, **settings):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"))
    builder.set_bolt("count", CountBolt(), count).shuffle_grouping("numbers")
    return builder.build("words", Settings(...))


class FakeWorker:
    """One task of the engine: the worker's end of a control connection, and a writer for the driver's."""

    def __init__(self, world, registry, launch, stage, index, node):
        self.world, self.registry, self.launch = world, registry, launch
        self.id = WorkerId(stage, index)
        self.active = self.open = self.alive = self.closed = False
        self.leaves_at = None
        self.heard = []
        self.connection = WorkerConnection(m.Hello(stage, index, launch.attempt, next(world.pids), node), self)
        world.after(LATENCY, self._connect)

    def _connect(self):
        self.alive = True
        self.registry.join(self.connection)
        self.say(m.ChannelsWarm())

    def say(self, *messages):
        for message in messages:
            self.world.after(LATENCY, lambda message=message: self._deliver(message))

    def _deliver(self, message):
        if self.alive and not self.world.mute(self):
            self.registry.take(self.connection, message)

    def die(self):
        if self.alive:
            self.alive = self.active = False
            self.registry.leave(self.connection)

    # the writer
    def write(self, data):
        message = self.world.decode(data)
        self.world.after(0.0, lambda: self._hear(message))

    def close(self):
        self.alive = self.active = False

    def _hear(self, message):
        if not self.alive or self.world.mute(self):
            return
        self.heard.append(message)
        answer = getattr(self, f"_on_{type(message).__name__}", None)
        if answer is not None:
            answer(message)

    def _on_AssignWorker(self, message):  # noqa: N802
        self.id = WorkerId(self.id.stage, message.worker)

    def _on_PrefetchState(self, message):  # noqa: N802
        self.say(m.StatePrefetched(message.epoch))

    def _on_OpenTasks(self, message):  # noqa: N802
        if self.world.refuses_to_open(self):
            self.say(m.WorkerFailed("component 'count'", "prepare must not raise: no such table", ""))
            return
        self.open = True
        self.say(m.TasksOpened(stateful=True))

    def _on_ActivateSpouts(self, message):  # noqa: N802
        assert self.open, "spouts emit only from open tasks"
        self.active = self.id.stage == 0

    def _on_DeactivateSpouts(self, message):  # noqa: N802
        self.active = False

    def _on_RequestReport(self, message):  # noqa: N802
        self.say(m.WorkerReport(7, 7, 0, 0.0, 0, {}, probe=message.number))

    def _on_EndEpoch(self, message):  # noqa: N802
        """Markers pass through all stages; each worker writes its snapshot."""
        if self.launch.guarantee == "exactly_once":
            for worker in self.world.workers_of(self.launch):
                worker.snapshot(message.epoch)
        else:
            self.world.leave_with(self.launch, message.epoch)

    def _on_TakeSnapshot(self, message):  # noqa: N802
        if message.what == "spouts":
            self.say(m.SpoutsSnapshotted(message.epoch))
        self.snapshot(message.epoch)

    def snapshot(self, epoch):
        self.say(m.SnapshotWritten(epoch, {}))
        if self.leaves_at == epoch:
            self.say(m.WorkerLeft(epoch, {}))

    def _on_EpochCommitted(self, message):  # noqa: N802
        self.say(m.EpochPublished(message.epoch))

    def _on_CloseTasks(self, message):  # noqa: N802
        self.open = self.active = False
        self.say(m.TasksClosed())

    def _on_RouteWorker(self, message):  # noqa: N802
        self.say(m.WorkerRouted(message.worker, message.slots))

    def _on_PrepareToLeave(self, message):  # noqa: N802
        self.leaves_at = message.epoch
        self.say(m.LeavePrepared(message.commit))

    def _on_CancelLeave(self, message):  # noqa: N802
        self.leaves_at = None


class FakeQuery:
    """Implements ``driver.engine.Query``."""

    def __init__(self, workers):
        self.workers, self.ended = workers, ""

    def is_active(self):
        return not self.ended

    def why_ended(self):
        return self.ended

    def stop(self):
        self.ended = self.ended or "stopped"
        for worker in self.workers:
            worker.die()

    def lose(self):
        """As when one of its processes is killed."""
        self.ended = "a task was lost"
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
        free = self.total() - sum(self.held.values()) + elsewhere + self.held.get(holder, 0)
        if free < slots:
            return Shortage(free, self.total(), "memory", final=True)
        self.held[holder] = slots
        return None

    def free(self, holder):
        self.held.pop(holder, None)

    def room(self):
        return self.total() - sum(self.held.values())

    def total(self):
        return self.slots * len(self.names)

    def shared_with_others(self, holders):
        return not set(self.held) <= set(holders)

    def launch(self, launch):
        query = self.world.launch(launch)
        self.queries.append(query)
        return query

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
        self.world.after(1.0, self._join, self.nodes_away)
        self.nodes_away = 0

    def _join(self, count):
        self.names += [f"new-{next(self.world.pids)}" for _ in range(count)]

    def pickle(self, value):
        return b""

    def user_modules(self):
        return None

    def warning(self):
        return ""

    def last_words(self):
        return "nothing"

    def close(self):
        self.closed = True


class FakeServer:
    """The driver's end of the connections, without a network."""

    def __init__(self, world):
        self.world = world
        self.changed = threading.Condition()
        self.address, self.secret, self.registries, self.running = ("memory", 1), b"", {}, False

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def begin(self, attempt, plan, bus, key, placed=False):
        made = WorkerRegistry(attempt, plan, bus, key, self.changed, lambda call: call(), placed)
        self.registries[attempt] = made
        return made

    def end(self, registry):
        self.registries.pop(registry.attempt, None)
        registry.dismiss()


class SimulatedCommits:
    """Implements ``CommitShell``: the loop has its turns whenever somebody waits."""

    def __init__(self, world, loop):
        self.world, self.loop = world, loop

    def start(self):
        self.world.waiter.pumps.append(self._turn)

    def stop(self):
        self.loop.stop()
        self._turn()

    def _turn(self):
        while self._turn in self.world.waiter.pumps:
            if not self.loop.turn(self.world.waiter.now()):
                self.world.waiter.pumps.remove(self._turn)
                self.loop.finish()
            if self.loop.idle:
                break
