"""Decides when a running topology is packed into its workers again, by what its components were measured to need.

Pure: the policy gets a sample of the whole topology about every 10 s and returns a ``Refit`` or None. The caller
carries it out by a replacement, which pauses the topology for some 50 ms and needs a second set of workers for a
short time. So a repacking must be worth it, and must not be undone a few minutes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from penstock.control.call_waits import BlockingParts, separate
from penstock.control.packing import PackedGroup, Part
from penstock.control.refit_load import CallWait, RefitSample, RefitWindow
from penstock.control.repack_rules import (
    PackingKey,
    Refit,
    RefitKind,
    RefitProposal,
    RefitTuning,
    RepackRules,
    check_setting,
    packing_key,
    percent_text,
    propose,
    same_packing,
    workers_text,
)

__all__ = [
    "CallWait",
    "Refit",
    "RefitKind",
    "RefitMode",
    "RefitPolicy",
    "RefitSample",
    "RefitTuning",
    "same_packing",
]

RefitMode: TypeAlias = Literal["off", "once", "always"]

SIGNIFICANT_SHARE = 0.05
"""The shares of two load mixes are compared if one of them is at least this large. Smaller ones vary by large
factors without any reason."""


class RefitPolicy:
    """Packs a running topology again: parts that wait in their calls get their own workers, the components of an
    overloaded worker are divided, and hops that a small load does not need are removed.

    A repacking needs ``samples`` samples in a row that lead to the same packing, each of them by the mean of the
    samples so far, at most ``samples``. After the first decision, hops are removed only after ``light_samples``
    such samples, and only if the load has clearly fallen since the last repacking. ``decide`` repeats a proposal
    for as long as it holds, until the caller carries it out and calls ``replaced``. So the caller may postpone it.

    Each repacking is on trial. If the topology is behind after ``samples`` samples, and its throughput is not
    higher than before by ``useful`` or, if it was not behind before, even lower, the earlier packing is restored.
    The other one is not proposed again until the load mix differs clearly. If the topology is not behind, its
    throughput is what its sources offer, which says nothing about a packing.

    Mode ``once``: the policy decides once, as soon as enough samples lead to the same result, which may be to keep
    the packing. Later it only restores the earlier packing and separates blocking parts. Mode ``always``: it goes
    on, with a cool-down after each repacking. The cool-down doubles whenever a repacking returns to an earlier
    packing, because it was useless or because the load returned.
    """

    def __init__(self, mode: RefitMode, workers: int, tuning: RefitTuning | None = None) -> None:
        """``workers``: the most workers to use, not counting those of blocking parts."""
        check_setting("the mode", mode, "off, once or always", mode in ("off", "once", "always"))
        check_setting("the maximum number of workers", workers, "at least 1", workers >= 1)
        self.mode, self.workers, self.tuning = mode, workers, tuning or RefitTuning()
        t = self.tuning
        self._rules = RepackRules(workers, t)
        self._window = RefitWindow(t.samples)
        self._streak = _Streak()
        self._blocking = BlockingParts(t.wait_share, t.wait_per_call, t.wait_samples, t.cool_down)
        self._cool_down = _CoolDown(t.cool_down, t.longest_cool_down)
        self._rejected = _RejectedPackings(t.other_mix)
        self._running: tuple[PackedGroup, ...] = ()
        self._shape: frozenset[tuple[str, int]] = frozenset()
        """The parts that run, with their parallelism."""
        self._proposed: RefitProposal | None = None
        """What the last ``decide`` returned."""
        self._carried_out: RefitProposal | None = None
        """The proposal of the last replacement, until a sample shows whether the packing has changed."""
        self._trial: RefitSample | None = None
        """The samples before the packing that is on trial, as one."""
        self._verdict: RefitProposal | None = None
        """To restore the earlier packing, because the one that runs was useless."""
        self._reference: float | None = math.inf
        """Share of a core that the busiest worker used after the last repacking; None if not measured yet."""
        self._decided = False
        """There was a decision. In mode ``once`` it is the only one."""

    @property
    def cool_down(self) -> float:
        """Seconds without another repacking after one by this policy, as of now."""
        return self._cool_down.seconds

    def decide(self, sample: RefitSample) -> Refit | None:
        """The packing to change to now, or None. Called with each sample, in order. Never returns the packing that
        runs."""
        if self.mode == "off":
            return None
        self._look(sample)
        sample = replace(sample, parts=self._blocking.observe(sample))
        self._proposed = None
        if any(part.weight for part in sample.parts):
            self._proposed = self._separate(sample) or self._from_load(sample)
        return self._proposed.refit if self._proposed else None

    def replaced(self, now: float, by_refit: bool) -> None:
        """Measuring starts again. Called after the end of each replacement, also of a failed one, before the next
        sample. ``by_refit``: it was to carry out what ``decide`` returned last. The next sample shows whether it
        did."""
        self._restart()
        self._carried_out, self._proposed = (self._proposed if by_refit else None), None
        if self._carried_out is not None:
            if self._carried_out.refit.kind is RefitKind.BLOCKING:
                self._blocking.tried(now)
            else:
                self._cool_down.start(now)

    def _restart(self) -> None:
        self._window.clear()
        self._streak.clear()
        self._blocking.restart()

    def _look(self, sample: RefitSample) -> None:
        """Notice that another packing runs than in the last sample, or other parts."""
        carried_out, self._carried_out = self._carried_out, None
        shape = frozenset((part.name, part.parallelism) for part in sample.parts)
        if shape == self._shape and same_packing(sample.groups, self._running):
            if carried_out is not None and carried_out.refit.kind is RefitKind.REVERT:
                self._verdict = None  # it failed; the packing that runs is no worse than the earlier one
            return
        if shape != self._shape:
            self._cool_down.forget()
            self._rejected.clear()
        self._restart()
        self._running, self._shape = sample.groups, shape
        self._trial = self._verdict = None
        returned = self._cool_down.has_run(sample.groups)
        self._reference = math.inf
        kind = carried_out.refit.kind if carried_out is not None else RefitKind.BLOCKING
        if (
            carried_out is not None
            and kind is not RefitKind.BLOCKING
            and same_packing(sample.groups, carried_out.refit.groups)
        ):
            self._reference = None
            if returned:
                self._cool_down.double()
            if kind is RefitKind.REPACK:
                self._decided = True
                self._trial = carried_out.before

    def _separate(self, sample: RefitSample) -> RefitProposal | None:
        """Give blocking parts their own workers. No cool-down applies, because each part is found only once."""
        waits = self._blocking.to_separate(sample)
        if not waits:
            return None
        groups = separate(sample.parts, sample.links, sample.groups, waits)
        reasons = [
            f"calls of '{name}' wait {percent_text(wait.share)} of the time, {1000 * wait.per_call:,.1f} ms each"
            for name, wait in waits.items()
        ]
        return propose(RefitKind.BLOCKING, groups, sample, f"{'; '.join(reasons)}: own workers")

    def _from_load(self, sample: RefitSample) -> RefitProposal | None:
        """Pack by load, once enough samples lead to the same packing."""
        if not (sample.throughput or sample.behind):
            self._window.clear()
            self._streak.clear()
            return None
        self._window.add(sample)
        mean = self._window.mean()
        if self._window.full:
            self._judge(mean)
            self._reference = mean.busiest if self._reference is None else self._reference
        if self._verdict is not None:
            return self._verdict
        if self.mode == "once" and self._decided:
            return None
        wanted = self._wanted(mean)
        count = self._streak.add(packing_key(wanted.refit.groups) if wanted else None)
        urgent = wanted is None or wanted.urgent or not self._decided
        if count < (self.tuning.samples if urgent else self.tuning.light_samples):
            return None
        self._decided |= wanted is None
        return None if self._cool_down.applies(sample.time) else wanted

    def _wanted(self, mean: RefitSample) -> RefitProposal | None:
        """A better packing that nothing speaks against."""
        wanted = self._rules.wanted(mean)
        if wanted is None or self._rejected.rules_out(wanted.refit.groups, mean.parts):
            return None
        # Otherwise an inexact measurement would lead to a second step without a change of the load.
        fallen = self._reference is not None and mean.busiest < (1 - self.tuning.clear_gain) * self._reference
        return wanted if wanted.urgent or fallen else None

    def _judge(self, mean: RefitSample) -> None:
        """End the trial, now that there are as many samples as before it."""
        before = self._trial
        if before is None:
            return
        self._trial = None
        wanted = (1 + self.tuning.useful if before.behind else 1.0) * before.throughput
        if mean.behind and mean.throughput < wanted and not self._blocking.sharing(mean.parts, before.groups):
            self._rejected.add(mean.groups, mean.parts)
            reason = (
                f"the repacking did not help: the topology is behind at {mean.throughput:,.0f} tuples/s, and with "
                f"{workers_text(mean, before.groups)} it did {before.throughput:,.0f} tuples/s"
            )
            self._verdict = propose(RefitKind.REVERT, before.groups, mean, reason)


class _Streak:
    """How many samples in a row have led to the same packing, None for the one that runs."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._packing: PackingKey | None = None
        self._count = 0

    def add(self, packing: PackingKey | None) -> int:
        """Returns the number, with this sample."""
        self._count = self._count + 1 if packing == self._packing else 1
        self._packing = packing
        return self._count


