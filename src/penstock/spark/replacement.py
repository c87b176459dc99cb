"""Replacement of a running topology by another form of itself, without a pause (SPEC 4).

In steps; whatever dies between two of them, exactly one of the two starts owns the state and the spouts:

1. The new form is checked against the old: name, delivery, state; workers for both are held (``checked``). Nodes
   that are to be left take nothing new from now on.
2. A second query is started beside the first; its workers connect, nothing in them is open (``standing_by``).
3. The old one commits an epoch, the new workers read its state ahead; once more, so that little is left; all
   channels between them have been used (``copied``). So far the new one can be dropped at any moment, and nobody
   has noticed.
4. The old one's spouts and ticks rest (``paused``). The gap begins.
5. Its tuples finish and a last epoch is committed, with what has changed since step 3 (``drained``). If that takes
   longer than ``lifecycle.drain_timeout``, or the old one dies, what is not committed comes again, as after any
loss.
6. Its tasks are closed (``closed``).
7. The new one takes over the state directory: from now on it is the owner, and nothing the old one might still
   write counts (``claimed``).
8. Its tasks open, with the state they take over (``opened``).
9. Its spouts emit (``activated``). The gap is over.
10. The old query is stopped, a moment later; nodes that are left end then.

Where step 8 fails because of the new form itself (its ``prepare`` raises, a state does not fit after all), the old
form is started again from the epoch of step 5.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.driver.commit_thread import CommitThread
from penstock.driver.registry import WorkerConnection
from penstock.errors import NotEnoughSlots, PenstockError, StateError, TopologyError, TopologyFailed
from penstock.faults import CrashPoint
from penstock.metrics.bus import MetricsBus
from penstock.plan.slot_placement import SlotPlacement
from penstock.protocol.messages import StopTicks
from penstock.spark.capacity import free
from penstock.spark.deployment import Deployment, make_deployment
from penstock.spark.nodes import executor_of
from penstock.spark.query_run import QueryLauncher, QueryLost, QueryRun
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.supervisor")

_LAST_TICKS = 1.0  # seconds for what a last tick may have set in motion
_AFTER = 2.0  # seconds until the old query is stopped: that is work for the machine, which the new one needs first
_COPIES = 2  # times the state is read ahead: what changed during the first is most of what the second has


@dataclass(frozen=True)
class Replaced:
    """A replacement that took place."""

    time: float
    """When the new one's spouts emitted, on the monotonic clock."""
    parallelism: Mapping[str, int]
    """Tasks of each component from now on."""
    reason: str
    gap: float
    """Seconds in which neither one's spouts emitted."""
    seconds: float
    """From the request to the end of the gap."""
    left_behind: str = ""
    """What became of tuples that there was no time to finish."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """When each step was done, in seconds since the request."""

    def __str__(self) -> str:
        text = f"{self.reason}; {self.gap * 1000:.0f} ms without spouts, after {self.seconds:.1f} s of preparation"
        return f"{text}; {self.left_behind}" if self.left_behind else text


def check_forms(old: Topology, new: Topology) -> None:
    """Raises where the one cannot take over from the other, whatever its state (step 1)."""
    for what, before, now in (
        ("name", old.name, new.name),
        ("setting delivery", old.settings.delivery.guarantee, new.settings.delivery.guarantee),
        ("setting delivery.state_dir", old.settings.delivery.state_dir, new.settings.delivery.state_dir),
    ):
        if before != now:
            raise TopologyError(
                f"topology '{old.name}', {what}",
                f"a replacement must keep '{before}', not have '{now}'",
                "Change it back, or end the topology and start the new one.",
            )


def differences(old: Deployment, new: Deployment) -> str:
    """In words: the numbers of tasks that differ, and components that came or went."""
    before = {component: len(tasks) for component, tasks in old.plan.tasks_of.items()}
    now = {component: len(tasks) for component, tasks in new.plan.tasks_of.items()}
    moved = [f"{c} {before[c]} → {now[c]}" for c in now if c in before and before[c] != now[c]]
    moved += [f"{c} is new" for c in now if c not in before] + [f"{c} is gone" for c in before if c not in now]
    return ", ".join(moved) or "the same numbers of tasks"


class Replacement:
    """One of them: the steps that two starts go through together."""

    def __init__(self, number: int, old: QueryRun, new: QueryRun, go_on: Callable[[], None]) -> None:
        """``go_on`` is asked while waiting, and raises where there is no point in it any longer."""
        self._old, self._new, self._go_on, self._number = old, new, go_on, number
        self._crash = CrashPoint(old.settings.lifecycle.crash_at, "driver")
        self._limit = old.settings.lifecycle.drain_timeout
        self.left_behind = ""
        self.times: dict[str, float] = {}
        """When each step was done, on the monotonic clock."""

    def reached(self, step: str) -> None:
        """The step has been done. Crash tests die here."""
        self.times[step] = time.monotonic()
        self._crash(step, self._number)

    def stand_by(self, launch: Callable[[QueryRun], None]) -> None:
        """Steps 2 and 3. Raises what keeps the new one from standing by, and what happens to the old meanwhile."""
        launch(self._new)
        self.reached("standing_by")
        if not self._old.keeps_state and self._old.stateful:
            self._old.begin_handover()
        if self._old.commits is not None:
            for _ in range(_COPIES):
                self._copy_ahead(self._old.commits)
        self._await_all(lambda worker: worker.warm, "did not use all their channels")
        if self._new.registry.broken:  # one that had done all that was asked of it
            raise QueryLost("a worker of it is gone")
        self.reached("copied")

    def _copy_ahead(self, commits: CommitThread) -> None:
        try:
            commits.commit_now(self._limit, go_on=self.watch)
        except StateError as error:  # an overloaded one may take long for an epoch: the last one there is will do
            log.info("topology '%s': no epoch to copy ahead (%s)", self._old.deployment.topology.name, error)
        new = self._new
        state = new.deployment.state
        state.look()
        new.registry.read_ahead(state.epoch, state.tasks())
        self._await_all(lambda worker: worker.ahead >= state.epoch, "did not prefetch their state")

    def _await_all(self, done: Callable[[WorkerConnection], bool], have_not: str) -> None:
        def behind() -> list[str]:
            return [str(id) for id, worker in self._new.registry.workers.items() if not done(worker)]

        self._new.await_(lambda: not behind(), lambda: f"workers {', '.join(behind())} {have_not}", self.watch)

    def watch(self) -> None:
        """Raises where there is no point in going on: told to stop, or the old one is lost."""
        self._go_on()
        self._old.raise_if_dead()
        self._old.raise_if_silent()

    def leave(self) -> None:
        """Steps 4 to 6: the old one ends its work, as far as it can."""
        old = self._old
        old.deactivate()
        self.reached("paused")
        done = True
        # else the last epoch's marker comes behind all tuples
        if old.settings.delivery.guarantee != "exactly_once":
            done = old.drain(self._limit)
        old.registry.send(StopTicks())  # not before: sinks and others may need their ticks to finish
        if old.settings.delivery.guarantee != "exactly_once":
            done = old.drain(_LAST_TICKS) and done
        done = old.commit_last(self._limit) and done
        if not done:
            what = "come again" if old.keeps_state else "are lost"
            self.left_behind = f"tuples in flight {what}, {self._limit:g} s were not enough to drain"
        old.give_up_state()
        self.reached("drained")
        old.close()
        self.reached("closed")

    def take_over(self) -> None:
        """Steps 7 and 8. Raises ``QueryLost`` where starting the new one again may help, else what is wrong with
        it."""
        old, new = self._old, self._new
        if old.keeps_state or old.stateful:
            new.deployment.state.recover(old.published)
        self.reached("claimed")
        new.open(self._go_on)
        self.reached("opened")


@dataclass(frozen=True)
class ReplaceRequest:
    """A replacement that somebody waits for."""

    topology: Topology
    reason: str
    pause: bool = False
    """Stop the old one first: no room for both is needed."""
    placement: SlotPlacement | None = None
    """Where its workers are to be; None: where Spark puts them."""
    leaves: frozenset[str] = frozenset()
    """Nodes that take nothing of it, and end with the old one."""
    answer: Future[Replaced] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    kind = "replacement"

    def fits(self, start: QueryRun) -> bool:
        """A placement is made for the workers of one form of the topology."""
        return self.placement is None or self.topology is start.deployment.topology


class WentBack(QueryLost):
    """The new form does not run; the old one is to be started again."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(f"what was to replace it does not run: {error}")
        self.error = error


