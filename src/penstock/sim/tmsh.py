"""TMSH-Storm, whose rate *Pu 2021* compares with ERDM's (section 4.1): it moves executors only to increase the
rate.

Modelled: an executor moves to the node with which it exchanges most bytes and that has room, if this saves bytes
between nodes. The executor that saves most moves first. This is repeated until no move saves more. A node has room
if ``fill`` of each limit is not exceeded, as for ERDM, because the paper gives all strategies the same parameters,
and if each direction of its link has room, because a strategy for speed must not fill one of them. No node is
released. Not modelled: how TMSH-Storm selects overloaded nodes to move from.

The plan states where executors should be in the end, but not in which order they move. When it is carried out move
by move, some moves are refused, because executors that should leave are still there. The paper observes that
TMSH-Storm does not notice when executors accumulate, does not complete all planned moves, and therefore has an
unsteady rate.
"""

from __future__ import annotations

from penstock.control.limits import Loads, Need
from penstock.control.placement import ExecutorMove, PlacementSnapshot
from penstock.sim.baselines import Proposal

_ROUNDS = 20
"""At most; the benchmarks of the paper take two to ten."""
_ONE_WAY = 0.9
"""Share of half a node's bandwidth, that is of one direction, that may be in use: there must be room for a rate
that rises by a few percent."""


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
    """Load of the nodes and placement of the executors after the moves so far, by position."""

    def __init__(self, snapshot: PlacementSnapshot, fill: float) -> None:
        self.snapshot, self.fill = snapshot, fill
        self.loads = Loads(snapshot)
        self.out, self.into = [0.0] * len(snapshot.nodes), [0.0] * len(snapshot.nodes)
        """Bytes per second to and from other nodes."""
        places = self.loads.places
        for index, children in enumerate(snapshot.graph.children):
            for child, bytes in children:
                if places[child] != places[index]:
                    self.out[places[index]] += bytes
                    self.into[places[child]] += bytes

    def best(self, index: int) -> tuple[float, int]:
        """⟨bytes per second saved between nodes, node⟩ of the best move; 0 and the current node if no move saves
        bytes."""
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
        """Additional bytes per second, out and in, on the node's link if the executor is on this node."""
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
