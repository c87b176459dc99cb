"""Finds parts whose calls wait rather than compute, and gives them their own workers. Pure.

A worker runs one call at a time, so a call that waits for a database holds up all executors of its worker. Waiting
needs no core, so a worker for each such executor costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from penstock.control.packing import Link, PackedGroup, Part, in_dependency_order, spouts_first
from penstock.control.refit_load import CallWait, RefitSample


class BlockingParts:
    """The parts that were found to wait. What was found stays found: a part that has its own workers harms no
    other, and if it were packed with others again whenever it waits less, it would go back and forth."""

    def __init__(self, share: float, per_call: float, samples: int, retry: float) -> None:
        """A part is found if its busiest executor waits for more than ``share`` of the time and more than
        ``per_call`` seconds per call, in ``samples`` samples in a row. ``retry``: seconds until a part is named
        again after an attempt to separate it that had no effect."""
        self._share, self._per_call, self._samples, self._retry = share, per_call, samples, retry
        self._streaks: dict[str, int] = {}
        self._found: dict[str, CallWait] = {}
        """By name: how long it waited when it was found."""
        self._tried: frozenset[str] = frozenset()
        self._retry_at = 0.0

    def observe(self, sample: RefitSample) -> tuple[Part, ...]:
        """Count the waits of a sample. Returns its parts, with those found marked as blocking."""
        for part in sample.parts:
            wait = sample.waits.get(part.name)
            waits = wait is not None and wait.share > self._share and wait.per_call > self._per_call
            self._streaks[part.name] = self._streaks.get(part.name, 0) + 1 if waits else 0
            if wait is not None and not part.blocking and self._streaks[part.name] >= self._samples:
                self._found.setdefault(part.name, wait)
        return tuple(replace(part, blocking=part.blocking or part.name in self._found) for part in sample.parts)

    def restart(self) -> None:
        """Measuring starts again."""
        self._streaks.clear()

    def tried(self, now: float) -> None:
        """There was an attempt to separate all parts found so far."""
        self._tried, self._retry_at = frozenset(self._found), now + self._retry

    def sharing(self, parts: Sequence[Part], groups: Sequence[PackedGroup]) -> dict[str, CallWait]:
        """The parts found whose executors share a worker with others, or with each other, in a packing."""
        apart = {group.names[0]: group.workers for group in groups if len(group.names) == 1}
        return {
            part.name: self._found[part.name]
            for part in parts
            if part.name in self._found and apart.get(part.name) != part.parallelism
        }

    def to_separate(self, sample: RefitSample) -> dict[str, CallWait]:
        """The parts that should get their own workers now."""
        found = self.sharing(sample.parts, sample.groups)
        return {} if sample.time < self._retry_at and found.keys() <= self._tried else found


def separate(
    parts: Sequence[Part], links: Sequence[Link], groups: Sequence[PackedGroup], names: Collection[str]
) -> list[PackedGroup]:
    """Give the named parts a worker per executor. What shared a worker with them stays together, unless some of it
    comes before and some after a named part: tuples cannot return to a worker that they left."""
    alone = [PackedGroup((part.name,), part.parallelism) for part in parts if part.name in names]
    rest = [
        PackedGroup(tuple(name for name in group.names if name not in names), group.workers) for group in groups
    ]
    rest = [group for group in rest if group.names]
    try:
        return in_dependency_order(spouts_first([*rest, *alone], links), links)
    except ValueError:
        before = _before(links, names)
        divided = [PackedGroup(side, group.workers) for group in rest for side in _sides(group.names, before)]
        return in_dependency_order(spouts_first([*divided, *alone], links), links)


def _before(links: Sequence[Link], names: Collection[str]) -> dict[str, frozenset[str]]:
    """For each part that reads from others: the named parts before it, directly or through others."""
    sources: dict[str, list[str]] = {}
    for link in links:
        sources.setdefault(link.target, []).append(link.source)
    found: dict[str, frozenset[str]] = {}

    def walk(name: str) -> frozenset[str]:
        if name not in found:
            found[name] = frozenset().union(*({s} & set(names) | walk(s) for s in sources.get(name, ())))
        return found[name]

    for name in sources:
        walk(name)
    return found


def _sides(names: Sequence[str], before: Mapping[str, frozenset[str]]) -> list[tuple[str, ...]]:
    """The parts of a group, divided by the blocking parts before them, in the order of the group."""
    sides: dict[frozenset[str], list[str]] = {}
    for name in names:
        sides.setdefault(before.get(name, frozenset()), []).append(name)
    return [tuple(side) for side in sides.values()]
