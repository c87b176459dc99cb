"""One start of a topology's query, from its launch to its end. A topology has one after the other, as it is
started again or replaced; while it is replaced, two."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock.driver.commit_thread import CommitThread
from penstock.driver.commits import Commits
from penstock.driver.control_thread import ControlThread
from penstock.driver.losses import LostWorker, explain
from penstock.driver.migration_controller import MigrationController
from penstock.driver.registry import WorkerConnection, WorkerRegistry
from penstock.driver.server import Coordinator
from penstock.errors import PenstockError, SnapshotCorrupt, StateError, TopologyFailed
from penstock.faults import CrashPoint
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement, assign_slots, fitted
from penstock.protocol.messages import ActivateSpouts, CloseTasks, DeactivateSpouts
from penstock.redaction import redacted
from penstock.spark import shipping
from penstock.spark.capacity import alone, free, release, reserve
from penstock.spark.dataflow import start_query
from penstock.spark.deployment import Deployment
from penstock.spark.exits import exit_status
from penstock.spark.nodes import executor_of, nodes_of
from penstock.spark.session import is_local, log_lines, session_folder, total_slots
from penstock.spark.stage import StageFunction

log = logging.getLogger("penstock.supervisor")

LOOK = 0.2  # seconds between two looks at a query while nothing is reported
_CLOSE_TIMEOUT = 5.0  # seconds for all close() and cleanup() calls together
_TOLD = 0.5  # seconds for the word how a process ended; it comes with the loss itself
_GRACE = 2.0  # seconds for Spark to say why a worker's connection is gone


class QueryLost(Exception):
    """The query ended, or a worker fell silent, through no word of the topology's own."""


class QueryLauncher:
    """Makes starts of deployments, on one Spark session and with one coordinator."""

    def __init__(self, spark: SparkSession, coordinator: Coordinator) -> None:
        self.spark, self.coordinator = spark, coordinator
        self.nodes = nodes_of(spark)
        self.stopping = threading.Event()
        """Nothing is to be started or waited for any more."""
        self._folder = Path(tempfile.mkdtemp(prefix="queries-", dir=session_folder()))
        self._numbers = itertools.count()
        self._holders: set[int] = set()
        self._shipped: Path | None = None

    def new(self, deployment: Deployment, bus: MetricsBus, after: QueryRun | None = None) -> QueryRun:
        """``after``: one that was lost, maybe with a node its workers were to be on; workers go where they were
        then, if they can."""
        return QueryRun(next(self._numbers), deployment, bus, self.coordinator, after)

    def hold(self, deployment: Deployment, timeout: float, elsewhere: int = 0) -> None:
        """Hold the deployment's workers, until ``release``. Raises ``NotEnoughSlots``. ``elsewhere``: workers that
        are held on nodes that are being left."""
        reserve(self.spark, deployment.topology.name, id(deployment), sum(deployment.slots), timeout, elsewhere)
        self._holders.add(id(deployment))

    def release(self, deployment: Deployment) -> None:
        release(id(deployment))
        self._holders.discard(id(deployment))

    def alone(self) -> bool:
        """No other topology holds workers of this session."""
        return alone(self._holders)

    def room(self) -> int:
        """Workers that nobody holds, with those of nodes that were left: they come back where they are needed."""
        present = self.nodes.present()
        return free(self.spark) + total_slots(self.spark) * self.nodes.away // max(1, present)

    def ship_penstock(self) -> None:
        """To nodes that may not have it."""
        context = self.spark.sparkContext
        if not is_local(context.master):
            context.addPyFile(str(shipping.penstock_zip(session_folder())))

    def launch(self, start: QueryRun) -> None:
        """Have the start's query run and its workers connect. The user's modules go along: workers look first in
        what was added last, so each form of a topology finds its own."""
        modules = start.deployment.modules
        if modules is not None and modules != self._shipped:
            self._shipped = modules
            # Spark keeps one file per name, and its list of files as long as the session: so must the files be.
            copy = modules.with_stem(f"{modules.stem}-{start.number}")
            shutil.copy(modules, copy)
            self.spark.sparkContext.addPyFile(str(copy))
        start.launch(self.spark, self._folder, self.go_on)

    def go_on(self) -> None:
        """Asked while something is waited for. Raises ``QueryLost`` where it is no longer wanted."""
        if self.stopping.is_set():
            raise QueryLost("told to stop")

    def close(self) -> None:
        """Nodes that were left are for the session's next topology."""
        with contextlib.suppress(Exception):  # the JVM may be dead, and answers with whatever py4j makes of it
            self.nodes.ask_back()
        shutil.rmtree(self._folder, ignore_errors=True)


