"""Decides when a topology doubles or halves bolts: what all policies share, and the policy by rates (as in DS2).
The policy by time-outs (Lu 2020, algorithm 2) is in ``penstock.control.failure_policy``.

Pure: a policy gets a load sample of the whole topology and returns a new parallelism or None. The caller replaces
the topology. A policy gets every load sample, in order and of equal length, except those during a replacement.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.control.topology_load import BoltLoad, LoadSample, SpoutLoad, TaskLoad
from penstock.errors import SettingError

__all__ = [
    "BoltLoad",
    "Bounds",
    "Doublings",
    "LoadSample",
    "RatePolicy",
    "Scale",
    "ScalingPolicy",
    "SpoutLoad",
    "TaskLoad",
    "check",
    "demands",
    "reachable",
    "use_with",
    "uses",
]


@dataclass(frozen=True)
class Scale:
    """Give these components a new parallelism by replacing the topology. Components not named keep theirs."""

    parallelism: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class Bounds:
    least: int = 1
    most: int = 64
    """Maximum executors of one component."""
    cool_down: float = 30.0
    """Seconds without a decision after the last decision, or after the end of the replacement if
    ``restart_cool_down`` is called. Long enough to work off the backlog of a replacement: if a spout does not
    report what is offered to it, catching up looks like load. In simulations with 1,000 pending tuples, 10 s led
    to four times the tasks needed, and 20 s to no excess."""

    def __post_init__(self) -> None:
        check("the minimum parallelism", self.least, "at least 1", self.least >= 1)
        check(
            "the maximum parallelism",
            self.most,
            f"at least the minimum, {self.least}",
            self.most >= self.least,
        )
        check("the cool-down", self.cool_down, "0 s or more", 0 <= self.cool_down < math.inf)


def reachable(old: int, bounds: Bounds) -> list[int]:
    """The parallelisms within the bounds that doubling and halving lead to from ``old``, ascending. Only even
    numbers are halved. ``old`` is missing if it is out of bounds itself."""
    if old < 1:
        raise ValueError(f"a component has at least one task, not {old}")
    found = [old]
    while found[0] % 2 == 0:
        found.insert(0, found[0] // 2)
    while found[-1] < bounds.most:
        found.append(found[-1] * 2)
    return [each for each in found if bounds.least <= each <= bounds.most]


class ScalingPolicy(ABC):
    """Base class of scaling policies: applies the cool-down. ``decide`` is called once per load sample."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._quiet_until = -math.inf

    def decide(self, sample: LoadSample) -> Scale | None:
        """The change to make now, or None. Never names spouts, fixed bolts, or bolts that keep their
        parallelism."""
        wanted = self.wanted(sample)
        if wanted is None or sample.time < self._quiet_until:
            return None
        self._quiet_until = sample.time + self.bounds.cool_down
        self._decided(sample, wanted)
        return wanted

    def restart_cool_down(self, now: float) -> None:
        """Restart the cool-down because a replacement has ended, whether by this policy or by a user."""
        self._quiet_until = now + self.bounds.cool_down

    @abstractmethod
    def wanted(self, sample: LoadSample) -> Scale | None:
        """The change the policy wants, regardless of the cool-down."""

    def _decided(self, sample: LoadSample, scale: Scale) -> None:  # noqa: B027 - some policies are stateless
        """Called with each change that ``decide`` returns."""


# ---- what both policies know ------------------------------------------------------------------------------


class Doublings:
    """Which bolts were doubled, so that a bolt whose work belongs to one key is not doubled again and again."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}
        """Their previous parallelism and their busiest task's share of the work."""

    def record(self, sample: LoadSample, scale: Scale) -> None:
        for bolt in sample.bolts:
            old, new = len(bolt.tasks), scale.parallelism.get(bolt.name, 0)
            work = uses(bolt, 1.0)
            if new > old and work and sum(work):
                self._before[bolt.name] = old, max(work) / sum(work)
            elif new:
                self._before.pop(bolt.name, None)

    def useless(self, name: str, use: list[float]) -> bool:
        """True if doubling brought less than half of the expected relief."""
        old, share = self._before.get(name, (len(use), 1.0))
        if len(use) <= old or not sum(use):
            return False
        return max(use) / sum(use) > share * (1 + old / len(use)) / 2


