"""ERDM: executors off the critical path move to its nodes, empty nodes are released (C algorithm 2, SPEC 6.4).

Pure: ``plan`` maps a snapshot to all that is to be said about it, ``ErdmPolicy`` to what is to be done. Time and
memory grow with executors and streams, but for a logarithm of the critical nodes where an executor may go to any
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.control.limits import AtLimit, Loads, Need
from penstock.control.paths import Critical, communication, critical, widened
from penstock.control.placement import ExecutorMove, ExecutorStay, PlacementSnapshot, Release
from penstock.control.roster import Roster
from penstock.errors import SettingError


@dataclass(frozen=True)
class InterNode:
    """What the streams between nodes cost before and after (C theorem 2)."""

    paths: int
    """C's n: streams from node to node before."""
    local: int
    """C's d: those of them inside a node after."""
    opened: int
    """Streams inside a node before and between nodes after; C has none of them, for its children follow."""
    before: float
    """C's W_node: seconds of a link a second, all streams together."""
    after: float
    """The same, counted anew."""

    @property
    def estimated(self) -> float:
        """C eq. 20: W_node · (n − d) / n, as if all streams cost the same and none were opened."""
        return self.before * (self.paths - self.local) / self.paths if self.paths else 0.0

    @property
    def saved(self) -> float:
        """Share of the cost that is saved, counted; below 0 where the moves cost more than they save."""
        return 1 - self.after / self.before if self.before else 0.0


@dataclass(frozen=True)
class PlacementPlan:
    critical: Critical
    moves: tuple[ExecutorMove, ...]
    """In the order they were decided, upstream first; each holds the limits with those before it carried out."""
    stays: tuple[ExecutorStay, ...]
    releases: tuple[Release, ...]
    emptied: int
    """Releases of nodes that had an executor."""
    limit_nodes: tuple[AtLimit, ...]
    """Nodes at a limit before any move."""
    cost: InterNode

    @property
    def worthwhile(self) -> bool:
        """A node becomes free or less goes from node to node (C eq. 19). Moving costs a peak of latency and power
        (C figures 10 and 13), so a plan that brings neither is not carried out."""
        return self.emptied > 0 or self.cost.after < self.cost.before


class ErdmPolicy:
    """``decide`` is called once a window with what the load monitor saw in it. Remembers nothing.

    ``slack``: as in ``paths.critical``; 0 is C's definition by the letter, one path. On a large cluster its three
    or four nodes are soon full, upstream executors of all others first, and none becomes empty. ``fill`` helps
    against that: as in ``paths.widened``; None is C's.
    """

    def __init__(self, slack: float = 0.0, fill: float | None = None) -> None:
        _check("the slack of the critical path", slack, "0 or more and below 1", 0 <= slack < 1)
        _check("the fill of critical nodes", fill, "above 0, up to 1", fill is None or 0 < fill <= 1)
        self.slack, self.fill = slack, fill

    def plan(self, snapshot: PlacementSnapshot) -> PlacementPlan:
        return plan(snapshot, self.slack, self.fill)

    def decide(self, snapshot: PlacementSnapshot) -> list[ExecutorMove | Release]:
        """What to do now: moves in order, then releases. Where the moves are not worthwhile only nodes that are
        empty as it is are released."""
        found = self.plan(snapshot)
        if found.worthwhile:
            return [*found.moves, *found.releases]
        busy = {executor.node for executor in snapshot.executors}
        return [release for release in found.releases if release.node not in busy]


def plan(snapshot: PlacementSnapshot, slack: float = 0.0, fill: float | None = None) -> PlacementPlan:
    """C algorithm 2. Critical executors stay; all others are asked, upstream first:

    1. Parents on critical nodes, also by a move of this plan: of these nodes the one with fewest executors (round
       robin), then the lowest CPU use, that holds its limits with the executor (algorithm 1).
    2. No such parent, or no such node has room: of all critical nodes the one by the same two rules.
    3. None has room: it stays, with the reason.

    Nodes without executors are released in the end.
    """
    found = critical(snapshot, slack)
    if fill is not None:
        found = widened(snapshot, found, fill)
    loads = Loads(snapshot)
    limit_nodes = loads.limit_nodes()
    moves, stays = _reallocate(snapshot, found, loads)
    before = {executor.node for executor in snapshot.executors}
    releases = tuple(
        Release(node.name, "all its executors move" if node.name in before else "it has no executor")
        for node, count in zip(snapshot.nodes, loads.counts, strict=True)
        if not count
    )
    emptied = sum(release.node in before for release in releases)
    return PlacementPlan(
        found, tuple(moves), tuple(stays), releases, emptied, limit_nodes, inter_node(snapshot, loads.places)
    )


def inter_node(snapshot: PlacementSnapshot, places: Sequence[int]) -> InterNode:
    """C eq. 20–25, with the executors on these nodes afterwards; both by position."""
    old, bandwidths = snapshot.graph.places, [node.limit.bandwidth for node in snapshot.nodes]
    paths = local = opened = 0
    before = after = 0.0
    for target, parents in enumerate(snapshot.graph.parents):
        was, now = old[target], places[target]
        for source, bytes in parents:
            crossed, crosses = old[source] != was, places[source] != now
            if crossed:
                paths += 1
                local += not crosses
                before += communication(bytes, bandwidths[old[source]], bandwidths[was])
            elif crosses:
                opened += 1
            if crosses:
                after += communication(bytes, bandwidths[places[source]], bandwidths[now])
    return InterNode(paths, local, opened, before, after)


