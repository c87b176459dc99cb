"""One run of a topology's query, from its launch to its end. Each restart or replacement of a topology begins a
new query run. During a replacement there are two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from penstock.clock import Clock, SystemClock
from penstock.driver.commit_thread import CommitLoop, CommitShell, CommitThread
from penstock.driver.control_thread import ControlThread
from penstock.driver.coordinator import Coordinator
from penstock.driver.deployment import Deployment
from penstock.driver.engine import Engine, Query, QueryLaunch, executor_of
from penstock.driver.migration_controller import MigrationController
from penstock.driver.registry import WorkerRegistry
from penstock.driver.run_epochs import RunEpochs
from penstock.driver.steps import Step, Watch
from penstock.errors import TopologyFailed
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement, assign_slots, fitted
from penstock.protocol.commands import ActivateSpouts, CloseTasks, DeactivateSpouts, StopTicks

CLOSE_TIMEOUT = 5.0
"""Seconds for all ``close`` and ``cleanup`` calls together. One that hangs must not block a replacement or the
end."""
_OPEN_HINT = "Raise lifecycle.start_timeout, or look for an open() or prepare() that hangs."


@dataclass(frozen=True)
class RunContext:
    """What all query runs of a topology share."""

    server: Coordinator
    engine: Engine
    clock: Clock = field(default_factory=SystemClock)
    commit_thread: Callable[[CommitLoop], CommitShell] = CommitThread
    """Makes what runs the commit loop: a thread. Tests pass their own and run the loop themselves."""


class QueryRun:
    """A query with its workers, its epochs and its control loop. Methods are called on the supervisor's thread;
    any thread may read properties."""

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        bus: MetricsBus,
        context: RunContext,
        after: QueryRun | None = None,
    ) -> None:
        """``after``: the lost query run that this one restarts. If that run had a placement, workers return to the
        nodes on which they ran, as far as possible: a node may have been lost, too."""
        self.number = number
        """The attempt, which no other query run of this topology has."""
        self.deployment, self.bus = deployment, bus
        self.plan, self.settings = deployment.plan, deployment.topology.settings
        self.migrations = MigrationController(deployment.plan, self.settings, self.places)
        """Decides about data migration, and has the decisions so far."""
        self.running_since = math.inf
        """When all tasks were open, on the monotonic clock. Infinite before that."""
        self.opened = False
        """Whether the tasks were told to open. From then on this run owns the state; before, it only reads it."""
        self.query: Query | None = None
        self._context, self._is_restart = context, after is not None
        self._server = server = context.server
        self._placement = deployment.placement
        if after is not None and after._placement is not None:
            self._placement = SlotPlacement({**after._placement.nodes, **after.places()}, exact=False)
        self._slots = deployment.slots
        tracked = self.settings.delivery.guarantee == "at_least_once"
        self.registry: WorkerRegistry = server.begin(
            number,
            deployment.plan,
            bus,
            deployment.job.key,
            self._placement is not None,
            deployment.job.ackers if tracked else 0,
            self.settings.lifecycle.heartbeat_timeout,
        )
        self.epochs = RunEpochs(deployment, self.registry, context.clock, context.commit_thread, number == 0)
        self._control: ControlThread | None = None

    @property
    def where(self) -> str:
        """The topology, as error messages name it."""
        return f"topology '{self.deployment.topology.name}'"

    # ---- beginning -------------------------------------------------------------------------------------

    def launch_steps(
        self, watch: Sequence[Watch], last: str = "assigned", meanwhile: Sequence[Step] = ()
    ) -> list[Step]:
        """Return the steps that launch the query, wait until all its workers have connected, and assign their
        slots. ``last``: the name of the last step. ``meanwhile``: steps that are carried out while the workers
        connect."""
        limit = self.settings.lifecycle.start_timeout
        launch = Step("launched", self._launch, undo=self.stop)
        connect = Step(
            "connected",
            until=self._all_connected,
            expected="not all workers connected",
            progress=self._connected,
            limit=limit,
            watch=watch,
            hint=_OPEN_HINT,
        )
        assign = Step(
            last,
            self._assign,
            lambda: len(self.registry.workers) == self.plan.workers,
            expected="not all workers were assigned to a slot",
            limit=limit,
            watch=watch,
        )
        return [launch, *meanwhile, connect, assign]

    def open_steps(self, watch: Sequence[Watch]) -> list[Step]:
        """Return the steps that open the tasks with the state that ``deployment.state`` has recovered, wait for
        the ackers, which start meanwhile, and start commits and migration."""
        opened = Step(
            "tasks_opened",
            self._open,
            lambda: all(worker.ready for worker in self.registry.workers.values()),
            expected="not all tasks opened",
            progress=self._ready,
            limit=self.settings.lifecycle.start_timeout,
            watch=watch,
            hint=_OPEN_HINT,
        )
        ackers = Step(
            "ackers_ready",
            until=lambda: self.registry.ackers.ready,
            expected="not all ackers were started and connected to the workers",
            limit=self.settings.lifecycle.start_timeout,
            watch=watch,
            hint=_OPEN_HINT,
        )
        waits = [ackers] if self.registry.ackers.has_processes else []
        return [opened, *waits, Step("opened", self._begin)]

    def _launch(self) -> None:
        if self._placement is not None and self._is_restart:  # a node may have been lost with its slots
            self._slots = fitted(self.plan, self._slots, self._context.engine.free_slots() + sum(self._slots))
        job, modules = self.deployment.job, self.deployment.modules
        address, secret = self._server.address, self._server.secret
        placed = self._placement is not None
        self.query = self._context.engine.launch(
            QueryLaunch(self.number, job, self._slots, placed, modules, address, secret)
        )

    def _all_connected(self) -> bool:
        if self._placement is not None:
            return len(self.registry.slots) == sum(self._slots)
        return len(self.registry.workers) == self.plan.workers

    def _connected(self) -> str:
        connected = self.registry.workers if self._placement is None else self.registry.slots
        return f"{len(connected)} of {sum(self._slots)} connected"

    def _assign(self) -> None:
        """Have the ackers started, and assign a slot to each worker. Raises ``TopologyFailed`` if the placement is
        exact and cannot be met."""
        if self.registry.ackers.has_processes:
            self.registry.start_ackers()
        if self._placement is None:
            return
        nodes = {slot: connection.hello.node for slot, connection in self.registry.slots.items()}
        assigned, unmet = assign_slots(self.plan, self._placement, nodes)
        if unmet and self._placement.exact:
            there = ", ".join(
                f"{count} slots on {node}" for node, count in sorted(Counter(nodes.values()).items())
            )
            raise TopologyFailed(
                self.where,
                f"these workers cannot run on their requested nodes: {', '.join(unmet)}; the query has {there}",
                "Give the nodes more task slots.",
            )
        self.registry.assign_slots(assigned)

    def _open(self) -> None:
        state = self.deployment.state
        self.epochs.epoch, self.opened = state.epoch, True
        self.registry.open(state.generation, state.epoch, state.tasks(), state.waiting())

    def _ready(self) -> str:
        return f"{sum(worker.ready for worker in self.registry.workers.values())} of {self.plan.workers} opened"

    def _begin(self) -> None:
        """Start commits and migration. The run uses the routes of the plan at first, so migration policies begin
        anew."""
        self.epochs.begin(self.stateful)
        interval = self.settings.migration.interval
        self._control = ControlThread(self.migrations, self.bus, self.registry.send, interval)
        if self.settings.migration.enabled:
            self._control.start()
        self.running_since = self._context.clock.monotonic()

    # ---- running ---------------------------------------------------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """Whether committed state survives the query."""
        return self.settings.delivery.guarantee != "at_most_once"

    @property
    def stateful(self) -> bool:
        """Whether a task has something to commit."""
        return any(worker.stateful for worker in self.registry.workers.values())

    @property
    def nodes(self) -> set[str]:
        """The nodes on which its workers run."""
        return set(self.places().values())

    def places(self) -> dict[WorkerId, str]:
        """The node of each worker that has connected."""
        with self._server.changed:
            return {worker: connection.hello.node for worker, connection in self.registry.workers.items()}

    def slots_on(self, executors: Collection[str]) -> int:
        """Return how many slots of this run are on these nodes, which are named as by ``executor_of``."""
        with self._server.changed:
            connections = list((self.registry.slots or self.registry.workers).values())
        return sum(executor_of(connection.hello.node) in executors for connection in connections)

    def activate(self) -> None:
        self.registry.send(ActivateSpouts())

    def deactivate(self) -> None:
        self.registry.send(DeactivateSpouts())

    def stop_ticks(self) -> None:
        self.registry.send(StopTicks())

    # ---- ending ----------------------------------------------------------------------------------------

    def close_step(self) -> Step:
        """Return the step that closes all tasks. It does not fail if a task is not closed in time."""
        return Step(
            "closed",
            lambda: self.registry.send(CloseTasks()),
            lambda: self.registry.all_closed,
            limit=CLOSE_TIMEOUT,
            on_problem=lambda problem: None,
            cancellable=False,
        )

    def stop_commits(self) -> None:
        """Stop commits and migration."""
        self.epochs.stop()
        if self._control is not None:
            self._control.stop()
            self._control = None

    def stop(self) -> None:
        """Stop the query, whatever state it is in. A second call does nothing."""
        self.stop_commits()
        if self.query is not None:
            self.query.stop()
        self._server.end(self.registry)
