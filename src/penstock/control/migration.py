"""Data migration to light branches (D, SPEC 3.2): which branch is overloaded, and which takes its data meanwhile.

Pure: a snapshot of every branch's load goes in once an interval, suggestions come out; somebody else carries them
out. ``SegmentLedger`` is what the sender writes down about the data it sent another way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.errors import SettingError


@dataclass(frozen=True)
class BranchNodeLoad:
    """One node (on Spark: a task) over the last interval; rates in bytes a second."""

    queue_use: float
    """Share of its input queue that is in use, 0 to 1."""
    bytes_in: float
    bytes_out: float
    """What it was done with, measured as it came in: a node that emits little is not heavy for that."""

    @property
    def growing(self) -> bool:
        return self.bytes_in > self.bytes_out


@dataclass(frozen=True)
class Branch:
    """One way from the branching point to the merge."""

    name: str
    nodes: tuple[BranchNodeLoad, ...]
    bandwidth: float
    """The least of its links, above 0; the unit does not matter as long as it is the same for all branches."""

    @property
    def queue_use(self) -> float:
        """D eq. 1"""
        return max((node.queue_use for node in self.nodes), default=0.0)

    @property
    def surplus(self) -> float:
        """D eq. 2, Δ: bytes a second that come in and do not go out. Node by node, so that a node which makes its
        data smaller or larger does not count as one that holds it back."""
        return sum(node.bytes_in - node.bytes_out for node in self.nodes)


@dataclass(frozen=True)
class Migrate:
    """Data bound for ``heavy`` goes to ``light`` from now on, also where it went elsewhere until now."""

    heavy: str
    light: str
    reason: str


@dataclass(frozen=True)
class Restore:
    """Data bound for ``heavy`` goes there again."""

    heavy: str
    reason: str


Suggestion = Migrate | Restore


def scores(branches: Iterable[Branch], alpha: float, beta: float) -> dict[str, float]:
    """The pressure of each branch (D eq. 4): P = (α·Q + (1 − α)·Δ) / B^β.

    D adds shares, bytes a second and bandwidths as they are. Here Δ is relative to the largest positive one (0
    where none is) and B to the largest, so that the weights mean the same at any rate (SPEC 3.2).
    """
    branches = list(branches)
    for branch in branches:
        if not (0 < branch.bandwidth < math.inf):
            raise ValueError(f"a branch's bandwidth is above 0 and finite; {branch.name} has {branch.bandwidth}")
    most = max((branch.surplus for branch in branches), default=0.0)
    widest = max((branch.bandwidth for branch in branches), default=1.0)
    found = {}
    for branch in branches:
        surplus = max(branch.surplus, 0.0) / most if most > 0 else 0.0
        found[branch.name] = (alpha * branch.queue_use + (1 - alpha) * surplus) / (
            branch.bandwidth / widest
        ) ** beta
    return found


class MigrationPolicy:
    """D's algorithm 1, steps 2 to 6. Remembers what is migrated; ``decide`` is called once an interval.

    A branch is heavy when one of its nodes has more than ``overload`` of its queue in use and takes in more than
    it puts out. Then its data goes to the branch with the least pressure, until its queue use is below
    ``recovery``. A branch that is heavy, migrated itself or has a queue above ``overload`` takes nothing: the last
    may stand still only because its senders were stopped, and then its Δ says nothing. Where no branch is left
    nothing is suggested: backpressure acts alone.
    """

    def __init__(
        self, alpha: float = 0.3, beta: float = 0.5, overload: float = 0.8, recovery: float = 0.5
    ) -> None:
        _check("alpha", alpha, "between 0 and 1", 0 < alpha < 1)
        _check("beta", beta, "above 0", 0 < beta < math.inf)
        _check("overload", overload, "between 0 and 1", 0 < overload < 1)
        _check(
            "recovery",
            recovery,
            f"between 0 and the overload threshold {overload:g}",
            0 < recovery < overload,
        )
        self.alpha, self.beta, self.overload, self.recovery = alpha, beta, overload, recovery
        self._routes: dict[str, str] = {}
        self.routes: Mapping[str, str] = MappingProxyType(self._routes)
        """Where the data of each migrated branch goes: heavy → light."""

    def decide(self, branches: Sequence[Branch]) -> list[Suggestion]:
        """What to change now. A branch that is no longer among ``branches`` has gone: nothing is sent there."""
        known = {branch.name: branch for branch in branches}
        if len(known) < len(branches):
            raise ValueError(f"branches have different names; got {[branch.name for branch in branches]}")
        heavy = {branch.name: why for branch in branches if (why := self._heavy(branch))}
        found: list[Suggestion] = list(self._restore_recovered(known))
        free = [b for b in branches if b.queue_use <= self.overload and b.name not in self._routes]
        pressure = scores(branches, self.alpha, self.beta)
        light = min(free, key=lambda branch: pressure[branch.name], default=None)
        figures = ", ".join(f"{branch.name} {pressure[branch.name]:.3f}" for branch in free)

        for name, target in list(self._routes.items()):
            if target in known and target not in heavy:
                continue
            why = heavy.get(target, f"branch {target} is gone")
            if light:
                found.append(self._migrate(name, light.name, f"{why}; least pressure of {figures}"))
            else:
                found.append(self._restore(name, f"{why}, and no branch is light"))
        for name, why in heavy.items():
            if name not in self._routes and light:
                found.append(self._migrate(name, light.name, f"{why}; least pressure of {figures}"))
        return found

    def _heavy(self, branch: Branch) -> str:
        """Why it is heavy; empty if it is not."""
        for node in branch.nodes:
            if node.queue_use > self.overload and node.growing:
                return (
                    f"branch {branch.name} has {node.queue_use:.0%} of a queue in use, above {self.overload:.0%}, "
                    f"and takes in {node.bytes_in:,.0f} B/s against {node.bytes_out:,.0f} out"
                )
        return ""

    def _restore_recovered(self, known: Mapping[str, Branch]) -> Iterable[Restore]:
        for name in list(self._routes):
            if name not in known:
                yield self._restore(name, f"branch {name} is gone")
            elif (use := known[name].queue_use) < self.recovery:
                yield self._restore(
                    name, f"branch {name} is down to {use:.0%} of its queue, below {self.recovery:.0%}"
                )

    def _migrate(self, name: str, light: str, reason: str) -> Migrate:
        self._routes[name] = light
        return Migrate(name, light, reason)

    def _restore(self, name: str, reason: str) -> Restore:
        del self._routes[name]
        return Restore(name, reason)

    def validate(self) -> None:
        """Invariants, after any ``decide``."""
        for name, light in self._routes.items():
            assert name != light, f"{name} is migrated to itself"
            assert light not in self._routes, f"{name} is migrated to {light}, which is migrated itself"


def _check(name: str, value: float, rule: str, holds: bool) -> None:
    if not holds:
        raise SettingError(
            "migration",
            f"{name} must be {rule}, not {value!r}",
            "The defaults are the values that Sun 2022 measured as best.",
        )


@dataclass(frozen=True)
class Segment:
    """Neighbouring tuples that were bound for ``branch`` and went to ``target``."""

    branch: str
    target: str
    offset: int
    """Of the first of them, counted in the tuples this sender had bound for the branch."""
    length: int


class SegmentLedger:
    """A sender's record of what it migrated (D algorithm 1, step 4). Segments of a branch never overlap; empty
    ones are not kept. Memory is bounded: the newest ``keep`` segments, and totals of all."""

    def __init__(self, keep: int = 1_000) -> None:
        self._closed: deque[Segment] = deque(maxlen=keep)
        self._open: dict[str, Segment] = {}
        self._ends: dict[str, int] = {}
        self.migrated: dict[str, int] = {}
        """Tuples migrated so far, by the branch they were bound for."""
        self.count = 0
        """Segments begun so far that are not empty, kept or not."""

    def open(self, branch: str, target: str, offset: int) -> None:
        """The branch's tuples from ``offset`` on go to ``target``. Ends the open segment, if there is one."""
        self.close(branch)
        if offset < self._ends.get(branch, 0):
            raise ValueError(f"segments do not overlap: {branch} has one up to {self._ends[branch]}, not {offset}")
        self._open[branch] = Segment(branch, target, offset, 0)

    def extend(self, branch: str, rows: int = 1) -> None:
        """So many more of the branch's tuples went to the open segment's target."""
        if rows < 0 or branch not in self._open:
            raise ValueError(f"an open segment grows by 0 rows or more; got {rows} for {branch!r}")
        segment = self._open[branch]
        if rows and not segment.length:
            self.count += 1
        self._open[branch] = grown = Segment(branch, segment.target, segment.offset, segment.length + rows)
        self._ends[branch] = grown.offset + grown.length
        self.migrated[branch] = self.migrated.get(branch, 0) + rows

    def close(self, branch: str) -> Segment | None:
        """The branch's tuples go their own way again. Returns the segment that ended, if one did and was not
        empty."""
        segment = self._open.pop(branch, None)
        if segment is None or not segment.length:
            return None
        self._closed.append(segment)
        return segment

    @property
    def segments(self) -> list[Segment]:
        """The newest closed ones, oldest first, then those still open that are not empty."""
        return [*self._closed, *(segment for segment in self._open.values() if segment.length)]

    def validate(self) -> None:
        """Invariants, after any call."""
        ends: dict[str, int] = {}
        for segment in self.segments:
            assert segment.length > 0
            assert segment.offset >= ends.get(segment.branch, 0), f"{segment} overlaps the one before it"
            ends[segment.branch] = segment.offset + segment.length
        kept = sum(segment.length for segment in self.segments)
        total = sum(self.migrated.values())
        assert kept == total if len(self.segments) == self.count else kept < total
