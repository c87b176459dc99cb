"""The supervisor: starts a topology's query, watches it, starts it again when a worker or node is lost, has it
replaced, and ends it without noise."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from pyspark.sql import SparkSession

from penstock.driver.lease_thread import Lease
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.load_sample import MonitorSample
from penstock.driver.migration_controller import MigrationController
from penstock.driver.outcome import Outcome, judge
from penstock.driver.placement_controller import PlacementController
from penstock.driver.registry import WorkerConnection
from penstock.driver.retrying import retried
from penstock.driver.runs import Run
from penstock.driver.scaling_controller import ScalingController
from penstock.driver.server import Coordinator
from penstock.driver.status import TopologyStatus, take
from penstock.errors import PenstockError, SettingError, StateUnavailable, TopologyFailed
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, WorkerId
from penstock.plan.slot_placement import SlotPlacement
from penstock.protocol.message_board import check_message_board
from penstock.protocol.messages import SetSpoutRate
from penstock.spark.capacity import await_nodes
from penstock.spark.changes import Changes
from penstock.spark.deployment import make_deployment
from penstock.spark.move import Moved, MoveRequest
from penstock.spark.nodes import nodes_of
from penstock.spark.operator import Operator
from penstock.spark.query_run import LOOK, QueryLauncher, QueryLost, QueryRun
from penstock.spark.replacement import Replaced, ReplaceRequest
from penstock.spark.restarts import Restarts
from penstock.spark.session import exposure, log_lines, open_session, reachable_address
from penstock.state import savepoints
from penstock.state.store import StateStore
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.supervisor")


class RunningTopology:
    """A topology on Spark. Made by ``submit``; usable as a context manager, which kills it at the end."""

    def __init__(
        self, topology: Topology, spark: SparkSession, host: str, port: int, lease: Lease | None = None
    ) -> None:
        """``lease``: on the state directory, where one is kept; it is released at the end."""
        owner = None if lease is None else lease.owner
        deployment = make_deployment(topology, None, _nodes_to_spare(topology, spark), owner)
        self._lease = lease
        self.monitor = LoadMonitor(topology.settings)
        """What executors, streams and nodes are up to, and the energy of that."""
        self.state = "starting"
        self._restarts = Restarts()
        self.error: PenstockError | None = None
        self.coordinator = Coordinator(host, port)
        self._starter = QueryLauncher(spark, self.coordinator)
        self.current = self._starter.new(deployment, MetricsBus(deployment.plan))
        """The start that owns the topology's state and has its spouts."""
        self._changes = Changes(self, self._starter)
        self.load: Callable[[str], Topology] | None = None
        """Makes a topology of FILE[:OBJECT], for ``penstock replace``; what was loaded before is loaded anew."""
        self.declared = topology
        """As its program or file has it, without what was scaled since."""
        self._run: Run | None = None
        self._rates: dict[str, float] = {}
        """Of spouts, as they were set while the topology runs."""
        self.coordinator.operator = Operator(self)
        self.begun: float | None = None
        """When its spouts first emitted, on the monotonic clock."""
        self.ending = threading.Event()
        """Set when the tasks are closed and the query is about to be stopped."""
        self.left_behind = ""
        """What became of tuples in flight at the end, where there was no time for them."""
        self._ended = threading.Event()
        self._stopping = self._starter.stopping
        self._lock = threading.RLock()
        self._wanted = "active"

    @property
    def restarts(self) -> int:
        """How often its query was started again after a loss."""
        return self._restarts.count

    @property
    def topology(self) -> Topology:
        return self.current.deployment.topology

    @property
    def plan(self) -> Plan:
        return self.current.plan

    @property
    def bus(self) -> MetricsBus:
        """Of the current start: a replacement has another one, which goes on counting where this one ended."""
        return self.current.bus

    @property
    def migrations(self) -> MigrationController:
        """What was decided about data migration since the last start."""
        return self.current.migrations

    @property
    def scalings(self) -> ScalingController:
        """What was decided about the number of tasks, and on what grounds."""
        return self._changes.scalings

    @property
    def placements(self) -> PlacementController:
        """What was decided about where workers are."""
        return self._changes.placements

    @property
    def workers(self) -> dict[WorkerId, WorkerConnection]:
        """Those that have connected."""
        return self.current.registry.workers

    @property
    def committed(self) -> int:
        """The newest committed epoch; 0 for none."""
        return self.current.committed

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit; None where the current start has made none."""
        return self.current.commit_age

    @property
    def epoch(self) -> int:
        """The committed epoch the last start began with, or the last one committed before it ended."""
        return self.current.epoch

    # ---- for the user ----------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let the spouts emit."""
        with self._lock:
            self._expect_running()
            self.current.activate()
            self._wanted = self.state = "active"

    def deactivate(self) -> None:
        """Let the spouts pause; what is in flight goes on."""
        with self._lock:
            self._expect_running()
            self.current.deactivate()
            self._wanted = self.state = "inactive"

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; of use once the spouts are inactive. False: still busy, or broken."""
        return self.current.drain(self.topology.settings.lifecycle.drain_timeout if timeout is None else timeout)

    def kill(self, drain: bool = True) -> None:
        """End the topology: pause the spouts, let what is in flight finish, close the tasks, stop. Raises the
        topology's error if it fails on the way."""
        self._stopping.set()
        with self._lock:
            if self.state in ("ended", "failed"):
                return
            current = self.current
            if self.state in ("active", "inactive", "ending"):  # the last: interrupted at the first try
                self.state = "ending"
                limit = self.topology.settings.lifecycle.drain_timeout
                if drain:
                    current.deactivate()
                    if not current.drain(limit) and not current.registry.broken:
                        what = "are lost" if not current.keeps_state else "come again with the next start"
                        self.left_behind = f"tuples in flight {what}, {limit:g} s were not enough to drain"
                        log.warning("topology '%s': %s", self.topology.name, self.left_behind)
                    if not current.commit_last(limit):
                        parts = (self.left_behind, current.not_committed, "the next start does it again")
                        self.left_behind = "; ".join(filter(None, parts))
                current.close()
            elif drain and self.state == "restarting":
                what = "is lost" if not current.keeps_state else "is done again by the next start"
                self.left_behind = f"it was restarting when it was to end: what was not committed {what}"
            failure = current.registry.failure
            if failure is not None:
                self.error = TopologyFailed(failure.where, failure.problem, failure.hint)
            self._end("ended" if failure is None else "failed")
            if self.error is not None:
                raise self.error

    def outcome(self) -> Outcome:
        """Of a topology that has ended: was its work done?"""
        return judge(self.plan.spouts, self.bus.totals(), self.left_behind)

    def commit(self, timeout: float = 60.0) -> int:
        """End an epoch now and commit it; returns its number. Raises ``StateError`` where that fails or takes too
        long, or where the topology keeps nothing to commit."""
        return self.current.expect_commits().commit_now(timeout)

    def savepoint(self, url: str, timeout: float = 60.0) -> int:
        """Commit an epoch now and copy it to ``url``, from where a topology can be started; returns its number."""
        return self.current.expect_commits().savepoint(StateStore(url), timeout)

    def set_max_rate(self, spout: str, rate: float) -> None:
        """Let a spout emit at most so many tuples a second from now on, its tasks together; ``inf`` for no limit.
        It stays so across restarts of the query."""
        self.set_max_rates({spout: rate})

    def set_max_rates(self, rates: Mapping[str, float]) -> None:
        """The same for several spouts; all of them, or none where one is wrong."""
        for spout, rate in rates.items():
            if spout not in self.plan.spouts:
                raise SettingError(
                    f"{spout}.max_rate", f"'{spout}' is not a spout; the spouts are {', '.join(self.plan.spouts)}"
                )
            if not isinstance(rate, int | float) or not rate > 0:
                raise SettingError(f"{spout}.max_rate", f"{rate!r} is not greater than 0 tuples per second")
        for spout, rate in rates.items():
            self._rates[spout] = float(rate)
            self.current.registry.send(SetSpoutRate(spout, float(rate)))

    @property
    def max_rates(self) -> dict[str, float]:
        """What each spout may emit; ``inf`` where there is no limit."""
        return {spout: self._rates.get(spout, self.topology.nodes[spout].max_rate) for spout in self.plan.spouts}

    def replace(self, topology: Topology, reason: str = "by hand", pause: bool = False) -> Replaced:
        """Let another form of the topology take over, while this one runs: other numbers of tasks, or changed
        code. State goes with it by component. Returns when the new one's spouts emit; raises what keeps it from
        that, and then the old one goes on. ``pause``: stop this one first, for where there is no room for both.
        From any thread; one at a time."""
        return self._changes.replace(ReplaceRequest(topology, reason, pause))

    def place(
        self,
        nodes: Mapping[WorkerId, str] | Mapping[str, str],
        reason: str = "by hand",
        leave: Collection[str] = (),
    ) -> Replaced:
        """Let workers, as "1.0", run on other nodes; those that are not named go anywhere. What a node is called,
        and which worker has which tasks, is in ``status().workers``. A replacement by the same topology: state and
        guarantees are those of ``replace``. ``leave``: nodes that Spark need not have any more; workers then go
        where they are wanted as far as Spark spreads them so."""
        placement = SlotPlacement({self._worker(worker): node for worker, node in nodes.items()}, exact=not leave)
        with self._lock:
            request = self._changes.placer.request(placement, frozenset(leave), reason, self.current)
        return self._changes.replace(request)

    def move(self, worker: WorkerId | str, node: str, reason: str = "by hand") -> Moved:
        """Let one worker of bolts, as "1.0", run on another node, while all others go on where they are. Needs a
        slot that is free there (``free_slots``, setting ``placement.spare_slots``). Raises what keeps it from
        that, and then the worker stays."""
        return self._changes.move(MoveRequest({self._worker(worker): node}, reason, self.current.number))[0]

    def _worker(self, worker: WorkerId | str) -> WorkerId:
        known = {str(each): each for each in self.plan.worker_ids()}
        if str(worker) not in known:
            name = f"topology '{self.topology.name}'"
            raise SettingError(name, f"it has no worker {worker}, only {', '.join(known)}")
        return known[str(worker)]

    @property
    def free_slots(self) -> list[tuple[int, str]]:
        """Stages and nodes of slots that workers can move into, one by one."""
        with self.coordinator.changed:
            slots = self.current.registry.slots.items()
            return sorted((slot.stage, each.hello.node) for slot, each in slots if each.free and slot.stage)

    def rearrange(self) -> Replaced | list[Moved] | None:
        """Have ERDM place the workers now, by the load monitor's newest load sample, and leave nodes that it
        empties. Where slots are free workers move one by one, and nodes without any are left the next time; else
        all go by a replacement. None: nothing that is worth it, or there is no load sample yet (``placement`` says
        which)."""
        with self._lock:
            sample = self.monitor.newest(self.bus)
            request = None if sample is None else self._changes.placer.by_hand(sample, self.current)
        if isinstance(request, MoveRequest):
            return self._changes.move(request)
        return None if request is None else self._changes.replace(request)

    def spread(self) -> int:
        """Use all nodes, those that were left too: the workers are spread over them as soon as they have joined.
        Returns how many more there are to be."""
        with self._lock:
            return self._changes.placer.ask_back("by hand: all nodes", self.current)

    def scale(self, parallelism: Mapping[str, int], reason: str = "by hand", pause: bool = False) -> Replaced:
        """The same topology with other numbers of tasks; components that are not named keep theirs."""
        return self.replace(self.topology.scaled(parallelism), reason, pause)

    @property
    def nodes_left(self) -> int:
        """Nodes that were left and not asked for again."""
        return self._starter.nodes.away

    @property
    def moves(self) -> list[Moved]:
        """Workers that moved alone, oldest first."""
        return self._changes.moved

    @property
    def replacements(self) -> list[Replaced]:
        """Those that took place, oldest first."""
        return self._changes.replaced

    def status(self) -> TopologyStatus:
        """All there is to see of the topology, now."""
        return take(self)

    def placement(self) -> str:
        """What ERDM would do by the load monitor's newest load sample, and where slots are free, as JSON."""
        answer, slots = json.loads(self.monitor.placement()), self.free_slots
        answer["free_slots"] = slots
        if slots:
            shown = ", ".join(f"{node} (stage {stage})" for stage, node in slots)
            answer["lines"].append(f"free slots, to move into alone: {shown}")
        return json.dumps(answer)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the topology has ended. Raises its error if it failed; False: it still runs."""
        done = self._ended.wait(timeout)
        if self.error is not None:
            raise self.error
        return done

    def __enter__(self) -> RunningTopology:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def prepare(self, savepoint: str | None, fresh: bool) -> None:
        """Before the start: what to begin with, other than the last committed epoch."""
        if not self.current.keeps_state:
            return
        if savepoint:
            self._ask_store(lambda: self.current.deployment.state.adopt(StateStore(savepoint)))
        elif fresh:
            self._ask_store(self.current.deployment.state.clear)

    def discard(self) -> None:
        """In place of ``start``: leave nothing behind."""
        self._starter.close()
        self.monitor.close()

    def _ask_store(self, action: Callable[[], object]) -> None:
        """Do something with the state store, again and again where it does not answer, until told to stop."""
        patience = self.topology.settings.lifecycle.start_timeout
        retried(action, patience, self._stopping.wait, lambda text: self.bus.note("state", "", text))

    # ---- starting --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start and return once the spouts emit. Raises what keeps the topology from running."""
        settings = self.topology.settings
        try:
            check_message_board(settings.flow.board, settings.flow.mode)
            self._starter.nodes.ask_back()  # which another topology of this session may have left
            self._starter.hold(self.current.deployment, settings.lifecycle.start_timeout)
            self._starter.ship_penstock()
            self.coordinator.start()
            self._start_first()
            self.begun = time.monotonic()
            self._announce()
            self._warn_of_ports()
        except BaseException as error:
            self._stopping.set()
            if isinstance(error, PenstockError):
                self.error = error
            self._end("failed")
            if isinstance(error, QueryLost):
                raise TopologyFailed(f"topology '{self.topology.name}'", f"it did not start: {error}") from error
            raise
        threading.Thread(target=self._watch, name="supervisor", daemon=True).start()

    def _announce(self) -> None:
        self._run = Run.here(self.topology.name, self.coordinator.address, self.coordinator.secret)
        self._run.announce()

    def _start_first(self) -> None:
        """A snapshot that cannot be read is no reason not to start, as long as there is an earlier one."""
        while True:
            try:
                self._start_query()
                return
            except QueryLost:
                if not self.current.registry.corrupt:
                    raise
                self._restarts.count += 1
                self._next_start()

    def _next_start(self) -> None:
        """Of the same deployment; the one before is stopped."""
        self.current.stop()
        self.current = self._starter.new(self.current.deployment, self.current.bus, self.current)

    def _start_query(self) -> None:
        """One attempt: query, connections, tasks open, spouts active."""
        current = self.current
        self._starter.launch(current)
        if current.keeps_state:
            self._ask_store(current.deployment.state.recover)
        else:
            current.deployment.state.forget()
        current.open(self._starter.go_on)
        self._let_go(current)

    def _let_go(self, start: QueryRun) -> None:
        """Its tasks are open: let the spouts emit, if they are to."""
        for spout, rate in list(self._rates.items()):  # an operator may set one meanwhile
            start.registry.send(SetSpoutRate(spout, rate))
        if self._wanted == "active":
            start.activate()
        self.state = self._wanted

    def _warn_of_ports(self) -> None:
        """Where Spark's sockets could not be kept to this machine."""
        text = exposure(self._starter.spark)
        if text:
            log.warning("%s", text)
            self.bus.note("security", "", text)

    # ---- watching --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the end: notice failures and lost workers; start again where that can help."""
        try:
            while not self._stopping.is_set():
                try:
                    self._raise_if_superseded()
                    self._change(self._monitor())
                    self.current.raise_if_dead()
                    self.current.raise_if_silent()
                except QueryLost as loss:
                    self._restart(loss)
                except StateUnavailable as error:  # of a fall back to an earlier epoch
                    self._restart(QueryLost(str(error)))
        except PenstockError as error:
            self._give_up(error)
        except Exception as error:  # a JVM that died answers with whatever py4j makes of it
            self._give_up(
                TopologyFailed(
                    f"topology '{self.topology.name}'",
                    f"Spark failed ({type(error).__name__}: {error})",
                    "Its last log lines: " + (" / ".join(log_lines()[-3:]) or "none") + ".",
                )
            )
        self._changes.refuse()

    def _raise_if_superseded(self) -> None:
        if self._lease is not None and self._lease.error is not None:
            raise self._lease.error

    def _change(self, sample: MonitorSample | None) -> None:
        """Carry out what somebody requests, or a policy."""
        changes = self._changes
        with self._lock:
            changes.stop_replaced()
        request = changes.asked(LOOK)
        with self._lock:
            if request is None and self.state == "active":
                request = changes.decided(sample)
            if request is not None:
                changes.carry_out(request, self._let_go)

    def _monitor(self) -> MonitorSample | None:
        """The load monitor's turn; a load sample, when one has just ended."""
        current = self.current
        with self.coordinator.changed:
            workers = dict(current.registry.workers)
        return self.monitor.poll(time.monotonic(), current.bus, workers)

    def _restart(self, loss: QueryLost) -> None:
        """Start the query again, with back-off. Raises when it gives up; returns at once when told to stop."""
        restarts = self._restarts
        restarts.lost(time.monotonic() - self.current.running_since)
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                if restarts.tries >= self.topology.settings.lifecycle.max_restarts:
                    raise TopologyFailed(
                        f"topology '{self.topology.name}'",
                        f"it failed again after {restarts.tries} restarts (setting "
                        f"lifecycle.max_restarts): {loss}",
                    )
                self.state = "restarting"
            self.bus.note("restart", "", str(loss))
            log.warning("topology '%s': %s; starting again", self.topology.name, loss)
            if self._stopping.wait(restarts.pause):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                restarts.begin()
                self._next_start()
                try:
                    self._starter.nodes.ask_back()  # what is left may be too little now
                    self._start_query()
                    return
                except (QueryLost, TopologyFailed, StateUnavailable) as again:  # what open() needs may be down too
                    loss = again if isinstance(again, QueryLost) else QueryLost(str(again))

    def _give_up(self, error: PenstockError) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._stopping.set()
            self.error = error
            self._end("failed")

    # ---- ending ----------------------------------------------------------------------------------------

    def _end(self, state: str) -> None:
        self.ending.set()
        try:
            self._changes.stop_replaced(at_once=True)
            self.current.stop()
            self.coordinator.stop()
            self._starter.close()
            self.monitor.close()
        finally:
            if self._run is not None:  # not before: who waits for the end waits for this
                self._run.withdraw()
            if self._lease is not None:
                self._lease.release()
            self._starter.release(self.current.deployment)
            self.state = state
            self._ended.set()

    def _expect_running(self) -> None:
        if self.state not in ("active", "inactive"):
            raise TopologyFailed(f"topology '{self.topology.name}'", f"it is {self.state}, not running")


