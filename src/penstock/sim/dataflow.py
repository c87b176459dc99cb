"""Tuples in the simulated cluster: spouts emit them, executors process them, links carry them, ackers ack them.

Tuples travel in frames: groups of tuples that take the same way. Each tuple of a frame takes and waits as long as
a single tuple would (see ``sim.machine``), but the frame keeps its executor, the machine's cores and the links
busy for all of its tuples. A frame only saves events; it is not a burst. Between machines a tuple also takes the
network's delay, and costs CPU time at both ends. Inside a machine sending is free, as in *Pu 2021*.

A root is complete when all tuples that stem from it are processed and its ack has reached the spout through an
acker. The acks of one root travel as one frame with the bytes and the work of all of them. (``penstock.acking`` is
not used: it works on columns of roots, but here roots come one by one.) Only tuples lost with a machine time out;
their spout emits them again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.sim.events import Loop, Process
from penstock.sim.executor import Root, SimExecutor
from penstock.sim.machine import SimMachine
from penstock.sim.outcome import ClusterSetUp

_START_SECONDS = 1.0
"""The spouts' first tuples are spread over this time. Emitted all at once, they would circulate as one wave."""
_LOOK_AHEAD = 0.1
"""Seconds. The end of a frame within this time is handled at once, without an event of its own. This saves most
events; links then accept work that begins up to this much later."""


class TupleCounts:
    """What spouts and bolts have done since the beginning of the run."""

    def __init__(self, bolts: Sequence[str]) -> None:
        self.emitted = self.completed = self.failed = 0
        """Tuples of spouts. Failed ones are emitted again."""
        self.processed = dict.fromkeys(bolts, 0)
        """Tuples processed, by bolt."""
        self.done = 0
        """Tuples processed by all bolts."""
        self.latencies: list[float] = []
        """Seconds from emission to ack of the roots completed in the current tick."""


