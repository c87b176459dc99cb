"""The supervisor: starts a topology's query, watches it, starts it again when a worker or node is lost, and
ends it without noise."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock.coordinator.boards import check_board
from penstock.coordinator.commit_thread import CommitThread
from penstock.coordinator.commits import Commits
from penstock.coordinator.control_thread import ControlThread
from penstock.coordinator.messages import Activate, Close, Deactivate, SetRate
from penstock.coordinator.migrations import Migrations
from penstock.coordinator.recovery import StateDirectory
from penstock.coordinator.runs import Run
from penstock.coordinator.server import Coordinator
from penstock.coordinator.status import Status, take
from penstock.errors import PenstockError, SettingError, StateError, TopologyFailed
from penstock.faults import CrashPoint
from penstock.metrics.bus import MetricsBus
from penstock.plan.planner import make_plan
from penstock.runtime.job import Job, make_job
from penstock.spark import shipping
from penstock.spark.capacity import release, reserve
from penstock.spark.dataflow import start_query
from penstock.spark.operator import Operator
from penstock.spark.pickling import dumps
from penstock.spark.session import (
    is_local,
    log_lines,
    open_session,
    reachable_address,
    session_folder,
)
from penstock.spark.stage import StageFunction
from penstock.state.store import StateStore
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.supervisor")

_LOOK = 0.2  # seconds between two looks at the query while nothing is reported
_CLOSE_TIMEOUT = 5.0  # seconds for all close() and cleanup() calls together
_STABLE = 600.0  # seconds of running after which earlier restarts no longer count against it
_WORKED = 1.0  # seconds of running after which a start was not in vain: the next need not wait longer
_GRACE = 2.0  # seconds for Spark to say why a slot's connection is gone
_FIRST_BACK_OFF = 0.5  # seconds before the first restart; doubled for each one that was in vain
_LONGEST_BACK_OFF = 30.0  # seconds; ten restarts then outlast an outage of two minutes


class RunningTopology:
    """A topology on Spark. Made by ``submit``; usable as a context manager, which kills it at the end."""

    def __init__(self, topology: Topology, spark: SparkSession, host: str, port: int) -> None:
        self.topology = topology
        self.plan = make_plan(topology)
        self.bus = MetricsBus(self.plan)
        self.state = "starting"
        self.restarts = 0
        self.error: PenstockError | None = None
        self.coordinator = Coordinator(self.bus, self.plan, host, port)
        self.epoch = 0
        """The committed epoch the last start began with, or the last one committed before it ended."""
        self._spark, self._settings = spark, topology.settings
        self._state = None if topology.settings.delivery == "at_most_once" else StateDirectory(self.plan, topology)
        self._commits: CommitThread | None = None
        self._control: ControlThread | None = None
        self.migrations = Migrations(self.plan, topology.settings)
        """What was decided about data migration since the last start."""
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._query: StreamingQuery | None = None
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
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        self._wanted = "active"
        self._running_since = 0.0
        self._tries = 0
        """Restarts, for the limit."""
        self._in_vain = 0
        """Restarts that did not run for a second, for the back-off."""

    # ---- for the user ----------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let the spouts emit."""
        with self._lock:
            self._expect_running()
            self.coordinator.send(Activate())
            self._wanted = self.state = "active"

    def deactivate(self) -> None:
        """Let the spouts pause; what is in flight goes on."""
        with self._lock:
            self._expect_running()
            self.coordinator.send(Deactivate())
            self._wanted = self.state = "inactive"

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; of use once the spouts are inactive. False: still busy, or broken."""
        deadline = time.monotonic() + (self._settings.drain_timeout if timeout is None else timeout)
        before: tuple[int, int] | None = None
        while time.monotonic() < deadline and not self._broken():
            counts = self._probe(deadline - time.monotonic())
            if counts is not None and counts == before:
                return True
            before = counts
        return False

    def kill(self, drain: bool = True) -> None:
        """End the topology: pause the spouts, let what is in flight finish, close the tasks, stop. Raises the
        topology's error if it fails on the way."""
        self._stopping.set()
        with self._lock:
            if self.state in ("ended", "failed"):
                return
            if self.state in ("active", "inactive", "ending"):  # the last: interrupted at the first try
                self.state = "ending"
                if drain:
                    self.coordinator.send(Deactivate())
                    if not self.drain() and not self._broken():
                        what = "are lost" if self._state is None else "come again with the next start"
                        limit = self._settings.drain_timeout
                        self.left_behind = f"tuples in flight {what}, {limit:g} s were not enough to drain"
                        log.warning("topology '%s': %s", self.topology.name, self.left_behind)
                    self._commit_last()
                self.coordinator.send(Close())
                self.coordinator.wait(self._all_closed, _CLOSE_TIMEOUT)
            failure = self.coordinator.failure
            if failure is not None:
                self.error = TopologyFailed(failure.where, failure.rule, failure.got, failure.way_out)
            self._end("ended" if failure is None else "failed")
            if self.error is not None:
                raise self.error

    def commit(self, timeout: float = 60.0) -> int:
        """End an epoch now and commit it; returns its number. Raises ``StateError`` where that fails or takes too
        long, or where the topology keeps nothing to commit."""
        return self._committing().commit_now(timeout)

    def savepoint(self, url: str, timeout: float = 60.0) -> int:
        """Commit an epoch now and copy it to ``url``, from where a topology can be started; returns its number."""
        return self._committing().savepoint(StateStore(url), timeout)

    def set_max_rate(self, spout: str, rate: float) -> None:
        """Let a spout emit at most so many tuples a second from now on, its tasks together; ``inf`` for no limit.
        It stays so across restarts of the query."""
        self.set_max_rates({spout: rate})

    def set_max_rates(self, rates: Mapping[str, float]) -> None:
        """The same for several spouts; all of them, or none where one is wrong."""
        for spout, rate in rates.items():
            if spout not in self.plan.spouts:
                raise SettingError(
                    f"{spout}.max_rate", "is a limit of a spout", f"the spouts are {', '.join(self.plan.spouts)}"
                )
            if not isinstance(rate, int | float) or not rate > 0:
                raise SettingError(f"{spout}.max_rate", "is greater than 0 tuples a second", repr(rate))
        for spout, rate in rates.items():
            self._rates[spout] = float(rate)
            self.coordinator.send(SetRate(spout, float(rate)))

    @property
    def max_rates(self) -> dict[str, float]:
        """What each spout may emit; ``inf`` where there is no limit."""
        return {spout: self._rates.get(spout, self.topology.nodes[spout].max_rate) for spout in self.plan.spouts}

    def status(self) -> Status:
        """All there is to see of the topology, now."""
        return take(self)

    def _committing(self) -> CommitThread:
        if self._commits is None:
            raise StateError(
                f"topology '{self.topology.name}'",
                "must run, and keep state",
                f"it is {self.state}, its delivery {self._settings.delivery}",
            )
        return self._commits

    @property
    def committed(self) -> int:
        """The newest committed epoch; 0 for none."""
        thread = self._commits
        return self.epoch if thread is None else thread.commits.committed

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
        if self._state is None:
            if savepoint:
                raise SettingError(
                    "setting delivery",
                    "a savepoint is begun from at least once or exactly once",
                    self._settings.delivery,
                    "Say --set delivery=exactly_once.",
                )
        elif savepoint:
            self._state.adopt(StateStore(savepoint))
        elif fresh:
            self._state.clear()

    # ---- starting --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start and return once the spouts emit. Raises what keeps the topology from running."""
        try:
            check_board(self._settings.board, self._settings.flow)
            reserve(self._spark, self.topology.name, id(self), self.plan.slots, self._settings.start_timeout)
            folder = "" if self._state is None else self._state.store.url
            job = make_job(self.topology, self.plan, folder, dumps)
            self._ship()
            self.coordinator.start()
            self._start_first(job)
            self.begun = time.monotonic()
            self._announce()
        except BaseException as error:
            self._stopping.set()
            if isinstance(error, PenstockError):
                self.error = error
            self._end("failed")
            if isinstance(error, _Lost):
                raise TopologyFailed(f"topology '{self.topology.name}'", "must start", str(error)) from error
            raise
        threading.Thread(target=self._watch, args=(job,), name="supervisor", daemon=True).start()

    def _announce(self) -> None:
        host, port = self.coordinator.address
        self._run = Run(self.topology.name, host, port, self.coordinator.secret.hex(), os.getpid())
        self._run.announce()

    def _start_first(self, job: Job) -> None:
        """A snapshot that cannot be read is no reason not to start, as long as there is an earlier one."""
        while True:
            try:
                self._start_query(job)
                return
            except _Lost:
                if not self.coordinator.corrupt:
                    raise
                self._stop_query()
                self.restarts += 1

    def _ship(self) -> None:
        context = self._spark.sparkContext
        if not is_local(context.master):
            context.addPyFile(str(shipping.penstock_zip(session_folder())))
        # Spark keeps its list of files as long as the session: so must the files be.
        modules = shipping.user_zip(session_folder())
        if modules is not None:
            context.addPyFile(str(modules))

    def _start_query(self, job: Job) -> None:
        """One attempt: query, connections, tasks open, spouts active."""
        attempt, coordinator = self.restarts, self.coordinator
        self._stop_commits()
        self._stop_control()
        coordinator.begin(attempt, job.key)
        deadline = time.monotonic() + self._settings.start_timeout
        self._query = start_query(
            self._spark,
            self.plan,
            lambda stage: StageFunction(stage, job, coordinator.address, coordinator.secret, attempt),
            self._folder,
        )
        self._await(
            lambda: len(coordinator.slots) == self.plan.slots, deadline, "all slots must connect", "connected"
        )
        if self._state is None:
            coordinator.open(0, 0, {})
        else:
            self._state.recover()
            self.epoch = self._state.epoch
            coordinator.open(self._state.generation, self._state.epoch, self._state.tasks())
        self._await(
            lambda: all(slot.ready for slot in coordinator.slots.values()),
            deadline,
            "all tasks must open",
            "ready",
        )
        self._start_commits()
        self._start_control()
        self._running_since = time.monotonic()
        for spout, rate in list(self._rates.items()):  # an operator may set one meanwhile
            coordinator.send(SetRate(spout, rate))
        if self._wanted == "active":
            coordinator.send(Activate())
        self.state = self._wanted

    def _start_commits(self) -> None:
        """Commit epochs from now on, if there is anything to commit."""
        coordinator, state = self.coordinator, self._state
        stateful = any(slot.stateful for slot in coordinator.slots.values())
        if state is None or not (stateful or self._settings.delivery == "exactly_once"):
            return
        crash = CrashPoint(self._settings.crash_at if self.restarts == 0 else "", "driver")
        commits = Commits(
            self.plan, self._settings, state.store, state.generation, state.epoch, coordinator.send, crash
        )

        def notify() -> None:
            with coordinator.changed:
                coordinator.changed.notify_all()

        self._commits = CommitThread(commits, state.store, coordinator.epoch_events, notify)
        self._commits.start()

    def _start_control(self) -> None:
        """A start has the routes of the plan, so the policies begin anew."""
        self.migrations = Migrations(self.plan, self._settings)
        self._control = ControlThread(
            self.migrations, self.bus, self.coordinator.send, self._settings.migration_interval
        )
        if self._settings.migration:
            self._control.start()

    def _stop_commits(self) -> None:
        if self._commits is not None:
            self._commits.stop()
            self.epoch = self._commits.commits.committed
            self._commits = None

    def _stop_control(self) -> None:
        if self._control is not None:
            self._control.stop()
            self._control = None

    def _commit_last(self) -> None:
        """So that the next start goes on where this one ended."""
        if self._commits is None or self._broken():
            return
        try:
            self._commits.commit_now(self._settings.drain_timeout)
        except PenstockError as error:
            log.warning(
                "topology '%s': its last epoch is not committed (%s); the next start does it again",
                self.topology.name,
                error,
            )

    def _await(self, condition: Callable[[], bool], deadline: float, rule: str, what: str) -> None:
        coordinator = self.coordinator
        while not coordinator.wait(
            lambda: condition() or coordinator.failure is not None or bool(coordinator.corrupt), _LOOK
        ):
            self._raise_if_dead()
            if self._stopping.is_set():
                raise _Lost("told to stop")
            if time.monotonic() > deadline:
                count = sum(1 for slot in coordinator.slots.values() if slot.ready or what == "connected")
                raise TopologyFailed(
                    f"topology '{self.topology.name}'",
                    f"{rule} within {self._settings.start_timeout:g} s",
                    f"{count} of {self.plan.slots} {what}",
                    "Raise start_timeout, or look for an open() or prepare() that hangs.",
                )
        self._raise_if_dead()

    # ---- watching --------------------------------------------------------------------------------------

    def _watch(self, job: Job) -> None:
        """Until the end: notice failures and lost slots; start again where that can help."""
        try:
            while not self._stopping.wait(_LOOK):
                try:
                    self._raise_if_dead()
                    self._raise_if_silent()
                except _Lost as loss:
                    self._restart(job, loss)
        except PenstockError as error:
            self._give_up(error)
        except Exception as error:  # a JVM that died answers with whatever py4j makes of it
            self._give_up(
                TopologyFailed(
                    f"topology '{self.topology.name}'",
                    "Spark must stay alive",
                    f"{type(error).__name__}: {error}",
                    "Its last words: " + (" / ".join(log_lines()[-3:]) or "none"),
                )
            )

    def _restart(self, job: Job, loss: _Lost) -> None:
        """Start the query again, with back-off. Raises when it gives up; returns at once when told to stop."""
        ran = time.monotonic() - self._running_since
        if ran > _STABLE:
            self._tries = 0
        if ran > _WORKED:
            self._in_vain = 0
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                if self._tries >= self._settings.max_restarts:
                    raise TopologyFailed(
                        f"topology '{self.topology.name}'",
                        f"gives up after {self._tries} restarts (setting max_restarts)",
                        str(loss),
                    )
                self.state = "restarting"
            self.bus.note("restart", "", str(loss))
            log.warning("topology '%s': %s; starting again", self.topology.name, loss)
            if self._stopping.wait(min(_FIRST_BACK_OFF * 2**self._in_vain, _LONGEST_BACK_OFF)):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                self._tries += 1
                self._in_vain += 1
                self.restarts += 1
                self._stop_query()
                try:
                    self._start_query(job)
                    return
                except (_Lost, TopologyFailed) as again:  # what open() needs may be down for a moment too
                    loss = again if isinstance(again, _Lost) else _Lost(str(again))

    def _raise_if_dead(self) -> None:
        if self._commits is not None and self._commits.error is not None:
            raise self._commits.error
        if self.coordinator.corrupt:
            assert self._state is not None
            self._state.fall_back(self.coordinator.corrupt)
            raise _Lost(f"its state of epoch {self.epoch} cannot be read")
        failure = self.coordinator.failure
        if failure is not None:
            error = TopologyFailed(failure.where, failure.rule, failure.got, failure.way_out)
            raise _Lost(str(error)) if failure.passing else error
        query = self._query
        assert query is not None
        if not query.isActive:
            raise _Lost(_why(query))

    def _raise_if_silent(self) -> None:
        for slot, (connected, seconds) in self.coordinator.silent_for().items():
            if seconds > (self._settings.heartbeat_timeout if connected else _GRACE):
                how = "has been silent" if connected else "has been disconnected"
                raise _Lost(f"slot {slot} {how} for {seconds:.0f} s")

    def _broken(self) -> bool:
        """No drain can succeed any more."""
        coordinator = self.coordinator
        return coordinator.failure is not None or not all(slot.connected for slot in coordinator.slots.values())

    def _all_closed(self) -> bool:
        return all(slot.closed or not slot.connected for slot in self.coordinator.slots.values())

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
            self._stop_commits()
            self._stop_control()
            self._stop_query()
            self.coordinator.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            if self._run is not None:  # not before: who waits for the end waits for this
                self._run.withdraw()
            release(id(self))
            self.state = state
            self._ended.set()

    def _stop_query(self) -> None:
        if self._query is not None:
            try:
                self._query.stop()
            except Exception as error:  # it may have died in any way, and the JVM with it
                log.debug("topology '%s': stopping its query: %s", self.topology.name, error)

    def _probe(self, timeout: float) -> tuple[int, int] | None:
        """Frames sent and done over all slots, asked now; None while anything is on its way."""
        number = self.coordinator.probe()
        slots = self.coordinator.slots

        def answered() -> bool:
            return self._broken() or all(
                slot.answer is not None and slot.answer.probe >= number for slot in slots.values()
            )

        if not self.coordinator.wait(answered, timeout) or self._broken():
            return None
        reports = [slot.answer for slot in slots.values() if slot.answer is not None]
        sent, done = sum(r.frames_sent for r in reports), sum(r.frames_done for r in reports)
        return (sent, done) if sent == done and not any(r.pending for r in reports) else None

    def _expect_running(self) -> None:
        if self.state not in ("active", "inactive"):
            raise TopologyFailed(f"topology '{self.topology.name}'", "must be running", self.state)