# ---- by rates ---------------------------------------------------------------------------------------------


class RatePolicy(ScalingPolicy):
    """The rule of DS2. The capacity of a task is what it processed per busy second, regardless of how long it
    waited. The load of a bolt follows from what the spouts would emit and from the selectivity of each bolt before
    it. One step is therefore right for all bolts, also for those that receive little now because an upstream bolt
    is slow.

    The busiest task decides. Doubling halves its work, because half of its keys move; halving adds the work of
    tasks i, i + n, … The policy chooses the smallest reachable parallelism at which the busiest task is at most at
    ``target``. A bolt is scaled up only if its busiest task is above ``target`` by more than ``slack``, and down
    only if with fewer tasks it would be below by as much, in several load samples in a row. If only one task is
    overloaded, more samples are required, and always for the same task, because one of eight tasks may be busy by
    chance. While a backlog is worked off no bolt is scaled down. A bolt whose busiest task kept its share of the
    work after a doubling is not doubled again, because that work belongs to one key.

    Tuples of several inputs are not distinguished. If the inputs grow by different factors, a bolt that emits more
    for one than for another may need a second step.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        target: float = 0.7,
        slack: float = 0.2,
        up_samples: int = 2,
        down_samples: int = 5,
    ) -> None:
        """``target``: the share of time for which a task should be busy. ``up_samples`` is 2, because a load that
        changes during a sample is only partly visible in it. ``down_samples`` is larger, because too few tasks
        cost more than too many."""
        super().__init__(bounds)
        check("the target use", target, "between 0 and 1", 0 < target < 1)
        check("the slack", slack, "between 0 and 1", 0 < slack < 1)
        check("the target use with its slack", target * (1 + slack), "below 1", target * (1 + slack) < 1)
        check(
            "the number of load samples",
            min(up_samples, down_samples),
            "at least 1",
            min(up_samples, down_samples) >= 1,
        )
        self.target, self.slack, self.up_samples, self.down_samples = target, slack, up_samples, down_samples
        self._streaks: dict[str, tuple[str, int]] = {}
        """The change that a bolt wants, and for how many load samples in a row."""
        self._doublings = Doublings()

    def restart_cool_down(self, now: float) -> None:
        super().restart_cool_down(now)
        self._streaks.clear()

    def wanted(self, sample: LoadSample) -> Scale | None:
        rates, backlog = demands(sample), sample.backlog
        grow: dict[str, tuple[int, str]] = {}
        found: dict[str, tuple[int, str]] = {}
        urgent = False
        for bolt in sample.bolts:
            use = None if bolt.fixed else uses(bolt, rates[bolt.name])
            new = len(bolt.tasks) if use is None else self._fitting_parallelism(bolt.name, use)
            if use is None or new == len(bolt.tasks) or (new < len(bolt.tasks) and backlog):
                self._streaks.pop(bolt.name, None)
                continue
            proposal = new, _reason(bolt, use, new)
            if new < len(bolt.tasks):
                if self._streak(bolt.name, "fewer") >= self.down_samples:
                    found[bolt.name] = proposal
            else:
                grow[bolt.name] = proposal
                broad = sum(use) / len(use) > self.target
                lasted = self._streak(bolt.name, "more" if broad else f"more, for task {use.index(max(use))}")
                urgent |= lasted >= (self.up_samples if broad else self.down_samples)
        if urgent:
            # all at once, because a replacement for five bolts costs as much as one for a single bolt
            found |= grow
        if not found:
            return None
        return Scale({name: new for name, (new, _) in found.items()}, "; ".join(why for _, why in found.values()))

    def _streak(self, name: str, proposal: str) -> int:
        """The number of load samples in a row with this proposal, including this one."""
        before, count = self._streaks.get(name, (proposal, 0))
        self._streaks[name] = proposal, count + 1 if before == proposal else 1
        return self._streaks[name][1]

    def _fitting_parallelism(self, name: str, use: list[float]) -> int:
        """The parallelism for this work. The current one if it is sufficient."""
        old = len(use)
        ways = reachable(old, self.bounds)
        if max(use) > self.target * (1 + self.slack):
            more = [new for new in ways if new > old]
            if not more or self._doublings.useless(name, use):
                return old
            return next((new for new in more if use_with(use, new) <= self.target), more[-1])
        low = self.target * (1 - self.slack)
        return next((new for new in ways if new < old and use_with(use, new) <= low), old)

    def _decided(self, sample: LoadSample, scale: Scale) -> None:
        self._streaks.clear()
        self._doublings.record(sample, scale)


def demands(sample: LoadSample) -> dict[str, float]:
    """Tuples per second that each bolt would receive if every component kept up. Computed from the demand of the
    spouts, the share of its inputs' tuples that a bolt receives, and the tuples it emits per processed tuple. If
    that share is unknown because its inputs emitted nothing, the arrived tuples are used."""
    out = {spout.name: spout.demand / sample.seconds for spout in sample.spouts}
    emitted = {spout.name: spout.emitted for spout in sample.spouts} | {
        bolt.name: bolt.emitted for bolt in sample.bolts
    }
    found: dict[str, float] = {}
    left = list(sample.bolts)
    while left:
        ready = [bolt for bolt in left if all(name in out for name in bolt.inputs)]
        if not ready:
            raise ValueError(f"these bolts form a cycle: {[bolt.name for bolt in left]}")
        for bolt in ready:
            observed = sum(emitted[name] for name in bolt.inputs)
            share = bolt.share if bolt.share is not None or not observed else bolt.arrived / observed
            offered = sum(out[name] for name in bolt.inputs)
            found[bolt.name] = rate = bolt.arrived / sample.seconds if share is None else offered * share
            out[bolt.name] = (
                rate * bolt.emitted / bolt.processed if bolt.processed else bolt.emitted / sample.seconds
            )
            left.remove(bolt)
    return found


def uses(bolt: BoltLoad, rate: float) -> list[float] | None:
    """The share of time for which each task would be busy if the bolt received ``rate`` tuples per second,
    distributed as in the load sample. None if the cost per tuple is unknown. For a task that processed nothing,
    the cost of the others is assumed."""
    if not bolt.arrived:
        return [0.0] * len(bolt.tasks)
    if not bolt.processed:
        return None
    usual = sum(task.busy for task in bolt.tasks) / bolt.processed
    costs = [task.busy / task.processed if task.processed else usual for task in bolt.tasks]
    return [rate * task.arrived / bolt.arrived * cost for task, cost in zip(bolt.tasks, costs, strict=True)]


def use_with(use: list[float], new: int) -> float:
    """The busy share of the busiest task if there were ``new`` tasks instead of ``len(use)``."""
    old = len(use)
    return max(use) * old / new if new >= old else max(sum(use[index::new]) for index in range(new))


def _reason(bolt: BoltLoad, use: list[float], new: int) -> str:
    """The reason of a change, in tuples per second of the busiest task."""
    index = use.index(max(use))
    task = bolt.tasks[index]
    old = len(use)
    if not (task.busy and task.processed):
        return f"{bolt.name}: no tuples arrive: {old} -> {new} tasks"
    capacity = task.processed / task.busy
    arriving = use[index] * capacity
    compared = "but" if arriving > capacity else "and only"
    return (
        f"{bolt.name}: the busiest task can process {capacity:,.0f}/s, {compared} {arriving:,.0f}/s arrive: "
        f"{old} -> {new} tasks"
    )


def check(name: str, value: float, rule: str, holds: bool) -> None:
    """Raise ``SettingError`` if a parameter of a policy is not allowed."""
    if not holds:
        raise SettingError("scaling", f"{name} must be {rule}, not {value!r}", "Leave it out to get the default.")