class QueryRun:
    """A query with its workers, its epochs and its control loop."""

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        bus: MetricsBus,
        coordinator: Coordinator,
        after: QueryRun | None = None,
    ) -> None:
        self.number, self.deployment, self.bus = number, deployment, bus
        """``number``: no other start of this run has it."""
        self._placement, self._after_a_loss = deployment.placement, after is not None
        if after is not None and after._placement is not None:
            self._placement = SlotPlacement({**after._placement.nodes, **after.places()}, exact=False)
        self.plan, self.settings = deployment.plan, deployment.topology.settings
        self.migrations = MigrationController(deployment.plan, self.settings)
        """What was decided about data migration."""
        self.commits: CommitThread | None = None
        self.epoch = 0
        """The committed epoch it began with, or the last one it committed before it ended."""
        self.published = 0
        """The newest epoch all sinks had published when it gave up its state."""
        self.not_committed = ""
        """Why its last epoch is not, where that is so."""
        self.running_since = math.inf
        self._name = deployment.topology.name
        self._coordinator = coordinator
        placed = deployment.placement is not None
        self.registry: WorkerRegistry = coordinator.begin(number, deployment.plan, bus, deployment.job.key, placed)
        self._control: ControlThread | None = None
        self._query: StreamingQuery | None = None
        self._opens = False
        """The state is its own: before that it only looks at it."""

    # ---- beginning -------------------------------------------------------------------------------------

    def launch(self, spark: SparkSession, folder: Path, go_on: Callable[[], None]) -> None:
        """Start the query and wait until all its workers have connected. ``go_on`` is asked meanwhile, and raises
        where there is no point in waiting any longer."""
        coordinator, job, number = self._coordinator, self.deployment.job, self.number
        placement, slots = self._placement, self.deployment.slots
        if placement is not None and self._after_a_loss:  # of a node maybe, and room with it
            slots = fitted(self.plan, slots, free(spark) + sum(slots))
        self._query = start_query(
            spark,
            slots,
            lambda stage: StageFunction(
                stage, job, coordinator.address, coordinator.secret, number, placement is not None
            ),
            folder,
        )
        if placement is not None:
            here = self.registry.slots
            self.await_(
                lambda: len(here) == sum(slots),
                lambda: f"only {len(here)} of {sum(slots)} slots connected",
                go_on,
            )
            self._place(placement)
        self.await_(lambda: len(self.registry.workers) == self.plan.workers, self._connected, go_on)

    def _place(self, placement: SlotPlacement) -> None:
        nodes = {slot: connection.hello.node for slot, connection in self.registry.slots.items()}
        taken, unmet = assign_slots(self.plan, placement, nodes)
        if unmet and placement.exact:
            raise TopologyFailed(
                f"topology '{self._name}'",
                f"its workers cannot be where they are wanted ({', '.join(unmet)}); there are "
                + (
                    ", ".join(
                        f"{count} slots on {node}" for node, count in sorted(Counter(nodes.values()).items())
                    )
                ),
                "Give the nodes more task slots.",
            )
        self.registry.assign_slots(taken)

    def open(self, go_on: Callable[[], None]) -> None:
        """Open the tasks with what ``deployment.state`` has recovered, and wait until all are open; begin to
        commit and to control."""
        state = self.deployment.state
        self.epoch, self._opens = state.epoch, True
        self.registry.open(state.generation, state.epoch, state.tasks())
        self.await_(lambda: all(worker.ready for worker in self.registry.workers.values()), self._ready, go_on)
        if self.settings.delivery.guarantee == "exactly_once" or (self.keeps_state and self.stateful):
            self.start_commits(self.settings.delivery.epoch_interval)
        self._start_control()
        self.running_since = time.monotonic()

    @property
    def keeps_state(self) -> bool:
        """What is committed survives the query."""
        return self.settings.delivery.guarantee != "at_most_once"

    @property
    def stateful(self) -> bool:
        """A task has something to commit."""
        return any(worker.stateful for worker in self.registry.workers.values())

    def start_commits(self, interval: float) -> None:
        """Commit epochs from now on, every ``interval`` seconds and when asked."""
        self.epoch = self.deployment.state.epoch
        state, changed = self.deployment.state, self._coordinator.changed
        crash = CrashPoint(self.settings.lifecycle.crash_at if self.number == 0 else "", "driver")
        send = self.registry.send
        commits = Commits(
            self.plan,
            self.settings.delivery.guarantee,
            interval,
            state.store,
            state.owner,
            self.epoch,
            send,
            crash,
        )

        def notify() -> None:
            with changed:
                changed.notify_all()

        self.commits = CommitThread(commits, state.store, self.registry.epoch_events, notify)
        self.commits.start()

    def begin_handover(self) -> None:
        """Where nothing is committed while a topology runs, its state is, to hand it over."""
        if self.commits is not None:
            return
        if not self.keeps_state:
            if self.epoch == 0:  # it began from nothing: what is there was of another run
                self.deployment.state.clear()
            self.deployment.state.recover()
        self.start_commits(math.inf)

    def _start_control(self) -> None:
        """A start has the routes of the plan, so the policies begin anew."""
        self._control = ControlThread(
            self.migrations, self.bus, self.registry.send, self.settings.migration.interval
        )
        if self.settings.migration.enabled:
            self._control.start()

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition, looked at whenever a worker says something, holds."""
        return self._coordinator.wait(condition, timeout)

    def await_(self, condition: Callable[[], bool], so_far: Callable[[], str], go_on: Callable[[], None]) -> None:
        """Wait for what must hold within the setting ``lifecycle.start_timeout``."""
        registry, deadline = self.registry, time.monotonic() + self.settings.lifecycle.start_timeout
        while not self._coordinator.wait(
            lambda: condition() or registry.failure is not None or bool(registry.corrupt), LOOK
        ):
            self.raise_if_dead()
            go_on()
            if time.monotonic() > deadline:
                raise TopologyFailed(
                    f"topology '{self._name}'",
                    f"{so_far()} within {self.settings.lifecycle.start_timeout:g} s",
                    "Raise lifecycle.start_timeout, or look for an open() or prepare() that hangs.",
                )
        self.raise_if_dead()

    def _connected(self) -> str:
        return f"only {len(self.registry.workers)} of {self.plan.workers} workers connected"

    def _ready(self) -> str:
        return (
            f"only {sum(worker.ready for worker in self.registry.workers.values())} of {self.plan.workers} "
            "workers opened their tasks"
        )

    # ---- running ---------------------------------------------------------------------------------------

    @property
    def nodes(self) -> set[str]:
        """Where its workers are."""
        return {connection.hello.node for connection in self.registry.workers.values()}

    def places(self) -> dict[WorkerId, str]:
        """The node of each worker that has connected."""
        with self._coordinator.changed:
            return {worker: connection.hello.node for worker, connection in self.registry.workers.items()}

    def slots_on(self, executors: Collection[str]) -> int:
        """Tasks of Spark's that it has on these executors."""
        connections = (self.registry.slots or self.registry.workers).values()
        return sum(executor_of(connection.hello.node) in executors for connection in connections)

    def activate(self) -> None:
        self.registry.send(ActivateSpouts())

    def deactivate(self) -> None:
        self.registry.send(DeactivateSpouts())

    @property
    def committed(self) -> int:
        """The newest committed epoch; 0 for none."""
        thread = self.commits
        return self.epoch if thread is None else thread.commits.committed

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit; None where this start has made none."""
        at = None if self.commits is None else self.commits.commits.committed_at
        return None if at is None else time.monotonic() - at

    def raise_if_dead(self) -> None:
        """Raises ``QueryLost`` where starting again may help, else why it does not."""
        if self.commits is not None and self.commits.error is not None:
            raise self.commits.error
        if self.registry.corrupt:
            if not self._opens:
                raise SnapshotCorrupt(
                    f"topology '{self._name}'", f"its state cannot be read: {self.registry.corrupt}"
                )
            self.deployment.state.fall_back(self.registry.corrupt)
            raise QueryLost(f"its state of epoch {self.epoch} cannot be read")
        failure = self.registry.failure
        if failure is not None:
            error = TopologyFailed(failure.where, failure.problem, failure.hint)
            raise QueryLost(str(error)) if failure.passing else error
        query = self._query
        if query is not None and not query.isActive:
            raise QueryLost(self._explain(_why(query)))

    def _explain(self, cause: str) -> str:
        """What was lost: the worker whose connection ended first, and how its process ended."""
        with self._coordinator.changed:
            gone = [each for each in self.registry.workers.values() if not each.connected and not each.closed]
        gone.sort(key=lambda each: each.gone_at)
        lost = [self._lost(each) for each in gone]
        executor_lost = "ExecutorLost" in cause
        status = exit_status(lost[0].pid, time.monotonic() + _TOLD) if lost and not executor_lost else None
        return explain(lost, status, executor_lost, cause)

    def _lost(self, connection: WorkerConnection) -> LostWorker:
        tasks = tuple(self.plan.task[task].key for task in self.plan.routes.tasks_of(connection.id))
        return LostWorker(str(connection.id), tasks, connection.hello.pid, connection.hello.node)

    def raise_if_silent(self) -> None:
        for worker, (connected, seconds) in self.registry.silent_for().items():
            if seconds > (self.settings.lifecycle.heartbeat_timeout if connected else _GRACE):
                lost = self._lost(self.registry.workers[worker])
                if connected:
                    raise QueryLost(
                        f"{worker} has said nothing for {seconds:.0f} s (setting lifecycle.heartbeat_timeout)"
                    )
                status = exit_status(lost.pid, time.monotonic())
                raise QueryLost(explain([lost], status, False, "nothing, and its query still runs"))

    # ---- ending ----------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is in flight; of use once the spouts are inactive. False: still busy, or broken."""
        registry, deadline = self.registry, time.monotonic() + timeout
        before: tuple[int, int] | None = None
        while time.monotonic() < deadline and not registry.broken:
            number = registry.probe()
            answered = self._coordinator.wait(
                lambda: registry.broken or registry.answered(number),  # noqa: B023 - waited for within the turn
                deadline - time.monotonic(),
            )
            counts = registry.in_flight(number) if answered and not registry.broken else None
            if counts is not None and counts == before:
                return True
            before = counts
        return False

    def commit_last(self, timeout: float) -> bool:
        """Commit what is there, so that the next start goes on where this one ends. False: it was not to be."""
        if self.commits is None:
            return True
        if self.registry.broken:
            self.not_committed = "a worker was lost before the last epoch was committed"
            return False

        def go_on() -> None:
            if self.registry.broken:  # nobody is to wait for an epoch that cannot come any more
                raise StateError("commits", "a worker was lost before the last epoch was committed")

        try:
            self.commits.commit_now(timeout, last=True, go_on=go_on)
        except PenstockError as error:
            log.warning(
                "topology '%s': its last epoch is not committed (%s); the next start does it again",
                self._name,
                error,
            )
            self.not_committed = f"the last epoch is not committed ({str(error).rstrip('.')})"
            return False
        return True

    def close(self) -> None:
        """Have all tasks closed."""
        self.registry.send(CloseTasks())
        self._coordinator.wait(lambda: self.registry.all_closed, _CLOSE_TIMEOUT)

    def give_up_state(self) -> None:
        """Commit and control nothing more."""
        if self.commits is not None:
            self.commits.stop()
            self.epoch, self.published = self.commits.commits.committed, self.commits.commits.published
            self.commits = None
        if self._control is not None:
            self._control.stop()
            self._control = None

    def stop(self) -> None:
        """Stop the query, whatever state it is in."""
        self.give_up_state()
        if self._query is not None:
            try:
                self._query.stop()
            except Exception as error:  # it may have died in any way, and the JVM with it
                log.debug("topology '%s': stopping its query: %s", self._name, error)
        self._coordinator.end(self.registry)

    def expect_commits(self) -> CommitThread:
        """Raises ``StateError`` where nothing is committed."""
        if self.commits is None:
            raise StateError(
                f"topology '{self._name}'",
                f"it does not run, or keeps no state (its delivery is {self.settings.delivery.guarantee})",
            )
        return self.commits


# A line that says why: a Python error, the root of a Java one, or a worker that is gone.
_CAUSE = re.compile(r"\s*([\w.]+(Error|Exception): |Caused by: |.*(crashed|exited unexpectedly|ExecutorLost))")


def _why(query: StreamingQuery) -> str:
    error = query.exception()
    if error is None:
        return "the query ended"
    lines = str(error).splitlines() or log_lines()[-1:] or ["the query ended"]
    told = [line.strip() for line in lines if _CAUSE.match(line)]
    return redacted((told or lines)[0])[:300]
