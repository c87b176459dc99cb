"""A simulated cluster that runs topologies: machines with cores and links, executors with service times, a
placement strategy that is asked once, and machines that fail (*Pu 2021*, section 4). ``sim.dataflow`` moves the
tuples, ``sim.relocation`` the executors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.control.energy import power
from penstock.control.placement import PlacementNode, PlacementSnapshot, Use
from penstock.sim.dataflow import SimDataflow
from penstock.sim.events import Loop, Process
from penstock.sim.executor import ACKER, Choice, SimComponent, SimExecutor
from penstock.sim.machine import UPDATE_INTERVAL, SimMachine
from penstock.sim.outcome import ClusterOutcome, ClusterSetUp, ClusterTick
from penstock.sim.relocation import PlacementStrategy, Relocation


def run(
    set_up: ClusterSetUp,
    strategy: PlacementStrategy | None = None,
    seed: int = 0,
    on_tick: Callable[[float], None] | None = None,
) -> ClusterOutcome:
    """Run the cluster once. The same seed gives the same run. ``on_tick`` is called after every tick."""
    return SimCluster(set_up, strategy, seed, on_tick).run()


class SimCluster:
    """One run of the cluster."""

    def __init__(
        self,
        set_up: ClusterSetUp,
        strategy: PlacementStrategy | None,
        seed: int,
        on_tick: Callable[[float], None] | None = None,
    ) -> None:
        self._set_up, self._strategy, self._on_tick = set_up, strategy, on_tick
        chance = random.Random(seed)
        width = len(str(set_up.machines))
        self._machines = [SimMachine(f"n{index + 1:0{width}}", set_up.machine) for index in range(set_up.machines)]
        self._executors: list[SimExecutor] = []
        ackers = [self._place(copy, chance) for copy in range(set_up.copies)]
        self._loop = Loop()
        self._dataflow = SimDataflow(self._loop, set_up, self._executors, ackers, chance)
        self._relocation = Relocation(self._loop, set_up, self._machines, self._executors, self._dataflow)
        self._ticks: list[ClusterTick] = []

    def _place(self, copy: int, chance: random.Random) -> list[SimExecutor]:
        """Place the executors of one copy of the topology round robin over its workers, as Storm does by default.
        Returns its ackers."""
        set_up = self._set_up
        acker = SimComponent(ACKER, set_up.ackers, set_up.ack_service)
        prefix = f"{copy}/" if set_up.copies > 1 else ""
        of_component: dict[str, list[SimExecutor]] = {}
        place = 0
        for component in (*set_up.components, acker):
            of_component[component.name] = []
            for number in range(component.executors):
                machine = self._machines[(copy * set_up.workers + place % set_up.workers) % set_up.machines]
                id = f"{prefix}{component.name}[{number}]"
                executor = SimExecutor(id, len(self._executors), component, machine)
                self._executors.append(executor)
                of_component[component.name].append(executor)
                place += 1
        for component in set_up.components:
            sources = of_component[component.source] if component.source is not None else []
            every = list(of_component[component.name])
            if component.pairs:
                chance.shuffle(every)
            for number, source in enumerate(sources):
                targets = every
                if component.pairs:
                    targets = every[number :: len(sources)] or [every[number % len(every)]]
                source.routers.append(Choice(component.grouping, targets, source.index, chance))
        return of_component[ACKER]

    def run(self) -> ClusterOutcome:
        set_up, loop, counts = self._set_up, self._loop, self._dataflow.counts
        self._dataflow.start()
        for time, machine in set_up.dies:
            loop.at(time, self._crash, self._machines[machine])
        loop.process(self._update_servers())
        if self._strategy is not None and set_up.switch < set_up.seconds:
            loop.at(max(set_up.switch - set_up.sample_seconds, 0.0), self._relocation.begin_sample)
            loop.at(set_up.switch, self._relocation.apply, self._strategy)
        loop.process(self._record_ticks())
        loop.run(set_up.seconds)
        return ClusterOutcome(
            set_up,
            tuple(self._ticks),
            self._relocation.switch,
            counts.emitted,
            counts.completed,
            counts.failed,
            sum(executor.pending for executor in self._executors),
            counts.processed,
            {executor.id: executor.machine.name for executor in self._executors},
            tuple(machine.name for machine in self._machines if machine.released),
        )

    def _crash(self, machine: SimMachine) -> None:
        machine.alive = False
        lost = [executor for executor in self._executors if executor.machine is machine]
        for executor in lost:
            self._dataflow.lose_queue(executor)
        self._loop.at(self._loop.now + self._set_up.recover, self._recover, lost)

    def _recover(self, lost: Sequence[SimExecutor]) -> None:
        """Start the executors of a dead machine on the remaining ones, round robin."""
        left = [machine for machine in self._machines if machine.alive and not machine.released]
        for number, executor in enumerate(lost):
            self._relocation.start_on(executor, left[number % len(left)])

    def _update_servers(self) -> Process:
        while True:
            yield self._loop.now + UPDATE_INTERVAL
            for machine in self._machines:
                machine.cores.update()
                machine.up.update()
                machine.down.update()
            for executor in self._executors:
                executor.thread.update()

    def _record_ticks(self) -> Process:
        set_up, span, counts = self._set_up, self._set_up.tick, self._dataflow.counts
        machines, spec = self._machines, set_up.machine
        busy, bytes = [0.0] * len(machines), [0.0] * len(machines)
        done = 0
        for number in range(round(set_up.seconds / span)):
            yield (number + 1) * span
            now = self._loop.now
            work, through = [each.busy(now) for each in machines], [each.bytes(now) for each in machines]
            cpu = [max(end - begin, 0.0) / span / spec.cores for end, begin in zip(work, busy, strict=True)]
            traffic = [
                max(end - begin, 0.0) / span / (2 * spec.bandwidth)
                for end, begin in zip(through, bytes, strict=True)
            ]
            memory = self._memory()
            nodes = tuple(
                # The power model expects the share of the cycles at full frequency.
                PlacementNode(each.name, Use(1.0, 1.0, 1.0), Use(share * each.frequency, room, network))
                for each, share, room, network in zip(machines, cpu, memory, traffic, strict=True)
            )
            off = [each.name for each in machines if each.released or not each.alive]
            watts = power(PlacementSnapshot(nodes, ()), released=off, regulated=self._relocation.settings)
            latency = sum(counts.latencies) / len(counts.latencies) if counts.latencies else None
            self._ticks.append(
                ClusterTick(now, counts.done - done, latency, tuple(cpu), tuple(memory), tuple(traffic), watts)
            )
            busy, bytes, done, counts.latencies = work, through, counts.done, []
            if self._on_tick is not None:
                self._on_tick(now)

    def _memory(self) -> list[float]:
        used = {machine.name: 0.0 for machine in self._machines}
        for executor in self._executors:
            used[executor.machine.name] += executor.component.memory
        return [used[machine.name] / self._set_up.machine.memory for machine in self._machines]
