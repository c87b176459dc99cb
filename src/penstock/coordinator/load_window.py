"""One window of the load monitor: what executors, the streams between them and their nodes were up to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.control.placement import Executor, Node, Snapshot, Stream, Use
from penstock.coordinator.crew import Connection
from penstock.metrics.bus import Load, Pair, SlotLoad, StreamCount
from penstock.plan.model import Plan, SlotId
from penstock.settings import Settings

_LEAST = 1e-9
"""Of a limit: a node that tells nothing of itself has none, and a snapshot wants limits above 0."""


@dataclass(frozen=True)
class Place:
    """Where a slot runs."""

    node: str
    pid: int


@dataclass(frozen=True)
class Look:
    """All that is known of one start at a moment. Slots that have not connected, or have not reported yet, are
    missing from ``places``."""

    time: float
    plan: Plan
    load: Load
    places: Mapping[SlotId, Place]

    @property
    def whole(self) -> bool:
        """All slots are there."""
        return all(slot in self.places and self.load.slots[slot].machine for slot in self.plan.slot_ids())

    @cached_property
    def slots_of(self) -> dict[str, list[SlotId]]:
        """By node, both in order."""
        result: dict[str, list[SlotId]] = {node: [] for node in sorted({p.node for p in self.places.values()})}
        for slot, place in self.places.items():
            result[place.node].append(slot)
        return result

    @cached_property
    def tasks_of(self) -> dict[SlotId, list[int]]:
        result: dict[SlotId, list[int]] = {slot: [] for slot in self.plan.slot_ids()}
        for task, slot in self.plan.routes.slot_of.items():
            result[slot].append(task)
        return result


def take_look(now: float, plan: Plan, load: Load, slots: Mapping[SlotId, Connection]) -> Look:
    """Only of slots that are connected and of this start: a straggler's figures are another process'."""
    places = {
        slot: Place(each.hello.node, each.hello.pid)
        for slot, each in sorted(slots.items())
        if each.connected and each.hello.attempt == load.attempt and slot in load.slots
    }
    return Look(now, plan, load, places)


@dataclass(frozen=True)
class ExecutorLoad:
    """The tasks of one component in one slot. Cores, bytes, bytes a second."""

    executor: str
    component: str
    node: str
    cpu: float
    memory: float
    bytes_in: float = 0.0
    """From other slots."""
    bytes_out: float = 0.0
    network: float = 0.0
    """Of both together, with other nodes."""


@dataclass(frozen=True)
class NodeLoad:
    """Sums over a node's executors; ``other`` is the Spark executor's JVM."""

    node: str
    used: Use
    other: Use
    capacity: Use
    """What it has."""
    limit: Use
    """What of that may be in use."""


@dataclass(frozen=True)
class Window:
    """``ended`` in seconds since 1970. ``streams`` are between executors."""

    topology: str
    ended: float
    seconds: float
    executors: tuple[ExecutorLoad, ...]
    streams: tuple[Stream, ...]
    nodes: tuple[NodeLoad, ...]
    slots: Mapping[str, SlotId] = field(default_factory=dict)
    """Of each executor. Those of one slot can move only together."""

    @cached_property
    def units(self) -> dict[str, SlotId]:
        """What can move: the executors of a slot together, as ``split+count@1.0``."""
        return {unit_id(names): slot for slot, names in self._members.items()}

    @cached_property
    def _members(self) -> dict[SlotId, list[str]]:
        result: dict[SlotId, list[str]] = {}
        for name, slot in self.slots.items():
            result.setdefault(slot, []).append(name)
        return result

    def snapshot(self, share: float = 1.0) -> Snapshot:
        """For placement policies, its executors being ``units``; what stays inside one is no stream. ``share``: of
        the nodes' limits."""
        unit_of = {name: unit_id(names) for names in self._members.values() for name in names}
        loads = {each.executor: each for each in self.executors}
        executors = []
        for names in self._members.values():
            parts = [loads[name] for name in names]
            executors.append(
                Executor(
                    unit_id(names),
                    "+".join(part.component for part in parts),
                    parts[0].node,
                    sum(part.cpu for part in parts),
                    sum(part.memory for part in parts),
                    sum(part.network for part in parts),
                )
            )
        between: dict[tuple[str, str], Stream] = {}
        for stream in self.streams:
            key = unit_of[stream.source], unit_of[stream.target]
            if key[0] != key[1]:
                before = between.get(key, Stream(*key, 0.0, 0.0))
                between[key] = Stream(*key, before.tuples + stream.tuples, before.bytes + stream.bytes)
        nodes = tuple(Node(node.node, node.limit.times(share), node.other) for node in self.nodes)
        return Snapshot(nodes, tuple(executors), tuple(between.values()))


def unit_id(executors: Sequence[str]) -> str:
    """Of the executors of one slot."""
    slot = executors[0].rpartition("@")[2]
    return "+".join(name.rpartition("@")[0] for name in executors) + f"@{slot}"


def executor_id(component: str, slot: SlotId) -> str:
    """As ``split@1.0``."""
    return f"{component}@{slot}"


