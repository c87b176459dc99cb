"""Simulates a topology that scales itself: a spout, a chain of bolts with service times, and a load that changes
in steps.

Every tuple is simulated. The source keeps what the spout has not emitted. The spout emits while fewer than
``max_pending`` tuples are in flight. A tuple that times out goes back to the front of the source, and what is left
of it in the queues is discarded unprocessed, as in the executors. The policy decides after each load sample. Its
decision is carried out as in production: the new topology is prepared while the old one runs, the spout stops, the
tuples in flight finish or time out, state is handed over, and the new topology starts.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

import simpy

from penstock.control.scaling import Scale, ScalingPolicy
from penstock.driver.load_sampler import LoadSampler, ScalingUnit, TopologyShape
from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats
from penstock.sim.flow import Process
from penstock.sim.network import after

SPOUT = "spout"
_SWEEP = 0.125
"""Seconds between two searches for timed-out tuples; short against any time-out. The searches lie between the
ticks, so that a time-out belongs to exactly one tick."""


@dataclass(frozen=True)
class BoltSpec:
    name: str
    service: float
    """Mean seconds per tuple; exponentially distributed."""
    emits: int = 1
    """Tuples emitted per received tuple."""
    parallelism: int = 1
    fixed: bool = False
    fields: bool = False
    """True: a fields grouping over many keys, each tuple's task is random. False: tasks take turns."""
    capacity: int = 1_000
    """Tuples in a task's inbox. Nothing is rejected, because pending tuples are bounded anyway."""


@dataclass(frozen=True)
class ScalingSetUp:
    bolts: tuple[BoltSpec, ...]
    """In the order of the stream."""
    load: tuple[tuple[float, float], ...]
    """⟨second, tuples per second⟩: the rate at the source from this second on, as a Poisson process. The first
    begins at 0."""
    seconds: int
    time_out: float = 5.0
    max_pending: int = 1_000
    sample_interval: float = 2.0
    """Length of a load sample in seconds. The first one after a replacement begins with the new topology."""
    prepare: float = 3.0
    """Seconds to prepare the new topology while the old one runs."""
    hand_over: float = 0.2
    """Seconds between the last tuple of the old topology and the first of the new one."""
    reports_lag: bool = True
    """The source reports how many tuples arrive. Otherwise the policy sees only what the spout emits."""

    def enough(self, rate: float) -> dict[str, int]:
        """The smallest parallelism of each bolt, reachable by doubling and halving, that can process this many
        spout tuples per second. All policies are measured by it, so it contains no target utilization."""
        found = {}
        for bolt in self.bolts:
            tasks = bolt.parallelism
            while not bolt.fixed and rate * bolt.service >= tasks:
                tasks *= 2
            while not bolt.fixed and tasks % 2 == 0 and rate * bolt.service < tasks // 2:
                tasks //= 2
            found[bolt.name] = tasks
            rate *= bolt.emits
        return found

    @property
    def phases(self) -> list[tuple[float, float, float]]:
        """⟨begin, end, rate⟩ of each phase."""
        ends = [*(begin for begin, _ in self.load[1:]), self.seconds]
        return [(begin, end, rate) for (begin, rate), end in zip(self.load, ends, strict=True)]


WORDS = ScalingSetUp(
    # Lu 2020, section 6.4: split and count are slowed and have parallelism 1; the load rises eightfold and falls
    # again. At 36/s one task of each is busy 60 % of its time; 288/s needs eight tasks, four are not enough.
    bolts=(
        BoltSpec("split", service=1 / 60, emits=2),
        BoltSpec("count", service=1 / 120, fields=True),
        BoltSpec("persist", service=1 / 5_000, fixed=True),
    ),
    load=((0.0, 36.0), (30.0, 288.0), (180.0, 24.0)),
    seconds=260,
    # Four tasks of each process 240/s, so 2,000 pending tuples wait for 8 s: with too few tasks tuples time out.
    # Half as many would wait for less than the time-out of 5 s, and a policy that counts time-outs would react to
    # chance.
    max_pending=2_000,
)


