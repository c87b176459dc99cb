"""The bandwidth of the links of a branch (Sun 2022, equation 3): as configured, or as measured between nodes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BranchLinks:
    """The links of one branch."""

    tasks: tuple[str, ...]
    """The keys of its tasks (``component/index``)."""
    hops: frozenset[tuple[str, str]]
    """⟨Sending node, receiving node⟩ of every link into the branch, within it, and out of it."""


class LinkSpeeds:
    """Knows bandwidths in bytes per second. ``configured`` (the setting ``migration.bandwidth``) names tasks,
    nodes, or ``node>node``, and takes precedence over what was measured."""

    def __init__(self, configured: Mapping[str, float]) -> None:
        self._configured = configured

    def bandwidths(
        self, branches: Sequence[BranchLinks], measured: Mapping[tuple[str, str], Sequence[float]]
    ) -> list[float]:
        """The minimum over the links of each branch. Links of which nothing is known do not limit a branch; a
        branch without a known link is as wide as the widest, and if nothing is known, all are equal. ``measured``:
        by sending and receiving node, what each pair of workers measured."""
        found = [min(self._known(branch, measured), default=None) for branch in branches]
        widest = max((each for each in found if each is not None), default=1.0)
        return [widest if each is None else each for each in found]

    def _known(self, branch: BranchLinks, measured: Mapping[tuple[str, str], Sequence[float]]) -> Iterable[float]:
        yield from (self._configured[task] for task in branch.tasks if task in self._configured)
        for source, target in branch.hops:
            speed = self._between(source, target)
            if speed is not None:
                yield speed
            elif source != target and (speeds := measured.get((source, target))):
                yield statistics.median(speeds)

    def _between(self, source: str, target: str) -> float | None:
        """The configured bandwidth between two nodes; None if there is none."""
        pair = next((p for p in (f"{source}>{target}", f"{target}>{source}") if p in self._configured), None)
        if pair is not None:
            return self._configured[pair]
        if source == target:
            return None
        ends = [self._configured[node] for node in (source, target) if node in self._configured]
        return min(ends, default=None)