class Replacer:
    """Carries out replacements, one after the other."""

    def __init__(self, starter: QueryLauncher) -> None:
        self.done: list[Replaced] = []
        """Oldest first."""
        self._starter = starter
        self._retired: tuple[QueryRun, float] | None = None
        """A start that was replaced, and when it is to be stopped."""

    def replace(
        self,
        request: ReplaceRequest,
        old: QueryRun,
        let_go: Callable[[QueryRun], None],
        hand_over: Callable[[QueryRun], None],
    ) -> Replaced:
        """Fulfil a request. ``hand_over`` is told which start is the current one from step 7 on, ``let_go`` has
        its spouts emit. Raises what keeps the new form from running while the old one goes on, and ``QueryLost``
        where the current start has to be started again."""
        try:
            return self._replace(request, old, let_go, hand_over)
        except BaseException:
            if request.leaves:
                with contextlib.suppress(Exception):  # a dead JVM's: what was raised before says more
                    self._starter.nodes.ask_back()
            raise

    def _replace(
        self,
        request: ReplaceRequest,
        old: QueryRun,
        let_go: Callable[[QueryRun], None],
        hand_over: Callable[[QueryRun], None],
    ) -> Replaced:
        starter = self._starter
        self.stop_retired(at_once=True)
        check_forms(old.deployment.topology, request.topology)
        active = set(starter.nodes.names())
        kept = active - {executor_of(node) for node in request.leaves}
        deployment = make_deployment(request.topology, request.placement, len(kept), old.deployment.state.owner)
        if old.keeps_state:
            deployment.state.look()
        if not request.pause:
            self._hold_beside(deployment, old, active)
        if request.leaves:
            starter.nodes.leave(request.leaves)
        new = starter.new(deployment, MetricsBus(deployment.plan))
        steps = Replacement(len(self.done) + 1, old, new, starter.go_on)
        steps.reached("checked")
        try:
            if not request.pause:
                steps.stand_by(starter.launch)
            steps.watch()
        except QueryLost as loss:
            self._drop(new)
            old.raise_if_dead()
            old.raise_if_silent()
            name = f"topology '{deployment.topology.name}'"
            raise TopologyFailed(name, f"its replacement could not be made ready: {loss}") from loss
        except BaseException:
            self._drop(new)
            raise
        paused = time.monotonic()
        steps.leave()
        failure = old.registry.failure
        if failure is not None and not failure.passing:  # its own user's error: it would have ended anyway
            self._drop(new)
            old.raise_if_dead()
        if request.pause:
            self._drop(old)
        new.bus.continue_from(old.bus)
        hand_over(new)
        try:
            if request.pause:
                starter.hold(deployment, new.settings.lifecycle.start_timeout)
                starter.launch(new)
            steps.take_over()
            let_go(new)
        except PenstockError as error:
            old.stop()
            self._drop(new)
            if request.pause:
                starter.hold(old.deployment, 0.0)
            hand_over(starter.new(old.deployment, old.bus, old))
            raise WentBack(error) from error
        except QueryLost:
            self._drop(old)
            raise
        steps.reached("activated")
        now = time.monotonic()
        reason = f"{request.reason}: {differences(old.deployment, deployment)}"
        numbers = {component: len(tasks) for component, tasks in deployment.plan.tasks_of.items()}
        times = {step: at - request.since for step, at in steps.times.items()}
        done = Replaced(now, numbers, reason, now - paused, now - request.since, steps.left_behind, times)
        self.done.append(done)
        new.bus.note("replacement", "", str(done))
        self._retired = old, now + _AFTER
        return done

    def stop_retired(self, at_once: bool = False) -> None:
        """Stop the start that was replaced at last, when its time has come."""
        if self._retired is not None and (at_once or self._retired[1] <= time.monotonic()):
            self._drop(self._retired[0])
            self._retired = None

    def _hold_beside(self, deployment: Deployment, old: QueryRun, active: set[str]) -> None:
        """Where there is no room, nodes that were left are waited for."""
        starter = self._starter
        elsewhere = sum(old.deployment.slots) - old.slots_on(active)  # on nodes that are being drained
        patience = 0.0
        try:
            if starter.nodes.away and sum(deployment.slots) > free(starter.spark) + elsewhere:
                starter.nodes.ask_back()
                patience = old.settings.lifecycle.start_timeout
            starter.hold(deployment, patience, elsewhere)
        except NotEnoughSlots as error:
            raise NotEnoughSlots(
                error.where,
                f"it cannot be replaced without a pause, which takes {sum(deployment.slots)} task "
                f"slots beside the {sum(old.deployment.slots)} it holds: {error.problem}",
                "Give the master more, or use --stop-and-go: the old query run is stopped first, "
                "and for some seconds nothing runs.",
            ) from error

    def _drop(self, start: QueryRun) -> None:
        start.stop()
        self._starter.release(start.deployment)
