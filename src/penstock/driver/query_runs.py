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
from penstock.driver.steps import Step, Watch
from penstock.errors import NotEnoughSlots
from penstock.metrics.bus import MetricsBus
from penstock.protocol.commands import SetSpoutRate

_AFTER = (
    2.0  # seconds until a replaced query is stopped: that is work for the machine, which the new one needs first
)


class QueryRuns:
    """Called by the supervisor's thread; ``current`` is read by any."""

    def __init__(self, deployment: Deployment, context: RunContext, pause: Callable[[float], bool]) -> None:
        """``pause`` passes so many seconds; it returns at once, and True, if the topology is to end."""
        self.context, self.engine = context, context.engine
        self.rates: dict[str, float] = {}
        """Of spouts, as they were set while the topology runs."""
        self.spouts_active = True
        """Whether spouts emit as soon as their tasks are open."""
        self._pause = pause
        self._numbers = itertools.count()
        self._holders: set[int] = set()
        self._retired: tuple[QueryRun, float] | None = None
        """A run that was replaced, and when it is to be stopped."""
        self.current = self.new(deployment, MetricsBus(deployment.plan))
        """The run that owns the topology's state and has its spouts."""

    def now(self) -> float:
        return self.context.clock.monotonic()

    def new(self, deployment: Deployment, bus: MetricsBus, after: QueryRun | None = None) -> QueryRun:
        """``after``: a run of the same deployment that was lost."""
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
    ) -> Step:
        """Hold the slots of a deployment; nodes that may still join are waited for so many seconds. ``elsewhere``:
        slots that this topology holds on nodes that are being released. Undone, they are given back, unless they
        were held before."""
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
        return Step("reserved", until=reserved, poll=True, watch=watch, undo=undo)

    def release(self, deployment: Deployment) -> None:
        self.engine.free(id(deployment))
        self._holders.discard(id(deployment))

    def alone(self) -> bool:
        """No other topology holds slots of this engine."""
        return not self.engine.shared_with_others(self._holders)

    def room(self) -> int:
        """Slots that nobody holds, with those of released nodes: they come back where they are needed."""
        engine = self.engine
        return engine.room() + engine.total() * engine.nodes_away // max(1, len(engine.nodes()))

    # ---- beginning -------------------------------------------------------------------------------------

    def start_steps(self, run: QueryRun) -> Iterator[Step]:
        """Launch, take the state over, open the tasks, let the spouts emit. For a first start and for a
        restart."""
        watch = (self.watch(run),)
        yield from run.launch_steps(watch)
        yield Step("claimed", lambda: self._recover(run))
        yield from run.open_steps(watch)
        yield Step("activated", lambda: self.resume_spouts(run))

    def _recover(self, run: QueryRun) -> None:
        state = run.deployment.state
        if run.keeps_state:
            self.ask_store(state.recover)
        else:
            state.forget()

    def ask_store(self, action: Callable[[], object]) -> None:
        """Do something with the state store, again and again where it does not answer, until told to end."""
        run = self.current
        patience = run.settings.lifecycle.start_timeout
        retried(action, patience, self._pause, lambda text: run.bus.note("state", "", text))

    def resume_spouts(self, run: QueryRun) -> None:
        """The run's tasks are open: let its spouts emit, if they are to."""
        for spout, rate in list(self.rates.items()):  # an operator may set one meanwhile
            run.registry.send(SetSpoutRate(spout, rate))
        if self.spouts_active:
            run.activate()

    # ---- ending ----------------------------------------------------------------------------------------

    def drop(self, run: QueryRun) -> None:
        """Stop it and give its slots back."""
        run.stop()
        self.release(run.deployment)

    def retire(self, run: QueryRun) -> None:
        """It was replaced: stop it a moment later."""
        self._retired = run, self.now() + _AFTER

    def stop_retired(self, at_once: bool = False) -> None:
        """Stop the run that was replaced at last, when its time has come."""
        if self._retired is not None and (at_once or self._retired[1] <= self.now()):
            run, self._retired = self._retired[0], None
            self.drop(run)


def _not_enough(deployment: Deployment, shortage: Shortage) -> NotEnoughSlots:
    return NotEnoughSlots(
        f"topology '{deployment.topology.name}'",
        f"it needs {sum(deployment.slots)} task slots, one per worker, but only {shortage.free} of "
        f"{shortage.total} are free on {shortage.master}",
        "Lower the parallelism, or give the master more: local[N] counts threads, not cores.",
    )
