"""Carries out a placement strategy's proposal in the simulated cluster: executors move, machines are released.

Each machine moves its executors one after the other. The executor's state is copied over the links while it still
processes tuples (without the delay, which models the queues of tuples on their way). Then the executor stops,
starts on the other machine and continues with the frames that wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.control.limits import Loads
from penstock.control.placement import (
    ExecutorMove,
    ExecutorStream,
    PlacedExecutor,
    PlacementNode,
    PlacementSnapshot,
    Use,
)
from penstock.sim.baselines import Proposal
from penstock.sim.dataflow import SimDataflow
from penstock.sim.events import Loop, Process
from penstock.sim.executor import SimExecutor
from penstock.sim.machine import SimMachine
from penstock.sim.outcome import ClusterSetUp, Switch

PlacementStrategy = Callable[[PlacementSnapshot], Proposal]

_CHUNK = 128 * 1024
"""Bytes of state copied at a time: 10 ms at 100 Mb/s, so that tuples can be sent in between."""
_PACKET = 1_500.0
"""Bytes of state in one packet on a link: Ethernet's."""


class Relocation:
    """Samples the load, asks the strategy once, and moves executors as it proposes."""

    def __init__(
        self,
        loop: Loop,
        set_up: ClusterSetUp,
        machines: Sequence[SimMachine],
        executors: Sequence[SimExecutor],
        dataflow: SimDataflow,
    ) -> None:
        self.switch: Switch | None = None
        """What became of the proposal; None before the strategy is asked."""
        self.settings = Proposal().settings
        """The strategy's settings of machines, from the switch on."""
        self._loop, self._set_up, self._dataflow = loop, set_up, dataflow
        self._machines, self._executors = machines, executors
        self._executor = {executor.id: executor for executor in executors}
        self._machine = {machine.name: machine for machine in machines}
        self._sample_begun = 0.0
        self._moving_sources = 0
        self._to_release: set[str] = set()

    def begin_sample(self) -> None:
        """Reset the executors' counters. The strategy decides on what they count from now on."""
        for executor in self._executors:
            executor.sent.clear()
            executor.begun, executor.traffic = executor.thread.work, 0.0
        self._sample_begun = self._loop.now

    def snapshot(self) -> PlacementSnapshot:
        """The load sample as the load monitor would report it. Acks sent back to spouts are part of the executors'
        traffic only, because streams must not form a cycle."""
        seconds, share = self._loop.now - self._sample_begun, self._set_up.limit
        spec = self._set_up.machine
        limit = Use(share * spec.cores, share * spec.memory, share * 2 * spec.bandwidth)
        executors = self._executors
        streams = (
            ExecutorStream(
                source.id, executors[target].id, tuples / seconds, tuples * self._size(source, target) / seconds
            )
            for source in executors
            for target, tuples in source.sent.items()
        )
        return PlacementSnapshot(
            tuple(
                PlacementNode(machine.name, limit)
                for machine in self._machines
                if machine.alive and not machine.released
            ),
            tuple(
                PlacedExecutor(
                    each.id,
                    each.component.name,
                    each.machine.name,
                    (each.thread.work - each.begun) / seconds,
                    each.component.memory,
                    each.traffic / seconds,
                )
                for each in executors
            ),
            tuple(streams),
        )

    def apply(self, strategy: PlacementStrategy) -> None:
        """Ask the strategy, and begin to carry out its proposal."""
        snapshot = self.snapshot()
        proposal = strategy(snapshot)
        carried, refused = moves_within_limits(snapshot, proposal.moves)
        self.switch = Switch(snapshot, proposal, carried, refused, math.inf if carried else 0.0)
        self.settings = proposal.settings
        frequency = {each.node: each.frequency for each in proposal.settings}
        for machine in self._machines:
            machine.frequency = frequency.get(machine.name, 1.0)
        by_source: dict[str, list[ExecutorMove]] = {}
        for move in carried:
            by_source.setdefault(move.source, []).append(move)
        self._moving_sources = len(by_source)
        self._to_release = {release.node for release in proposal.releases}
        self._release()
        for moves in by_source.values():
            self._loop.process(self._move_away(moves))

    def start_on(self, executor: SimExecutor, target: SimMachine) -> None:
        """Start a stopped executor on a machine. After its start it continues with the frames that wait for it."""
        executor.machine = target
        start, now = self._set_up.start / target.frequency, self._loop.now
        target.cores.accept(now, start, 0.0)
        executor.thread.accept(now, start, 0.0)
        executor.until = now + start
        self._loop.at(now + start, self._dataflow.resume, executor, target)

    def _size(self, source: SimExecutor, target: int) -> float:
        return self._set_up.ack_size if self._executors[target].is_acker else source.component.size

    def _move_away(self, moves: Sequence[ExecutorMove]) -> Process:
        """Move executors of one machine, one after the other."""
        for move in moves:
            executor, target = self._executor[move.executor], self._machine[move.target]
            source = executor.machine
            left = executor.component.state
            while left > 0 and source.alive and target.alive:
                yield self._copy_end(source, target, min(left, _CHUNK))
                left -= _CHUNK
            if not (source.alive and target.alive) or executor.machine is not source:
                continue  # the executors of a dead machine are placed anew, including this one
            executor.paused = True
            yield max(executor.until, self._loop.now)
            if source.alive and target.alive:
                self.start_on(executor, target)
            elif source.alive:
                self._dataflow.resume(executor, source)  # it stays where it was
        self._moving_sources -= 1
        self._release()
        if self.switch is not None and not self._moving_sources:
            self.switch = replace(self.switch, took=self._loop.now - self._set_up.switch)

    def _copy_end(self, source: SimMachine, target: SimMachine, size: float) -> float:
        """The time at which a chunk of state has arrived, in packets one after the other."""
        packets, machine = size / _PACKET, self._set_up.machine
        first = self._dataflow.transmit(source, target, self._loop.now, packets, _PACKET) - machine.delay
        return max(first + (packets - 1) * _PACKET / machine.bandwidth, self._loop.now)

    def _release(self) -> None:
        used = {executor.machine.name for executor in self._executors}
        for name in self._to_release - used:
            self._machine[name].released = True


def moves_within_limits(
    snapshot: PlacementSnapshot, moves: Sequence[ExecutorMove]
) -> tuple[tuple[ExecutorMove, ...], int]:
    """The moves that keep all limits when carried out in order, and the number of the others. All moves of ERDM
    keep the limits; a strategy that ignores what else moves may exceed them."""
    loads, graph = Loads(snapshot), snapshot.graph
    held = []
    for move in moves:
        index, target = graph.position[move.executor], graph.node_position[move.target]
        need = loads.need(index)
        if loads.lacking(need, target) is None:
            loads.move(index, target, need)
            held.append(move)
    return tuple(held), len(moves) - len(held)
