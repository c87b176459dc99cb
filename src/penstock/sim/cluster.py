"""A cluster that runs topologies: machines with cores and links, executors with service times, spouts that wait
for acks, a placement strategy that is asked once, machines that die (C §4; SPEC 6.7).

Work goes in frames, so many tuples that take the same way. A frame between machines occupies the sender's uplink,
is under way for the delay and occupies the receiver's downlink; inside a machine it is free, as C has it. A root
is complete when all that stems from it is processed and its ack has gone by an acker to the spout; the acks of one
root go as one frame with the bytes and the work of all of them. (``penstock.acking`` is not used: its arrays are
for columns of roots, here a root comes alone.) Only what a machine took with it times out and is emitted again.

Executors go where the strategy wants them one after the other from each machine: their state is copied over the
links while they work on (without the delay, which is that of tuples' transfer queues); then they stop, start on
the other machine and go on with what waits for them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy

from penstock.control.energy import Power, power
from penstock.control.limits import Loads
from penstock.control.placement import Executor as Seen
from penstock.control.placement import Move, Node, Snapshot, Stream, Use
from penstock.control.rivals import Proposal
from penstock.sim.executor import ACKER, Choice, Executor, Frame, Part, Root
from penstock.sim.flow import Process
from penstock.sim.machine import Machine, MachineSpec
from penstock.sim.network import after

Strategy = Callable[[Snapshot], Proposal]
_CHUNK = 128 * 1024
"""Bytes of state that go at a time: 10 ms at 100 Mb/s, so that frames get their turn in between."""


@dataclass(frozen=True)
class SetUp:
    """Figures without a word about C are ours."""

    parts: tuple[Part, ...]
    """Spouts first; each after what it takes from."""
    seconds: int
    machine: MachineSpec = MachineSpec()  # noqa: RUF009
    machines: int = 16
    copies: int = 1
    """Topologies of these parts, each on ``workers`` machines in a row."""
    workers: int = 16
    ackers: int = 16
    """Of each copy."""
    ack_service: float = 2e-6
    """Core seconds for each tuple acked."""
    ack_size: float = 20.0
    """Bytes for each tuple acked."""
    max_pending: int = 200
    """Tuples of a spout's executor (C table 3)."""
    frame: int = 20
    """Tuples a spout emits at a time. The fewer, the less they wait for each other, and the longer a run takes."""
    switch: float = math.inf
    """When the strategy is asked (C: 105 s)."""
    window: float = 30.0
    """Seconds before that the monitor looked at (C table 4)."""
    limit: float = 0.95
    """Of what a machine has, a strategy may use so much."""
    start: float = 2.0
    """Core seconds an executor's start takes."""
    dies: tuple[tuple[float, int], ...] = ()
    """When which machine dies."""
    recover: float = 10.0
    """Seconds until its executors are placed on the others."""
    time_out: float = 30.0
    """Seconds after which a spout emits again what was lost; Storm's."""
    tick: float = 1.0

    def __post_init__(self) -> None:
        if self.max_pending < self.frame:
            raise ValueError(f"a frame of {self.frame} tuples is never emitted with {self.max_pending} pending")


@dataclass(frozen=True)
class Tick:
    """What happened in one."""

    time: float
    """Its end."""
    processed: int
    """Tuples, by bolts: C's rate of transmission and processing."""
    latency: float | None
    """Mean from emission to ack of what was acked in it."""
    cpu: tuple[float, ...]
    """Share of each machine in use."""
    memory: tuple[float, ...]
    bandwidth: tuple[float, ...]
    power: Power
    """Modelled."""


@dataclass(frozen=True)
class Switch:
    """What became of the strategy's proposal."""

    snapshot: Snapshot
    proposal: Proposal
    carried: tuple[Move, ...]
    """Moves that held the limits, those before them carried out."""
    refused: int
    took: float
    """Seconds until the last executor was where it should be; inf if the run ended before."""


