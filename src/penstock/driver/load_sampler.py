"""Load samples of a whole topology, for the scaling policies, out of what its tasks count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.control.scaling import BoltLoad, LoadSample, SpoutLoad, TaskLoad
from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, WorkerId
from penstock.plan.scalable import why_fixed
from penstock.topology.builder import Topology

Stats = Mapping[int, TaskStats]
"""By task; not to be changed by anybody once it is handed over."""


@dataclass(frozen=True)
class ScalingUnit:
    """What scales as one: a bolt and those fused with it. They share workers, so their work adds up; what comes to
    the first is what all of them get. A bolt fused with a spout is a unit of its own, and fixed."""

    components: tuple[str, ...]
    inputs: tuple[str, ...]
    """Spouts and units, by the name of their first component, that it gets tuples from."""
    executors: tuple[tuple[int, ...], ...]
    """Tasks of the first bolt, executor by executor."""
    fused: tuple[tuple[int, ...], ...] = ()
    """Tasks of the others, likewise; empty where there are none."""
    fixed: bool = False

    @property
    def name(self) -> str:
        return self.components[0]


@dataclass(frozen=True)
class TopologyShape:
    """What a load sample needs to know of a topology."""

    spouts: Mapping[str, tuple[int, ...]]
    """Their tasks."""
    units: tuple[ScalingUnit, ...]
    ends: tuple[int, ...] = ()
    """Without acks: tasks of the bolts that nothing follows, where it shows how long tuples took."""
    timeout: float = math.inf
    """Seconds after which a tuple there is late."""

    @cached_property
    def tasks(self) -> frozenset[int]:
        every = [*self.spouts.values(), *(t for unit in self.units for t in (*unit.executors, *unit.fused))]
        return frozenset(task for tasks in every for task in tasks)


def shape_of(plan: Plan, topology: Topology) -> TopologyShape:
    """The shape of a topology that runs by this plan."""
    spouts = {spout: plan.tasks_of[spout] for spout in plan.spouts}
    unit_of = {spout: spout for spout in spouts}
    units = []
    for group in (group for stage in plan.stages for group in stage.fused_groups):
        bolts = [(each,) for each in group[1:]] if group[0] in spouts else [group]
        for components in bolts:
            unit_of |= dict.fromkeys(components, components[0])
            sources = [plan.source_of(edge) for edge in plan.edges if edge.target == components[0]]
            units.append(
                ScalingUnit(
                    components,
                    tuple(dict.fromkeys(unit_of[source] for source in sources)),
                    _by_worker(plan, components[:1]),
                    _by_worker(plan, components[1:]),
                    bool(why_fixed(topology, components[0])),
                )
            )
    if topology.settings.delivery.guarantee == "at_least_once":
        return TopologyShape(spouts, tuple(units))
    followed = {plan.source_of(edge) for edge in plan.edges}
    last = [component for component in unit_of if component not in followed and component not in spouts]
    ends = tuple(task for component in last for task in plan.tasks_of[component])
    return TopologyShape(spouts, tuple(units), ends, topology.settings.delivery.message_timeout)


def _by_worker(plan: Plan, components: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    found: dict[WorkerId, tuple[int, ...]] = {}
    for task in (task for component in components for task in plan.tasks_of[component]):
        worker = plan.routes.worker_of[task]
        found[worker] = (*found.get(worker, ()), task)
    return tuple(found[worker] for worker in sorted(found))


class LoadSampler:
    """Of one topology, one after the other: what was counted between two calls of ``take``."""

    def __init__(self, shape: TopologyShape, longest: float = math.inf) -> None:
        """``longest``: seconds of a load sample; one that would span more is left out, for load samples are to be
        compared."""
        self.shape, self._longest = shape, longest
        self._before: tuple[float, Stats] | None = None

    def counters_went_back(self, stats: Stats) -> bool:
        """A task counts from the beginning again, or does not report any more: there was a restart."""
        before = {} if self._before is None else self._before[1]
        return any(task not in stats or _went_back(stats[task], then) for task, then in before.items())

    def take(self, now: float, stats: Stats, offered: Mapping[str, float] | None = None) -> LoadSample | None:
        """The load sample that ends now. None where there is nothing to compare with: at the first call, after a
        restart, while a task has not reported, after a pause. ``offered``: what came to a spout's source, where
        known."""
        if set(stats) != self.shape.tasks:
            self._before = None
            return None
        if self._before is not None and now <= self._before[0]:
            return None
        fresh = self._before is None or self.counters_went_back(stats) or now - self._before[0] > self._longest
        before, self._before = self._before, (now, stats)
        if fresh or before is None:
            return None
        seconds, then = now - before[0], before[1]
        spouts = [_spout(name, tasks, seconds, then, stats, offered) for name, tasks in self.shape.spouts.items()]
        bolts = [_bolt(unit, seconds, then, stats) for unit in self.shape.units]
        timed = self.shape.ends or [task for tasks in self.shape.spouts.values() for task in tasks]
        latency = Histogram()
        for task in timed:
            latency = latency.plus(stats[task].latency.minus(then[task].latency))
        return LoadSample(
            now,
            seconds,
            tuple(spouts),
            tuple(bolts),
            latency.seconds / latency.count if latency.count else None,
            latency.above(self.shape.timeout) if self.shape.ends else 0,
        )


def _spout(
    name: str,
    tasks: tuple[int, ...],
    seconds: float,
    then: Stats,
    now: Stats,
    offered: Mapping[str, float] | None,
) -> SpoutLoad:
    held = sum(now[task].held_back - then[task].held_back for task in tasks)
    return SpoutLoad(
        name,
        sum(now[task].emitted - then[task].emitted for task in tasks),
        sum(now[task].timed_out - then[task].timed_out for task in tasks),
        min(1.0, held / (seconds * len(tasks))),
        (offered or {}).get(name),
    )


def _bolt(unit: ScalingUnit, seconds: float, then: Stats, now: Stats) -> BoltLoad:
    fused = unit.fused or ((),) * len(unit.executors)
    loads = [_executor(first, rest, seconds, then, now) for first, rest in zip(unit.executors, fused, strict=True)]
    return BoltLoad(unit.name, unit.inputs, tuple(loads), unit.fixed)


def _executor(first: tuple[int, ...], rest: tuple[int, ...], seconds: float, then: Stats, now: Stats) -> TaskLoad:
    every = first + rest
    busy = sum(now[task].busy - then[task].busy for task in every)
    # Tuples are also read and written, which is not in ``busy``. A task that had to slow its senders and that
    # nobody slows has worked all the time, whatever at: what it got done is all it can do.
    if any(then[task].demand and now[task].demand for task in first) and all(
        math.isinf(now[task].limit) for task in every
    ):
        busy = max(busy, seconds)
    return TaskLoad(
        sum(now[task].executed - then[task].executed for task in first),
        busy,
        sum(now[task].arrived - then[task].arrived for task in first),
        sum(now[task].emitted - then[task].emitted for task in every),
        sum(now[task].queued for task in every),
        max(1, sum(now[task].capacity for task in first)),
    )


_GROWING = ("arrived", "executed", "emitted", "busy", "held_back", "timed_out")


def _went_back(now: TaskStats, then: TaskStats) -> bool:
    return any(getattr(now, name) < getattr(then, name) for name in _GROWING)
