"""Measures what the refit policy decides on: the load of components, the traffic between them, and their waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.control.packing import PackedGroup
from penstock.control.refit_load import CallWait, RefitSample
from penstock.driver.load_sampler import LoadSampler, Stats, shape_of
from penstock.metrics.stats import TaskStats
from penstock.metrics.views import Load, WorkerLoad
from penstock.plan.fusing import Pair, find_pairs
from penstock.plan.model import Fit, Plan, WorkerId
from penstock.plan.planner import executor_of, parts_of
from penstock.topology.builder import Topology

_AT_ITS_LIMIT = 0.9
"""Share of a core. The loop of a worker that uses more has no time left, so its spouts emit less than they could,
even if nothing is queued: inside a worker a spout only runs when no bolt has work."""


@dataclass(frozen=True)
class MeasuredLoad:
    """The load of the components in one interval."""

    sample: RefitSample
    weights: Mapping[str, float]
    """Cores that all executors of a component use together."""
    traffic: Mapping[tuple[str, str], float]
    """Tuples per second from component to component."""
    waiting: Mapping[str, str]
    """For each part whose calls wait, the component of the part that waits most."""

    def fit(self, before: Fit) -> Fit:
        """What the planner packs the components by, from now on."""
        return replace(before, weights=dict(self.weights), traffic=dict(self.traffic), groups=())


@dataclass(frozen=True)
class _Reading:
    time: float
    stats: Stats
    workers: Mapping[WorkerId, WorkerLoad]


class RefitSampler:
    """Takes successive samples of one form of a topology. A sample covers the time between two calls of ``take``.
    Not thread-safe."""

    def __init__(self, plan: Plan, topology: Topology, longest: float) -> None:
        """``longest``: maximum length of a sample in seconds. Longer ones are dropped."""
        self._plan, self._topology = plan, topology
        self._pairs = find_pairs(topology, plan.blocking)
        self._sampler = LoadSampler(shape_of(plan, topology), longest)
        self._before: _Reading | None = None

    def take(self, now: float, stats: Stats, load: Load) -> MeasuredLoad | None:
        """Return the sample that ends now. None if there is no earlier reading to compare with: at the first call,
        after a restart or a pause, and until all workers have reported."""
        sample = self._sampler.take(now, stats)
        before, self._before = self._before, _Reading(now, stats, load.workers)
        if sample is None or before is None or not self._complete(before, self._before):
            return None
        rates = {
            worker: (load.workers[worker].loop_cpu - then.loop_cpu) / (load.workers[worker].time - then.time)
            for worker, then in before.workers.items()
        }
        weights = self._weights(rates, before.stats, stats)
        traffic = self._traffic(sample.seconds, before.stats, stats)
        fit = Fit(self._plan.fit.workers, weights, traffic)
        parts, links = parts_of(self._topology, self._pairs, fit, self._plan.blocking)
        busiest, waits = max(rates.values()), self._waits(before.stats, stats)
        return MeasuredLoad(
            RefitSample(
                now,
                sample.seconds,
                tuple(parts),
                tuple(links),
                self.groups(),
                busiest,
                sum(spout.emitted for spout in sample.spouts) / sample.seconds,
                sample.backlog or busiest > _AT_ITS_LIMIT,
                {
                    pair[0]: self._call_wait(pair, sample.seconds, waits, before.stats, stats)
                    for pair in self._pairs
                },
            ),
            weights,
            traffic,
            {pair[0]: max(pair, key=lambda each: max(waits[each].values())) for pair in self._pairs},
        )

    def groups(self) -> tuple[PackedGroup, ...]:
        """The packing of the plan, by the names of parts."""
        names = [pair[0] for pair in self._pairs]
        groups = [group for stage in self._plan.stages for group in stage.fused_groups]
        return tuple(
            PackedGroup(tuple(each for each in group.components if each in names), group.workers)
            for group in groups
        )

    def _complete(self, before: _Reading, now: _Reading) -> bool:
        every = set(self._plan.worker_ids())
        return (
            before.workers.keys() == every == now.workers.keys()
            and all(now.workers[worker].time > then.time for worker, then in before.workers.items())
            and all(now.workers[worker].loop_cpu >= then.loop_cpu for worker, then in before.workers.items())
        )

    def _weights(self, rates: Mapping[WorkerId, float], then: Stats, now: Stats) -> dict[str, float]:
        """Divide the CPU time of each worker's loop among its components, by the time spent computing in their
        code."""
        found = dict.fromkeys(self._plan.tasks_of, 0.0)
        for worker, rate in rates.items():
            tasks = self._plan.routes.tasks_of(worker)
            computed = {task: _computed(then[task], now[task]) for task in tasks}
            total = sum(computed.values())
            for task, seconds in computed.items():
                share = seconds / total if total > 0 else 1 / len(tasks)
                found[self._plan.task[task].component] += rate * share
        return found

    def _traffic(self, seconds: float, then: Stats, now: Stats) -> dict[tuple[str, str], float]:
        """The tuples that arrived at each component, divided among its sources by what these emitted."""
        plan = self._plan
        emitted = {
            component: sum(now[task].emitted - then[task].emitted for task in tasks)
            for component, tasks in plan.tasks_of.items()
        }
        sources: dict[str, list[str]] = {}
        for edge in plan.edges:
            sources.setdefault(edge.target, []).append(plan.source_of(edge))
        found = {}
        for target, several in sources.items():
            arrived = sum(now[task].arrived - then[task].arrived for task in plan.tasks_of[target])
            total = sum(emitted[source] for source in set(several))
            for source in set(several):
                share = emitted[source] / total if total else 1 / len(set(several))
                found[source, target] = arrived * share / seconds
        return found

    def _waits(self, then: Stats, now: Stats) -> dict[str, dict[int, float]]:
        """The seconds that each executor of each component waited in calls."""
        found: dict[str, dict[int, float]] = {}
        for component, tasks in self._plan.tasks_of.items():
            node, waited = self._topology.nodes[component], dict[int, float]()
            for task in tasks:
                executor = executor_of(self._plan.task[task].index, node.parallelism, node.tasks)
                waited[executor] = waited.get(executor, 0.0) + now[task].waited - then[task].waited
            found[component] = waited
        return found

    def _call_wait(
        self, pair: Pair, seconds: float, waits: Mapping[str, Mapping[int, float]], then: Stats, now: Stats
    ) -> CallWait:
        """The waits of the busiest executor of a pair, and those per call of the component that waits most."""
        executors = waits[pair[0]]
        most = max(sum(waits[component][executor] for component in pair) for executor in executors)
        per_call = 0.0
        for component in pair:
            tasks = self._plan.tasks_of[component]
            calls = sum(now[task].slow_calls - then[task].slow_calls for task in tasks)
            per_call = max(per_call, sum(waits[component].values()) / max(calls, 1))
        return CallWait(min(1.0, most / seconds), per_call)


def _computed(then: TaskStats, now: TaskStats) -> float:
    return max(0.0, (now.busy - then.busy) - (now.waited - then.waited))