@dataclass(frozen=True)
class Outcome:
    set_up: SetUp
    ticks: tuple[Tick, ...]
    switch: Switch | None
    emitted: int
    """Roots' tuples, those emitted again included."""
    completed: int
    failed: int
    """Given up, and emitted again."""
    pending: int
    processed: dict[str, int]
    """Tuples by component."""
    places: dict[str, str]
    """Executor → machine, at the end."""
    released: tuple[str, ...]

    def mean_rate(self, begin: float, end: float) -> float:
        """Tuples a second."""
        ticks = self.between(begin, end)
        return sum(tick.processed for tick in ticks) / (len(ticks) * self.set_up.tick)

    def mean_latency(self, begin: float, end: float) -> float:
        """Of the ticks' means, in seconds."""
        found = [tick.latency for tick in self.between(begin, end) if tick.latency is not None]
        return sum(found) / len(found)

    def mean_power(self, begin: float, end: float) -> float:
        ticks = self.between(begin, end)
        return sum(tick.power.total for tick in ticks) / len(ticks)

    def between(self, begin: float, end: float) -> list[Tick]:
        """Ticks that lie in it."""
        half = self.set_up.tick / 2
        return [tick for tick in self.ticks if begin + half < tick.time < end + half]

    def until(self, tuples: float, begin: float = 0.0) -> tuple[float, float] | None:
        """Seconds and joules until so many are processed, from ``begin`` on; None: not in this run."""
        seconds = joules = done = 0.0
        for tick in self.between(begin, math.inf):
            part = min((tuples - done) / tick.processed, 1.0) if tick.processed else 1.0
            seconds += part * self.set_up.tick
            joules += part * self.set_up.tick * tick.power.total
            done += tick.processed
            if done >= tuples:
                return seconds, joules
        return None


def run(
    set_up: SetUp, strategy: Strategy | None = None, seed: int = 0, tell: Callable[[float], None] | None = None
) -> Outcome:
    """One run; the same seed is the same run. ``tell`` hears every tick."""
    return Cluster(set_up, strategy, seed, tell).run()