def _nodes_to_spare(topology: Topology, spark: SparkSession) -> int:
    """On how many nodes slots are to be kept free."""
    if not topology.settings.placement.spare_slots:
        return 0
    nodes = nodes_of(spark)
    nodes.ask_back()  # which another topology of this session may have left
    await_nodes(spark, topology.settings.lifecycle.start_timeout)
    return nodes.present()


def submit(
    topology: Topology,
    master: str | None = None,
    host: str | None = None,
    port: int = 0,
    savepoint: str | None = None,
    fresh: bool = False,
    take_over: bool = False,
) -> RunningTopology:
    """Run a topology on Spark; returns once its spouts emit.

    ``master`` as for Spark; without one, this machine. The coordinator listens on ``host``, by default the
    address of this machine that the master's nodes can reach, and on ``port``, by default any free one.
    At least once and exactly once it goes on from the last committed epoch in its state directory, from a
    ``savepoint`` (a path or URL) instead, or ``fresh`` from nothing. Raises ``AlreadyRunning`` where a driver that
    is alive runs the topology on the same state directory; with ``take_over`` that driver is ended instead.
    """
    if savepoint:
        _check_savepoint(topology, savepoint)
    lease = _lease(topology, take_over)
    try:
        spark = open_session(master)
        address = host or reachable_address(spark.sparkContext.master)
        running = RunningTopology(topology, spark, address, port, lease)
        try:
            running.prepare(savepoint, fresh)
        except BaseException:
            running.discard()
            raise
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    running.start()
    return running


def _check_savepoint(topology: Topology, savepoint: str) -> None:
    """Before Spark is started and the state directory is claimed: a wrong path is reported at once."""
    settings = topology.settings
    if settings.delivery.guarantee == "at_most_once":
        raise SettingError(
            "setting delivery",
            f"with {settings.delivery.guarantee} a topology cannot start from a savepoint",
            "Use --set delivery=exactly_once or at_least_once.",
        )
    retried(
        lambda: savepoints.find(StateStore(savepoint)), settings.lifecycle.start_timeout, threading.Event().wait
    )


def _lease(topology: Topology, take_over: bool) -> Lease | None:
    """On the topology's state directory, before Spark is started; None where it keeps no state."""
    settings = topology.settings
    if settings.delivery.guarantee == "at_most_once":
        return None
    lease = Lease(StateStore(settings.delivery.state_dir).child(topology.name), topology.name)
    retried(lambda: lease.take(take_over), settings.lifecycle.start_timeout, threading.Event().wait)
    return lease
