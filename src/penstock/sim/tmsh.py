"""TMSH-Storm, the strategy C compares ERDM's rate with (C §4.1): executors move for speed alone.

Modelled: an executor moves to the node it exchanges most bytes with that has room, if that saves bytes between
nodes, the one that saves most first; again and again until none saves more. Room: ``fill`` of each limit, as much
as ERDM may use, for C gives all strategies the same parameters; and room in each direction of the link, for what
is after speed must not fill one of them. No node is released. Not modelled: how it picks overloaded nodes to move
from.

The plan says where executors are in the end, and not how they get there: who carries it out move by move finds
some of them refused, where others still are that are to leave. C finds that TMSH-Storm does not see executors
crowd together and does not move all as planned, and that its rate is unsteady for that.
"""

from __future__ import annotations

from penstock.control.limits import Loads, Need
from penstock.control.placement import ExecutorMove, PlacementSnapshot
from penstock.sim.baselines import Proposal

_ROUNDS = 20
"""At most; C's cases take two to ten."""
_ONE_WAY = 0.9
"""Of half a node's bandwidth, that is of a direction, so much may be in use: a rate that rises by some percent
must find room too."""


def tmsh(snapshot: PlacementSnapshot, fill: float = 0.95) -> Proposal:
    planned, graph = _Planned(snapshot, fill), snapshot.graph
    gains: dict[int, float] = {}
    for _ in range(_ROUNDS):
        proposals = sorted((-planned.best(index)[0], index) for index in range(len(graph.places)))
        moved = False
        for proposal, index in proposals:
            gain, target = planned.best(index) if proposal < 0 else (0.0, 0)
            if gain > 0:
                planned.move(index, target)
                gains[index] = gains.pop(index, 0.0) + gain
                moved = True
        if not moved:
            break
    moves = []
    for index, gain in gains.items():
        executor, target = snapshot.executors[index], planned.loads.places[index]
        if target != graph.places[index]:
            reason = f"{gain / 1e6:,.2f} MB/s less between nodes"
            moves.append(ExecutorMove(executor.id, executor.node, snapshot.nodes[target].name, reason))
    return Proposal(tuple(moves))


class _Planned:
    """Nodes and executors as moved so far, by position."""

    def __init__(self, snapshot: PlacementSnapshot, fill: float) -> None:
        self.snapshot, self.fill = snapshot, fill
        self.loads = Loads(snapshot)
        self.out, self.into = [0.0] * len(snapshot.nodes), [0.0] * len(snapshot.nodes)
        """Bytes a second to and from other nodes."""
        places = self.loads.places
        for index, children in enumerate(snapshot.graph.children):
            for child, bytes in children:
                if places[child] != places[index]:
                    self.out[places[index]] += bytes
                    self.into[places[child]] += bytes

    def best(self, index: int) -> tuple[float, int]:
        """⟨bytes a second between nodes it saves, node⟩; 0 and where it is: nowhere."""
        need, home = self.loads.need(index), self.loads.places[index]
        here = need.shared.get(home, 0.0)
        allowed = self.snapshot.executors[index].nodes
        for node in sorted(need.shared, key=lambda node: (-need.shared[node], node)):
            if need.shared[node] <= here:
                break
            if allowed is not None and self.snapshot.nodes[node].name not in allowed:
                continue
            if self._room(index, node, need):
                return need.shared[node] - here, node
        return 0.0, home

    def move(self, index: int, target: int) -> None:
        need, source = self.loads.need(index), self.loads.places[index]
        for node, sign in ((source, -1), (target, 1)):
            sends, takes = self._ways(index, node)
            self.out[node] += sign * sends
            self.into[node] += sign * takes
        self.loads.move(index, target, need)

    def _ways(self, index: int, node: int) -> tuple[float, float]:
        """What the node's link has to carry more, out and in, with the executor on it."""
        places, graph = self.loads.places, self.snapshot.graph
        sends = takes = 0.0
        for child, bytes in graph.children[index]:
            if child != index and places[child] == node:
                takes -= bytes
            else:
                sends += bytes
        for parent, bytes in graph.parents[index]:
            if parent != index and places[parent] == node:
                sends -= bytes
            else:
                takes += bytes
        return sends, takes

    def _room(self, index: int, node: int, need: Need) -> bool:
        loads = self.loads
        if any(
            loads.used[each][node] + need.of(each, node) > self.fill * loads.limits[each][node]
            for each in range(3)
        ):
            return False
        sends, takes = self._ways(index, node)
        way = _ONE_WAY * loads.limits[2][node] / 2
        return self.out[node] + sends <= way and self.into[node] + takes <= way