@dataclass(slots=True)
class _Root:
    """One spout tuple."""

    came: float
    emitted: float = 0.0
    left: int = 0
    """Tuples of it in flight; 0: complete."""
    given_up: bool = False


class _Task:
    def __init__(self) -> None:
        self.queue: deque[_Root] = deque()
        self.working = False
        self.stats = TaskStats()


@dataclass(frozen=True)
class ScalingTick:
    """One second of the run."""

    time: float
    latency: float | None
    """Mean seconds from the source to completion, of the tuples completed in this second."""
    completed: int
    failed: int
    waiting: int
    """Tuples not emitted yet at the end of this second."""
    parallelism: dict[str, int]


@dataclass(frozen=True)
class ScalingChange:
    decided: float
    done: float
    """Start of the new topology; inf if the run ended before."""
    scale: Scale


@dataclass(frozen=True)
class ScalingOutcome:
    set_up: ScalingSetUp
    ticks: tuple[ScalingTick, ...]
    changes: tuple[ScalingChange, ...]
    longest_gap: float
    """Longest time between two completed tuples, in seconds."""
    came: int
    completed: int
    failed: int
    """Number of time-outs; each tuple was emitted again."""
    left: int
    """Tuples at the source or in flight at the end."""

    def steps(self, phase: int) -> int:
        """Number of decisions between two changes of the load."""
        begin, end, _ = self.set_up.phases[phase]
        return sum(begin <= change.decided < end for change in self.changes)

    def steps_up(self, phase: int) -> int:
        """Number of decisions until every bolt had enough tasks; all decisions if that never happened."""
        begin, end, rate = self.set_up.phases[phase]
        enough = self.set_up.enough(rate)
        now = self._parallelism_at(begin)
        for count, change in enumerate(each for each in self.changes if begin <= each.decided < end):
            if all(now[name] >= needed for name, needed in enough.items()):
                return count
            now = now | dict(change.scale.parallelism)
        return self.steps(phase)

    def settled(self, phase: int) -> float | None:
        """Seconds from the change of the load to the end of the last replacement; None if a bolt never had enough
        tasks."""
        begin, end, rate = self.set_up.phases[phase]
        enough = self.set_up.enough(rate)
        final = self._parallelism_at(end - 1e-9)
        if any(final[name] < needed for name, needed in enough.items()):
            return None
        return max((each.done - begin for each in self.changes if begin <= each.decided < end), default=0.0)

    def overshoot(self, phase: int) -> float:
        """The highest ratio of a bolt's tasks to the tasks it needs, after the first change of the phase; at least
        1."""
        begin, end, rate = self.set_up.phases[phase]
        enough = self.set_up.enough(rate)
        mine = [each for each in self.changes if begin <= each.decided < end and each.done < math.inf]
        found = [self._parallelism_at(change.done) for change in mine]
        return max((tasks[name] / enough[name] for tasks in found for name in enough), default=1.0)

    def _parallelism_at(self, time: float) -> dict[str, int]:
        found = {bolt.name: bolt.parallelism for bolt in self.set_up.bolts}
        for change in self.changes:
            if change.done <= time:
                found |= change.scale.parallelism
        return found


def run(policy: ScalingPolicy | None, set_up: ScalingSetUp = WORDS, seed: int = 0) -> ScalingOutcome:
    """Run the simulation once. The same seed gives the same tuples at the same times. A policy object can be used
    for one run only; None means no scaling."""
    return _Run(policy, set_up, seed).run()


class _Counts:
    """What happened so far."""

    def __init__(self) -> None:
        self.came = self.failed = 0
        self.offered = 0
        """Tuples that came to the source in the current load sample."""
        self.completions: list[float] = [0.0]
        """Time of each completion, after a first entry for the beginning of the run."""
        self.latencies: list[float] = []
        """Of the tuples completed in the current tick."""