def between(first: Look, last: Look, ended: float, settings: Settings) -> Window:
    """What happened from one whole look to another of the same start."""
    plan = last.plan
    slots = {
        executor_id(component, slot): slot for slot in plan.slot_ids() for component in _components(last, slot)
    }
    streams = _streams(first, last)
    traffic = _traffic(streams, slots, last)
    executors = [_executor(first, last, name, slot, traffic[name]) for name, slot in slots.items()]
    capacities = node_capacities(last, settings)
    on: dict[str, list[ExecutorLoad]] = {name: [] for name in last.slots_of}
    for each in executors:
        on[each.node].append(each)
    nodes = tuple(_node(name, on[name], first, last, capacities[name], settings) for name in on)
    seconds = last.time - first.time
    return Window(plan.topology, ended, seconds, tuple(executors), tuple(streams.values()), nodes, slots)


def node_capacities(look: Look, settings: Settings) -> dict[str, Use]:
    """What each node has: as set, or an even share of what its machine says. Several nodes may stand on one
    machine (containers, network namespaces); those of other topologies are not known."""
    machine_of: dict[str, Any] = {}
    for slot, place in look.places.items():
        machine_of[place.node] = machine_of.get(place.node) or look.load.slots[slot].machine
    ids = [machine.get("id") for machine in machine_of.values()]
    result = {}
    for node, machine in machine_of.items():
        sharing = max(1, ids.count(machine["id"])) if machine.get("id") else 1
        cores = settings.node_cores or machine.get("cores", 0) / sharing
        memory = settings.node_memory or machine.get("memory", 0) / sharing
        result[node] = Use(max(cores, _LEAST), max(memory, _LEAST), settings.node_bandwidth)
    return result


def _components(look: Look, slot: SlotId) -> list[str]:
    return list(dict.fromkeys(look.plan.task[task].component for task in look.tasks_of[slot]))


@dataclass
class _Traffic:
    """Bytes a second of an executor with other slots, and of both with other nodes."""

    into: float = 0.0
    out: float = 0.0
    network: float = 0.0


def _traffic(
    streams: Mapping[tuple[str, str], Stream], slots: Mapping[str, SlotId], look: Look
) -> dict[str, _Traffic]:
    result = {name: _Traffic() for name in slots}
    for (source, target), stream in streams.items():
        here, there = slots[source], slots[target]
        if here == there:
            continue
        result[source].out += stream.bytes
        result[target].into += stream.bytes
        if look.places[here].node != look.places[there].node:
            result[source].network += stream.bytes
            result[target].network += stream.bytes
    return result


def _executor(first: Look, last: Look, name: str, slot: SlotId, traffic: _Traffic) -> ExecutorLoad:
    """A slot's process has one CPU time; where several components are chained in it, their shares are those of the
    time in their code; of its memory, those of their tasks."""
    plan, component = last.plan, name.rpartition("@")[0]
    tasks = last.tasks_of[slot]
    mine = [task for task in tasks if plan.task[task].component == component]
    busy = {task: last.load.busy.get(task, 0.0) - first.load.busy.get(task, 0.0) for task in tasks}
    evenly, total = len(mine) / len(tasks), sum(busy.values())
    share = sum(busy[task] for task in mine) / total if total > 0 else evenly
    old, new = first.load.slots[slot], last.load.slots[slot]
    cpu = _rate(old.cpu, new.cpu, old.time, new.time) * share
    return ExecutorLoad(
        name,
        component,
        last.places[slot].node,
        cpu,
        new.rss * evenly,
        traffic.into,
        traffic.out,
        traffic.network,
    )


def _streams(first: Look, last: Look) -> dict[tuple[str, str], Stream]:
    """By executors, both names; all streams between two of them together."""
    plan = last.plan
    name = {task: executor_id(plan.task[task].component, slot) for task, slot in plan.routes.slot_of.items()}
    result: dict[tuple[str, str], Stream] = {}
    for slot in plan.slot_ids():
        old, new = first.load.slots[slot], last.load.slots[slot]
        for (source, target), grown in _grown(old, new):
            key = name[source], name[target]
            before = result.get(key, Stream(*key, 0.0, 0.0))
            seconds = new.told - old.told
            result[key] = Stream(
                *key, before.tuples + grown.tuples / seconds, before.bytes + grown.bytes / seconds
            )
    return result


def _grown(old: SlotLoad, new: SlotLoad) -> Iterator[tuple[Pair, StreamCount]]:
    if new.told <= old.told:
        return  # nothing new was told
    for pair, count in (new.streams or {}).items():
        before = (old.streams or {}).get(pair, StreamCount())
        yield pair, StreamCount(count.tuples - before.tuples, count.bytes - before.bytes)


def _node(
    name: str,
    executors: list[ExecutorLoad],
    first: Look,
    last: Look,
    capacity: Use,
    settings: Settings,
) -> NodeLoad:
    used = Use(
        sum(each.cpu for each in executors),
        sum(each.memory for each in executors),
        sum(each.network for each in executors),
    )
    slot = last.slots_of[name][0]  # any of them tells the same
    old, new = first.load.slots[slot], last.load.slots[slot]
    other, jvm, before = Use(), new.machine.get("jvm"), old.machine.get("jvm")
    if jvm and before and jvm[0] == before[0]:
        other = Use(_rate(before[1], jvm[1], old.told, new.told), jvm[2])
    limit = Use(
        capacity.cpu * settings.node_cpu_limit,
        capacity.memory * settings.node_memory_limit,
        capacity.bandwidth * settings.node_bandwidth_limit,
    )
    return NodeLoad(name, used, other, capacity, limit)


def _rate(old: float, new: float, since: float, until: float) -> float:
    return max(new - old, 0.0) / (until - since) if until > since else 0.0