class Cluster:
    """One run."""

    def __init__(
        self, set_up: SetUp, strategy: Strategy | None, seed: int, tell: Callable[[float], None] | None = None
    ) -> None:
        self.env = simpy.Environment()
        self.set_up, self._strategy, self._tell = set_up, strategy, tell
        self._chance = random.Random(seed)
        width = len(str(set_up.machines))
        self.machines = [Machine(f"n{index + 1:0{width}}", set_up.machine) for index in range(set_up.machines)]
        self.executors: list[Executor] = []
        self._ackers: list[list[Executor]] = []
        for copy in range(set_up.copies):
            self._place(copy)
        self._by_id = {executor.id: executor for executor in self.executors}
        self._by_name = {machine.name: machine for machine in self.machines}
        self._regulated = Proposal().settings
        self._switch: Switch | None = None
        self._carried: tuple[Move, ...] = ()
        self._emitted = self._completed = self._failed = self._done = 0
        self._processed = {part.name: 0 for part in set_up.parts if part.source is not None}
        self._latencies: list[float] = []
        self._ticks: list[Tick] = []
        self._roots = 0

    def _place(self, copy: int) -> None:
        """Storm's default, round robin over the copy's workers."""
        set_up = self.set_up
        acker = Part(ACKER, set_up.ackers, set_up.ack_service)
        name = f"{copy}/" if set_up.copies > 1 else ""
        mine: dict[str, list[Executor]] = {}
        place = 0
        for part in (*set_up.parts, acker):
            mine[part.name] = []
            for number in range(part.executors):
                machine = self.machines[(copy * set_up.workers + place % set_up.workers) % set_up.machines]
                executor = Executor(f"{name}{part.name}[{number}]", len(self.executors), part, machine)
                self.executors.append(executor)
                mine[part.name].append(executor)
                place += 1
        self._ackers.append(mine.pop(ACKER))
        for part in set_up.parts:
            for source in mine[part.source] if part.source is not None else ():
                source.routers.append(Choice(part.grouping, mine[part.name], source.index, self._chance))
        self._per_copy = len(self.executors) // (copy + 1)

    def run(self) -> Outcome:
        set_up = self.set_up
        for executor in self.executors:
            if executor.part.rate is not None:
                self.env.process(self._arrivals(executor, executor.part.rate))
            elif self._is_spout(executor):
                self._ask(executor)
        for time, machine in set_up.dies:
            after(self.env, time, lambda machine=machine: self._die(self.machines[machine]))  # type: ignore[misc]
        if self._strategy is not None and set_up.switch < set_up.seconds:
            after(self.env, max(set_up.switch - set_up.window, 0.0), self._begin_window)
            self.env.process(self._switching(self._strategy))
        self.env.run(self.env.process(self._clock()))
        return Outcome(
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

    @staticmethod
    def _is_spout(executor: Executor) -> bool:
        return executor.part.source is None and executor.part.name != ACKER

    def _arrivals(self, spout: Executor, rate: float) -> Process:
        while True:
            yield self.env.timeout(self._chance.expovariate(rate / self.set_up.frame))
            spout.waiting += 1
            self._ask(spout)

    def _ask(self, spout: Executor) -> None:
        """It stands in line to emit, if it may."""
        frame = self.set_up.frame
        if spout.queue or spout.working or spout.pending + frame > self.set_up.max_pending:
            return
        if spout.part.rate is None or spout.waiting:
            self._arrive(spout, (None, frame, 0.0))

    def _emit_root(self, spout: Executor, tuples: int) -> None:
        root = Root(spout, self.env.now)
        spout.pending += tuples
        spout.waiting -= spout.part.rate is not None
        self._emitted += tuples
        self._send_on(spout, root, tuples)
        self._processed_one(spout, root)

    def _complete(self, root: Root) -> None:
        if root.over:
            return
        root.over = True
        self._completed += self.set_up.frame
        self._latencies.append(self.env.now - root.emitted)
        self._went(root.spout)

    def _give_up(self, root: Root) -> None:
        if root.over:
            return
        root.over = True
        self._failed += self.set_up.frame
        root.spout.waiting += root.spout.part.rate is not None
        self._went(root.spout)

    def _went(self, spout: Executor) -> None:
        spout.pending -= self.set_up.frame
        if spout.machine.alive:
            self._ask(spout)

    # ---- work

    def _arrive(self, executor: Executor, frame: Frame) -> None:
        if not executor.machine.alive:
            self._lost(frame)
            return
        executor.queue.append(frame)
        self._line_up(executor)

    def _line_up(self, executor: Executor) -> None:
        if executor.queue and not executor.ready and not executor.paused:
            executor.ready = True
            executor.machine.line.append(executor)
            self._dispatch(executor.machine)

    def _dispatch(self, machine: Machine) -> None:
        while machine.idle and machine.line:
            executor = machine.line.popleft()
            frame = executor.queue.popleft()
            executor.working = frame
            _, tuples, more = frame
            mean = executor.part.service
            # So many exponential times, one for each tuple.
            work = more + (self._chance.gammavariate(tuples, mean) if tuples and mean else 0.0)
            machine.idle -= 1
            after(
                self.env,
                work / machine.frequency,
                lambda executor=executor, frame=frame, work=work: self._worked(machine, executor, frame, work),  # type: ignore[misc]
            )

    def _worked(self, machine: Machine, executor: Executor, frame: Frame, work: float) -> None:
        if not machine.alive:
            return
        machine.idle += 1
        machine.busy += work
        executor.busy += work
        executor.working = None
        executor.ready = False
        self._process(executor, frame)
        self._line_up(executor)
        self._dispatch(machine)

    def _process(self, executor: Executor, frame: Frame) -> None:
        root, tuples, _ = frame
        if root is None:
            if tuples:
                self._emit_root(executor, tuples)
            if self._is_spout(executor):
                self._ask(executor)
        elif executor.part.name == ACKER:
            size = self.set_up.ack_size * self.set_up.frame
            self._send(executor, root.spout, size, lambda: self._complete(root))
        elif not root.over:
            self._processed[executor.part.name] += tuples
            self._done += tuples
            root.processed += tuples
            self._send_on(executor, root, tuples * executor.part.emits)
            self._processed_one(executor, root)

    def _send_on(self, executor: Executor, root: Root, tuples: int) -> None:
        if not tuples:
            return
        frames = min(executor.part.frames, tuples)
        for choice in executor.routers:
            root.left += frames
            for number in range(frames):
                count = tuples * (number + 1) // frames - tuples * number // frames
                self._hand(executor, choice.next(), (root, count, 0.0), count * executor.part.size)

    def _processed_one(self, executor: Executor, root: Root) -> None:
        root.left -= 1
        if root.left:
            return
        ackers = self._ackers[executor.index // self._per_copy]
        if not ackers:
            self._complete(root)
            return
        tuples = root.processed + self.set_up.frame
        self._roots += 1
        acker = ackers[self._roots % len(ackers)]
        self._hand(executor, acker, (root, tuples, 0.0), tuples * self.set_up.ack_size)

    def _lost(self, frame: Frame) -> None:
        root = frame[0]
        if root is not None and not root.over:
            left = max(root.emitted + self.set_up.time_out - self.env.now, 0.0)
            after(self.env, left, lambda: self._give_up(root))

    # ---- network

    def _hand(self, source: Executor, target: Executor, frame: Frame, size: float) -> None:
        source.sent[target.index] = source.sent.get(target.index, 0) + frame[1]
        self._send(source, target, size, lambda: self._arrive(target, frame))

    def _send(self, source: Executor, target: Executor, size: float, act: Callable[[], None]) -> None:
        if source.machine is target.machine:
            act()
            return
        source.traffic += size
        target.traffic += size
        self._transmit(source.machine, target.machine, size, act, self.set_up.machine.delay)

    def _transmit(
        self, source: Machine, target: Machine, size: float, act: Callable[[], None], delay: float
    ) -> None:
        now = self.env.now
        sent = source.up.accept(now, size, now)

        def came() -> None:
            here = self.env.now
            through = target.down.accept(here, size, here - size / target.down.bandwidth)
            if through > here:
                after(self.env, through - here, act)
            else:
                act()

        after(self.env, sent - now + delay, came)

    # ---- the strategy

    def _begin_window(self) -> None:
        for executor in self.executors:
            executor.sent.clear()
            executor.busy = executor.traffic = 0.0
        self._window_begun = self.env.now

    def snapshot(self) -> Snapshot:
        """What the load monitor saw in the window. What goes back from ackers to spouts is in the executors'
        traffic only: streams make no cycle."""
        seconds, share = self.env.now - self._window_begun, self.set_up.limit
        spec = self.set_up.machine
        limit = Use(share * spec.cores, share * spec.memory, share * 2 * spec.bandwidth)
        executors = self.executors
        streams = (
            Stream(
                source.id, executors[target].id, tuples / seconds, tuples * self._size(source, target) / seconds
            )
            for source in executors
            for target, tuples in source.sent.items()
        )
        return Snapshot(
            tuple(
                Node(machine.name, limit) for machine in self.machines if machine.alive and not machine.released
            ),
            tuple(
                Seen(
                    each.id,
                    each.part.name,
                    each.machine.name,
                    each.busy / seconds,
                    each.part.memory,
                    each.traffic / seconds,
                )
                for each in executors
            ),
            tuple(streams),
        )

    def _size(self, source: Executor, target: int) -> float:
        return self.set_up.ack_size if self.executors[target].part.name == ACKER else source.part.size

    def _switching(self, strategy: Strategy) -> Process:
        yield self.env.timeout(self.set_up.switch)
        snapshot = self.snapshot()
        proposal = strategy(snapshot)
        self._carried, refused = allowed(snapshot, proposal.moves)
        self._switch = Switch(snapshot, proposal, self._carried, refused, math.inf)
        self._regulated = proposal.settings
        frequency = {each.node: each.frequency for each in proposal.settings}
        for machine in self.machines:
            machine.frequency = frequency.get(machine.name, 1.0)
        by_source: dict[str, list[Move]] = {}
        for move in self._carried:
            by_source.setdefault(move.source, []).append(move)
        goes = {release.node for release in proposal.releases}
        yield self.env.all_of([self.env.process(self._leave(moves, goes)) for moves in by_source.values()])
        self._release(goes)
        took = self.env.now - self.set_up.switch
        self._switch = Switch(snapshot, proposal, self._carried, refused, took)

    def _leave(self, moves: Sequence[Move], goes: set[str]) -> Process:
        """Executors of one machine, one after the other."""
        for move in moves:
            executor, target = self._by_id[move.executor], self._by_name[move.target]
            source = executor.machine
            left = executor.part.state
            while left > 0 and source.alive and target.alive:
                yield self._copied(source, target, min(left, _CHUNK))
                left -= _CHUNK
            if not (source.alive and target.alive) or executor.machine is not source:
                continue  # its machine's executors are placed anew, and this one with them
            executor.paused = True
            while executor.working is not None and source.alive:
                yield self.env.timeout(_HAND_OVER)
            if source.alive and target.alive:
                self._settle(executor, target)
            executor.paused = not executor.machine.alive
            self._line_up(executor)
        self._release(goes & {move.source for move in moves})

    def _copied(self, source: Machine, target: Machine, size: float) -> simpy.Event:
        through = self.env.event()
        self._transmit(source, target, size, lambda: through.succeed(), delay=0.0)
        return through

    def _settle(self, executor: Executor, target: Machine) -> None:
        """Stopped; goes on there, after its start, with what waits for it."""
        if executor.ready and executor.working is None:
            executor.machine.line.remove(executor)
            executor.ready = False
        executor.machine = target
        executor.queue.appendleft((None, 0, self.set_up.start))

    def _release(self, goes: set[str]) -> None:
        used = {executor.machine.name for executor in self.executors}
        for name in goes - used:
            self._by_name[name].released = True

    # ---- failures

    def _die(self, machine: Machine) -> None:
        machine.alive = False
        machine.line.clear()
        lost = [executor for executor in self.executors if executor.machine is machine]
        for executor in lost:
            for frame in (*executor.queue, *((executor.working,) if executor.working else ())):
                self._lost(frame)
            executor.queue.clear()
            executor.working, executor.ready, executor.paused = None, False, True
        after(self.env, self.set_up.recover, lambda: self._recover(lost))

    def _recover(self, lost: Sequence[Executor]) -> None:
        """On the machines that are left, round robin."""
        left = [machine for machine in self.machines if machine.alive and not machine.released]
        for number, executor in enumerate(lost):
            self._settle(executor, left[number % len(left)])
            executor.paused = False
            self._line_up(executor)

    # ---- time

    def _clock(self) -> Process:
        set_up = self.set_up
        busy, bytes = [0.0] * len(self.machines), [0.0] * len(self.machines)
        done = 0
        for number in range(round(set_up.seconds / set_up.tick)):
            yield self.env.timeout((number + 1) * set_up.tick - self.env.now)
            spec, span = set_up.machine, set_up.tick
            work = [
                (each.busy - before) / span / spec.cores for each, before in zip(self.machines, busy, strict=True)
            ]
            # A link takes a frame when it is asked to; what it has not let through yet counts later.
            traffic = [
                (through - before) / span / (2 * spec.bandwidth)
                for through, before in zip(self._through(), bytes, strict=True)
            ]
            memory = self._memory()
            loads = zip(self.machines, work, memory, traffic, strict=True)
            nodes = tuple(
                Node(
                    each.name,
                    Use(1.0, 1.0, 1.0),
                    Use(max(cpu, 0.0), share, max(network, 0.0)),
                )
                for each, cpu, share, network in loads
            )
            off = [each.name for each in self.machines if each.released or not each.alive]
            watts = power(Snapshot(nodes, ()), released=off, regulated=self._regulated)
            self._ticks.append(
                Tick(
                    self.env.now,
                    self._done - done,
                    sum(self._latencies) / len(self._latencies) if self._latencies else None,
                    tuple(cpu / each.frequency for cpu, each in zip(work, self.machines, strict=True)),
                    tuple(memory),
                    tuple(traffic),
                    watts,
                )
            )
            busy, bytes = [each.busy for each in self.machines], self._through()
            done, self._latencies = self._done, []
            if self._tell is not None:
                self._tell(self.env.now)

    def _through(self) -> list[float]:
        now = self.env.now
        return [
            each.bytes - sum(max(port.free_at - now, 0.0) * port.bandwidth for port in (each.up, each.down))
            for each in self.machines
        ]

    def _memory(self) -> list[float]:
        used = {machine.name: 0.0 for machine in self.machines}
        for executor in self.executors:
            used[executor.machine.name] += executor.part.memory
        return [used[machine.name] / self.set_up.machine.memory for machine in self.machines]


_HAND_OVER = 0.001
"""Seconds between two looks whether an executor that stops is done with its last frame."""


def allowed(snapshot: Snapshot, moves: Sequence[Move]) -> tuple[tuple[Move, ...], int]:
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
