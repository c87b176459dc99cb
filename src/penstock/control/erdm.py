"""ERDM (Pu 2021, algorithm 2): moves executors from other nodes to the nodes of the critical path and releases
nodes that become empty.

Pure: ``plan`` computes the complete plan for a snapshot, ``ErdmPolicy`` the actions to take. Time and memory are
linear in executors and streams, with an additional logarithm of the number of critical nodes for executors that
may move to any of them.
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
    """The cost of the streams between nodes before and after the plan (Pu 2021, theorem 2)."""

    paths: int
    """n in Pu 2021: streams between nodes before."""
    local: int
    """d in Pu 2021: those of them that are within a node after."""
    opened: int
    """Streams that are within a node before and between nodes after. Pu 2021 has none, because children follow
    their parents."""
    before: float
    """W_node in Pu 2021: busy seconds of links per second, over all streams."""
    after: float
    """The same cost after the plan, computed anew."""

    @property
    def estimated(self) -> float:
        """W_node · (n − d) / n (Pu 2021, equation 20). Assumes that all streams cost the same and that ``opened``
        is 0."""
        return self.before * (self.paths - self.local) / self.paths if self.paths else 0.0

    @property
    def saved(self) -> float:
        """The saved share of the cost, from ``before`` and ``after``. Negative if the moves cost more than they
        save."""
        return 1 - self.after / self.before if self.before else 0.0


@dataclass(frozen=True)
class PlacementPlan:
    critical: Critical
    moves: tuple[ExecutorMove, ...]
    """In the order of decision, upstream first. The limits hold after each move if all earlier moves were carried
    out."""
    stays: tuple[ExecutorStay, ...]
    releases: tuple[Release, ...]
    emptied: int
    """The number of released nodes that had executors before."""
    limit_nodes: tuple[AtLimit, ...]
    """The nodes that are at a limit before any move."""
    cost: InterNode

    @property
    def worthwhile(self) -> bool:
        """True if a node becomes free or the traffic between nodes decreases (Pu 2021, equation 19). Moves cause a
        peak of latency and power (figures 10 and 13), so a plan with neither benefit is not carried out."""
        return self.emptied > 0 or self.cost.after < self.cost.before


class ErdmPolicy:
    """Decides on moves and releases from load snapshots. Stateless; ``decide`` is called once per load sample.

    ``slack`` is that of ``paths.critical``; 0 is the definition of Pu 2021, a single path. On a large cluster the
    three or four nodes of one path are soon filled by the upstream executors of all other nodes, and no node
    becomes empty. ``fill``, that of ``paths.widened``, prevents this; None is Pu 2021's rule.
    """

    def __init__(self, slack: float = 0.0, fill: float | None = None) -> None:
        _check("the slack of the critical path", slack, "0 or more and below 1", 0 <= slack < 1)
        _check("the fill of critical nodes", fill, "above 0, up to 1", fill is None or 0 < fill <= 1)
        self.slack, self.fill = slack, fill

    def plan(self, snapshot: PlacementSnapshot) -> PlacementPlan:
        return plan(snapshot, self.slack, self.fill)

    def decide(self, snapshot: PlacementSnapshot) -> list[ExecutorMove | Release]:
        """The actions to take now: moves in order, then releases. If the moves are not worthwhile, only nodes that
        are already empty are released."""
        found = self.plan(snapshot)
        if found.worthwhile:
            return [*found.moves, *found.releases]
        busy = {executor.node for executor in snapshot.executors}
        return [release for release in found.releases if release.node not in busy]


def plan(snapshot: PlacementSnapshot, slack: float = 0.0, fill: float | None = None) -> PlacementPlan:
    """Pu 2021, algorithm 2. Critical executors stay. For every other executor, upstream first:

    1. If parents are on critical nodes, also through a move of this plan: choose among these nodes the one with
       the fewest executors (round robin), then the lowest CPU use, that has room for the executor (algorithm 1).
    2. If there is no such parent, or none of these nodes has room: choose among all critical nodes by the same
       rules.
    3. If no node has room, the executor stays, and the reason is recorded.

    Finally, nodes without executors are released.
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
    """The costs of Pu 2021, equations 20 to 25, if the executors move to these nodes. Executors and nodes are
    positions."""
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
    """Chooses among the critical nodes, for one executor after the other."""

    def __init__(self, snapshot: PlacementSnapshot, found: Critical, loads: Loads) -> None:
        self.snapshot, self.loads = snapshot, loads
        self.nodes = {snapshot.graph.node_position[name] for name in found.nodes}
        self.roster = Roster(loads, sorted(self.nodes), self._rules)

    def of(self, index: int, need: Need) -> tuple[int | None, str]:
        """The node to move to and the reason, or None and the reason why the executor stays."""
        executor = self.snapshot.executors[index]
        allowed = self._allowed(executor.nodes)
        parents = [
            parent for parent, _ in self.snapshot.graph.parents[index] if self.loads.places[parent] in self.nodes
        ]
        parent_nodes = sorted(
            {self.loads.places[parent] for parent in parents}, key=lambda node: (self._rules(node), node)
        )
        for parent_node in parent_nodes:
            if (allowed is None or parent_node in allowed) and self.loads.lacking(need, parent_node) is None:
                return parent_node, self._reason_for_parent_node(parent_node, parent_nodes, parents, need)
        why = self._refused(parent_nodes, allowed, need) if parent_nodes else "no parent on a critical node"
        target = self._anywhere(allowed, need)
        if target is None:
            among = self.nodes if allowed is None else allowed
            return None, f"{why}; none of {len(among)} critical nodes it may move to has room"
        return target, f"{why}; the first of all critical nodes with room is {self._figures(target)}"

    def _rules(self, node: int) -> tuple[float, ...]:
        """Round robin, then CPU priority (Pu 2021, definition 5)."""
        return self.loads.counts[node], self.loads.share(node)

    def _allowed(self, names: frozenset[str] | None) -> set[int] | None:
        if names is None:
            return None
        position = self.snapshot.graph.node_position
        return {position[name] for name in names if name in position} & self.nodes

    def _anywhere(self, allowed: set[int] | None, need: Need) -> int | None:
        """Pu 2021, equation 16."""
        if allowed is None:
            return self.roster.first(need)
        room = [node for node in allowed if self.loads.lacking(need, node) is None]
        return min(room, key=lambda node: (self._rules(node), node), default=None)

    def _reason_for_parent_node(
        self, parent_node: int, parent_nodes: list[int], parents: list[int], need: Need
    ) -> str:
        """Pu 2021, equation 13 for one node, equations 14 and 15 for several."""
        if len(parent_nodes) == 1:
            named = [self.snapshot.executors[parent].id for parent in parents[:_NAMED]]
            more = f" and {len(parents) - _NAMED} more" if len(parents) > _NAMED else ""
            return f"parent {', '.join(named)}{more} on critical node {self.snapshot.nodes[parent_node].name}"
        others = [node for node in parent_nodes if node != parent_node and self.loads.lacking(need, node) is None]
        if not others:
            return f"only {self._figures(parent_node)} of its parents' nodes has room"
        runner_up = others[0]
        rule = (
            "fewest executors"
            if self.loads.counts[runner_up] > self.loads.counts[parent_node]
            else "equally few executors, lowest CPU use"
        )
        return (
            f"parents on {len(parent_nodes)} critical nodes; {self._figures(parent_node)} before "
            f"{self._figures(runner_up)}: {rule}"
        )

    def _refused(self, parent_nodes: list[int], allowed: set[int] | None, need: Need) -> str:
        first = parent_nodes[0]
        name = self.snapshot.nodes[first].name
        why = f"{name} has no slot for it" if allowed is not None and first not in allowed else ""
        why = why or self.loads.why_not(need, first)
        others = len(parent_nodes) - 1
        return why + (f", and {others} other nodes of its parents have no room either" if others else "")

    def _figures(self, node: int) -> str:
        count = self.loads.counts[node]
        executors = "1 executor" if count == 1 else f"{count} executors"
        return f"{self.snapshot.nodes[node].name} ({executors}, CPU {self.loads.share(node):.0%})"


_NAMED = 3
"""The number of parents named in a reason. An executor behind a shuffle has hundreds."""


def _check(name: str, value: float | None, rule: str, holds: bool) -> None:
    if not holds:
        raise SettingError(
            "placement", f"{name} must be {rule}, not {value!r}", "Leave it out to get the default."
        )
