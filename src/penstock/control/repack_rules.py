"""Which packing the measured load of a topology calls for, regardless of how long the load has lasted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.control.packing import Link, PackedGroup, Part, busiest_load, hops_between, pack, worker_loads
from penstock.control.refit_load import RefitSample

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
class RepackRules:
    """Which packing a load calls for. The fields are explained at ``RefitPolicy``."""

    workers: int
    overloaded: float
    busy_behind: float
    enough: float
    clear_gain: float
    light: float

    def wanted(self, mean: RefitSample) -> RefitProposal | None:
        """A packing that is clearly better than the one that runs."""
        load = busiest_load(mean.parts, mean.links, mean.groups)
        if not load or not mean.busiest:
            return None
        # The model need not fit: only the ratio of two of its loads is used.
        model = _LoadModel(mean.parts, mean.links, mean.busiest / load)
        overloaded = mean.busiest > self.overloaded or (mean.behind and mean.busiest > self.busy_behind)
        if not overloaded and mean.behind:
            return None  # nothing says what it waits for
        proposal = self._relieved(mean, model) if overloaded else self._fewer_hops(mean, model)
        same = proposal is not None and same_packing(proposal.refit.groups, mean.groups)
        return None if same else proposal

    def _relieved(self, mean: RefitSample, model: _LoadModel) -> RefitProposal | None:
        enough = self.enough / UNKNOWN_DEMAND if mean.behind else self.enough
        groups = model.pack(self.workers, enough)
        predicted = model.busiest(groups)
        if predicted > (1 - self.clear_gain) * mean.busiest:
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
        groups = model.pack(self.workers, self.light)
        predicted, fewer = model.busiest(groups), hops_between(mean.links, groups)
        if fewer >= hops or predicted > self.light:
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
        return pack(self.parts, self.links, workers, enough / self.scale)

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
