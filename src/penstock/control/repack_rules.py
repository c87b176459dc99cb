"""Which packing the measured load of a topology calls for, regardless of how long the load has lasted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.control.packing import (
    UNCOUNTED_LOAD,
    Link,
    PackedGroup,
    Part,
    busiest_load,
    hops_between,
    pack,
    worker_loads,
)
from penstock.control.refit_load import RefitSample
from penstock.errors import SettingError

UNKNOWN_DEMAND = 2.0
"""While a topology is behind, its load shows what it can do, not what is demanded of it. A packing is sought that
carries this many times as much."""
MOST_NAMES = 3
"""Components that a reason names; the others are counted."""


class RefitKind(Enum):
    REPACK = "repack"
    """A worker is overloaded, or hops are avoidable."""
    REVERT = "revert"
    """A repacking did not help: back to the packing before it."""
    BLOCKING = "blocking"
    """Parts that wait in their calls get workers of their own. Nothing else moves."""


@dataclass(frozen=True)
class Refit:
    """Change to this packing by replacing the topology."""

    kind: RefitKind
    groups: tuple[PackedGroup, ...]
    """Each after the groups it reads from."""
    blocking: frozenset[str]
    """The parts that must not share a worker: those that say so, and those that were found to wait."""
    reason: str


def same_packing(one: Iterable[PackedGroup], other: Iterable[PackedGroup]) -> bool:
    """The same parts share the same number of workers. The order does not matter."""
    return packing_key(one) == packing_key(other)


PackingKey: TypeAlias = frozenset[tuple[frozenset[str], int]]


def packing_key(groups: Iterable[PackedGroup]) -> PackingKey:
    return frozenset((frozenset(group.names), group.workers) for group in groups)


@dataclass(frozen=True)
class RefitProposal:
    refit: Refit
    before: RefitSample
    """What runs now."""
    urgent: bool
    """Tuples wait, or will soon."""


def propose(
    kind: RefitKind, groups: Sequence[PackedGroup], sample: RefitSample, reason: str, urgent: bool = True
) -> RefitProposal:
    blocking = frozenset(part.name for part in sample.parts if part.blocking)
    return RefitProposal(Refit(kind, tuple(groups), blocking, reason), sample, urgent)


@dataclass(frozen=True)
class RefitTuning:
    """The constants of ``RefitPolicy``. Loads are shares of a core, samples are 10 s long."""

    samples: int = 6
    """Samples in a row that a repacking needs: the first minute. A shorter burst is not worth a replacement."""
    light_samples: int = 60
    """The same for the removal of hops after the first decision: 10 minutes. Nobody waits for it, and a load that
    falls for hours leads to one repacking rather than several."""
    overloaded: float = 0.8
    """The load above which the busiest worker needs relief, because queues grow with each burst."""
    busy_behind: float = 0.6
    """The same while the topology is behind. A worker that is less busy is not what the topology waits for."""
    enough: float = 0.6
    """The load that the busiest worker may have after relief: it can grow by a third until the next one."""
    clear_gain: float = 0.2
    """The share by which the load of the busiest worker must fall through relief. A smaller gain is within the
    error of the model."""
    light: float = 0.5
    """The load that the busiest worker may have after hops are removed. It can grow by more than half before the
    worker is divided again."""
    useful: float = 0.05
    """The share by which the throughput of a topology that is behind must rise through a repacking. Samples of the
    same packing differ by less."""
    other_mix: float = 2.0
    """A packing that was useless may be tried again if the share of a part in the load differs by this factor."""
    cool_down: float = 300.0
    """Seconds after a repacking without another one, at first. A load that changes by the minute is not
    followed."""
    longest_cool_down: float = 3600.0
    """The most seconds of a cool-down. A load that changes with the hours of the day is followed."""
    wait_share: float = 0.3
    """A part is blocking if its busiest executor waits for more than this share of the time, ..."""
    wait_per_call: float = 0.001
    """... for more than this many seconds per call, because waits for the page cache are shorter, ..."""
    wait_samples: int = 2
    """... in this many samples in a row: one may contain a single long wait, for example for a connection."""

    def __post_init__(self) -> None:
        top = self.overloaded
        check_setting("the number of samples", self.samples, "at least 1", self.samples >= 1)
        least, light = self.samples, self.light_samples
        check_setting("the number of light samples", light, f"at least {least}", light >= least)
        check_setting("the load of an overloaded worker", top, "between 0 and 1", 0 < top < 1)
        check_setting("the sufficient load", self.enough, f"between 0 and {top}", 0 < self.enough < top)
        check_setting("the light load", self.light, f"between 0 and {top}", 0 < self.light < top)
        check_setting("the clear gain", self.clear_gain, "between 0 and 1", 0 < self.clear_gain < 1)
        check_setting("the cool-down", self.cool_down, "0 s or more", 0 <= self.cool_down < math.inf)


def check_setting(name: str, value: object, rule: str, holds: bool) -> None:
    """Raise ``SettingError`` unless a value of the refit policy keeps its rule."""
    if not holds:
        raise SettingError("refit", f"{name} must be {rule}, not {value!r}", "Leave it out to get the default.")


@dataclass(frozen=True)
class RepackRules:
    """Which packing a load calls for."""

    workers: int
    tuning: RefitTuning

    def wanted(self, mean: RefitSample) -> RefitProposal | None:
        """A packing that is clearly better than the one that runs."""
        load = busiest_load(mean.parts, mean.links, mean.groups)
        if not load or not mean.busiest:
            return None
        # The model need not fit: only the ratio of two of its loads is used.
        model = _LoadModel(mean.parts, mean.links, mean.busiest / load)
        overloaded = mean.busiest > self.tuning.overloaded or (
            mean.behind and mean.busiest > self.tuning.busy_behind
        )
        if not overloaded and mean.behind:
            return None  # nothing says what it waits for
        proposal = self._relieved(mean, model) if overloaded else self._fewer_hops(mean, model)
        same = proposal is not None and same_packing(proposal.refit.groups, mean.groups)
        return None if same else proposal

    def _relieved(self, mean: RefitSample, model: _LoadModel) -> RefitProposal | None:
        enough = self.tuning.enough / UNKNOWN_DEMAND if mean.behind else self.tuning.enough
        groups = model.pack(self.workers, enough)
        predicted = model.busiest(groups)
        if predicted > (1 - self.tuning.clear_gain) * mean.busiest:
            return None
        worker = names_text(model.busiest_group(mean.groups))
        reason = (
            f"the worker of {worker} uses {percent_text(mean.busiest)} of a core"
            f"{' and the topology is behind' if mean.behind else ''}; "
            f"with {workers_text(mean, groups)} the busiest would use {percent_text(predicted)}"
        )
        return propose(RefitKind.REPACK, groups, mean, reason)

    def _fewer_hops(self, mean: RefitSample, model: _LoadModel) -> RefitProposal | None:
        hops = hops_between(mean.links, mean.groups)
        if not hops:
            return None
        groups = model.pack(self.workers, self.tuning.light)
        predicted, fewer = model.busiest(groups), hops_between(mean.links, groups)
        if fewer >= hops or predicted > self.tuning.light:
            return None
        reason = (
            f"the busiest worker uses {percent_text(mean.busiest)} of a core; "
            f"with {workers_text(mean, groups)} it would use {percent_text(predicted)}, "
            f"and {fewer} instead of {hops} streams would cross between workers"
        )
        return propose(RefitKind.REPACK, groups, mean, reason, urgent=False)


@dataclass(frozen=True)
class _LoadModel:
    parts: tuple[Part, ...]
    links: tuple[Link, ...]
    scale: float
    """Measured share of a core per predicted load."""

    def pack(self, workers: int, enough: float) -> list[PackedGroup]:
        return pack(self.parts, self.links, workers, enough / self.scale, UNCOUNTED_LOAD / self.scale)

    def busiest(self, groups: Sequence[PackedGroup]) -> float:
        """The share of a core that the busiest worker of a packing would use."""
        return self.scale * busiest_load(self.parts, self.links, groups)

    def busiest_group(self, groups: Sequence[PackedGroup]) -> PackedGroup:
        loads = worker_loads(self.parts, self.links, groups)
        return max(loads, key=lambda group: loads[group])


def names_text(group: PackedGroup) -> str:
    """The parts of a group, in a sentence."""
    named = [f"'{name}'" for name in group.names[:MOST_NAMES]]
    if len(group.names) > MOST_NAMES:
        left = len(group.names) - MOST_NAMES
        named.append(f"{left} other{'s' if left > 1 else ''}")
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))


def workers_text(sample: RefitSample, groups: Iterable[PackedGroup]) -> str:
    """The number of workers of a packing, not counting those of blocking parts."""
    blocking = {part.name for part in sample.parts if part.blocking}
    count = sum(group.workers for group in groups if not blocking.issuperset(group.names))
    return f"{count} worker{'s' if count != 1 else ''}"


def percent_text(share: float) -> str:
    return f"{100 * share:.0f} %"
