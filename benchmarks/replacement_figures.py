"""Computes figures from arrivals: gaps, latency over time, and differences from a run without replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.persistence import by_second
from benchmarks.persistence_topology import IntArray
from benchmarks.replacement_topology import COUNT, SPLIT, WORDS, Arrivals, Floats, Schedule, key_of
from penstock.control.scaling import Scale
from penstock.sim.scaling import BoltSpec, ScalingChange, ScalingOutcome, ScalingSetUp

# ---- gaps ----------------------------------------------------------------------------------------------


def longest_gap(came: IntArray, begin: int, end: int) -> float:
    """The longest time in seconds between ``begin`` and ``end`` in which nothing arrived; ``came`` is sorted. Time
    outside the interval does not count."""
    inside = came[np.searchsorted(came, begin) : np.searchsorted(came, end, "right")]
    return float(np.diff(np.concatenate([[begin], inside, [end]])).max()) / 1e6


@dataclass(frozen=True)
class Turn:
    """One replacement and an equally long time without one after it; in microseconds since 1970."""

    begin: int
    end: int
    """After the new topology had caught up."""
    quiet: int
    """Begin of the undisturbed time."""
    tasks: int
    silent: float
    """Seconds in which no spout was active, as the replacement reports it."""
    seconds: float
    """Duration of the replacement."""

    def gap(self, came: IntArray) -> float:
        return longest_gap(came, self.begin, self.end)

    def ordinary_gap(self, came: IntArray) -> float:
        return longest_gap(came, self.quiet, self.quiet + self.end - self.begin)


# ---- against a sequential run --------------------------------------------------------------------------


def wrong_keys(numbers: IntArray, counts: IntArray, total: int, keys: int) -> int:
    """Number of keys whose results differ from a sequential count of the numbers below ``total``, in which each
    number occurs once, and a key with n numbers has the counts 1 to n."""
    wanted = np.arange(total)
    strange = _differ(numbers, wanted)
    wrong = set(key_of(strange, keys).tolist())
    of_wanted, of_came = key_of(wanted, keys), key_of(numbers, keys)
    order = np.argsort(of_wanted, kind="stable")
    ordered = of_wanted[order]
    ranks = np.arange(total) - np.searchsorted(ordered, ordered) + 1
    base = int(max(ranks.max(initial=0), counts.max(initial=0))) + 1
    differing = _differ(of_came * base + counts, ordered * base + ranks)
    return len(wrong | set((differing // base).tolist()))


def _differ(some: IntArray, others: IntArray) -> IntArray:
    """The values that do not occur equally often in both."""
    values, places = np.unique(np.concatenate([some, others]), return_inverse=True)
    times = np.bincount(places[: len(some)], minlength=len(values))
    differing: IntArray = values[times != np.bincount(places[len(some) :], minlength=len(values))]
    return differing


def lost(numbers: IntArray, total: int) -> int:
    """Numbers below ``total`` that never arrived."""
    return total - len(np.unique(numbers[(numbers >= 0) & (numbers < total)]))


# ---- scaling -------------------------------------------------------------------------------------------


@dataclass
class Course:
    """One run with a load in steps. Seconds are counted from when the first line was due."""

    schedule: Schedule
    arrived: Arrivals
    changes: list[ScalingChange] = field(default_factory=list)
    failed: int = 0
    """Number of timeouts."""

    @property
    def begun(self) -> int:
        return int(self.arrived.since.min())

    @property
    def seconds(self) -> int:
        return int(self.schedule.ends[-1])

    @property
    def outcome(self) -> ScalingOutcome:
        """For steps and overshoot, computed by the code of the simulation."""
        came, gap = len(self.arrived), self.longest_gap()
        return ScalingOutcome(set_up(self.schedule), (), tuple(self.changes), gap, came, came, self.failed, 0)

    def longest_gap(self) -> float:
        """The longest gap in the whole run."""
        return longest_gap(self.arrived.came, self.begun, self.begun + self.seconds * 1_000_000)

    def gaps(self, tail: float) -> list[float]:
        """The longest gap of each replacement, from the decision to ``tail`` seconds after its end, or to the end
        of the input."""
        found = []
        for change in self.changes:
            if change.decided < self.seconds:
                end = self.begun + int(min(change.done + tail, self.seconds) * 1e6)
                found.append(longest_gap(self.arrived.came, self.begun + int(change.decided * 1e6), end))
        return found

    def latency(self, *percents: int) -> list[Floats]:
        """Percentiles in ms from when a line was due until its words arrived, by second; nan if none arrived."""
        end = self.begun + self.seconds * 1_000_000
        seconds, found = by_second(self.arrived.since, self.arrived.came, self.begun, end, percents)
        result = []
        for values in found:
            every = np.full(self.seconds, np.nan)
            every[seconds.astype(int)] = values
            result.append(every)
        return result

    def rate(self) -> IntArray:
        """Words that arrived, by second."""
        seconds = (self.arrived.came - self.begun) // 1_000_000
        return np.bincount(seconds[seconds < self.seconds], minlength=self.seconds)

    def tasks(self, component: str) -> IntArray:
        """Number of tasks at the end of each second."""
        found = np.ones(self.seconds, np.int64)
        for change in self.changes:
            if component in change.scale.parallelism and change.done < self.seconds:
                found[int(change.done) :] = change.scale.parallelism[component]
        return found

    def as_json(self) -> dict[str, Any]:
        p50, p95 = self.latency(50, 95)
        return {
            "schedule": [list(step) for step in self.schedule.steps],
            "p50 ms": [None if np.isnan(value) else round(float(value), 2) for value in p50],
            "p95 ms": [None if np.isnan(value) else round(float(value), 2) for value in p95],
            "words/s": self.rate().tolist(),
            "tasks": {name: self.tasks(name).tolist() for name in ("split", "count")},
            "changes": [
                {
                    "decided": c.decided,
                    "done": c.done,
                    "tasks": dict(c.scale.parallelism),
                    "reason": c.scale.reason,
                }
                for c in self.changes
            ],
            "time-outs": self.failed,
        }


def set_up(schedule: Schedule) -> ScalingSetUp:
    """The slow word count as a set-up of the simulation, which knows the phases and the necessary tasks."""
    load = tuple((float(begin), rate) for begin, (_, rate) in zip(schedule.ends, schedule.steps, strict=False))
    bolts = (BoltSpec("split", SPLIT, emits=WORDS), BoltSpec("count", COUNT, fields=True))
    return ScalingSetUp(bolts, load, int(schedule.ends[-1]))


def rises(schedule: Schedule) -> list[int]:
    """The phases with more load than the one before."""
    rates = [rate for _, rate in schedule.steps]
    return [phase for phase in range(1, len(rates)) if rates[phase] > rates[phase - 1]]


def right_changes(schedule: Schedule, noticed: float) -> list[ScalingChange]:
    """The changes by somebody who knows the load: enough tasks, a given time after each step."""
    wanted = set_up(schedule)
    now, found = {bolt.name: bolt.parallelism for bolt in wanted.bolts}, []
    for begin, _, rate in wanted.phases:
        enough = wanted.enough(rate)
        if enough != now:
            now = enough
            found.append(
                ScalingChange(begin + noticed, begin + noticed, Scale(enough, f"{rate:g} lines a second"))
            )
    return found


def draw(courses: Mapping[str, Course], path: Path) -> None:
    """Draw latency (*Lu 2020*, figure 17), arrivals and tasks over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True)
    schedule: Schedule | None = None
    for place, (case, course) in enumerate(courses.items()):
        schedule = course.schedule
        seconds = np.arange(course.seconds) + 0.5
        p50, p95 = course.latency(50, 95)
        (line,) = above.plot(seconds, p95 / 1000, label=f"{case}, p95")
        above.plot(seconds, p50 / 1000, color=line.get_color(), alpha=0.4, linestyle=":")
        middle.plot(seconds, course.rate(), color=line.get_color(), alpha=0.8, label=case)
        lift = 1.02**place  # so that equal lines can be distinguished
        below.step(seconds, course.tasks("count") * lift, where="post", color=line.get_color(), label=case)
    if schedule is not None:
        _mark(schedule, (above, middle, below))
        offered = [rate * WORDS for _, rate in schedule.steps]
        middle.step(schedule.ends, [*offered, offered[-1]], where="post", color="grey", label="due")
        load = " → ".join(f"{rate:g}" for _, rate in schedule.steps)
        above.set_title(f"slow split and count, load {load} lines/s")
    above.set(yscale="log", ylabel="s until arrived (dotted: p50)")
    middle.set(ylabel="words/s")
    below.set(xlabel="s", ylabel="tasks of count")
    below.set_yscale("log", base=2)
    above.legend()
    middle.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _mark(schedule: Schedule, panels: Sequence[Any]) -> None:
    for panel in panels:
        panel.grid(alpha=0.3)
        for begin in schedule.ends[1:-1]:
            panel.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