class _Run:
    def __init__(self, policy: ScalingPolicy | None, set_up: ScalingSetUp, seed: int) -> None:
        self._env = simpy.Environment()
        self._policy, self._set_up = policy, set_up
        self._arrivals, self._chance = random.Random(seed), random.Random(seed + 1_000_003)
        self._waiting: deque[_Root] = deque()
        self._pending: dict[int, _Root] = {}
        """By identity, in the order of emission."""
        self._active = True
        self._held_since: float | None = None
        self._drained: simpy.Event | None = None
        self._tasks = {bolt.name: [_Task() for _ in range(bolt.parallelism)] for bolt in set_up.bolts}
        self._turn = dict.fromkeys(self._tasks, 0)
        self._changes: list[ScalingChange] = []
        self._ticks: list[ScalingTick] = []
        self._counts = _Counts()
        self._spout = TaskStats()
        self._begin_sampling()

    def run(self) -> ScalingOutcome:
        for process in (self._load(), self._sweep(), self._sample_load()):
            self._env.process(process)
        self._env.run(self._env.process(self._clock()))
        counts = self._counts
        gap = max((later - earlier for earlier, later in pairwise(counts.completions)), default=math.inf)
        return ScalingOutcome(
            self._set_up,
            tuple(self._ticks),
            tuple(self._changes),
            gap,
            counts.came,
            len(counts.completions) - 1,
            counts.failed,
            len(self._waiting) + len(self._pending),
        )

    # ---- the source and the spout

    def _load(self) -> Process:
        for _, end, rate in self._set_up.phases:
            while True:
                gap = self._arrivals.expovariate(rate)
                if self._env.now + gap >= end:
                    yield self._env.timeout(end - self._env.now)
                    break
                yield self._env.timeout(gap)
                self._counts.came += 1
                self._counts.offered += 1
                self._waiting.append(_Root(self._env.now))
                self._emit()

    def _emit(self) -> None:
        """Emit all tuples that may be emitted now."""
        while self._active and self._waiting and len(self._pending) < self._set_up.max_pending:
            root = self._waiting.popleft()
            root.emitted, root.left = self._env.now, 1
            self._pending[id(root)] = root
            self._spout.emitted += 1
            self._arrive(0, root)
        self._note_held(self._active and bool(self._waiting))

    def _note_held(self, held: bool) -> None:
        now = self._env.now
        if self._held_since is not None:
            self._spout.held_back += now - self._held_since
        self._held_since = now if held else None

    def _sweep(self) -> Process:
        yield self._env.timeout(_SWEEP / 2)
        while True:
            yield self._env.timeout(_SWEEP)
            late = []
            for root in self._pending.values():
                if root.emitted + self._set_up.time_out > self._env.now:
                    break
                late.append(root)
            for root in reversed(late):  # so that the oldest one is first in line
                self._counts.failed += 1
                self._spout.timed_out += 1
                root.given_up = True
                del self._pending[id(root)]
                self._waiting.appendleft(_Root(root.came))
            if late:
                self._left_topology()

    def _complete(self, root: _Root) -> None:
        del self._pending[id(root)]
        self._counts.completions.append(self._env.now)
        self._counts.latencies.append(self._env.now - root.came)
        self._spout.latency.record(self._env.now - root.emitted)
        self._left_topology()

    def _left_topology(self) -> None:
        self._emit()
        if self._drained is not None and not self._pending and not self._drained.triggered:
            self._drained.succeed()

    # ---- the bolts

    def _arrive(self, stage: int, root: _Root) -> None:
        bolt = self._set_up.bolts[stage]
        tasks = self._tasks[bolt.name]
        if bolt.fields:
            task = tasks[self._chance.randrange(len(tasks))]
        else:
            self._turn[bolt.name] += 1
            task = tasks[self._turn[bolt.name] % len(tasks)]
        task.stats.arrived += 1
        task.queue.append(root)
        if not task.working:
            self._work(stage, task)

    def _work(self, stage: int, task: _Task) -> None:
        while task.queue and task.queue[0].given_up:
            task.queue.popleft()
        task.working = bool(task.queue)
        if task.working:
            root = task.queue.popleft()
            seconds = self._chance.expovariate(1 / self._set_up.bolts[stage].service)
            after(self._env, seconds, lambda: self._done(stage, task, root, seconds))

    def _done(self, stage: int, task: _Task, root: _Root, seconds: float) -> None:
        task.stats.executed += 1
        task.stats.busy += seconds
        last = stage + 1 == len(self._set_up.bolts)
        if not root.given_up:
            emits = 0 if last else self._set_up.bolts[stage].emits
            task.stats.emitted += emits
            root.left += emits - 1
            for _ in range(emits):
                self._arrive(stage + 1, root)
            if not root.left:
                self._complete(root)
        self._work(stage, task)

    # ---- control

    def _sample_load(self) -> Process:
        while True:
            yield self._env.timeout(self._set_up.sample_interval)
            if self._policy is None:
                continue
            offered = {SPOUT: self._counts.offered} if self._set_up.reports_lag else None
            sample = self._sampler.take(self._env.now, self._stats(), offered)
            assert sample is not None, "all tasks report from the beginning"
            self._counts.offered = 0
            scale = self._policy.decide(sample)
            if scale is not None:
                yield from self._replace(scale)
                self._policy.restart_cool_down(self._env.now)
                self._begin_sampling()

    def _replace(self, scale: Scale) -> Process:
        decided = self._env.now
        self._changes.append(ScalingChange(decided, math.inf, scale))
        yield self._env.timeout(self._set_up.prepare)
        self._active = False
        if self._pending:
            self._drained = self._env.event()
            yield self._drained
            self._drained = None
        yield self._env.timeout(self._set_up.hand_over)
        for name, count in scale.parallelism.items():
            self._tasks[name] = [_Task() for _ in range(count)]
        self._changes[-1] = ScalingChange(decided, self._env.now, scale)
        self._active = True
        self._emit()

    def _begin_sampling(self) -> None:
        """Sample the topology that runs now, from now on."""
        names = [SPOUT, *self._tasks]
        number = 1
        units = []
        for source, bolt in zip(names, self._set_up.bolts, strict=False):
            tasks = range(number, number + len(self._tasks[bolt.name]))
            number = tasks.stop
            units.append(ScalingUnit((bolt.name,), (source,), tuple((task,) for task in tasks), fixed=bolt.fixed))
        self._counts.offered = 0
        self._sampler = LoadSampler(TopologyShape({SPOUT: (0,)}, tuple(units)))
        self._sampler.take(self._env.now, self._stats())

    def _stats(self) -> dict[int, TaskStats]:
        """The counters that every task would report now: the spout first, then the bolts."""
        self._note_held(self._held_since is not None)
        every = [replace(self._spout, latency=Histogram(self._spout.latency.counts))]
        for bolt in self._set_up.bolts:
            for task in self._tasks[bolt.name]:
                every.append(replace(task.stats, queued=len(task.queue), capacity=bolt.capacity))
        return dict(enumerate(every))

    def _clock(self) -> Process:
        counts = self._counts
        for _ in range(self._set_up.seconds):
            before, failed = len(counts.completions), counts.failed
            yield self._env.timeout(1.0)
            self._ticks.append(
                ScalingTick(
                    self._env.now,
                    _mean(counts.latencies),
                    len(counts.completions) - before,
                    counts.failed - failed,
                    len(self._waiting),
                    {name: len(tasks) for name, tasks in self._tasks.items()},
                )
            )
            counts.latencies = []


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
