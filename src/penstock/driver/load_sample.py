"""Computes the load samples of the load monitor: what executors, the streams between them, and their nodes used
between two readings. Does no IO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot, Use
from penstock.driver.registry import WorkerConnection
from penstock.metrics.bus import Load, Pair, StreamCount, WorkerLoad
from penstock.plan.model import Plan, WorkerId
from penstock.settings import Settings

_LEAST = 1e-9
"""Smallest capacity, in cores or bytes. A node that reports no capacity gets this, because placement requires
limits above 0."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker runs."""

    node: str
    pid: int


@dataclass(frozen=True)
class LoadReading:
    """The counters of one query run at one moment. Workers that have not connected or not reported yet are missing
    from ``places``."""

    time: float
    plan: Plan
    load: Load
    places: Mapping[WorkerId, WorkerPlace]

    @property
    def complete(self) -> bool:
        """Whether all workers have connected and reported."""
        return all(
            worker in self.places and self.load.workers[worker].machine for worker in self.plan.worker_ids()
        )

    @cached_property
    def workers_of(self) -> dict[str, list[WorkerId]]:
        """Workers by node, both sorted."""
        result: dict[str, list[WorkerId]] = {node: [] for node in sorted({p.node for p in self.places.values()})}
        for worker, place in self.places.items():
            result[place.node].append(worker)
        return result

    @cached_property
    def tasks_of(self) -> dict[WorkerId, list[int]]:
        """Task ids by worker."""
        result: dict[WorkerId, list[int]] = {worker: [] for worker in self.plan.worker_ids()}
        for task, worker in self.plan.routes.worker_of.items():
            result[worker].append(task)
        return result


def read_load(now: float, plan: Plan, load: Load, workers: Mapping[WorkerId, WorkerConnection]) -> LoadReading:
    """Make a reading. It includes only workers that are connected and belong to this query run, because reports
    from an earlier query run describe other processes."""
    places = {
        worker: WorkerPlace(each.hello.node, each.hello.pid)
        for worker, each in sorted(workers.items())
        if each.connected and each.hello.attempt == load.attempt and worker in load.workers
    }
    return LoadReading(now, plan, load, places)


@dataclass(frozen=True)
class ExecutorLoad:
    """Load of an executor, which is the tasks of one component in one worker. ``cpu`` is in cores, ``memory`` in
    bytes, the rest in bytes per second."""

    executor: str
    component: str
    node: str
    cpu: float
    memory: float
    bytes_in: float = 0.0
    """From other workers."""
    bytes_out: float = 0.0
    """To other workers."""
    network: float = 0.0
    """From and to other nodes, together."""


@dataclass(frozen=True)
class NodeLoad:
    """Load of a node. ``used`` is the sum over its executors; ``other`` is used by Spark's processes: the JVM of
    the Spark executor, that of a standalone worker, and the PySpark daemon."""

    node: str
    used: Use
    other: Use
    capacity: Use
    """What the node has."""
    limit: Use
    """How much of the capacity may be used."""