class SimDataflow:
    """Moves frames through the executors of all copies of a topology."""

    def __init__(
        self,
        loop: Loop,
        set_up: ClusterSetUp,
        executors: Sequence[SimExecutor],
        ackers: Sequence[Sequence[SimExecutor]],
        chance: random.Random,
    ) -> None:
        """``ackers``: of each copy of the topology; executors of the copies follow each other."""
        self.counts = TupleCounts([each.name for each in set_up.components if each.source is not None])
        self._loop, self._set_up, self._chance = loop, set_up, chance
        self._frame, self._machine = set_up.frame, set_up.machine
        self._executors, self._ackers = executors, ackers
        self._per_copy = len(executors) // len(ackers)
        self._roots = 0

    def start(self) -> None:
        """Schedule what the spouts emit first."""
        for spout in self._executors:
            if spout.component.rate is not None:
                self._loop.process(self._arrivals(spout, spout.component.rate))
            elif spout.is_spout:
                for _ in range(self._set_up.max_pending // self._frame):
                    self._loop.at(self._chance.uniform(0.0, _START_SECONDS), self._emit_next, spout)

    def resume(self, executor: SimExecutor, machine: SimMachine) -> None:
        """Let a paused executor continue with the frames that wait for it, unless it has been placed elsewhere."""
        if executor.machine is not machine or not machine.alive:
            return
        executor.paused = False
        waiting, executor.queue = executor.queue, []
        for root, tuples, read in waiting:
            self._arrive(executor, root, tuples, read)
        if executor.is_spout:
            for _ in range(self._set_up.max_pending // self._frame):
                self._emit_next(executor)

    def lose_queue(self, executor: SimExecutor) -> None:
        """The executor's machine has died: its frames are lost, and it is paused until it is placed elsewhere."""
        for root, _, _ in executor.queue:
            self._on_lost(root)
        executor.queue, executor.paused = [], True

    def transmit(self, source: SimMachine, target: SimMachine, now: float, pieces: float, size: float) -> float:
        """The time at which one of the pieces has arrived. The receiver accepts them at the rate of the sender's
        link."""
        each = size / self._machine.bandwidth
        work = pieces * each
        squares = work * each
        now += source.up.accept(now, work, squares) + each + self._machine.delay
        return now + target.down.accept(now, work, squares)

    # ---- spouts

    def _arrivals(self, spout: SimExecutor, rate: float) -> Process:
        while True:
            yield self._loop.now + self._chance.expovariate(rate / self._frame)
            spout.waiting += 1
            self._emit_next(spout)

    def _emit_next(self, spout: SimExecutor) -> None:
        """Emit one frame, if the spout has one and may emit it."""
        frame = self._frame
        if spout.paused or spout.pending + frame > self._set_up.max_pending:
            return
        if spout.component.rate is not None:
            if not spout.waiting:
                return
            spout.waiting -= 1
        spout.pending += frame
        self.counts.emitted += frame
        self._arrive(spout, Root(spout, self._loop.now), frame)

    def _complete(self, root: Root) -> None:
        if not root.over:
            root.over = True
            self.counts.completed += self._frame
            self.counts.latencies.append(self._loop.now - root.emitted)
            self._root_ended(root.spout)

    def _give_up(self, root: Root) -> None:
        if not root.over:
            root.over = True
            self.counts.failed += self._frame
            root.spout.waiting += root.spout.component.rate is not None
            self._root_ended(root.spout)

    def _root_ended(self, spout: SimExecutor) -> None:
        spout.pending -= self._frame
        self._emit_next(spout)

    def _on_lost(self, root: Root) -> None:
        if not root.over:
            self._loop.at(max(root.emitted + self._set_up.time_out, self._loop.now), self._give_up, root)

    # ---- processing

    def _arrive(self, executor: SimExecutor, root: Root, tuples: int, read: float = 0.0) -> None:
        """``read``: core seconds to deserialize each tuple, if it comes from another machine."""
        machine, now = executor.machine, self._loop.now
        if not machine.alive:
            self._on_lost(root)
            return
        if executor.paused:
            executor.queue.append((root, tuples, read))
            return
        service = (executor.component.service + read) / machine.frequency
        work = tuples * service
        squares = 2.0 * work * service  # second moment of an exponential distribution
        own, shared = executor.thread.accept(now, work, squares), machine.cores.accept(now, work, squares)
        # The mean waits add up. The backlogs of thread and cores are the same work, so only the larger one counts.
        behind = max(own - executor.thread.wait, shared - machine.cores.wait)
        end = now + executor.thread.wait + machine.cores.wait + behind + service
        if end > executor.until:
            executor.until = end
        if end - now < _LOOK_AHEAD:
            self._on_processed(machine, executor, root, tuples, end)
        else:
            self._loop.at(end, self._on_processed, machine, executor, root, tuples, end)

    def _on_processed(
        self, machine: SimMachine, executor: SimExecutor, root: Root, tuples: int, now: float
    ) -> None:
        if not machine.alive:
            self._on_lost(root)
            return
        if root.over:
            return
        if now > root.last:
            root.last = now
        component = executor.component
        if executor.is_acker:
            self._send(now, executor, root.spout, self._frame, self._set_up.ack_size, self._complete, root)
            return
        if executor.is_spout:
            root.emitted = now
        else:
            self.counts.processed[component.name] += tuples
            self.counts.done += tuples
            root.processed += tuples
        if component.emits and executor.routers:
            self._send_on(executor, root, tuples * component.emits, now)
        root.left -= 1
        if not root.left:
            self._ack(executor, root)

    def _send_on(self, executor: SimExecutor, root: Root, tuples: int, now: float) -> None:
        component, sent = executor.component, executor.sent
        handling = component.size * self._machine.handling
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
                    self._serialize(executor, count, handling)
                self._send(now, executor, target, count, component.size, self._arrive, target, root, count, read)

    def _serialize(self, executor: SimExecutor, tuples: int, each: float) -> None:
        """Keep the thread and the machine's cores busy. The time a tuple waits for this is part of the delay."""
        each, now = each / executor.machine.frequency, self._loop.now
        work = tuples * each
        executor.thread.accept(now, work, 2.0 * work * each)
        executor.machine.cores.accept(now, work, 2.0 * work * each)

    def _ack(self, executor: SimExecutor, root: Root) -> None:
        ackers = self._ackers[executor.index // self._per_copy]
        if not ackers:
            self._loop.at(root.last, self._complete, root)
            return
        tuples = root.processed + self._frame
        self._roots += 1
        acker = ackers[self._roots % len(ackers)]
        executor.sent[acker.index] = executor.sent.get(acker.index, 0) + tuples
        self._send(root.last, executor, acker, tuples, self._set_up.ack_size, self._arrive, acker, root, tuples)

    def _send(
        self,
        now: float,
        source: SimExecutor,
        target: SimExecutor,
        tuples: int,
        size: float,
        act: Callable[..., None],
        *args: object,
    ) -> None:
        """Send tuples of ``size`` bytes each at time ``now``. ``act`` is called when they have arrived."""
        here, there = source.machine, target.machine
        if here is not there:
            bytes = tuples * size
            source.traffic += bytes
            target.traffic += bytes
            now = self.transmit(here, there, now, tuples, size)
        self._loop.at(now, act, *args)
