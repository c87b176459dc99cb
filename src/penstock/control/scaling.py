"""When a topology doubles or halves itself (SPEC 4), by time-outs (A algorithm 2) or by rates (as DS2 does).

Pure: a look at the whole topology goes in, a new parallelism or None comes out; somebody else does the replacing.
A policy is told of every load sample, one after the other and of equal length, but of none that a replacement
falls into.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import SettingError

_MOST_UNSEEN = 2.0
"""A spout with a backlog behind it emits as fast as it can whenever it may. So a share held back near 1 says that
more would come, not how much more; it counts for at most this factor, which makes two steps of four."""

_HELD_BACK = 0.05
"""Share of a load sample up to which a spout that waits is not held back: frames come whole, and some wait a
moment."""

_BACKLOG = 0.1
"""Share of an inbox above which what waits there is a backlog."""

_CATCHING_UP = 1.1
"""Emitted against offered, from where on a spout works off what it had not emitted before."""


@dataclass(frozen=True)
class TaskLoad:
    """One task of a bolt during a load sample; of tasks that share an executor, and of bolts that are fused, all
    of them together, for they share its time."""

    processed: float
    busy: float
    """Seconds in the component's own code."""
    arrived: float
    emitted: float
    queued: int = 0
    """Tuples in its inbox at the end."""
    capacity: int = 1
    """Tuples the inbox holds."""


@dataclass(frozen=True)
class BoltLoad:
    name: str
    inputs: tuple[str, ...]
    """The components it gets tuples from."""
    tasks: tuple[TaskLoad, ...]
    """By index: keys of task i are those a halving to n gives to task i mod n."""
    fixed: bool = False
    """Does not scale: the user says so, or its tasks do not share the work (global, all, direct and the user's own
    groupings), or it is fused with a spout."""

    @property
    def arrived(self) -> float:
        return sum(task.arrived for task in self.tasks)

    @property
    def processed(self) -> float:
        return sum(task.processed for task in self.tasks)

    @property
    def emitted(self) -> float:
        return sum(task.emitted for task in self.tasks)


@dataclass(frozen=True)
class SpoutLoad:
    name: str
    emitted: float
    """Replays included."""
    failed: int = 0
    """By time-out."""
    held_back: float = 0.0
    """Share of the load sample in which it had something to emit and might not (pending, backpressure), 0 to 1."""
    offered: float | None = None
    """Tuples that came to the source during the load sample, where that is known (a lag, the rate before a
    backpressure). The only way to tell a load from a backlog while the spout is held back."""

    @property
    def demand(self) -> float:
        """Tuples it would have emitted in this load sample, had nobody held it back and had it no backlog."""
        if self.offered is not None:
            return self.offered
        return self.emitted / max(1.0 - self.held_back, 1.0 / _MOST_UNSEEN)

    @property
    def behind(self) -> bool:
        catches_up = self.offered is not None and self.emitted > _CATCHING_UP * self.offered
        return self.held_back > _HELD_BACK or catches_up


@dataclass(frozen=True)
class LoadSample:
    """The topology from ``time - seconds`` to ``time``; counts are of that span. Its graph has no cycle."""

    time: float
    seconds: float
    spouts: tuple[SpoutLoad, ...]
    bolts: tuple[BoltLoad, ...]
    latency: float | None = None
    """Seconds from emit to ack, of the tuples completed; None where there were none."""
    late: int = 0
    """Without acks: tuples that were at the end of the topology later than the time-out."""

    @property
    def failed(self) -> int:
        """A's X_i."""
        return sum(spout.failed for spout in self.spouts) + self.late

    @property
    def backlog(self) -> bool:
        """Something is being worked off, so what is processed says nothing about what comes."""
        full = any(task.queued > _BACKLOG * task.capacity for bolt in self.bolts for task in bolt.tasks)
        return full or any(spout.behind for spout in self.spouts)


