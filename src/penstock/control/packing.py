"""Packs the components of a topology into workers: which of them share workers, and how many.

Pure. The planner calls ``pack`` before anything is measured, and the refit policy calls it with measured weights.
A packing is legal if

- parts in one group have an order in which every tuple from another group comes from an earlier group, because
  Spark moves rows only forward;
- a group with a part without inputs (a spout) reads from no other group, because spouts run in the first stage;
- a group with several workers contains only links whose tuples may stay in their worker (``Link.local``), and each
  of its parts has at least one executor per worker;
- a blocking part is alone, with one worker per executor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

HOP_COST = 0.5
"""What a stream that crosses between workers costs: this share of the source's weight at the sender, and of the
target's weight at the receiver. A hop costs about as much CPU time as a light bolt: tuples are converted to Arrow
and back, and the JVM moves the frames on the same cores."""
TUPLE_COST = 0.25e-6
FRAME_COST = 0.15e-3
MOST_FRAMES = 500.0
"""What a hop costs at each of its ends if its traffic is known: seconds of CPU per tuple and per frame, and frames
per second, since a worker spaces frames by 1 to 2 ms. From the difference between one hop and none in ``penstock
bench ladder``, rounded up: at 2 M tuples/s, and at 1,000/s."""
CLEAR_GAIN = 0.2
"""More workers are used only if the load of the busiest worker falls by more than this share. Weights are
estimates, and each process costs memory and idle time, so a smaller gain may be none."""

UNCOUNTED_LOAD = 0.15
"""Share of a core. A single worker whose measured load is at most this is not counted against the limit: it leaves
its core to others. Otherwise a spout and a sink with little to do would keep a heavy bolt between them from using
the cores."""

ROUNDING = 1e-9
"""Loads that differ by less than this share are equal: the same numbers were added in another order."""

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """A component, or components that are always fused with each other."""

    name: str
    weight: float
    """The load of all its executors together, in any unit."""
    parallelism: int
    """Number of executors, and so the most workers that can share the load."""
    blocking: bool = False
    """Its calls wait rather than compute, so it must not share a worker."""


@dataclass(frozen=True)
class Link:
    """The streams from one part to another."""

    source: str
    target: str
    local: bool
    """Each tuple may go to any task of the target (shuffle, none, local-or-shuffle grouping), so tuples may stay
    in their worker."""
    traffic: float = 1.0
    """Tuples in any unit of time. Only the ratio to the other links of the same source or target matters, unless
    it is measured."""
    measured: bool = False
    """``traffic`` is in tuples per second and weights are in cores, so what the hop costs follows from the traffic
    alone: a bolt that computes for a millisecond does not make its hop dearer."""
    hop_cost: float = HOP_COST
    """Otherwise: what the hop costs at each of its ends, as a share of the weight there."""


@dataclass(frozen=True)
class PackedGroup:
    """Parts that share the same workers, in an order in which each comes after the parts it reads."""

    names: tuple[str, ...]
    workers: int


def pack(
    parts: Sequence[Part], links: Sequence[Link], workers: int, enough: float = 0.0, light: float = 0.0
) -> list[PackedGroup]:
    """Return the groups, each after the groups it reads from. The result depends only on the arguments.

    ``enough`` is a load, in the unit of the weights, that a worker carries without trouble. Packings whose busiest
    worker has at most this load are equally good: the one with the fewest links between groups is taken, then the
    one with the fewest workers.

    If there is no such packing, or ``enough`` is 0 because nothing was measured, the load of the busiest worker is
    minimised, but more workers are used only for a ``CLEAR_GAIN``. Of the packings with the lowest load, the one
    with the fewest links between groups is taken, then the one with the fewest workers.

    ``workers`` is an upper bound; workers of blocking parts are not counted, nor groups of one worker whose load
    is at most ``light``. It is exceeded only if blocking parts lie between others, because what comes before and
    after a blocking part cannot share a worker. If ``enough`` is 0 and there are enough workers for all executors,
    each executor has its own.

    Groups are sections of a few topological orders, so for a graph with branches the result is not always the best
    of all legal packings. ``links`` must not contain a cycle.
    """
    alone = [PackedGroup((part.name,), part.parallelism) for part in parts]
    computing = [part for part in parts if not part.blocking]
    executors = sum(part.parallelism for part in computing)
    if not computing or (workers >= executors and not enough):
        return in_dependency_order(alone, links)
    limit = min(workers, executors)
    # Blocking parts may make it impossible to use so few workers; a worker for each other part is always enough.
    most = limit if len(computing) == len(parts) else max(limit, len(computing))
    searches = [_Search(order, links, parts, most, light) for order in orders(parts, links)]
    lowest: _Floats = np.min([search.lowest_loads() for search in searches], axis=0)
    used = max(limit, _fewest_workers(lowest))
    bound = enough
    if lowest[: used + 1].min() > enough * (1 + ROUNDING):
        used = _useful_workers(lowest, limit)
        bound = float(lowest[used])
    found = [search.fewest_hops(bound * (1 + ROUNDING), used) for search in searches]
    _, _, groups = min((each for each in found if each is not None), key=lambda each: each[:2])
    groups += [group for group, part in zip(alone, parts, strict=True) if part.blocking]
    return in_dependency_order(groups, links)


def busiest_load(parts: Sequence[Part], links: Sequence[Link], groups: Sequence[PackedGroup]) -> float:
    """The load of the busiest worker in a packing, in the unit of the weights."""
    return max(worker_loads(parts, links, groups).values(), default=0.0)


def worker_loads(
    parts: Sequence[Part], links: Sequence[Link], groups: Sequence[PackedGroup]
) -> dict[PackedGroup, float]:
    """The load of the busiest worker of each group, including what streams between workers cost, in the unit of
    the weights. Groups of blocking parts only are left out, because waiting uses no core."""
    group_of = {name: group for group in groups for name in group.names}
    costs = _HopCosts(parts, links)
    loads = dict.fromkeys(groups, 0.0)
    for part in parts:
        group = group_of[part.name]
        loads[group] += part.weight * busiest_share(part.parallelism, group.workers)
    for number, link in enumerate(links):
        source, target = group_of[link.source], group_of[link.target]
        if source is not target:
            loads[source] += costs.sender[number] * busiest_share(costs.executors[link.source], source.workers)
            loads[target] += costs.receiver[number] * busiest_share(costs.executors[link.target], target.workers)
    blocking = {part.name for part in parts if part.blocking}
    return {group: load for group, load in loads.items() if not blocking.issuperset(group.names)}


def hops_between(links: Sequence[Link], groups: Sequence[PackedGroup]) -> int:
    """The number of links that cross between groups."""
    group_of = {name: group for group in groups for name in group.names}
    return sum(group_of[link.source] is not group_of[link.target] for link in links)


def busiest_share(executors: int, workers: int) -> float:
    """The share of a part's load that the worker with the most of its executors has."""
    return -(-executors // workers) / executors


def orders(parts: Sequence[Part], links: Sequence[Link]) -> list[list[Part]]:
    """The topological orders of which groups are sections: breadth first, which keeps what has the same distance
    from the spouts together; depth first, which keeps branches together; and depth first with the branches in the
    opposite order. Blocking parts are left out, but the others respect the order through them."""
    readers: dict[str, list[Part]] = {part.name: [] for part in parts}
    by_name = {part.name: part for part in parts}
    unread = dict.fromkeys(by_name, 0)
    for source, target in dict.fromkeys((link.source, link.target) for link in links):
        readers[source].append(by_name[target])
        unread[target] += 1

    def walk(first: int, next_ready: Callable[[list[Part]], Part]) -> list[Part]:
        missing = dict(unread)
        ready = [part for part in parts if not missing[part.name]][::first]
        order: list[Part] = []
        while ready:
            order.append(next_ready(ready))
            for reader in readers[order[-1].name][::first]:
                missing[reader.name] -= 1
                if not missing[reader.name]:
                    ready.append(reader)
        return [part for part in order if not part.blocking]

    found = [walk(1, lambda ready: ready.pop(0)), walk(-1, list.pop), walk(1, list.pop)]
    return [order for number, order in enumerate(found) if order not in found[:number]]


def spouts_first(groups: Sequence[PackedGroup], links: Sequence[Link]) -> list[PackedGroup]:
    """Divide groups that contain a part without inputs and read from another group: what reads from others, and
    what follows it, becomes a group of its own."""
    fed, found = {link.target for link in links}, []
    for group in groups:
        members = set(group.names)
        later = {link.target for link in links if link.target in members and link.source not in members}
        if later and not members <= fed:
            for name in group.names:  # each comes after the parts that it reads
                if any(link.target == name and link.source in later for link in links):
                    later.add(name)
            first = tuple(name for name in group.names if name not in later)
            found.append(PackedGroup(first, group.workers))
            group = PackedGroup(tuple(name for name in group.names if name in later), group.workers)
        found.append(group)
    return found


def in_dependency_order(groups: Sequence[PackedGroup], links: Sequence[Link]) -> list[PackedGroup]:
    """Sort groups so that each comes after the groups it reads from; otherwise they keep their order. Raises
    ``ValueError`` if that is impossible."""
    group_of = {name: group for group in groups for name in group.names}
    reads: dict[PackedGroup, set[PackedGroup]] = {group: set() for group in groups}
    for link in links:
        if group_of[link.source] is not group_of[link.target]:
            reads[group_of[link.target]].add(group_of[link.source])
    done: dict[PackedGroup, None] = {}
    while len(done) < len(groups):
        ready = next((group for group in groups if group not in done and reads[group] <= done.keys()), None)
        if ready is None:
            raise ValueError("two groups read from each other")
        done[ready] = None
    return list(done)


def _fewest_workers(lowest: _Floats) -> int:
    """The fewest workers that a packing can have, from the lowest possible load for each number of workers
    (infinite where there is no packing)."""
    return int(np.argmax(np.isfinite(lowest)))


def _useful_workers(lowest: _Floats, limit: int) -> int:
    """The number of workers to use if no load is known to be low enough: more only for a ``CLEAR_GAIN``, and more
    than ``limit`` only if there is no packing with fewer."""
    used = _fewest_workers(lowest)
    for workers in range(used + 1, limit + 1):
        if lowest[workers] < (1 - CLEAR_GAIN) * (1 - ROUNDING) * lowest[used]:
            used = workers
    return used


class _HopCosts:
    """What each link costs if it crosses between workers, if one worker had the whole part."""

    def __init__(self, parts: Sequence[Part], links: Sequence[Link]) -> None:
        weight = {part.name: part.weight for part in parts}
        self.executors = {part.name: part.parallelism for part in parts}
        most_from: dict[str, float] = {}
        into: dict[str, float] = {}
        for link in links:
            most_from[link.source] = max(most_from.get(link.source, 0.0), link.traffic)
            into[link.target] = into.get(link.target, 0.0) + link.traffic
        # A source's weight is that of emitting its largest stream once, and every reader gets its own copy. A
        # target's weight is that of processing all its inputs together.
        self.sender = [
            _measured_cost(e)
            if e.measured
            else e.hop_cost * weight[e.source] * _ratio(e.traffic, most_from[e.source])
            for e in links
        ]
        self.receiver = [
            _measured_cost(e) if e.measured else e.hop_cost * weight[e.target] * _ratio(e.traffic, into[e.target])
            for e in links
        ]


def _measured_cost(link: Link) -> float:
    return TUPLE_COST * link.traffic + FRAME_COST * min(link.traffic, MOST_FRAMES)


def _ratio(traffic: float, whole: float) -> float:
    return traffic / whole if whole else 0.0


class _Search:
    """Finds the best division of one topological order into sections, by dynamic programming over the position in
    the order and the workers used so far."""

    def __init__(
        self, order: Sequence[Part], links: Sequence[Link], every: Sequence[Part], most: int, light: float
    ) -> None:
        """``order`` contains the parts of ``every`` that are not blocking. ``most``: the most workers to consider
        for all sections together, without single workers whose load is at most ``light``."""
        self._order, self._most, self._light = order, most, light
        self._widths = np.arange(1, min(most, max(part.parallelism for part in order)) + 1)
        shares = [np.ceil(part.parallelism / self._widths) / part.parallelism for part in order]
        self._own: list[_Floats] = [part.weight * share for part, share in zip(order, shares, strict=True)]
        """By position: the load of one worker by the number of workers, if all streams cross."""
        self._inputs: list[list[tuple[int, bool, _Floats]]] = [[] for _ in order]
        """By position: the position of each source, whether the link is local, and the load saved inside."""
        position = {part.name: number for number, part in enumerate(order)}
        costs = _HopCosts(every, links)
        for link, sender, receiver in zip(links, costs.sender, costs.receiver, strict=True):
            source, target = position.get(link.source), position.get(link.target)
            if source is not None:
                self._own[source] = self._own[source] + sender * shares[source]
            if target is not None:
                self._own[target] = self._own[target] + receiver * shares[target]
            if source is not None and target is not None:
                saved = sender * shares[source] + receiver * shares[target]
                self._inputs[target].append((source, link.local, saved))
        self._apart = _around_blocking(position, links)
        fed = {link.target for link in links}
        self._spouts = [part.name not in fed for part in order]
        self._fed_by_blocking = [
            any(link.target == part.name and link.source not in position for link in links) for part in order
        ]
        self._loads = self._section_loads()

    def lowest_loads(self) -> _Floats:
        """The lowest possible load of the busiest worker, by the number of workers from 0. Infinite where there is
        no packing."""
        best = np.full((len(self._order) + 1, self._most + 1), np.inf)
        best[0] = 0.0
        for end, loads in enumerate(self._loads, 1):
            if self._light:
                uncounted = np.where(loads[:, 0] <= self._light, loads[:, 0], np.inf)[:, np.newaxis]
                np.minimum(best[end], np.maximum(best[:end], uncounted).min(axis=0), out=best[end])
            for width in range(1, loads.shape[1] + 1):
                of_section = loads[:, width - 1, np.newaxis]
                if np.isfinite(of_section).any():
                    busiest = np.maximum(best[:end, : self._most + 1 - width], of_section).min(axis=0)
                    np.minimum(best[end, width:], busiest, out=best[end, width:])
        lowest: _Floats = best[-1]
        return lowest

    def fewest_hops(self, bound: float, most: int) -> tuple[int, int, list[PackedGroup]] | None:
        """The packing with the fewest links between groups, then the fewest workers, of those with at most
        ``most`` workers and a load of at most ``bound``, after these two numbers. None if there is none."""
        count = len(self._order)
        fewest = np.full((count + 1, most + 1), np.inf)
        fewest[0] = 0.0
        choice = np.zeros((count + 1, most + 1, 3), dtype=np.int64)
        """The first position of the last section, its workers, and how many of them are counted."""
        for end, loads in enumerate(self._loads, 1):
            fits = loads <= bound
            widths = np.where(fits.any(axis=1), fits.argmax(axis=1) + 1, loads.shape[1] + 1)
            for start in range(end):
                width = int(widths[start])
                counted = 0 if width == 1 and loads[start, 0] <= self._light else width
                if counted <= most and width <= loads.shape[1]:
                    hops = fewest[start, : most + 1 - counted] + self._hops_into(start, end)
                    better = hops < fewest[end, counted:]
                    fewest[end, counted:][better] = hops[better]
                    choice[end, counted:][better] = (start, width, counted)
        if not np.isfinite(fewest[count, most]):
            return None
        workers = int(np.argmax(fewest[count] == fewest[count, most]))
        groups: list[PackedGroup] = []
        end, left = count, workers
        while end:
            start, width, counted = (int(each) for each in choice[end, left])
            groups.append(PackedGroup(tuple(part.name for part in self._order[start:end]), width))
            end, left = start, left - counted
        return int(fewest[count, most]), workers, groups[::-1]

    def _section_loads(self) -> list[_Floats]:
        """For each end, exclusive: the load of one worker of the section, by its first position and its number of
        workers less 1. Infinite where the section is not legal."""
        count, found = len(self._order), []
        loads = np.zeros((count, len(self._widths)))
        widest = np.full(count, len(self._widths))
        has_spout, reads_others = np.zeros(count, bool), np.zeros(count, bool)
        """By first position, of the section up to ``last``."""
        for last, part in enumerate(self._order):
            has_spout[: last + 1] |= self._spouts[last]
            reads_others[: last + 1] |= self._fed_by_blocking[last]
            for source, _, _ in self._inputs[last]:
                reads_others[source + 1 : last + 1] = True
            loads[: last + 1] += self._own[last]
            np.minimum(widest[: last + 1], part.parallelism, out=widest[: last + 1])
            for source, local, saved in self._inputs[last]:
                loads[: source + 1] -= saved
                if not local:
                    widest[: source + 1] = 1
            for before in self._apart[last]:
                loads[: before + 1] = np.inf
            legal = self._widths <= widest[: last + 1, np.newaxis]
            legal &= ~(has_spout & reads_others)[: last + 1, np.newaxis]
            found.append(np.where(legal, loads[: last + 1], np.inf))
        return found

    def _hops_into(self, start: int, end: int) -> int:
        """The number of links that lead into a section."""
        return sum(source < start for inputs in self._inputs[start:end] for source, _, _ in inputs)


def _around_blocking(position: Mapping[str, int], links: Sequence[Link]) -> list[list[int]]:
    """For each position: the positions of parts that it reads through blocking parts only. It cannot share a
    worker with them, because tuples would have to return to the worker that they left."""
    sources: dict[str, list[str]] = {}
    for link in links:
        sources.setdefault(link.target, []).append(link.source)
    found: list[list[int]] = [[] for _ in position]
    for name, here in position.items():
        behind = [source for source in sources.get(name, ()) if source not in position]
        seen: set[str] = set()
        while behind:
            blocking = behind.pop()
            if blocking not in seen:
                seen.add(blocking)
                found[here] += [position[each] for each in sources.get(blocking, ()) if each in position]
                behind += [each for each in sources.get(blocking, ()) if each not in position]
    return found