def _reallocate(
    snapshot: PlacementSnapshot, found: Critical, loads: Loads
) -> tuple[list[ExecutorMove], list[ExecutorStay]]:
    choice = _Choice(snapshot, found, loads)
    moves: list[ExecutorMove] = []
    stays: list[ExecutorStay] = []
    for index in snapshot.graph.order:
        executor, source = snapshot.executors[index], loads.places[index]
        if source in choice.nodes:
            continue
        need = loads.need(index)
        target, reason = choice.of(index, need)
        if target is None:
            stays.append(ExecutorStay(executor.id, executor.node, reason))
            continue
        loads.move(index, target, need)
        choice.roster.moved(target)
        moves.append(ExecutorMove(executor.id, executor.node, snapshot.nodes[target].name, reason))
    return moves, stays


class _Choice:
    """Among critical nodes, for one executor after the other."""

    def __init__(self, snapshot: PlacementSnapshot, found: Critical, loads: Loads) -> None:
        self.snapshot, self.loads = snapshot, loads
        self.nodes = {snapshot.graph.node_position[name] for name in found.nodes}
        self.roster = Roster(loads, sorted(self.nodes), self._rules)

    def of(self, index: int, need: Need) -> tuple[int | None, str]:
        """The node to move to and why; None and why not."""
        executor = self.snapshot.executors[index]
        allowed = self._allowed(executor.nodes)
        parents = [
            parent for parent, _ in self.snapshot.graph.parents[index] if self.loads.places[parent] in self.nodes
        ]
        homes = sorted(
            {self.loads.places[parent] for parent in parents}, key=lambda node: (self._rules(node), node)
        )
        for home in homes:
            if (allowed is None or home in allowed) and self.loads.lacking(need, home) is None:
                return home, self._reason_at_home(home, homes, parents, need)
        why = self._refused(homes, allowed, need) if homes else "no parent on a critical node"
        target = self._anywhere(allowed, need)
        if target is None:
            among = self.nodes if allowed is None else allowed
            return None, f"{why}; none of {len(among)} critical nodes it may move to has room"
        return target, f"{why}; of all critical nodes with room {self._figures(target)} comes first"

    def _rules(self, node: int) -> tuple[float, ...]:
        """Round robin, then CPU priority (C definition 5)."""
        return self.loads.counts[node], self.loads.share(node)

    def _allowed(self, names: frozenset[str] | None) -> set[int] | None:
        if names is None:
            return None
        position = self.snapshot.graph.node_position
        return {position[name] for name in names if name in position} & self.nodes

    def _anywhere(self, allowed: set[int] | None, need: Need) -> int | None:
        """C eq. 16."""
        if allowed is None:
            return self.roster.first(need)
        room = [node for node in allowed if self.loads.lacking(need, node) is None]
        return min(room, key=lambda node: (self._rules(node), node), default=None)

    def _reason_at_home(self, home: int, homes: list[int], parents: list[int], need: Need) -> str:
        """C eq. 13 for one node, eq. 14 and 15 for several."""
        if len(homes) == 1:
            named = [self.snapshot.executors[parent].id for parent in parents[:_NAMED]]
            more = f" and {len(parents) - _NAMED} more" if len(parents) > _NAMED else ""
            return f"parent {', '.join(named)}{more} on critical node {self.snapshot.nodes[home].name}"
        others = [node for node in homes if node != home and self.loads.lacking(need, node) is None]
        if not others:
            return f"of its parents' nodes only {self._figures(home)} has room"
        runner_up = others[0]
        rule = (
            "fewest executors"
            if self.loads.counts[runner_up] > self.loads.counts[home]
            else "as few executors, least CPU"
        )
        return f"parents on {len(homes)} critical nodes: {self._figures(home)} before {self._figures(runner_up)}: {rule}"

    def _refused(self, homes: list[int], allowed: set[int] | None, need: Need) -> str:
        first = homes[0]
        name = self.snapshot.nodes[first].name
        why = f"{name} has no slot for it" if allowed is not None and first not in allowed else ""
        why = why or self.loads.why_not(need, first)
        return why + (f", and no more room on {len(homes) - 1} other nodes of parents" if len(homes) > 1 else "")

    def _figures(self, node: int) -> str:
        count = self.loads.counts[node]
        executors = "1 executor" if count == 1 else f"{count} executors"
        return f"{self.snapshot.nodes[node].name} ({executors}, CPU {self.loads.share(node):.0%})"


_NAMED = 3
"""Parents named in a reason; a shuffle has hundreds."""


def _check(name: str, value: float | None, rule: str, holds: bool) -> None:
    if not holds:
        raise SettingError(
            "placement", f"{name} must be {rule}, not {value!r}", "Leave it out to get the default."
        )
