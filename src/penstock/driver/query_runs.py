"""All query runs of one topology: which one is current, which one is about to be stopped, and the task slots they
hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from penstock.driver.deployment import Deployment
from penstock.driver.engine import Shortage
from penstock.driver.health import RunWatch
from penstock.driver.query_run import QueryRun, RunContext
from penstock.driver.retrying import retried
from penstock.driver.steps import Step, Watch, nothing
from penstock.errors import NotEnoughSlots
from penstock.metrics.bus import MetricsBus
from penstock.protocol.commands import SetSpoutRate

_STOP_DELAY = 2.0
"""Seconds until a replaced query is stopped. Stopping it takes CPU time, which the new query needs first."""


class QueryRuns:
    """Called on the supervisor's thread; any thread may read ``current``."""

    def __init__(self, deployment: Deployment, context: RunContext, pause: Callable[[float], bool]) -> None:
        """``pause`` waits for the given seconds. It returns True, without further waiting, when the topology is
        asked to end."""
        self.context, self.engine = context, context.engine
        self.rates: dict[str, float] = {}
        """Maximum rates of spouts that were set while the topology runs."""
        self.spouts_active = True
        """Whether spouts emit as soon as their tasks are open."""
        self._pause = pause
        self._numbers = itertools.count()
        self._holders: set[int] = set()
        self._retired: tuple[QueryRun, float] | None = None
        """The replaced run that is still to be stopped, and when, on the monotonic clock."""
        self.current = self.new(deployment, MetricsBus(deployment.plan))
        """The run that owns the topology's state and has its spouts."""

    def now(self) -> float:
        return self.context.clock.monotonic()

    def new(self, deployment: Deployment, bus: MetricsBus, after: QueryRun | None = None) -> QueryRun:
        """Make a query run. ``after``: the lost run of the same deployment that it restarts."""
        return QueryRun(next(self._numbers), deployment, bus, self.context, after)

    def watch(self, run: QueryRun, strict: bool = False) -> RunWatch:
        return RunWatch(run, self.engine, strict)

    # ---- task slots ------------------------------------------------------------------------------------

    def reserve_step(
        self,
        deployment: Deployment,
        patience: float,
        elsewhere: int = 0,
        watch: Sequence[Watch] = (),
        explain: Callable[[NotEnoughSlots], NotEnoughSlots] = lambda error: error,
        prepare: Callable[[], None] = nothing,
    ) -> Step:
        """Return the step that reserves the slots of a deployment. It calls ``prepare``, waits up to ``patience``
        seconds for nodes that may still join, and raises what ``explain`` makes of the error if the slots are too
        few. Undoing it releases the slots, unless they were reserved before. ``elsewhere``: number of slots that
        this topology holds on nodes that are being released."""
        deadline = self.now() + patience
        wanted, engine, held = sum(deployment.slots), self.engine, id(deployment) in self._holders

        def reserved() -> bool:
            late = self.now() >= deadline
            if not late and not engine.nodes_settled():
                return False
            shortage = engine.reserve(id(deployment), wanted, elsewhere)
            if shortage is not None and (shortage.final or late):
                raise explain(_not_enough(deployment, shortage))
            if shortage is None:
                self._holders.add(id(deployment))
            return shortage is None

        undo = None if held else partial(self.release, deployment)
        return Step("reserved", prepare, reserved, poll=True, watch=watch, undo=undo)

    def release(self, deployment: Deployment) -> None:
        self.engine.free(id(deployment))
        self._holders.discard(id(deployment))

    def alone(self) -> bool:
        """Return whether no other topology holds slots of this engine."""
        return not self.engine.shared_with_others(self._holders)

    def room(self) -> int:
        """Return the number of free slots, including those of released nodes, which can be requested again."""
        engine = self.engine
        return engine.free_slots() + engine.total() * engine.nodes_away // max(1, len(engine.nodes()))

    # ---- beginning -------------------------------------------------------------------------------------

    def start_steps(self, run: QueryRun) -> Iterator[Step]:
        """Return the steps of a first start or a restart: launch the query, take over the state while the workers
        connect, open the tasks, activate the spouts."""
        watch = (self.watch(run),)
        claim = Step("claimed", lambda: self._recover(run))
        yield from run.launch_steps(watch, meanwhile=(claim,))
        yield from run.open_steps(watch)
        yield Step("activated", lambda: self.resume_spouts(run))

    def _recover(self, run: QueryRun) -> None:
        state = run.deployment.state
        if run.keeps_state:
            self.ask_store(state.recover)
        else:
            state.forget()

    def ask_store(self, action: Callable[[], object]) -> None:
        """Call ``action``, which uses the state store. If the store does not answer, retry for up to
        ``lifecycle.start_timeout`` seconds, unless the topology is asked to end; then raise
        ``StateUnavailable``."""
        run = self.current
        patience = run.settings.lifecycle.start_timeout
        retried(action, patience, self._pause, lambda text: run.bus.note("state", "", text))

    def resume_spouts(self, run: QueryRun) -> None:
        """Set the rates of the spouts, and activate them unless they are paused. Called when the run's tasks are
        open."""
        for spout, rate in list(self.rates.items()):  # copied, because an operator may set a rate meanwhile
            run.registry.send(SetSpoutRate(spout, rate))
        if self.spouts_active:
            run.activate()

    # ---- ending ----------------------------------------------------------------------------------------

    def drop(self, run: QueryRun) -> None:
        """Stop a run and release its slots."""
        run.stop()
        self.release(run.deployment)

    def retire(self, run: QueryRun) -> None:
        """Have ``stop_retired`` stop a replaced run after ``_STOP_DELAY``."""
        self._retired = run, self.now() + _STOP_DELAY

    def stop_retired(self, at_once: bool = False) -> None:
        """Stop the replaced run, if there is one, when its delay is over or ``at_once``. Called repeatedly."""
        if self._retired is not None and (at_once or self._retired[1] <= self.now()):
            run, self._retired = self._retired[0], None
            self.drop(run)


def _not_enough(deployment: Deployment, shortage: Shortage) -> NotEnoughSlots:
    return NotEnoughSlots(
        f"topology '{deployment.topology.name}'",
        f"it needs {sum(deployment.slots)} task slots, one per worker, but only {shortage.free} of "
        f"{shortage.total} are free on {shortage.master}",
        "Lower the setting workers or the parallelism, or give the master more: local[N] counts threads, not "
        "cores.",
    )
