"""Computes load samples of a whole topology for the scaling policies, from the counters of its tasks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.control.scaling import BoltLoad, LoadSample, SpoutLoad, TaskLoad
from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats
from penstock.plan.fusing import find_pairs
from penstock.plan.model import Plan
from penstock.plan.planner import executor_of
from penstock.plan.scalable import why_fixed
from penstock.topology.builder import Topology

_SHARE_SAMPLES = 6
"""Load samples: with the default interval half a minute. Tuples wait for a quarter of that in full queues."""

Stats = Mapping[int, TaskStats]
"""Counters by task id. The sampler keeps them, so the caller must not change them afterwards."""


@dataclass(frozen=True)
class ScalingUnit:
    """Bolts that are scaled together: a bolt and the bolts paired with it. Task i of each always sends to task i,
    so their busy times add up, and the input of the first bolt is the input of the unit. A bolt that is paired
    with a spout is a unit of its own and has a fixed parallelism."""

    components: tuple[str, ...]
    inputs: tuple[str, ...]
    """The spouts and units that send tuples to this unit, by the name of their first component."""
    executors: tuple[tuple[int, ...], ...]
    """Tasks of the first bolt, by executor."""
    fused: tuple[tuple[int, ...], ...] = ()
    """Tasks of the other bolts, by executor. Empty if there are none."""
    fixed: bool = False

    @property
    def name(self) -> str:
        return self.components[0]


@dataclass(frozen=True)
class TopologyShape:
    """The parts of a topology that a load sample consists of."""

    spouts: Mapping[str, tuple[int, ...]]
    """Tasks of each spout."""
    units: tuple[ScalingUnit, ...]
    ends: tuple[int, ...] = ()
    """Without acks: tasks of the last bolts, where the latency of tuples is measured. Empty with acks."""
    timeout: float = math.inf
    """Seconds after which a tuple that reaches the last bolts counts as late."""

    @cached_property
    def tasks(self) -> frozenset[int]:
        every = [*self.spouts.values(), *(t for unit in self.units for t in (*unit.executors, *unit.fused))]
        return frozenset(task for tasks in every for task in tasks)


def shape_of(plan: Plan, topology: Topology) -> TopologyShape:
    """Return the shape of a topology that runs with this plan."""
    spouts = {spout: plan.tasks_of[spout] for spout in plan.spouts}
    unit_of = {spout: spout for spout in spouts}
    units = []
    for pair in find_pairs(topology, plan.blocking):
        bolts = [(each,) for each in pair[1:]] if pair[0] in spouts else [pair]
        for components in bolts:
            unit_of |= dict.fromkeys(components, components[0])
            sources = [plan.source_of(edge) for edge in plan.edges if edge.target == components[0]]
            units.append(
                ScalingUnit(
                    components,
                    tuple(dict.fromkeys(unit_of[source] for source in sources)),
                    _by_executor(plan, topology, components[:1]),
                    _by_executor(plan, topology, components[1:]),
                    bool(why_fixed(topology, components[0])),
                )
            )
    if topology.settings.delivery.guarantee == "at_least_once":
        return TopologyShape(spouts, tuple(units))
    followed = {plan.source_of(edge) for edge in plan.edges}
    last = [component for component in unit_of if component not in followed and component not in spouts]
    ends = tuple(task for component in last for task in plan.tasks_of[component])
    return TopologyShape(spouts, tuple(units), ends, topology.settings.delivery.message_timeout)


def _by_executor(plan: Plan, topology: Topology, components: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, tuple[int, ...]] = {}
    for component in components:
        node = topology.nodes[component]
        for task in plan.tasks_of[component]:
            executor = executor_of(plan.task[task].index, node.parallelism, node.tasks)
            found[executor] = (*found.get(executor, ()), task)
    return tuple(found[executor] for executor in sorted(found))


class LoadSampler:
    """Takes successive load samples of one topology. A load sample covers the time between two calls of ``take``.
    Not thread-safe."""

    def __init__(self, shape: TopologyShape, longest: float = math.inf) -> None:
        """``longest``: maximum length of a load sample in seconds. Longer ones are dropped, since policies compare
        load samples of about the same length."""
        self.shape, self._longest = shape, longest
        self._before: tuple[float, Stats] | None = None
        self._recent: deque[Stats] = deque(maxlen=_SHARE_SAMPLES)
        """Readings without a restart between them, oldest first."""

    def counters_went_back(self, stats: Stats) -> bool:
        """Whether the counters of a task have decreased or are missing, which means that the query was
        restarted."""
        before = {} if self._before is None else self._before[1]
        return any(task not in stats or _went_back(stats[task], then) for task, then in before.items())

    def take(self, now: float, stats: Stats, offered: Mapping[str, float] | None = None) -> LoadSample | None:
        """Return the load sample that ends now. None if there is no earlier reading to compare with: at the first
        call, after a restart or a pause, and until all tasks have reported. ``offered``: tuples that arrived at
        the sources of spouts, if known."""
        if set(stats) != self.shape.tasks:
            self._before = None
            self._recent.clear()
            return None
        if self._before is not None and now <= self._before[0]:
            return None
        fresh = self._before is None or self.counters_went_back(stats) or now - self._before[0] > self._longest
        before, self._before = self._before, (now, stats)
        if fresh or before is None:
            self._recent.clear()
            self._recent.append(stats)
            return None
        oldest = self._recent[0] if self._recent else before[1]
        self._recent.append(stats)
        seconds, then = now - before[0], before[1]
        spouts = [_spout(name, tasks, seconds, then, stats, offered) for name, tasks in self.shape.spouts.items()]
        bolts = [_bolt(unit, seconds, then, stats, self._share(unit, oldest, stats)) for unit in self.shape.units]
        latency_tasks = self.shape.ends or [task for tasks in self.shape.spouts.values() for task in tasks]
        latency = Histogram()
        for task in latency_tasks:
            latency = latency.plus(stats[task].latency.minus(then[task].latency))
        return LoadSample(
            now,
            seconds,
            tuple(spouts),
            tuple(bolts),
            latency.seconds / latency.count if latency.count else None,
            latency.above(self.shape.timeout) if self.shape.ends else 0,
        )

    def _share(self, unit: ScalingUnit, then: Stats, now: Stats) -> float | None:
        """``BoltLoad.share`` between two readings."""
        units = {each.name: each for each in self.shape.units}
        emitted = 0
        for name in unit.inputs:
            source = units.get(name)
            for task in self.shape.spouts[name] if source is None else _tasks(source):
                emitted += now[task].emitted - then[task].emitted
        arrived = sum(now[task].arrived - then[task].arrived for tasks in unit.executors for task in tasks)
        return arrived / emitted if emitted else None


def _tasks(unit: ScalingUnit) -> list[int]:
    return [task for tasks in (*unit.executors, *unit.fused) for task in tasks]


def _spout(
    name: str,
    tasks: tuple[int, ...],
    seconds: float,
    then: Stats,
    now: Stats,
    offered: Mapping[str, float] | None,
) -> SpoutLoad:
    held_back = sum(now[task].held_back - then[task].held_back for task in tasks)
    return SpoutLoad(
        name,
        sum(now[task].emitted - then[task].emitted for task in tasks),
        sum(now[task].timed_out - then[task].timed_out for task in tasks),
        min(1.0, held_back / (seconds * len(tasks))),
        (offered or {}).get(name),
    )


def _bolt(unit: ScalingUnit, seconds: float, then: Stats, now: Stats, share: float | None) -> BoltLoad:
    fused = unit.fused or ((),) * len(unit.executors)
    loads = [_executor(first, rest, seconds, then, now) for first, rest in zip(unit.executors, fused, strict=True)]
    return BoltLoad(unit.name, unit.inputs, tuple(loads), unit.fixed, share)


def _executor(first: tuple[int, ...], rest: tuple[int, ...], seconds: float, then: Stats, now: Stats) -> TaskLoad:
    every = first + rest
    busy = sum(now[task].busy - then[task].busy for task in every)
    # ``busy`` does not include the time for reading and writing tuples. A task that slowed its senders, and was
    # not slowed by its receivers, was busy all the time: its throughput is its capacity.
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


# Counters that never decrease while a task runs.
_GROWING = ("arrived", "executed", "emitted", "busy", "held_back", "timed_out")


def _went_back(now: TaskStats, then: TaskStats) -> bool:
    return any(getattr(now, name) < getattr(then, name) for name in _GROWING)