@dataclass(frozen=True)
class MonitorSample:
    """One load sample. ``ended`` is in seconds since 1970; ``streams`` are between executors."""

    topology: str
    ended: float
    seconds: float
    executors: tuple[ExecutorLoad, ...]
    streams: tuple[ExecutorStream, ...]
    nodes: tuple[NodeLoad, ...]
    workers: Mapping[str, WorkerId] = field(default_factory=dict)
    """The worker of each executor. The executors of one worker can only move together."""

    @cached_property
    def units(self) -> dict[str, WorkerId]:
        """The units that can move, each being all executors of a worker. A unit is named like
        ``split+count@1.0``."""
        return {unit_id(names): worker for worker, names in self._members.items()}

    @cached_property
    def _members(self) -> dict[WorkerId, list[str]]:
        result: dict[WorkerId, list[str]] = {}
        for name, worker in self.workers.items():
            result.setdefault(worker, []).append(name)
        return result

    @cached_property
    def node_of(self) -> dict[WorkerId, str]:
        """The node of each worker."""
        loads = {each.executor: each for each in self.executors}
        return {worker: loads[name].node for name, worker in self.workers.items()}

    def snapshot(self, settings: Settings, filled: bool = False) -> PlacementSnapshot:
        """Return the load sample as input for placement policies. Its executors are the ``units``, and streams
        inside a unit are left out. ``filled``: nodes may be used only up to ``placement.fill`` of their limits.

        Of what Spark's processes use on a node, ``placement.spark_cores`` stay on it whatever runs there, and are
        reserved even if less is used. The rest is the work of moving the executors' tuples. It moves with them, so
        it is divided among the executors of the node by their own use.
        """
        base, share = settings.placement.spark_cores, settings.placement.fill if filled else 1.0
        moving = {node.node: _moving_share(node, base) for node in self.nodes}
        unit_of = {name: unit_id(names) for names in self._members.values() for name in names}
        loads = {each.executor: each for each in self.executors}
        executors = []
        for names in self._members.values():
            parts = [loads[name] for name in names]
            executors.append(
                PlacedExecutor(
                    unit_id(names),
                    "+".join(part.component for part in parts),
                    parts[0].node,
                    sum(part.cpu for part in parts) * (1 + moving[parts[0].node]),
                    sum(part.memory for part in parts),
                    sum(part.network for part in parts),
                )
            )
        streams: dict[tuple[str, str], ExecutorStream] = {}
        for stream in self.streams:
            key = unit_of[stream.source], unit_of[stream.target]
            if key[0] != key[1]:
                before = streams.get(key, ExecutorStream(*key, 0.0, 0.0))
                streams[key] = ExecutorStream(*key, before.tuples + stream.tuples, before.bytes + stream.bytes)
        nodes = tuple(
            PlacementNode(node.node, node.limit.times(share), replace(node.other, cpu=_staying(node, base)))
            for node in self.nodes
        )
        return PlacementSnapshot(nodes, tuple(executors), tuple(streams.values()))


def _staying(node: NodeLoad, base: float) -> float:
    """Cores of Spark's processes that do not move with executors."""
    return base if node.used.cpu else max(base, node.other.cpu)


def _moving_share(node: NodeLoad, base: float) -> float:
    """Cores of Spark's processes per core of executors that move with these."""
    return max(0.0, node.other.cpu - base) / node.used.cpu if node.used.cpu else 0.0


def unit_id(executors: Sequence[str]) -> str:
    """Return the name of the unit that consists of these executors of one worker."""
    worker = executors[0].rpartition("@")[2]
    return "+".join(name.rpartition("@")[0] for name in executors) + f"@{worker}"


def executor_id(component: str, worker: WorkerId) -> str:
    """Return the name of an executor, such as ``split@1.0``."""
    return f"{component}@{worker}"


def sample_between(first: LoadReading, last: LoadReading, ended: float, settings: Settings) -> MonitorSample:
    """Return the load sample between two complete readings of the same query run."""
    plan = last.plan
    workers = {
        executor_id(component, worker): worker
        for worker in plan.worker_ids()
        for component in _components(last, worker)
    }
    streams = _streams(first, last)
    traffic = _traffic(streams, workers, last)
    executors = [_executor(first, last, name, worker, traffic[name]) for name, worker in workers.items()]
    capacities = node_capacities(last, settings)
    on: dict[str, list[ExecutorLoad]] = {name: [] for name in last.workers_of}
    for each in executors:
        on[each.node].append(each)
    nodes = tuple(_node(name, on[name], first, last, capacities[name], settings) for name in on)
    seconds = last.time - first.time
    return MonitorSample(plan.topology, ended, seconds, tuple(executors), tuple(streams.values()), nodes, workers)


def node_capacities(reading: LoadReading, settings: Settings) -> dict[str, Use]:
    """Return the capacity of each node: from the settings, from the CPU quota that the kernel enforces on the
    node, or an even share of what its machine reports. Several nodes may share one machine (containers, network
    namespaces). Nodes of other topologies are unknown and not counted."""
    machine_of: dict[str, Any] = {}
    for worker, place in reading.places.items():
        machine_of[place.node] = machine_of.get(place.node) or reading.load.workers[worker].machine
    ids = [machine.get("id") for machine in machine_of.values()]
    result = {}
    for node, machine in machine_of.items():
        sharing = max(1, ids.count(machine["id"])) if machine.get("id") else 1
        cores = settings.placement.node_cores or machine.get("quota") or machine.get("cores", 0) / sharing
        memory = settings.placement.node_memory or machine.get("memory", 0) / sharing
        result[node] = Use(max(cores, _LEAST), max(memory, _LEAST), settings.placement.node_bandwidth)
    return result


