"""Replacement of a running topology by another form of itself, without a pause.

The steps, in order. Whichever process dies between two of them, exactly one of the two query runs owns the state
and has the spouts:

1. The new form is checked against the old one: name, guarantee, state (``checked``). Task slots for the new form
   are reserved beside those of the old one (``reserved``). Nodes that are to be released accept no new tasks from
   now on (``nodes_released``).
2. A second query is launched beside the first. Its workers connect but do not open their tasks (``standing_by``).
3. The old run commits an epoch, and the new workers prefetch its state. Both are repeated once, so that little is
   left to read later. Then all channels between the new workers must have been used (``copied``). Up to here the
   new run can be dropped at any time.
4. The spouts of the old run pause (``paused``). This is the point of no return. The gap, in which no spout emits,
   begins.
5. The tuples in flight of the old run finish, its ticks stop, and it commits a last epoch (``drained``). If that
   takes longer than ``lifecycle.drain_timeout``, or the old run dies, tuples that are not committed come again, as
   after any loss. With at-least-once delivery, tuples that do not finish at once are handed to the new run
   (``driver/handing_on.py``). With exactly-once delivery, the marker of the last epoch then overtakes them: they
   are stored with the epoch, and the new run processes them first (``driver/overtaken.py``). The same is done in
   step 3, so that neither step depends on how much waits.
6. The tasks of the old run are closed (``closed``).
7. The new run becomes the current one (``handed_over``) and takes over the state directory (``claimed``). Anything
   that the old run still writes there is ignored.
8. The tasks of the new run open with the state of step 5 (``opened``).
9. The spouts of the new run emit (``activated``). The gap is over.
10. The old query is stopped a moment later. Released nodes end then.

If step 8 fails because of the new form itself (its ``prepare`` raises, or a state does not match), the old form is
restarted from the epoch of step 5. With ``pause``, task slots for one of the two forms are enough: steps 2 and 3
are left out, and in step 7 the old query is stopped and the new one launched.

With at-most-once delivery, the old run begins to commit epochs before step 3 or, with ``pause``, before step 4
(``handover_begun``). If it commits none until step 5, the new form begins without state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from penstock.driver.deployment import Deployment, first_fit, make_deployment
from penstock.driver.drain import Drain
from penstock.driver.engine import executor_of
from penstock.driver.handing_on import PATIENCE, HandingOn, backlog_seconds
from penstock.driver.health import RewordedWatch
from penstock.driver.nodes import release_step
from penstock.driver.overtaken import why_not_overtaken
from penstock.driver.query_run import QueryRun
from penstock.driver.query_runs import QueryRuns
from penstock.driver.recovery import StateDirectory
from penstock.driver.requests import Replaced, ReplaceRequest
from penstock.driver.steps import Cause, Ending, Problem, Settled, Step, StepsEnded, Watch, nothing
from penstock.errors import NotEnoughSlots, TopologyError, TopologyFailed
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Fit
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.driver")

_LAST_TICKS = 1.0
"""Seconds to finish what the last ticks emitted. Short, because no spout emits meanwhile."""
_COPIES = 2
"""How often the state is prefetched. The second time reads only what has changed since the first."""


def check_forms(old: Topology, new: Topology) -> None:
    """Raise ``TopologyError`` if ``new`` cannot take over from ``old``, whatever the state is."""
    for what, before, now in (
        ("name", old.name, new.name),
        ("setting delivery.guarantee", old.settings.delivery.guarantee, new.settings.delivery.guarantee),
        ("setting delivery.state_dir", old.settings.delivery.state_dir, new.settings.delivery.state_dir),
    ):
        if before != now:
            raise TopologyError(
                f"topology '{old.name}', {what}",
                f"the new topology has '{now}', but a replacement must keep '{before}'",
                "Change it back, or end the topology and start the new one.",
            )


def differences(old: Deployment, new: Deployment) -> str:
    """Return a text that lists changed numbers of tasks and workers, new components and removed ones."""
    before = {component: len(tasks) for component, tasks in old.plan.tasks_of.items()}
    now = {component: len(tasks) for component, tasks in new.plan.tasks_of.items()}
    changed = [f"{c} {before[c]} → {now[c]}" for c in now if c in before and before[c] != now[c]]
    changed += [f"{c} is new" for c in now if c not in before] + [f"{c} is gone" for c in before if c not in now]
    if old.plan.workers != new.plan.workers:
        changed.append(f"{old.plan.workers} → {new.plan.workers} workers")
    elif not changed and old.plan.routes.worker_of != new.plan.routes.worker_of:
        changed.append(f"other components share the {new.plan.workers} workers")
    return ", ".join(changed) or "the same numbers of tasks"


class Replacement:
    """One replacement, as steps. Created and carried out on the supervisor's thread."""

    kind = "replacement"

    def __init__(self, number: int, request: ReplaceRequest, runs: QueryRuns) -> None:
        self.number = number
        self.old = runs.current
        self.new: QueryRun | None = None
        self._form = self.old.deployment.topology
        """The new form, from the step ``checked`` on."""
        self._request, self._runs, self._engine = request, runs, runs.engine
        self._limit = self.old.settings.lifecycle.drain_timeout
        self._epoch_before = 0
        """The newest epoch of the old run before commits for this replacement began (at-most-once delivery)."""
        self._unfinished = self._without_state = False
        """The old run did not finish its tuples in flight; the new run begins without state although the old one
        had some."""

    # ---- the steps -------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        old, request, runs = self.old, self._request, self._runs
        yield Step("checked", self._check)
        active = set(self._engine.nodes())
        deployment = self._make_deployment(active)
        if not request.pause:
            yield self._reserve_beside(deployment, active)
        if request.leaves:
            yield release_step(self._engine, request.leaves)
        self.new = new = runs.new(deployment, MetricsBus(deployment.plan))
        yield Step("new_run", undo=lambda: runs.drop(new))
        if request.pause:
            yield from self._begin_handover(old)
        else:
            yield from self._stand_by(old, new)
        yield from self._leave(old, new)
        yield Step("handed_over", lambda: self._hand_over(old, new), cancellable=False)
        if request.pause:
            yield runs.reserve_step(deployment, new.settings.lifecycle.start_timeout)
            yield from new.launch_steps((runs.watch(new),))
        if old.keeps_state or old.stateful:
            yield Step("claimed", lambda: self._claim(old, deployment.state))
        yield from new.open_steps((runs.watch(new),))
        yield Step("activated", lambda: runs.resume_spouts(new), cancellable=False)

    def _check(self) -> None:
        self._runs.stop_retired(at_once=True)
        before = self.old.deployment.topology
        self._form = self._request.form(before)
        check_forms(before, self._form)

    def _make_deployment(self, active: set[str]) -> Deployment:
        request, old = self._request, self.old
        kept = active - {executor_of(node) for node in request.leaves}
        owner = old.deployment.state.owner
        engine = self._engine
        room = engine.free_slots() * len(kept) // max(1, len(active))
        if request.leaves:  # what the old form holds on the nodes that stay may be more than their even share
            room = min(room, engine.total() * len(kept) // max(1, len(active)) - old.slots_on(kept))
        deployment = make_deployment(self._form, engine, request.placement, len(kept), owner, self._fit(), room)
        if old.keeps_state:
            deployment.state.inspect()  # raises if the state does not match the new form
        return deployment

    def _fit(self) -> Fit:
        """Return what the components of the new form are packed by. What was measured stays valid. The number of
        workers is that of the old form, also if nodes have come or gone, so that a placement that was made for the
        workers of the old form fits; a new setting takes effect."""
        if self._request.fit is not None:
            return self._request.fit
        fit = self.old.plan.fit
        if self._form is not self.old.deployment.topology:
            fit = replace(fit, groups=())
        if self._form.settings.workers.count == self.old.settings.workers.count:
            return fit
        return replace(fit, workers=first_fit(self._form, self._engine).workers)

    def _reserve_beside(self, deployment: Deployment, active: set[str]) -> Step:
        """Return the step that reserves slots beside those of the old run. If too few are free, released nodes are
        requested again, and the step waits for them."""
        old, engine = self.old, self._engine
        wanted, held = sum(deployment.slots), sum(old.deployment.slots)
        elsewhere = held - old.slots_on(active)  # on nodes that are being released
        too_few = bool(engine.nodes_away) and wanted > engine.free_slots() + elsewhere
        patience = old.settings.lifecycle.start_timeout if too_few else 0.0
        prepare = engine.take_nodes_back if too_few else nothing

        def explain(error: NotEnoughSlots) -> NotEnoughSlots:
            return NotEnoughSlots(
                error.where,
                f"a replacement without a pause needs {wanted} task slots in addition to the {held} in use: "
                f"{error.problem}",
                "Give the master more, or use --stop-and-go: the old form is stopped first, and for some seconds "
                "nothing runs.",
            )

        return self._runs.reserve_step(deployment, patience, elsewhere, self._watch_old(), explain, prepare)

    def _stand_by(self, old: QueryRun, new: QueryRun) -> Iterator[Step]:
        """Steps 2 and 3."""
        runs = self._runs
        standing_by = "its replacement could not be made ready"
        watch = (*self._watch_old(), RewordedWatch(runs.watch(new), standing_by, Cause.FAILED))
        strict = (*self._watch_old(), RewordedWatch(runs.watch(new, strict=True), standing_by, Cause.FAILED))
        yield from new.launch_steps(watch, "standing_by")
        yield from self._begin_handover(old)
        limit = new.settings.lifecycle.start_timeout
        for _ in range(_COPIES if old.epochs.running else 0):
            yield old.epochs.commit_step(
                "ahead_committed", self._watch_old(), self._no_epoch_ahead, patience=self._patience(new)
            )
            yield self._prefetch(new, limit, watch)
        yield Step(
            "copied",
            until=lambda: all(worker.warm for worker in new.registry.workers.values()),
            expected="not all channels between the new workers were used",
            limit=limit,
            watch=strict,
        )

    def _begin_handover(self, old: QueryRun) -> Iterator[Step]:
        """With at-most-once delivery, the old run commits epochs only to hand its state over."""

        def begin() -> None:
            old.epochs.begin_handover()
            self._epoch_before = old.epochs.committed

        if not old.keeps_state and old.stateful:
            yield Step("handover_begun", begin)

    def _prefetch(self, new: QueryRun, limit: float, watch: tuple[RewordedWatch, ...]) -> Step:
        state = new.deployment.state

        def tell() -> None:
            state.inspect()
            new.registry.prefetch(state.epoch, state.tasks())

        return Step(
            "prefetched",
            tell,
            lambda: all(worker.prefetched_epoch >= state.epoch for worker in new.registry.workers.values()),
            expected="not all new workers read the state ahead",
            limit=limit,
            watch=watch,
        )

    def _no_epoch_ahead(self, problem: Problem) -> Problem | None:
        """Continue if no epoch was committed in time, as in an overloaded topology: the newest committed epoch is
        prefetched instead."""
        if problem.cause not in (Cause.FAILED, Cause.TIMED_OUT):
            return problem
        log.info("topology '%s': no epoch to copy ahead (%s)", self.old.deployment.topology.name, problem)
        return None

    def _patience(self, new: QueryRun) -> float:
        """Return the seconds that tuples in flight get to finish before a marker overtakes them. Infinity if the
        new form could not process them."""
        why_not = why_not_overtaken(self.old.plan, new.plan)
        if why_not:
            log.info("topology '%s': epochs end when all queues are empty: %s", new.plan.topology, why_not)
            return math.inf
        return 0.0 if backlog_seconds(self.old.bus.tasks().values()) > PATIENCE else PATIENCE

    def _leave(self, old: QueryRun, new: QueryRun) -> Iterator[Step]:
        """Steps 4 to 6: the old run finishes its work, as far as it can."""
        gone = (self._runs.watch(old, strict=True),)
        yield Step("paused", old.deactivate, point_of_no_return=True)
        if old.settings.delivery.guarantee == "exactly_once":  # the markers of the last epoch follow all tuples
            yield Step("ticks_stopped", old.stop_ticks, cancellable=False)
        elif old.settings.delivery.guarantee == "at_least_once":
            handing_on = HandingOn(old, gone)
            yield from handing_on.steps()
            self._unfinished, self._limit = handing_on.unfinished, handing_on.waited
        else:  # ticks stop after the tuples, because sinks and other bolts may need ticks to finish
            yield self._finish("finished", nothing, self._limit, gone)
            yield self._finish("ticks_stopped", old.stop_ticks, _LAST_TICKS, gone)
        if old.epochs.running:
            yield old.epochs.commit_step(
                "last_committed",
                gone,
                self._not_finished,
                last=True,
                cancellable=False,
                patience=self._patience(new),
            )
        yield Step("drained", old.stop_commits, cancellable=False)
        yield old.close_step()
        yield Step("old_checked", lambda: self._raise_if_failed(old), cancellable=False)

    def _finish(self, name: str, do: Callable[[], None], limit: float, watch: Sequence[Watch]) -> Step:
        """Return a step that calls ``do`` and waits until the old run's tuples in flight have finished, at most
        ``limit`` seconds."""
        done = Drain(self.old.registry).done
        return Step(name, do, done, limit=limit, watch=watch, on_problem=self._not_finished, cancellable=False)

    def _not_finished(self, problem: Problem) -> None:
        self._unfinished = True

    def _raise_if_failed(self, old: QueryRun) -> None:
        """Raise an error of user code in the old form: it would have ended the topology without a replacement,
        too."""
        failure = old.registry.failure
        if failure is not None and not failure.passing:
            raise TopologyFailed(failure.where, failure.problem, failure.hint)

    def _hand_over(self, old: QueryRun, new: QueryRun) -> None:
        if self._request.pause:
            self._runs.drop(old)
        new.bus.continue_from(old.bus)
        self._runs.current = new

    def _claim(self, old: QueryRun, state: StateDirectory) -> None:
        """Take over the state directory. With at-most-once delivery it may have only the state of an earlier time,
        if the old run could not commit an epoch for this replacement. Such a state is not used."""
        if old.keeps_state or old.epochs.epoch > self._epoch_before:
            state.recover(old.epochs.published)
            return
        state.forget()
        self._without_state = True

    def _watch_old(self) -> tuple[RewordedWatch, ...]:
        return (RewordedWatch(self._runs.watch(self.old), "it was lost during a replacement"),)

    # ---- the end ---------------------------------------------------------------------------------------

    def settle(self, ended: StepsEnded) -> Settled:
        """Return the outcome. Called once, after the steps."""
        if ended.ending is Ending.DONE:
            return Settled(self._done(ended))
        assert ended.problem is not None
        error = ended.problem.error
        if ended.ending is Ending.UNDONE:
            return Settled(error=error)  # the old run continues; if it is lost, the supervisor detects that
        assert self.new is not None
        cancelled = ended.problem.cause is Cause.CANCELLED
        left_behind = self._left_behind("the next run") if cancelled else ""
        problem = self._broken(ended.problem, self.old, self.new)
        return Settled(error=error, problem=problem, left_behind=left_behind)

    def _left_behind(self, successor: str) -> str:
        """What the old run did not finish, as a clause. ``successor``: what continues with its state."""
        texts = []
        if self._unfinished:
            what = f"{successor} processes them" if self.old.keeps_state else "they are lost"
            texts.append(f"tuples in flight were not processed within {self._limit:g} s; {what}")
        if self._without_state:
            texts.append(f"its state was not committed in time, so {successor} begins without it")
        return "; ".join(texts)

    def _done(self, ended: StepsEnded) -> Replaced:
        assert self.new is not None
        request, times, runs = self._request, ended.times, self._runs
        now = times["activated"]
        numbers = {component: len(tasks) for component, tasks in self.new.plan.tasks_of.items()}
        done = Replaced(
            now,
            numbers,
            f"{request.reason}: {differences(self.old.deployment, self.new.deployment)}",
            now - times["paused"],
            now - request.since,
            self._left_behind("the new form"),
            {step: at - request.since for step, at in times.items()},
            self.new.plan.workers,
            request.kept(self.old.deployment.topology),
        )
        self.new.bus.note("replacement", "", str(done))
        runs.retire(self.old)
        return done

    def _broken(self, problem: Problem, old: QueryRun, new: QueryRun) -> Problem:
        """Decide which form is started again after a problem behind the point of no return, and drop the other.
        Returns the problem for the lifecycle."""
        runs = self._runs
        if runs.current is old:  # the old run failed, before the hand-over
            runs.drop(new)
            return problem
        if problem.cause not in (Cause.FAILED, Cause.TIMED_OUT):  # the new form may run when started again
            runs.drop(old)
            return problem
        old.stop()
        runs.drop(new)
        runs.current = runs.new(old.deployment, old.bus, old)
        error = problem.error
        text = f"what was to replace it does not run ({error.where}: {error.problem})"
        return Problem(Cause.LOST, TopologyFailed(old.where, text))
