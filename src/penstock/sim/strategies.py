"""Strategies that distribute data over the branches: Flink's credits, fixed shares, or migration. Each installs
the flow control of the links and the router of the source. Migration decides with
``penstock.control.migration``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import simpy

from penstock.control.migration import Branch, BranchNodeLoad, Migrate, MigrationPolicy
from penstock.control.segments import SegmentLedger
from penstock.sim.flow import Credit, Process, StopResume
from penstock.sim.network import Packet, SimLink, SimNetwork, SimNode

MB = 1_000_000
"""Bytes in a MB: the network counts MB, the policy counts bytes."""

MONITOR_INTERVAL = 1.0
"""Seconds of a load sample. *Sun 2022* gives no value. It is long enough to count a few packets of each node, and
short against the time in which a queue fills."""

Paths = Mapping[str, list[SimLink]]


class BranchingStrategy(Protocol):
    def set_up(self, env: simpy.Environment, network: SimNetwork, source: SimNode, paths: Paths) -> None:
        """Called once, before the run begins."""


class CreditStrategy:
    """Flink's flow control: each packet goes to the branch that its identifier names, as soon as that branch has
    granted a credit."""

    def set_up(self, env: simpy.Environment, network: SimNetwork, source: SimNode, paths: Paths) -> None:
        for link in network.links:
            Credit(env, link)
        source.router = lambda packet: source.links[packet.bound]


class StaticStrategy:
    """The static allocation of *Sun 2022*: shares are fixed beforehand from the known capacity of each branch,
    whatever branch a packet names. It knows what the other strategies must find out, so it is an upper bound."""

    def set_up(self, env: simpy.Environment, network: SimNetwork, source: SimNode, paths: Paths) -> None:
        for link in network.links:
            StopResume(link)
        capacity = {
            name: min(min(link.spec.bandwidth, link.target.spec.speed) for link in path)
            for name, path in paths.items()
        }
        self._shares = {name: rate / sum(capacity.values()) for name, rate in capacity.items()}
        self._due = dict.fromkeys(capacity, 0.0)
        self._chosen: tuple[int, str] | None = None
        source.router = lambda packet: source.links[self._choose(packet)]

    def _choose(self, packet: Packet) -> str:
        """The branch that lacks most of its share. A waiting packet keeps its branch."""
        if self._chosen is None or self._chosen[0] != packet.number:
            for name, share in self._shares.items():
                self._due[name] += share
            name = max(self._due, key=self._due.__getitem__)
            self._due[name] -= 1
            self._chosen = packet.number, name
        return self._chosen[1]


@dataclass
class _NodeCounters:
    bytes_in: float = 0.0
    bytes_out: float = 0.0


class MigrationStrategy:
    """The strategy of *Sun 2022*: plain nodes stop and resume their senders, and the policy decides on a load
    sample of the branches in every interval."""

    def __init__(self, policy: MigrationPolicy | None = None, interval: float = MONITOR_INTERVAL) -> None:
        self.policy = policy or MigrationPolicy()
        self.ledger = SegmentLedger()
        self.log: list[tuple[float, str]] = []
        """⟨time, reason⟩ of each change."""
        self._interval = interval
        self._offsets: dict[str, int] = {}

    def set_up(self, env: simpy.Environment, network: SimNetwork, source: SimNode, paths: Paths) -> None:
        for link in network.links:
            StopResume(link)
        self._source, self._paths = source, paths
        self._before = {node: _NodeCounters() for path in paths.values() for node in _nodes(path)}
        source.router = lambda packet: source.links[self.policy.routes.get(packet.bound, packet.bound)]
        source.on_sent = self._sent
        env.process(self._monitor(env))

    def _sent(self, packet: Packet, link: SimLink) -> None:
        self._offsets[packet.bound] = self._offsets.get(packet.bound, 0) + 1
        if link.spec.target != packet.bound:
            self.ledger.extend(packet.bound)

    def _monitor(self, env: simpy.Environment) -> Process:
        while True:
            yield env.timeout(self._interval)
            suggestions = self.policy.decide([self._branch(name, path) for name, path in self._paths.items()])
            for suggestion in suggestions:
                self.log.append((env.now, suggestion.reason))
                if isinstance(suggestion, Migrate):
                    self.ledger.open(suggestion.heavy, suggestion.light, self._offsets.get(suggestion.heavy, 0))
                else:
                    self.ledger.close(suggestion.heavy)
            if suggestions:
                self._source.wake()

    def _branch(self, name: str, path: list[SimLink]) -> Branch:
        loads = tuple(self._load(node) for node in _nodes(path))
        return Branch(name, loads, min(link.spec.bandwidth for link in path) * MB)

    def _load(self, node: SimNode) -> BranchNodeLoad:
        before, now = self._before[node], _NodeCounters(node.bytes_in, node.bytes_out)
        self._before[node] = now
        per_second = MB / self._interval
        return BranchNodeLoad(
            node.queue_use,
            (now.bytes_in - before.bytes_in) * per_second,
            (now.bytes_out - before.bytes_out) * per_second,
        )


def _nodes(path: list[SimLink]) -> list[SimNode]:
    """The nodes between the branching point and the sink."""
    return [link.target for link in path[:-1]]