class _CoolDown:
    def __init__(self, seconds: float, longest: float) -> None:
        self._first, self._longest = seconds, max(seconds, longest)
        self._since = -math.inf
        self.forget()

    def forget(self) -> None:
        """Other parts run: earlier packings mean nothing for them."""
        self.seconds = self._first
        self._earlier: set[PackingKey] = set()

    def start(self, now: float) -> None:
        self._since = now

    def applies(self, now: float) -> bool:
        return now < self._since + self.seconds

    def has_run(self, groups: Iterable[PackedGroup]) -> bool:
        """Whether this packing ran earlier. Called with each packing when it begins to run."""
        packing = packing_key(groups)
        returned = packing in self._earlier
        self._earlier.add(packing)
        return returned

    def double(self) -> None:
        self.seconds = min(2 * self.seconds, self._longest)


class _RejectedPackings:
    """Packings that were useless, each for the load mix it was tried with."""

    def __init__(self, other_mix: float) -> None:
        self._other_mix = other_mix
        self._mixes: dict[PackingKey, dict[str, float]] = {}

    def clear(self) -> None:
        self._mixes.clear()

    def add(self, groups: Iterable[PackedGroup], parts: Sequence[Part]) -> None:
        self._mixes[packing_key(groups)] = _mix(parts)

    def rules_out(self, groups: Iterable[PackedGroup], parts: Sequence[Part]) -> bool:
        mix = self._mixes.get(packing_key(groups))
        if mix is None:
            return False
        pairs = [sorted((mix.get(name, 0.0), share)) for name, share in _mix(parts).items()]
        return not any(high >= SIGNIFICANT_SHARE and high > self._other_mix * low for low, high in pairs)


def _mix(parts: Sequence[Part]) -> dict[str, float]:
    """The share of each part in the load. Shares do not change with the hours of the day."""
    whole = sum(part.weight for part in parts)
    return {part.name: part.weight / whole for part in parts} if whole else {}