# A line that says why: a Python error, the root of a Java one, or a worker that is gone.
_CAUSE = re.compile(r"\s*([\w.]+(Error|Exception): |Caused by: |.*(crashed|exited unexpectedly|ExecutorLost))")


class _Lost(Exception):
    """The query ended, or a slot fell silent, through no word of the topology's own."""


def _why(query: StreamingQuery) -> str:
    error = query.exception()
    if error is None:
        return "the query ended"
    lines = str(error).splitlines() or log_lines()[-1:] or ["the query ended"]
    told = [line.strip() for line in lines if _CAUSE.match(line)]
    return (told or lines)[0][:300]


def submit(
    topology: Topology,
    master: str | None = None,
    host: str | None = None,
    port: int = 0,
    savepoint: str | None = None,
    fresh: bool = False,
) -> RunningTopology:
    """Run a topology on Spark; returns once its spouts emit.

    ``master`` as for Spark; without one, this machine. The coordinator listens on ``host``, by default the
    address of this machine that the master's nodes can reach, and on ``port``, by default any free one.
    At least once and exactly once it goes on from the last committed epoch in its state directory, from a
    ``savepoint`` (a path or URL) instead, or ``fresh`` from nothing.
    """
    spark = open_session(master)
    running = RunningTopology(topology, spark, host or reachable_address(spark.sparkContext.master), port)
    running.prepare(savepoint, fresh)
    running.start()
    return running