def _components(reading: LoadReading, worker: WorkerId) -> list[str]:
    return list(dict.fromkeys(reading.plan.task[task].component for task in reading.tasks_of[worker]))


@dataclass
class _Traffic:
    """Bytes per second of one executor: from and to other workers, and from and to other nodes together."""

    into: float = 0.0
    out: float = 0.0
    network: float = 0.0


def _traffic(
    streams: Mapping[tuple[str, str], ExecutorStream], workers: Mapping[str, WorkerId], reading: LoadReading
) -> dict[str, _Traffic]:
    result = {name: _Traffic() for name in workers}
    for (source, target), stream in streams.items():
        here, there = workers[source], workers[target]
        if here == there:
            continue
        result[source].out += stream.bytes
        result[target].into += stream.bytes
        if reading.places[here].node != reading.places[there].node:
            result[source].network += stream.bytes
            result[target].network += stream.bytes
    return result


def _executor(
    first: LoadReading, last: LoadReading, name: str, worker: WorkerId, traffic: _Traffic
) -> ExecutorLoad:
    """A worker process reports one CPU time and one memory size. If several components are fused in it, its CPU
    time is divided by the time spent in their code, and its memory by their numbers of tasks."""
    plan, component = last.plan, name.rpartition("@")[0]
    tasks = last.tasks_of[worker]
    mine = [task for task in tasks if plan.task[task].component == component]
    busy = {task: last.load.busy.get(task, 0.0) - first.load.busy.get(task, 0.0) for task in tasks}
    evenly, total = len(mine) / len(tasks), sum(busy.values())
    share = sum(busy[task] for task in mine) / total if total > 0 else evenly
    old, new = first.load.workers[worker], last.load.workers[worker]
    cpu = _rate(old.cpu, new.cpu, old.time, new.time) * share
    return ExecutorLoad(
        name,
        component,
        last.places[worker].node,
        cpu,
        new.rss * evenly,
        traffic.into,
        traffic.out,
        traffic.network,
    )


def _streams(first: LoadReading, last: LoadReading) -> dict[tuple[str, str], ExecutorStream]:
    """Return the streams by the names of source and target. All streams between two executors are added up."""
    plan = last.plan
    name = {task: executor_id(plan.task[task].component, worker) for task, worker in plan.routes.worker_of.items()}
    result: dict[tuple[str, str], ExecutorStream] = {}
    for worker in plan.worker_ids():
        old, new = first.load.workers[worker], last.load.workers[worker]
        for (source, target), growth in _growth(old, new):
            key = name[source], name[target]
            before = result.get(key, ExecutorStream(*key, 0.0, 0.0))
            seconds = new.detailed_at - old.detailed_at
            result[key] = ExecutorStream(
                *key, before.tuples + growth.tuples / seconds, before.bytes + growth.bytes / seconds
            )
    return result


def _growth(old: WorkerLoad, new: WorkerLoad) -> Iterator[tuple[Pair, StreamCount]]:
    if new.detailed_at <= old.detailed_at:
        return  # the worker has not reported its streams since
    for pair, count in (new.streams or {}).items():
        before = (old.streams or {}).get(pair, StreamCount())
        yield pair, StreamCount(count.tuples - before.tuples, count.bytes - before.bytes)


def _node(
    name: str,
    executors: list[ExecutorLoad],
    first: LoadReading,
    last: LoadReading,
    capacity: Use,
    settings: Settings,
) -> NodeLoad:
    used = Use(
        sum(each.cpu for each in executors),
        sum(each.memory for each in executors),
        sum(each.network for each in executors),
    )
    worker = last.workers_of[name][0]  # all workers of a node report the same machine
    old, new = first.load.workers[worker], last.load.workers[worker]
    other, jvm, before = Use(), new.machine.get("jvm"), old.machine.get("jvm")
    if jvm and before and jvm[0] == before[0]:
        other = Use(_rate(before[1], jvm[1], old.detailed_at, new.detailed_at), jvm[2])
    limit = Use(
        capacity.cpu * settings.placement.cpu_limit,
        capacity.memory * settings.placement.memory_limit,
        capacity.bandwidth * settings.placement.bandwidth_limit,
    )
    return NodeLoad(name, used, other, capacity, limit)


def _rate(old: float, new: float, since: float, until: float) -> float:
    return max(new - old, 0.0) / (until - since) if until > since else 0.0