@dataclass(frozen=True)
class Scale:
    """Replace the topology by one with these numbers of tasks, of executors where several tasks share one;
    components not named keep theirs."""

    parallelism: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class Bounds:
    least: int = 1
    most: int = 64
    """Tasks of one component."""
    cool_down: float = 30.0
    """Seconds after a decision, or after the replacement where ``restart_cool_down`` is called, in which none is
    made. Long enough to work off the backlog of a replacement: where a spout does not tell what is offered to it,
    catching up looks like a load. Simulated with 1,000 pending, 10 s led to four times the tasks needed, 20 s to
    no more."""

    def __post_init__(self) -> None:
        _check("the least parallelism", self.least, "at least 1", self.least >= 1)
        _check(
            "the most parallelism",
            self.most,
            f"at least the least of {self.least}",
            self.most >= self.least,
        )
        _check("the cool-down", self.cool_down, "0 s or more", 0 <= self.cool_down < math.inf)


def reachable(old: int, bounds: Bounds) -> list[int]:
    """What doubling and halving lead to from ``old``, ascending, within the bounds; halving needs an even number.
    ``old`` is missing if it is out of bounds itself."""
    if old < 1:
        raise ValueError(f"a component has at least one task; got {old}")
    found = [old]
    while found[0] % 2 == 0:
        found.insert(0, found[0] // 2)
    while found[-1] < bounds.most:
        found.append(found[-1] * 2)
    return [each for each in found if bounds.least <= each <= bounds.most]


class ScalingPolicy(ABC):
    """Keeps the cool-down; what is wanted is for the policies to say."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._quiet_until = -math.inf

    def decide(self, sample: LoadSample) -> Scale | None:
        """What to change now; spouts, fixed bolts and what would stay as it is are never named."""
        wanted = self._wanted(sample)
        if wanted is None or sample.time < self._quiet_until:
            return None
        self._quiet_until = sample.time + self.bounds.cool_down
        self._decided(sample, wanted)
        return wanted

    def restart_cool_down(self, now: float) -> None:
        """A replacement has ended, this policy's or one by hand: the cool-down begins anew."""
        self._quiet_until = now + self.bounds.cool_down

    @abstractmethod
    def _wanted(self, sample: LoadSample) -> Scale | None:
        """Whether or not the cool-down allows it."""

    def _decided(self, sample: LoadSample, scale: Scale) -> None:  # noqa: B027 - not all of them remember
        """It will be carried out."""


# ---- by time-outs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FailureCount:
    failed: int
    latency: float | None
    """Recorded beside the failures (SPEC 4); decides nothing."""


class FailurePolicy(ScalingPolicy):
    """A algorithm 2: more time-outs than on average and an unsteady number of them: double all bolts; fewer, and
    unsteady: halve them. One load sample is one window.

    The ring ends with the window just over, as A's interval does, so a first surge counts at once. n is the number
    of windows in it (A's "valid" ones), not its length: with none or one of them S² is 0 and nothing happens.
    Weights fall in a straight line, from 1 to 1 / length: a window that leaves the ring had little weight left,
    so S² does not jump for that, and there is no further constant to set. A bolt that is fixed, at its bound or,
    where halving is wanted, odd, stays as it is.

    The ring outlives a replacement, as in A: with a cool-down shorter than the ring, a doubling that helped is
    taken back, for then there are fewer failures than on average. So let it be as long as the ring: the default of
    30 s is, with six windows of 5 s.
    Also A's: a number of failures that is high but steady has no S² and scales nothing, and neither has none at
    all, so idle tasks are kept. ``RatePolicy`` has none of these.
    """

    def __init__(self, bounds: Bounds | None = None, windows: int = 6, threshold: float = 25.0) -> None:
        """``threshold``: A's C, failures squared; A names no value. 25: five more or less are chance."""
        super().__init__(bounds)
        _check("the number of windows", windows, "at least 2", windows >= 2)
        _check("the threshold C", threshold, "0 or more", 0 <= threshold < math.inf)
        self.threshold = threshold
        self.recent: deque[FailureCount] = deque(maxlen=windows)
        """Oldest first."""
        self.weights = [1 - age / windows for age in range(windows)]
        """By age, the newest first."""

    @property
    def mean(self) -> float:
        """A eq. 2, E; of an empty ring 0."""
        return sum(count.failed for count in self.recent) / max(1, len(self.recent))

    @property
    def dispersion(self) -> float:
        """A eq. 3, S²; of an empty ring 0."""
        mean = self.mean
        weighted = zip(self.weights, reversed(self.recent), strict=False)  # a ring that is not full yet
        return sum(weight * (count.failed - mean) ** 2 for weight, count in weighted) / max(1, len(self.recent))

    def _wanted(self, sample: LoadSample) -> Scale | None:
        failed = sample.failed
        self.recent.append(FailureCount(failed, sample.latency))
        mean, dispersion = self.mean, self.dispersion
        if dispersion <= self.threshold or failed == mean:
            return None
        more = failed > mean
        found = {}
        for bolt in sample.bolts:
            old = len(bolt.tasks)
            new = old * 2 if more else old // 2
            if not bolt.fixed and new in reachable(old, self.bounds):
                found[bolt.name] = new
        if not found:
            return None
        moves = ", ".join(f"{b.name} {len(b.tasks)} -> {found[b.name]}" for b in sample.bolts if b.name in found)
        return Scale(
            found,
            f"{failed:,} time-outs, {'more' if more else 'fewer'} than the average of {mean:,.1f} in "
            f"{len(self.recent)} windows, S² {dispersion:,.0f} above {self.threshold:,.0f}: {moves} tasks",
        )


# ---- by rates ---------------------------------------------------------------------------------------------


class RatePolicy(ScalingPolicy):
    """DS2's idea: what a task could do is what it processed per busy second, however long it waited; what it must
    do follows from what the spouts would emit, through what each bolt makes of it. So one step is right for all
    bolts, also for those that get little today because one before them is slow.

    The busiest task decides. A doubling halves its work (half of its keys go), a halving adds the work of tasks
    i, i + n, …; the parallelism taken is the least reachable at which the busiest is at ``target`` or below. But a
    bolt moves only if its busiest task is above ``target`` by more than ``slack`` now, or with fewer tasks would
    be below it by as much, and that in a few load samples in a row; in more of them, and always the same task,
    where the others are at ease, for of eight tasks one is busy by chance. While a backlog is worked off, nothing
    shrinks. A bolt that was doubled and whose busiest task kept its share of the work is not doubled again: that
    is one key.

    Tuples of several inputs are not told apart: where they grow by different factors, a bolt that makes more of
    one than of another gets a first step that is off, and a second.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        target: float = 0.7,
        slack: float = 0.2,
        up_samples: int = 2,
        down_samples: int = 5,
    ) -> None:
        """``target``: share of its time a task is to be busy. ``up_samples``: 2, for of a load that changes during
        a look only a part is seen in it. ``down_samples``: more, for too few tasks cost more than too many."""
        super().__init__(bounds)
        _check("the target use", target, "between 0 and 1", 0 < target < 1)
        _check("the slack", slack, "between 0 and 1", 0 < slack < 1)
        _check("the target use with its slack", target * (1 + slack), "below 1", target * (1 + slack) < 1)
        _check(
            "the number of load samples",
            min(up_samples, down_samples),
            "at least 1",
            min(up_samples, down_samples) >= 1,
        )
        self.target, self.slack, self.up_samples, self.down_samples = target, slack, up_samples, down_samples
        self._streaks: dict[str, tuple[str, int]] = {}
        """What a bolt wants, and in how many load samples in a row."""
        self._doubled: dict[str, tuple[int, float]] = {}
        """Bolts that got more tasks: how many they had, and the busiest one's share of the work."""

    def restart_cool_down(self, now: float) -> None:
        super().restart_cool_down(now)
        self._streaks.clear()

    def _wanted(self, sample: LoadSample) -> Scale | None:
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
            found |= grow  # all of them: a replacement costs the same for one bolt and for five
        if not found:
            return None
        return Scale({name: new for name, (new, _) in found.items()}, "; ".join(why for _, why in found.values()))

    def _streak(self, name: str, proposal: str) -> int:
        """In how many load samples in a row, this one included."""
        before, count = self._streaks.get(name, (proposal, 0))
        self._streaks[name] = proposal, count + 1 if before == proposal else 1
        return self._streaks[name][1]

    def _fitting_parallelism(self, name: str, use: list[float]) -> int:
        """The parallelism for this work; that of now where it will do."""
        old = len(use)
        ways = reachable(old, self.bounds)
        if max(use) > self.target * (1 + self.slack):
            more = [new for new in ways if new > old]
            if not more or self._doubling_was_useless(name, use):
                return old
            return next((new for new in more if use_with(use, new) <= self.target), more[-1])
        low = self.target * (1 - self.slack)
        return next((new for new in ways if new < old and use_with(use, new) <= low), old)

    def _doubling_was_useless(self, name: str, use: list[float]) -> bool:
        """More tasks did not bring half the relief they should have brought."""
        old, share = self._doubled.get(name, (len(use), 1.0))
        if len(use) <= old:
            return False
        return max(use) / sum(use) > share * (1 + old / len(use)) / 2

    def _decided(self, sample: LoadSample, scale: Scale) -> None:
        self._streaks.clear()
        for bolt in sample.bolts:
            old, new = len(bolt.tasks), scale.parallelism.get(bolt.name, 0)
            if new > old:
                work = uses(bolt, 1.0)
                assert work, "else nobody knew that it has too much"
                self._doubled[bolt.name] = old, max(work) / sum(work)
            elif new:
                self._doubled.pop(bolt.name, None)


def demands(sample: LoadSample) -> dict[str, float]:
    """Tuples a second each bolt would get if every component kept up: from the spouts' demand, by the share of its
    inputs' tuples that comes to a bolt and the tuples it emits for each it processes. Where that share is not
    known, for its inputs emitted nothing, what arrived."""
    out = {spout.name: spout.demand / sample.seconds for spout in sample.spouts}
    emitted = {spout.name: spout.emitted for spout in sample.spouts} | {
        bolt.name: bolt.emitted for bolt in sample.bolts
    }
    found: dict[str, float] = {}
    left = list(sample.bolts)
    while left:
        ready = [bolt for bolt in left if all(name in out for name in bolt.inputs)]
        if not ready:
            raise ValueError(f"bolts get their tuples from spouts; got {[bolt.name for bolt in left]} in a cycle")
        for bolt in ready:
            observed = sum(emitted[name] for name in bolt.inputs)
            arrived = bolt.arrived / sample.seconds
            rate = sum(out[name] for name in bolt.inputs) * bolt.arrived / observed if observed else arrived
            found[bolt.name] = rate
            out[bolt.name] = (
                rate * bolt.emitted / bolt.processed if bolt.processed else bolt.emitted / sample.seconds
            )
            left.remove(bolt)
    return found


def uses(bolt: BoltLoad, rate: float) -> list[float] | None:
    """The share of its time each task would be busy if the bolt got ``rate`` tuples a second, spread as they
    were in the load sample; None where what a tuple costs is not known. A task that processed nothing takes as
    long for one as the others do."""
    if not bolt.arrived:
        return [0.0] * len(bolt.tasks)
    if not bolt.processed:
        return None
    usual = sum(task.busy for task in bolt.tasks) / bolt.processed
    costs = [task.busy / task.processed if task.processed else usual for task in bolt.tasks]
    return [rate * task.arrived / bolt.arrived * cost for task, cost in zip(bolt.tasks, costs, strict=True)]


def use_with(use: list[float], new: int) -> float:
    """The busiest task's with ``new`` tasks instead of as many as ``use`` has."""
    old = len(use)
    return max(use) * old / new if new >= old else max(sum(use[index::new]) for index in range(new))


def _reason(bolt: BoltLoad, use: list[float], new: int) -> str:
    """In tuples a second of the busiest task."""
    index = use.index(max(use))
    task = bolt.tasks[index]
    old = len(use)
    if not (task.busy and task.processed):
        return f"{bolt.name}: nothing arrives: {old} -> {new} tasks"
    does = task.processed / task.busy
    comes = use[index] * does
    said = f"does {does:,.0f}/s of" if comes > does else f"could do {does:,.0f}/s of"
    return f"{bolt.name}: busiest task {said} {comes:,.0f}/s that arrive: {old} -> {new} tasks"


def _check(name: str, value: float, rule: str, holds: bool) -> None:
    if not holds:
        raise SettingError("scaling", f"{name} must be {rule}, not {value!r}", "Leave it out to get the default.")
