"""The scaling policy by time-outs and completion latency: Lu 2020, algorithm 2."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.control.scaling import (
    Bounds,
    Doublings,
    Scale,
    ScalingPolicy,
    check,
    demands,
    reachable,
    use_with,
    uses,
)
from penstock.control.topology_load import LoadSample


@dataclass(frozen=True)
class FailureCount:
    """What the policy keeps of one load sample."""

    failed: int
    latency: float | None
    """Mean seconds until a tuple was completed. None if none was."""
    backlog: bool = False


class FailurePolicy(ScalingPolicy):
    """Lu 2020, algorithm 2: doubles all bolts if time-outs are above average and their number varies strongly;
    halves them if time-outs are below average and vary strongly. The completion latency is judged by the same
    rule, because Lu 2020 (section 5) judges by both, and because tuples that wait in queues that are bounded in
    time are late but do not time out. Lu 2020 calls a load sample a window.

    The ring includes the load sample that has just ended, as in Lu 2020, so a first surge takes effect at once. n
    is the number of load samples in the ring (the "valid" windows of Lu 2020), not its length; with fewer than two
    S² is 0 and nothing happens. Weights fall linearly from 1 to 1 / length: a load sample that leaves the ring has
    little weight left, so S² does not jump, and no further constant is needed. A bolt that is fixed or at its
    bound keeps its parallelism, and an odd parallelism is not halved. The ring is kept across a replacement, as in
    Lu 2020.

    Taken literally, the algorithm reverts a doubling that helped, because failures are then below average; it does
    nothing about an overload that does not vary; and it never returns idle tasks, because without failures nothing
    is below average. Therefore:

    - A latency above average counts only while a backlog waits. Otherwise more tasks would not shorten it.
    - A backlog in all load samples of the ring since the last change doubles the bolts whose tasks are too busy on
      average. (A single busy task is left to ``RatePolicy``.)
    - No bolt is halved while a backlog is worked off, nor if half of its tasks could not do its work.
    - If there was neither a failure nor a backlog in the whole ring, bolts are halved that can do with half.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        samples: int = 6,
        threshold: float = 25.0,
        late: float = 0.75,
        target: float = 0.7,
        slack: float = 0.2,
    ) -> None:
        """``threshold``: C in Lu 2020, in failures squared. Lu 2020 gives no value; with 25, differences of up to
        five failures are regarded as random. ``late``: seconds; its square is C for the latency. ``target`` and
        ``slack``: as for ``RatePolicy``."""
        super().__init__(bounds)
        check("the number of load samples", samples, "at least 2", samples >= 2)
        check("the threshold C", threshold, "0 or more", 0 <= threshold < math.inf)
        check("the threshold of the latency", late, "greater than 0", 0 < late < math.inf)
        self.threshold, self.late_threshold = threshold, late * late
        self.recent: deque[FailureCount] = deque(maxlen=samples)
        """Oldest first."""
        self.weights = [1 - age / samples for age in range(samples)]
        """By age, newest first."""
        self._high, self._low = target * (1 + slack), target * (1 - slack)
        self._doublings = Doublings()
        self._since_change = 0
        """Load samples since the last change."""

    def restart_cool_down(self, now: float) -> None:
        super().restart_cool_down(now)
        self._since_change = 0

    @property
    def mean(self) -> float:
        """E (Lu 2020, equation 2); 0 for an empty ring."""
        return _mean(self._failures)

    @property
    def dispersion(self) -> float:
        """S² (Lu 2020, equation 3); 0 for an empty ring."""
        return self._dispersion(self._failures)

    @property
    def _failures(self) -> list[float]:
        return [count.failed for count in self.recent]

    @property
    def _latencies(self) -> list[float]:
        return [count.latency for count in self.recent if count.latency is not None]

    def _dispersion(self, values: list[float]) -> float:
        mean = _mean(values)
        weighted = zip(self.weights, reversed(values), strict=False)  # the ring may not be full yet
        return sum(weight * (value - mean) ** 2 for weight, value in weighted) / max(1, len(values))

    def wanted(self, sample: LoadSample) -> Scale | None:
        self.recent.append(FailureCount(sample.failed, sample.latency, sample.backlog))
        self._since_change += 1
        failures, latency = self._judged_by_failures(sample), self._judged_by_latency(sample)
        if failures > 0:
            return self._doubled(sample, self._why_failures("more"))
        if latency > 0 and sample.backlog:
            return self._doubled(sample, self._why_latency("longer"))
        if self._steady(backlog=True):
            return self._relieved(sample)
        if sample.backlog or latency > 0:
            return None
        if failures < 0:
            return self._halved(sample, self._why_failures("fewer"))
        if latency < 0:
            return self._halved(sample, self._why_latency("shorter"))
        if self._steady(backlog=False) and not self.mean:
            return self._halved(sample, f"no time-outs and no backlog in {len(self.recent)} load samples")
        return None

    # ---- judging ---------------------------------------------------------------------------------------

    def _judged_by_failures(self, sample: LoadSample) -> int:
        """1: more than average, -1: fewer, 0: no difference, or they vary too little."""
        return _sign(sample.failed - self.mean) if self.dispersion > self.threshold else 0

    def _judged_by_latency(self, sample: LoadSample) -> int:
        if sample.latency is None or self._dispersion(self._latencies) <= self.late_threshold:
            return 0
        return _sign(sample.latency - _mean(self._latencies))

    def _steady(self, backlog: bool) -> bool:
        """Whether all load samples of a full ring had a backlog, or none had, and all are newer than the last
        change."""
        full = min(len(self.recent), self._since_change) == self.recent.maxlen
        return full and all(count.backlog == backlog for count in self.recent)

    # ---- proposing -------------------------------------------------------------------------------------

    def _doubled(self, sample: LoadSample, why: str) -> Scale | None:
        names = [bolt.name for bolt in sample.bolts if not bolt.fixed]
        return self._proposal(sample, {bolt.name: 2 * len(bolt.tasks) for bolt in sample.bolts}, names, why)

    def _relieved(self, sample: LoadSample) -> Scale | None:
        """Double the bolts that are too busy, unless that did not help before."""
        rates, busy = demands(sample), []
        for bolt in sample.bolts:
            use = None if bolt.fixed else uses(bolt, rates[bolt.name])
            if (
                use is not None
                and sum(use) > self._high * len(use)
                and not self._doublings.useless(bolt.name, use)
            ):
                busy.append(bolt.name)
        why = f"a backlog in each of {len(self.recent)} load samples"
        return self._proposal(sample, {bolt.name: 2 * len(bolt.tasks) for bolt in sample.bolts}, busy, why)

    def _halved(self, sample: LoadSample, why: str) -> Scale | None:
        rates, light = demands(sample), []
        for bolt in sample.bolts:
            use = None if bolt.fixed else uses(bolt, rates[bolt.name])
            half = len(bolt.tasks) // 2
            if use is not None and half and use_with(use, half) <= self._low:
                light.append(bolt.name)
        return self._proposal(sample, {bolt.name: len(bolt.tasks) // 2 for bolt in sample.bolts}, light, why)

    def _proposal(
        self, sample: LoadSample, new: Mapping[str, int], names: Collection[str], why: str
    ) -> Scale | None:
        old = {bolt.name: len(bolt.tasks) for bolt in sample.bolts}
        found = {name: new[name] for name in names if new[name] in reachable(old[name], self.bounds)}
        if not found:
            return None
        moves = ", ".join(f"{name} {old[name]} -> {number}" for name, number in found.items())
        return Scale(found, f"{why}: {moves} tasks")

    def _decided(self, sample: LoadSample, scale: Scale) -> None:
        self._since_change = 0
        self._doublings.record(sample, scale)

    def _why_failures(self, compared: str) -> str:
        return (
            f"{self.recent[-1].failed:,} time-outs, {compared} than the average of {self.mean:,.1f} in "
            f"{len(self.recent)} load samples, S² {self.dispersion:,.0f} above {self.threshold:,.0f}"
        )

    def _why_latency(self, compared: str) -> str:
        values = self._latencies
        return (
            f"tuples took {values[-1]:,.2f} s, {compared} than the average of {_mean(values):,.2f} s in "
            f"{len(values)} load samples, S² {self._dispersion(values):,.2f} above {self.late_threshold:,.2f}"
        )


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
