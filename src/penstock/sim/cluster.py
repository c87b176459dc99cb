"""A cluster that runs topologies: machines with cores and links, executors with service times, spouts that wait
for acks, a placement strategy that is asked once, machines that die (C §4; SPEC 6.7).

Work goes in frames, so many tuples that take the same way. They take the time a single tuple takes, and wait as a
single tuple does (``machine.Server``), but keep their executor, its machine's cores and the links busy for all of
them: a frame saves events, it is no burst. Between machines a tuple is under way for a delay besides, and costs
both ends work; inside a machine it is free, as C has it. A root is complete when all that stems from it is
processed and its ack has gone by an acker to the spout; the acks of one root go as one frame with the bytes and
the work of all of them. (``penstock.acking`` is not used: its arrays are for columns of roots, here a root comes
alone.) Only what a machine took with it times out and is emitted again.

Executors go where the strategy wants them one after the other from each machine: their state is copied over the
links while they work on (without the delay, which is that of tuples' transfer queues); then they stop, start on
the other machine and go on with what waits for them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from penstock.control.energy import power
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
from penstock.sim.events import Loop, Process
from penstock.sim.executor import ACKER, Choice, Root, SimComponent, SimExecutor
from penstock.sim.machine import UPDATE_INTERVAL, SimMachine
from penstock.sim.outcome import ClusterOutcome, ClusterSetUp, ClusterTick, Switch

Strategy = Callable[[PlacementSnapshot], Proposal]
_CHUNK = 128 * 1024
"""Bytes of state that go at a time: 10 ms at 100 Mb/s, so that tuples get their turn in between."""
_PACKET = 1_500.0
"""Bytes of state that pass a link at once."""
_SPREAD = 1.0
"""Seconds in which the spouts emit their first tuples: all at once they would go round in one wave for long."""
_SOON = 0.1
"""Seconds from now that a frame's end may lie ahead without an event of its own: links look that far ahead."""


def run(
    set_up: ClusterSetUp,
    strategy: Strategy | None = None,
    seed: int = 0,
    on_tick: Callable[[float], None] | None = None,
) -> ClusterOutcome:
    """One run; the same seed is the same run. ``on_tick`` is called after every tick."""
    return Cluster(set_up, strategy, seed, on_tick).run()


