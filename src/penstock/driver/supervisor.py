"""The supervisor: one thread that reports events to the lifecycle of a topology and carries out its decisions.

All changes of the topology are made on this thread, one after the other: requests of users and policies, restarts,
the end. Other threads post requests and wait for the answer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.driver import lifecycle
from penstock.driver.changes import Changes
from penstock.driver.coordinator import Coordinator
from penstock.driver.deployment import Deployment
from penstock.driver.discovery import DriverEntry
from penstock.driver.engine import Engine
from penstock.driver.lease_thread import Lease
from penstock.driver.lifecycle import Decision, Event, TopologyLifecycle, TopologyPhase
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.load_sample import MonitorSample
from penstock.driver.query_run import RunContext
from penstock.driver.query_runs import QueryRuns
from penstock.driver.request_queue import Posted, RequestQueue
from penstock.driver.requests import ChangeRequest
from penstock.driver.restart import FirstStart, Restart
from penstock.driver.shutdown import ShuttingDown
from penstock.driver.steps import (
    Cause,
    Change,
    ConditionWaiter,
    Problem,
    StepRunner,
    Waiter,
    nothing,
)
from penstock.errors import PenstockError, TopologyFailed
from penstock.faults import CrashPoint

log = logging.getLogger("penstock.driver")
T = TypeVar("T")


class Supervisor:
    """Supervises one topology. ``start`` is called once; after that any thread may call ``call``, ``change``,
    ``request``, ``spouts``, ``kill``, ``ask_to_end`` and ``wait``."""

    def __init__(
        self,
        deployment: Deployment,
        engine: Engine,
        server: Coordinator,
        lease: Lease | None = None,
        context: RunContext | None = None,
        waiter: Waiter | None = None,
    ) -> None:
        """``lease``: the lease on the state directory, if the topology keeps state; it is released at the end.
        Tests pass their own ``context`` and ``waiter``."""
        settings = deployment.topology.settings
        self.server, self.engine = server, engine
        self.lifecycle = TopologyLifecycle(deployment.topology.name, settings.lifecycle.max_restarts)
        self.monitor = LoadMonitor(settings)
        """Takes load samples of executors, streams and nodes, and meters their energy."""
        self.left_behind = ""
        """What was not finished at the end, and what happens to it. Empty if everything was."""
        self.begun: float | None = None
        """When the spouts first emitted, on the monotonic clock."""
        self.closing = threading.Event()
        """Set when the tasks are closed and the query is about to be stopped."""
        self._ended, self._stopping, self._hurry = threading.Event(), threading.Event(), threading.Event()
        self._turns = threading.Lock()
        self._requests = RequestQueue(server.changed)
        self._lease = lease
        self._announced: DriverEntry | None = None
        self.runner = StepRunner(
            waiter or ConditionWaiter(server.changed),
            self._stopping.is_set,
            _crash_at(settings.lifecycle.crash_at),
            self._engine_error,
            f"topology '{deployment.topology.name}'",
        )
        self.runs = QueryRuns(deployment, context or RunContext(server, engine), self.runner.pause)
        self.changes = Changes(self.runs, self.runner, self.monitor)

    # ---- for any thread --------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the supervisor's thread, between two changes. Returns its result, or raises its
        exception. Raises ``TopologyFailed`` if the topology has ended."""
        posted = Posted(None, function)
        self._requests.post(posted)
        result: T = posted.answer.result()
        return result

    def change(self, request: ChangeRequest) -> Any:
        """Post a change request and wait. Returns its result, or raises why it was not carried out."""
        self.request(request)
        return request.answer.result()

    def request(self, request: ChangeRequest) -> None:
        """Post a change request without waiting for it."""
        self._requests.post(Posted(lifecycle.ChangeRequested(request), answer=request.answer))

    def spouts(self, active: bool) -> None:
        """Activate or pause the spouts, and wait for that. Raises ``TopologyFailed`` if the topology does not
        run."""
        posted = Posted(lifecycle.SpoutsRequested(active))
        self._requests.post(posted)
        posted.answer.result()

    def kill(self, drain: bool) -> None:
        """End the topology and wait until it has ended. Raises its error if it fails meanwhile. A second call
        without ``drain`` ends the draining of the first."""
        if self._ended.is_set():
            return
        self.ask_to_end(drain)
        self._ended.wait()
        if self.lifecycle.error is not None:
            raise self.lifecycle.error

    def ask_to_end(self, drain: bool) -> None:
        """Like ``kill``, without waiting. A change that is being carried out is cancelled."""
        if not drain:
            self._hurry.set()
        self._stopping.set()
        self._requests.post(Posted(lifecycle.KillRequested(drain)))

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end, at most ``timeout`` seconds. Returns False if the topology still runs. Raises its
        error if it has failed."""
        done = self._ended.wait(timeout)
        if done and self.lifecycle.error is not None:
            raise self.lifecycle.error
        return done

    # ---- starting --------------------------------------------------------------------------------------

    def start(self, then: Callable[[], None] = nothing) -> None:
        """Start the topology on the caller's thread, and call ``then`` as soon as the spouts emit. If the topology
        cannot run, ``then`` raises or the caller is interrupted, raises the error after everything has been shut
        down."""
        try:
            change: FirstStart | Restart = FirstStart(self.runs, self.server.start)
            while self.lifecycle.phase is TopologyPhase.STARTING:
                ended = self.runner.run(change)
                decision = self.lifecycle.handle(lifecycle.StartEnded(ended.problem))
                if isinstance(decision, lifecycle.StartAgain):
                    assert ended.problem is not None
                    change = Restart(0, ended.problem, 0.0, self.runs)
                elif decision is not None:
                    self._carry_out(decision)
            if self.lifecycle.error is not None:
                raise self.lifecycle.error
            self.begun = self.runs.now()
            then()
        except PenstockError as error:
            self._abandon(error)
            raise
        except Exception as error:  # py4j and the operating system may raise anything
            text = f"its start failed ({type(error).__name__}: {error})"
            failed = TopologyFailed(self.runner.where, text, "Start it again.")
            self._abandon(failed)
            raise failed from error
        except BaseException:
            text = "it was interrupted while it started"
            self._abandon(TopologyFailed(self.runner.where, text, "Start it again."))
            raise

    def _abandon(self, error: PenstockError) -> None:
        """End a topology whose start failed with this error, and return when it has ended. Does nothing if it has
        ended already, or if the error has interrupted its end."""
        phase = self.lifecycle.phase
        if phase is TopologyPhase.STARTING:
            self._carry_out(self.lifecycle.fail(error))
        elif TopologyPhase.ENDING in lifecycle.TRANSITIONS[phase]:
            self._requests.post(self._failed(Problem(Cause.INTERNAL, error)))
            self._run()  # in case that its thread does not run yet

    def supervise(self) -> None:
        """Register the topology, so that commands find it, report a warning of the engine, if any, and start the
        supervisor's thread. Called by ``start`` as its argument, except in tests."""
        name = self.runs.current.deployment.topology.name
        self._announced = DriverEntry.here(name, self.server.address, self.server.secret)
        self._announced.announce()
        text = self.engine.warning()
        if text:
            log.warning("%s", text)
            self.runs.current.bus.note("security", "", text)
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    # ---- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Take turns until the end. If a start is abandoned, two threads may do so, one turn at a time."""
        while not self._ended.is_set():
            with self._turns:
                if not self._ended.is_set():
                    self.turn()

    def turn(self) -> None:
        """Wait a moment for a request (``RequestQueue.arrive``), then look for policy decisions and problems;
        handle the first thing found. The supervisor's thread calls this until the end; tests call it too."""
        posted = None
        try:
            posted = self._next()
            if posted is not None:
                self._handle(posted)
        except Exception as error:  # the client library of an engine that has died may raise anything
            log.debug("supervisor", exc_info=True)
            problem = Problem(Cause.INTERNAL, self._engine_error(error))
            if posted is not None and not posted.answer.done():
                posted.answer.set_exception(problem.error)
            self._handle(self._failed(problem))

    def _next(self) -> Posted | None:
        """Return what to handle next: a request of another thread, a decision of a policy, or a problem. None if
        there is nothing."""
        if self._lease is not None and self._lease.error is not None and not self._requests.waiting():
            return self._failed(Problem(Cause.FAILED, self._lease.error))
        sample = self._poll_monitor()
        self.runs.stop_retired()
        if self._requests.arrive(self.runner.waiter, self.runs.current.registry):
            return self._requests.take()
        if self.lifecycle.phase in lifecycle.RUNNING:
            request = self.changes.decided(sample, self.lifecycle.phase is TopologyPhase.ACTIVE)
            if request is not None:
                return Posted(lifecycle.ChangeRequested(request), answer=request.answer)
        problem = self.runs.watch(self.runs.current).check()
        return None if problem is None else self._failed(problem)

    def _failed(self, problem: Problem) -> Posted:
        return Posted(lifecycle.RunFailed(problem, self._ran()))

    def _ran(self) -> float:
        return self.runs.now() - self.runs.current.running_since

    def _poll_monitor(self) -> MonitorSample | None:
        """Poll the load monitor. Returns a load sample if it has just taken one."""
        current = self.runs.current
        with self.server.changed:
            workers = dict(current.registry.workers)
        return self.monitor.poll(self.runs.now(), current.bus, workers)

    def _handle(self, posted: Posted) -> None:
        answer = posted.answer
        try:
            if posted.call is not None:
                answer.set_result(posted.call())
                return
        except Exception as error:  # raised in the thread that waits for the answer
            answer.set_exception(error)
            return
        assert posted.event is not None
        decision = self.lifecycle.handle(posted.event)
        if isinstance(decision, lifecycle.Refuse):
            answer.set_exception(decision.error)
            return
        if decision is not None:
            self._carry_out(decision)
        if isinstance(posted.event, lifecycle.SpoutsRequested):
            answer.set_result(None)

    def _carry_out(self, decision: Decision) -> None:
        """Carry out a decision, and the decisions that follow from its result."""
        following: Decision | None = decision
        while following is not None:
            event = self._act(following)
            following = None if event is None else self.lifecycle.handle(event)
        if self.lifecycle.phase in lifecycle.OVER:
            self._ended.set()
            self._requests.refuse(lifecycle.not_running(self.runner.where, self.lifecycle.state))

    def _act(self, decision: Decision) -> Event | None:
        """Carry out one decision. Returns the event that reports its result, if any."""
        match decision:
            case lifecycle.SetSpouts(active):
                self.runs.spouts_active = active
                run = self.runs.current
                run.activate() if active else run.deactivate()
            case lifecycle.CarryOut(request):
                settled = self.changes.carry_out(request)
                self.left_behind = settled.left_behind
                self.lifecycle.use(self.runs.current.settings.lifecycle.max_restarts)
                return lifecycle.ChangeEnded(settled.problem, self._ran())
            case lifecycle.RestartQuery(problem, pause):
                return self._restart(problem, pause)
            case lifecycle.ShutDown():
                return self._shut_down(decision)
        return None

    def _restart(self, problem: Problem, pause: float) -> Event:
        run = self.runs.current
        run.bus.note("restart", "", str(problem))
        log.warning("%s; starting again", str(problem).rstrip("."))
        ended = self.runner.run(Restart(self.lifecycle.restarts.count, problem, pause, self.runs))
        return lifecycle.RestartEnded(ended.problem)

    def _shut_down(self, decision: lifecycle.ShutDown) -> Event:
        self._stopping.set()
        run = self.runs.current
        if decision.error is None and not decision.running and not self._hurry.is_set():
            what = "the next run repeats the work" if run.keeps_state else "the work is lost"
            self.left_behind = f"it was restarting when it was asked to end; {what} that was not committed"
        shutdown = ShuttingDown(
            self.runs, decision.drain, decision.running, self._on_tasks_closed, self._give_back()
        )
        self.runner.run(shutdown, self._hurry.is_set)
        return lifecycle.ShutDownEnded(shutdown.error)

    def _on_tasks_closed(self, shutdown: ShuttingDown) -> None:
        self.left_behind = "; ".join(filter(None, (self.left_behind, shutdown.left_behind)))
        self.lifecycle.error = self.lifecycle.error or shutdown.error
        self.closing.set()

    def _give_back(self) -> list[Callable[[], None]]:
        """Return what has to be ended after the query, in order. ``kill`` and ``wait`` wait for all of it."""
        ends = [self.server.stop, self.engine.close, self.monitor.close]
        if self._announced is not None:
            ends.append(self._announced.withdraw)
        if self._lease is not None:
            ends.append(self._lease.release)
        return ends

    def _engine_error(self, error: Exception) -> PenstockError:
        words = ""
        with contextlib.suppress(Exception):
            words = self.engine.last_log_lines()
        return TopologyFailed(
            self.runner.where,
            f"Spark failed ({type(error).__name__}: {error})",
            f"Its last log lines: {words or 'none'}.",
        )


def _crash_at(spec: str) -> Callable[[Change, str], None]:
    """Return a function that ends the driver at a step of a replacement or of a move, for crash tests."""
    crash = CrashPoint(spec, "driver")

    def reached(change: Change, step: str) -> None:
        if change.kind in ("replacement", "move"):
            crash(step, change.number)

    return reached
