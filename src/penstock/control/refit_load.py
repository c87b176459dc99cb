"""The measurements that decisions about the packing are made from, and their mean over the last samples. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.control.packing import Link, PackedGroup, Part


@dataclass(frozen=True)
class CallWait:
    """How long the busiest executor of a part waited inside calls of the user's code, for example for a database.
    Waiting is wall time minus CPU time minus waiting for a core."""

    share: float
    """Share of the sample."""
    per_call: float
    """Mean seconds per call."""


@dataclass(frozen=True)
class RefitSample:
    """What a topology did in one interval without a replacement."""

    time: float
    """The end of the sample."""
    seconds: float
    parts: tuple[Part, ...]
    """Weights in cores: CPU seconds per second of all executors of the part together."""
    links: tuple[Link, ...]
    """Traffic in tuples per second."""
    groups: tuple[PackedGroup, ...]
    """The packing that runs."""
    busiest: float
    """Share of a core that the busiest worker uses."""
    throughput: float
    """Tuples per second that all spouts emit."""
    behind: bool
    """Spouts are held back, or a backlog is worked off."""
    waits: Mapping[str, CallWait]
    """By the name of the part. Parts without calls may be missing."""


class RefitWindow:
    """The samples since measuring began, at most ``length``."""

    def __init__(self, length: int) -> None:
        self._samples: deque[RefitSample] = deque(maxlen=length)

    @property
    def full(self) -> bool:
        return len(self._samples) == self._samples.maxlen

    def add(self, sample: RefitSample) -> None:
        """``sample`` has the same parts, links and groups as those before, apart from figures."""
        self._samples.append(sample)

    def clear(self) -> None:
        self._samples.clear()

    def mean(self) -> RefitSample:
        """All samples as one. It is behind if most of them are. There is at least one sample."""
        samples = self._samples
        last = samples[-1]
        weights = _means([{part.name: part.weight for part in sample.parts} for sample in samples])
        traffic = _means([{(e.source, e.target): e.traffic for e in sample.links} for sample in samples])
        return replace(
            last,
            seconds=sum(sample.seconds for sample in samples),
            parts=tuple(replace(part, weight=weights[part.name]) for part in last.parts),
            links=tuple(replace(link, traffic=traffic[link.source, link.target]) for link in last.links),
            busiest=sum(sample.busiest for sample in samples) / len(samples),
            throughput=sum(sample.throughput for sample in samples) / len(samples),
            behind=2 * sum(sample.behind for sample in samples) > len(samples),
        )


def _means(every: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """The mean of each key of the last mapping."""
    return {key: sum(each.get(key, 0.0) for each in every) / len(every) for key in every[-1]}
