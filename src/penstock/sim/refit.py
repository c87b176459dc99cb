"""Simulates a topology that is packed again while it runs, on one machine, under a load that changes over a day.

The topology is a spout and a chain of bolts. Tuples are a fluid: in each tick, which is as long as a load sample,
the workers process what has arrived and what is left from before, as far as they can. A worker cannot use more
than one core, and waiting in calls takes its time too. All workers and the JVM share the cores of the machine.
What a hop really costs can differ from what the packing assumes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.control.packing import Link, PackedGroup, Part, pack, worker_loads
from penstock.control.refit import CallWait, Refit, RefitPolicy, RefitSample

DAY = 86_400.0


@dataclass(frozen=True)
class ChainStep:
    """The spout, or a bolt that reads from the step before."""

    name: str
    cost: float
    """CPU seconds per tuple that the spout emits, of all tuples that follow from it."""
    parallelism: int = 1
    local: bool = False
    """Its tuples may stay in their worker (shuffle grouping)."""
    wait: float = 0.0
    """Seconds that its calls wait, per tuple that the spout emits."""
    calls: float = 1.0
    """Calls per tuple that the spout emits."""


@dataclass(frozen=True)
class RefitSetUp:
    steps: tuple[ChainStep, ...]
    load: tuple[float, ...]
    """Tuples per second at the source, by tick."""
    cores: float = 4.0
    workers: int = 4
    """The most workers that the first packing and the policy may use."""
    tick: float = 10.0
    """Seconds of a tick and of a load sample."""
    hop_cost: float = 1.0
    """What a hop costs in a worker, as a multiple of what the packing assumes."""
    jvm_cost: float = 0.5
    """CPU time of the JVM per CPU time that hops cost in workers."""
    noise: float = 0.0
    """Measured weights are wrong by up to this share."""
    gap: float = 0.05
    """Seconds without processing during a replacement."""
    start: tuple[PackedGroup, ...] = ()
    """The first packing. Empty: what the planner chooses when nothing is measured."""

    @property
    def links(self) -> tuple[Link, ...]:
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return tuple(Link(source.name, target.name, target.local) for source, target in pairs)

    def parts(self, rate: float) -> tuple[Part, ...]:
        """With weights in cores at this many tuples per second."""
        return tuple(Part(step.name, rate * step.cost, step.parallelism) for step in self.steps)

    def first_packing(self) -> tuple[PackedGroup, ...]:
        parts = [Part(step.name, step.parallelism, step.parallelism) for step in self.steps]
        return self.start or tuple(pack(parts, self.links, self.workers))


def day_curve(
    night: float,
    peak: float,
    *,
    burst: float = 0.0,
    noise: float = 0.0,
    days: int = 1,
    tick: float = 10.0,
    seed: int = 0,
) -> tuple[float, ...]:
    """Tuples per second over days that begin at midnight: little at night, peaks at 10 and at 19 o'clock, each
    some two hours wide. ``burst``: tuples per second more, for ten minutes at 15 o'clock. ``noise``: the rate of
    each tick differs by up to this share."""
    chance = random.Random(seed)
    rates = []
    for number in range(round(days * DAY / tick)):
        hour = number * tick % DAY / 3600
        shape = math.exp(-(((hour - 10) / 1.5) ** 2)) + math.exp(-(((hour - 19) / 1.5) ** 2))
        rate = night + (peak - night) * shape + (burst if 15 <= hour < 15 + 1 / 6 else 0.0)
        rates.append(rate * (1 + noise * chance.uniform(-1, 1)))
    return tuple(rates)


@dataclass(frozen=True)
class RefitTick:
    time: float
    """The end of the tick."""
    busiest: float
    """Share of a core that the busiest worker used."""
    throughput: float
    """Tuples per second that the spout emitted."""
    backlog: float
    """Tuples at the source that the spout has not emitted."""


@dataclass(frozen=True)
class RefitChange:
    time: float
    before: tuple[PackedGroup, ...]
    refit: Refit


@dataclass(frozen=True)
class RefitOutcome:
    changes: tuple[RefitChange, ...]
    ticks: tuple[RefitTick, ...]
    groups: tuple[PackedGroup, ...]
    """The packing at the end."""


def run(policy: RefitPolicy | None, set_up: RefitSetUp, seed: int = 0) -> RefitOutcome:
    """Run the simulation once. The same seed gives the same run. A policy object can be used for one run only.
    Without one the first packing stays."""
    return _RefitRun(policy, set_up, seed).run()


@dataclass
class _Capacity:
    """What a packing does with one tuple per second."""

    set_up: RefitSetUp
    groups: Sequence[PackedGroup]
    cpu: dict[PackedGroup, float] = field(init=False)
    """CPU seconds of the busiest worker of each group."""
    most: float = field(init=False)
    """The most tuples per second."""

    def __post_init__(self) -> None:
        parts, links = self.set_up.parts(1.0), self.set_up.links
        waiting = [replace(part, weight=step.wait) for part, step in zip(parts, self.set_up.steps, strict=True)]
        own = worker_loads(parts, [], self.groups)
        assumed = worker_loads(parts, links, self.groups)
        hops = {group: self.set_up.hop_cost * (assumed[group] - own[group]) for group in self.groups}
        waits = worker_loads(waiting, [], self.groups)
        self.cpu = {group: own[group] + hops[group] for group in self.groups}
        # All workers of a group count as its busiest one, as if every parallelism were a multiple of the workers.
        in_workers = sum(self.cpu[group] * group.workers for group in self.groups)
        in_jvm = self.set_up.jvm_cost * sum(hops[group] * group.workers for group in self.groups)
        slowest = max(self.cpu[group] + waits[group] for group in self.groups)
        self.most = min(1 / slowest, self.set_up.cores / (in_workers + in_jvm))


class _RefitRun:
    def __init__(self, policy: RefitPolicy | None, set_up: RefitSetUp, seed: int) -> None:
        self._policy, self._set_up = policy, set_up
        self._chance = random.Random(seed)
        self._groups = set_up.first_packing()
        self._capacity = _Capacity(set_up, self._groups)
        self._blocking: frozenset[str] = frozenset()
        self._backlog = 0.0
        self._changes: list[RefitChange] = []
        self._ticks: list[RefitTick] = []

    def run(self) -> RefitOutcome:
        tick = self._set_up.tick
        gap = 0.0
        for number, load in enumerate(self._set_up.load, 1):
            done = min(self._backlog + load * tick, self._capacity.most * (tick - gap))
            self._backlog += load * tick - done
            rate = done / tick
            busiest = rate * max(self._capacity.cpu.values())
            self._ticks.append(RefitTick(number * tick, busiest, rate, self._backlog))
            gap = self._set_up.gap if self._decide(number * tick, load) else 0.0
        return RefitOutcome(tuple(self._changes), tuple(self._ticks), self._groups)

    def _decide(self, now: float, load: float) -> bool:
        """Ask the policy, and do what it says. Returns whether there was a replacement."""
        refit = self._policy.decide(self._sample(now, load)) if self._policy else None
        if self._policy is None or refit is None:
            return False
        self._changes.append(RefitChange(now, self._groups, refit))
        self._groups, self._blocking = refit.groups, refit.blocking
        self._capacity = _Capacity(self._set_up, self._groups)
        self._policy.replaced(now, by_refit=True)
        return True

    def _sample(self, now: float, load: float) -> RefitSample:
        set_up, last = self._set_up, self._ticks[-1]
        parts = tuple(
            replace(
                part,
                weight=part.weight * (1 + set_up.noise * self._chance.uniform(-1, 1)),
                blocking=part.name in self._blocking,
            )
            for part in set_up.parts(last.throughput)
        )
        links = tuple(replace(link, traffic=last.throughput) for link in set_up.links)
        waits = {
            step.name: CallWait(last.throughput * step.wait / step.parallelism, step.wait / step.calls)
            for step in set_up.steps
        }
        behind = last.backlog > load  # more than what arrives in a second
        return RefitSample(
            now, set_up.tick, parts, links, self._groups, last.busiest, last.throughput, behind, waits
        )