class Cluster:
    """One run."""

    def __init__(
        self,
        set_up: ClusterSetUp,
        strategy: Strategy | None,
        seed: int,
        on_tick: Callable[[float], None] | None = None,
    ) -> None:
        self.loop = Loop()
        self.set_up, self._strategy, self._on_tick = set_up, strategy, on_tick
        self._frame, self._delay = set_up.frame, set_up.machine.delay
        self._bandwidth, self._handling = set_up.machine.bandwidth, set_up.machine.handling
        self._chance = random.Random(seed)
        width = len(str(set_up.machines))
        self.machines = [SimMachine(f"n{index + 1:0{width}}", set_up.machine) for index in range(set_up.machines)]
        self.executors: list[SimExecutor] = []
        self._ackers: list[list[SimExecutor]] = []
        for copy in range(set_up.copies):
            self._place(copy)
        self._by_id = {executor.id: executor for executor in self.executors}
        self._by_name = {machine.name: machine for machine in self.machines}
        self._regulated = Proposal().settings
        self._switch: Switch | None = None
        self._emitted = self._completed = self._failed = self._done = 0
        self._processed = {component.name: 0 for component in set_up.components if component.source is not None}
        self._latencies: list[float] = []
        self._ticks: list[ClusterTick] = []
        self._roots = 0

    def _place(self, copy: int) -> None:
        """Storm's default, round robin over the copy's workers."""
        set_up = self.set_up
        acker = SimComponent(ACKER, set_up.ackers, set_up.ack_service)
        name = f"{copy}/" if set_up.copies > 1 else ""
        mine: dict[str, list[SimExecutor]] = {}
        place = 0
        for component in (*set_up.components, acker):
            mine[component.name] = []
            for number in range(component.executors):
                machine = self.machines[(copy * set_up.workers + place % set_up.workers) % set_up.machines]
                executor = SimExecutor(
                    f"{name}{component.name}[{number}]", len(self.executors), component, machine
                )
                self.executors.append(executor)
                mine[component.name].append(executor)
                place += 1
        self._ackers.append(mine.pop(ACKER))
        for component in set_up.components:
            for source in mine[component.source] if component.source is not None else ():
                source.routers.append(Choice(component.grouping, mine[component.name], source.index, self._chance))
        self._per_copy = len(self.executors) // (copy + 1)

    def run(self) -> ClusterOutcome:
        set_up, loop = self.set_up, self.loop
        for spout in self.executors:
            if spout.component.rate is not None:
                loop.process(self._arrivals(spout, spout.component.rate))
            elif spout.is_spout:
                for _ in range(set_up.max_pending // set_up.frame):
                    loop.at(self._chance.uniform(0.0, _SPREAD), self._emit_next, spout)
        for time, machine in set_up.dies:
            loop.at(time, self._crash, self.machines[machine])
        loop.process(self._update_servers())
        if self._strategy is not None and set_up.switch < set_up.seconds:
            loop.at(max(set_up.switch - set_up.sample_seconds, 0.0), self._begin_sample)
            loop.at(set_up.switch, self._switching, self._strategy)
        loop.process(self._clock())
        loop.run(set_up.seconds)
        return ClusterOutcome(
            set_up,
            tuple(self._ticks),
            self._switch,
            self._emitted,
            self._completed,
            self._failed,
            sum(executor.pending for executor in self.executors),
            self._processed,
            {executor.id: executor.machine.name for executor in self.executors},
            tuple(machine.name for machine in self.machines if machine.released),
        )

    # ---- spouts

    def _arrivals(self, spout: SimExecutor, rate: float) -> Process:
        while True:
            yield self.loop.now + self._chance.expovariate(rate / self._frame)
            spout.waiting += 1
            self._emit_next(spout)

    def _emit_next(self, spout: SimExecutor) -> None:
        """It emits one frame, if it may."""
        frame = self._frame
        if spout.paused or spout.pending + frame > self.set_up.max_pending:
            return
        if spout.component.rate is not None:
            if not spout.waiting:
                return
            spout.waiting -= 1
        spout.pending += frame
        self._emitted += frame
        self._arrive(spout, Root(spout, self.loop.now), frame)

    def _complete(self, root: Root) -> None:
        if not root.over:
            root.over = True
            self._completed += self._frame
            self._latencies.append(self.loop.now - root.emitted)
            self._root_ended(root.spout)

    def _give_up(self, root: Root) -> None:
        if not root.over:
            root.over = True
            self._failed += self._frame
            root.spout.waiting += root.spout.component.rate is not None
            self._root_ended(root.spout)

    def _root_ended(self, spout: SimExecutor) -> None:
        spout.pending -= self._frame
        self._emit_next(spout)

    # ---- work

    def _arrive(self, executor: SimExecutor, root: Root, tuples: int, read: float = 0.0) -> None:
        """``read``: core seconds for each of them to be read, from another machine."""
        machine, now = executor.machine, self.loop.now
        if not machine.alive:
            self._on_lost(root)
            return
        if executor.paused:
            executor.queue.append((root, tuples, read))
            return
        service = (executor.component.service + read) / machine.frequency
        work = tuples * service
        squares = 2.0 * work * service  # exponential
        own, shared = executor.thread.accept(now, work, squares), machine.cores.accept(now, work, squares)
        # Mean waits add up; what thread and cores are behind is the same work.
        behind = max(own - executor.thread.wait, shared - machine.cores.wait)
        end = now + executor.thread.wait + machine.cores.wait + behind + service
        if end > executor.until:
            executor.until = end
        if end - now < _SOON:
            self._on_worked(machine, executor, root, tuples, end)
        else:
            self.loop.at(end, self._on_worked, machine, executor, root, tuples, end)

    def _on_worked(self, machine: SimMachine, executor: SimExecutor, root: Root, tuples: int, now: float) -> None:
        if not machine.alive:
            self._on_lost(root)
            return
        if root.over:
            return
        if now > root.last:
            root.last = now
        component = executor.component
        if executor.is_acker:
            self._send(now, executor, root.spout, self._frame, self.set_up.ack_size, self._complete, root)
            return
        if executor.is_spout:
            root.emitted = now
        else:
            self._processed[component.name] += tuples
            self._done += tuples
            root.processed += tuples
        if component.emits and executor.routers:
            self._send_on(executor, root, tuples * component.emits, now)
        root.left -= 1
        if not root.left:
            self._ack(executor, root)

    def _send_on(self, executor: SimExecutor, root: Root, tuples: int, now: float) -> None:
        component, sent = executor.component, executor.sent
        handling = component.size * self._handling
        frames = min(component.frames, tuples)
        for choice in executor.routers:
            root.left += frames
            for number in range(frames):
                count = tuples * (number + 1) // frames - tuples * number // frames
                target = choice.next()
                sent[target.index] = sent.get(target.index, 0) + count
                read = 0.0
                if target.machine is not executor.machine:
                    read = handling
                    self._serialise(executor, count, handling)
                self._send(now, executor, target, count, component.size, self._arrive, target, root, count, read)

    def _serialise(self, executor: SimExecutor, tuples: int, each: float) -> None:
        """Keeps its thread and its machine's cores busy; that a tuple is emitted so much later is in the delay."""
        each, now = each / executor.machine.frequency, self.loop.now
        work = tuples * each
        executor.thread.accept(now, work, 2.0 * work * each)
        executor.machine.cores.accept(now, work, 2.0 * work * each)

    def _ack(self, executor: SimExecutor, root: Root) -> None:
        ackers = self._ackers[executor.index // self._per_copy]
        if not ackers:
            self.loop.at(root.last, self._complete, root)
            return
        tuples = root.processed + self._frame
        self._roots += 1
        acker = ackers[self._roots % len(ackers)]
        executor.sent[acker.index] = executor.sent.get(acker.index, 0) + tuples
        self._send(root.last, executor, acker, tuples, self.set_up.ack_size, self._arrive, acker, root, tuples)

    def _on_lost(self, root: Root) -> None:
        if not root.over:
            self.loop.at(max(root.emitted + self.set_up.time_out, self.loop.now), self._give_up, root)

    # ---- network

    def _send(
        self, now: float, source: SimExecutor, target: SimExecutor, tuples: int, size: float, act: Callable[..., None],
        *args: object,
    ) -> None:  # fmt: skip
        """Tuples of so many bytes each from now on; ``act`` when they are there."""
        here, there = source.machine, target.machine
        if here is not there:
            bytes = tuples * size
            source.traffic += bytes
            target.traffic += bytes
            now = self._transmit(here, there, now, tuples, size)
        self.loop.at(now, act, *args)

    def _transmit(self, source: SimMachine, target: SimMachine, now: float, pieces: float, size: float) -> float:
        """When one of them is there. The receiver takes what the sender's link lets through while it comes."""
        each = size / self._bandwidth
        work = pieces * each
        squares = work * each
        now += source.up.accept(now, work, squares) + each + self._delay
        return now + target.down.accept(now, work, squares)

    # ---- the strategy

    def _begin_sample(self) -> None:
        for executor in self.executors:
            executor.sent.clear()
            executor.begun, executor.traffic = executor.thread.work, 0.0
        self._sample_begun = self.loop.now

    def snapshot(self) -> PlacementSnapshot:
        """What the load monitor saw in the window. What goes back from ackers to spouts is in the executors'
        traffic only: streams make no cycle."""
        seconds, share = self.loop.now - self._sample_begun, self.set_up.limit
        spec = self.set_up.machine
        limit = Use(share * spec.cores, share * spec.memory, share * 2 * spec.bandwidth)
        executors = self.executors
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
                for machine in self.machines
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

    def _size(self, source: SimExecutor, target: int) -> float:
        return self.set_up.ack_size if self.executors[target].is_acker else source.component.size

    def _switching(self, strategy: Strategy) -> None:
        snapshot = self.snapshot()
        proposal = strategy(snapshot)
        carried, refused = allowed(snapshot, proposal.moves)
        self._switch = Switch(snapshot, proposal, carried, refused, math.inf if carried else 0.0)
        self._regulated = proposal.settings
        frequency = {each.node: each.frequency for each in proposal.settings}
        for machine in self.machines:
            machine.frequency = frequency.get(machine.name, 1.0)
        by_source: dict[str, list[ExecutorMove]] = {}
        for move in carried:
            by_source.setdefault(move.source, []).append(move)
        self._moving_sources = len(by_source)
        self._to_release = {release.node for release in proposal.releases}
        self._release()
        for moves in by_source.values():
            self.loop.process(self._move_away(moves))

    def _move_away(self, moves: Sequence[ExecutorMove]) -> Process:
        """Executors of one machine, one after the other."""
        for move in moves:
            executor, target = self._by_id[move.executor], self._by_name[move.target]
            source = executor.machine
            left = executor.component.state
            while left > 0 and source.alive and target.alive:
                yield self._copy_end(source, target, min(left, _CHUNK))
                left -= _CHUNK
            if not (source.alive and target.alive) or executor.machine is not source:
                continue  # its machine's executors are placed anew, and this one with them
            executor.paused = True
            yield max(executor.until, self.loop.now)
            if source.alive and target.alive:
                self._start_on(executor, target)
            elif source.alive:
                self._resume(executor, source)  # where it was
        self._moving_sources -= 1
        self._release()
        switch = self._switch
        if switch is not None and not self._moving_sources:
            took = self.loop.now - self.set_up.switch
            self._switch = Switch(switch.snapshot, switch.proposal, switch.carried, switch.refused, took)

    def _copy_end(self, source: SimMachine, target: SimMachine, size: float) -> float:
        """When they are there, in packets one after the other."""
        packets = size / _PACKET
        first = self._transmit(source, target, self.loop.now, packets, _PACKET) - self._delay
        return max(first + (packets - 1) * _PACKET / self._bandwidth, self.loop.now)

    def _start_on(self, executor: SimExecutor, target: SimMachine) -> None:
        """Stopped; goes on there, after its start, with what waits for it."""
        executor.machine = target
        start, now = self.set_up.start / target.frequency, self.loop.now
        target.cores.accept(now, start, 0.0)
        executor.thread.accept(now, start, 0.0)
        executor.until = now + start
        self.loop.at(now + start, self._resume, executor, target)

    def _resume(self, executor: SimExecutor, machine: SimMachine) -> None:
        if executor.machine is not machine or not machine.alive:
            return
        executor.paused = False
        waiting, executor.queue = executor.queue, []
        for root, tuples, read in waiting:
            self._arrive(executor, root, tuples, read)
        if executor.is_spout:
            for _ in range(self.set_up.max_pending // self._frame):
                self._emit_next(executor)

    def _release(self) -> None:
        used = {executor.machine.name for executor in self.executors}
        for name in self._to_release - used:
            self._by_name[name].released = True

    # ---- failures

    def _crash(self, machine: SimMachine) -> None:
        machine.alive = False
        lost = [executor for executor in self.executors if executor.machine is machine]
        for executor in lost:
            for root, _, _ in executor.queue:
                self._on_lost(root)
            executor.queue, executor.paused = [], True
        self.loop.at(self.loop.now + self.set_up.recover, self._recover, lost)

    def _recover(self, lost: Sequence[SimExecutor]) -> None:
        """On the machines that are left, round robin."""
        left = [machine for machine in self.machines if machine.alive and not machine.released]
        for number, executor in enumerate(lost):
            self._start_on(executor, left[number % len(left)])

    # ---- time

    def _update_servers(self) -> Process:
        while True:
            yield self.loop.now + UPDATE_INTERVAL
            for machine in self.machines:
                machine.cores.update()
                machine.up.update()
                machine.down.update()
            for executor in self.executors:
                executor.thread.update()

    def _clock(self) -> Process:
        set_up, span = self.set_up, self.set_up.tick
        busy, bytes = [0.0] * len(self.machines), [0.0] * len(self.machines)
        done = 0
        for number in range(round(set_up.seconds / span)):
            yield (number + 1) * span
            now, spec = self.loop.now, set_up.machine
            work, through = [each.busy(now) for each in self.machines], [each.bytes(now) for each in self.machines]
            cpu = [max(end - begin, 0.0) / span / spec.cores for end, begin in zip(work, busy, strict=True)]
            traffic = [
                max(end - begin, 0.0) / span / (2 * spec.bandwidth)
                for end, begin in zip(through, bytes, strict=True)
            ]
            memory = self._memory()
            nodes = tuple(
                # Of the cycles at full frequency, as the power model has it.
                PlacementNode(each.name, Use(1.0, 1.0, 1.0), Use(share * each.frequency, room, network))
                for each, share, room, network in zip(self.machines, cpu, memory, traffic, strict=True)
            )
            off = [each.name for each in self.machines if each.released or not each.alive]
            watts = power(PlacementSnapshot(nodes, ()), released=off, regulated=self._regulated)
            latency = sum(self._latencies) / len(self._latencies) if self._latencies else None
            self._ticks.append(
                ClusterTick(now, self._done - done, latency, tuple(cpu), tuple(memory), tuple(traffic), watts)
            )
            busy, bytes, done, self._latencies = work, through, self._done, []
            if self._on_tick is not None:
                self._on_tick(now)

    def _memory(self) -> list[float]:
        used = {machine.name: 0.0 for machine in self.machines}
        for executor in self.executors:
            used[executor.machine.name] += executor.component.memory
        return [used[machine.name] / self.set_up.machine.memory for machine in self.machines]


def allowed(snapshot: PlacementSnapshot, moves: Sequence[ExecutorMove]) -> tuple[tuple[ExecutorMove, ...], int]:
    """The moves that hold the limits with those before them carried out, and how many do not. ERDM's all do; those
    of a strategy that does not look what else moves may not."""
    loads, graph = Loads(snapshot), snapshot.graph
    held = []
    for move in moves:
        index, target = graph.position[move.executor], graph.node_position[move.target]
        need = loads.need(index)
        if loads.lacking(need, target) is None:
            loads.move(index, target, need)
            held.append(move)
    return tuple(held), len(moves) - len(held)
