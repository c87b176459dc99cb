"""One worker moves to another node while the topology runs (SPEC 6.5), into a slot that is kept free there.

In steps; up to the third it can be given up, and the old slot goes on as if nothing had been:

1. A free slot on the node prepares to take the worker over, and reads ahead what the worker has committed
   (``placed``).
2. The workers that send to it send everything to both slots from now on (``doubled``). The old one goes on
   producing the results; the new one emits nothing, and keeps what comes.
3. The end of an epoch is announced, and its markers come from every sender: the snapshot of each. The old one does
   all that came before them, stores its state with a commit (``stored``), and then nothing more.
4. The worker is mapped to the new slot, which is told and asked from now on, and its old tasks are closed
   (``mapped``); the new ones take up the state, drop the copies of what came before the markers and do what came
   behind them (``merged``).
5. The senders send to the new one only (``switched``). The old slot is free as soon as nothing more can come
   there.

Every tuple is so applied by exactly one of the two. Whatever dies after step 3, the topology is started again from
a committed epoch, as after any other loss. At most once there is nothing to start from; a commit is made for the
move alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.driver.registry import WorkerConnection
from penstock.errors import PenstockError, StateError, TopologyFailed
from penstock.faults import CrashPoint
from penstock.plan.model import WorkerId
from penstock.protocol.messages import (
    CancelLeave,
    CloseTasks,
    OpenTasks,
    PrefetchState,
    PrepareToLeave,
    RouteWorker,
)
from penstock.spark.query_run import LOOK, QueryLost, QueryRun

log = logging.getLogger("penstock.supervisor")


@dataclass(frozen=True)
class Moved:
    """A worker that is on another node."""

    time: float
    """When, on the monotonic clock."""
    worker: WorkerId
    source: str
    target: str
    """Nodes."""
    gap: float
    """Seconds in which nobody did the worker's work."""
    seconds: float
    """From the request to the end of the gap."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """When each step was done, in seconds since the request."""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "worker": str(self.worker)}

    def __str__(self) -> str:
        way = f"worker {self.worker} from {self.source} to {self.target}"
        return f"{way}; {self.gap * 1000:.0f} ms without it, after {self.seconds:.1f} s of preparation"


@dataclass(frozen=True)
class MoveRequest:
    """Workers that are to be on other nodes, one after the other."""

    nodes: Mapping[WorkerId, str]
    reason: str
    start: int
    """The number of the one they are workers of."""
    by_policy: bool = False
    answer: Future[list[Moved]] = field(default_factory=Future)
    kind = "move"

    def fits(self, start: QueryRun) -> bool:
        return self.start == start.number


def movable(start: QueryRun, nodes: Mapping[WorkerId, str]) -> dict[WorkerId, str]:
    """Those workers that are not where they are wanted, and can move there alone: workers of bolts, as many as
    find a free slot."""
    free = Counter((slot.stage, each.hello.node) for slot, each in start.registry.slots.items() if each.free)
    found = {}
    for worker, node in sorted(nodes.items()):
        now = start.registry.workers.get(worker)
        if worker.stage and now is not None and now.hello.node != node and free[worker.stage, node]:
            free[worker.stage, node] -= 1
            found[worker] = node
    return found


class Mover:
    """Carries out moves, one after the other."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        """``go_on`` is asked while waiting, and raises where there is no point in it any longer."""
        self.done: list[Moved] = []
        """Oldest first."""
        self._go_on = go_on

    def move(self, request: MoveRequest, start: QueryRun) -> list[Moved]:
        """Fulfil a request. Raises ``PenstockError`` where a worker stays where it was, and ``QueryLost`` where
        the topology has to be started again."""
        done = []
        for worker, node in sorted(request.nodes.items()):
            move = Move(len(self.done) + 1, start, worker, node, self._go_on)
            done.append(move.carry_out())
            self.done.append(done[-1])
            start.bus.note("move", "", f"{request.reason}: {done[-1]}")
        return done


class _Stuck(Exception):
    """It goes no further."""


class Move:
    """One worker's."""

    def __init__(
        self, number: int, start: QueryRun, worker: WorkerId, node: str, go_on: Callable[[], None]
    ) -> None:
        """Raises ``TopologyFailed`` where it cannot be."""
        self._number, self._start, self._worker, self._go_on = number, start, worker, go_on
        self._registry, self._limit = start.registry, start.settings.lifecycle.drain_timeout
        registry = self._registry
        if worker not in movable(start, {worker: node}):
            free = {
                each.hello.node for id, each in registry.slots.items() if each.free and id.stage == worker.stage
            }
            now = registry.workers[worker].hello.node if worker in registry.workers else "no node"
            slots = ", ".join(sorted(free)) or "no node"
            raise TopologyFailed(
                f"topology '{start.deployment.topology.name}'",
                f"worker {worker} on {now} cannot move to {node}: only a worker of bolts alone can, "
                f"to another node with a free slot for its stage (free slots are on {slots})",
                "Start it with --set placement.spare_slots=1 or more, or let it be replaced: handle.place().",
            )
        self._old, self._old_slot = registry.workers[worker], registry.slot_of_worker[worker]
        self._slot = next(
            slot
            for slot, each in sorted(registry.slots.items())
            if each.free and slot.stage == worker.stage and each.hello.node == node
        )
        self._new = registry.slots[self._slot]
        self._crash = CrashPoint(start.settings.lifecycle.crash_at, "driver")
        self._stoppable = True
        self._since = time.monotonic()
        self._times: dict[str, float] = {}

    def carry_out(self) -> Moved:
        """Raises ``PenstockError`` where the worker stays, ``QueryLost`` where the topology has to be started
        again."""
        start, old, new = self._start, self._old, self._new
        start.begin_handover()
        commits = start.expect_commits()
        try:
            try:
                self._take_slot()
                commits.pause()
                self._double()
                self._store()
            except QueryLost as loss:  # maybe told to stop: what is there is to end its work
                self._give_up(str(loss))
                raise
            except (_Stuck, PenstockError) as error:
                self._give_up(str(error))
                start.raise_if_dead()
                name = f"topology '{start.deployment.topology.name}'"
                raise TopologyFailed(
                    name,
                    f"worker {self._worker} could not move to {new.hello.node}: {error}",
                    "It goes on where it was.",
                ) from error
            try:
                self._merge()
                self._switch()
            except (_Stuck, PenstockError) as error:  # nobody has the worker now
                self._registry.hand_over(self._worker, self._old_slot)  # which is where it is started again
                raise QueryLost(f"worker {self._worker} cannot go on on {new.hello.node}: {error}") from error
        finally:
            commits.resume()
        begun, ended = old.left_at, self._times["merged"]
        steps = {step: at - self._since for step, at in self._times.items()}
        return Moved(
            ended, self._worker, old.hello.node, new.hello.node, ended - begun, ended - self._since, steps
        )

    # ---- the steps -------------------------------------------------------------------------------------

    def _take_slot(self) -> None:
        start, registry, worker = self._start, self._registry, self._worker
        registry.stand_by(worker, self._slot)
        with contextlib.suppress(StateError):  # an overloaded one may take long: the last one there is will do
            start.expect_commits().commit_now(self._limit, go_on=self._watch)
        state = start.deployment.state
        state.look()
        registry.tell(self._new, PrefetchState(state.epoch, registry.share(worker, state.tasks())))
        self._await(lambda: self._new.ahead >= state.epoch, "the new slot must read the state ahead")
        self._reached("placed")

    def _double(self) -> None:
        self._send_to(self._old_slot, self._slot)
        self._reached("doubled")

    def _store(self) -> None:
        commits, old = self._start.expect_commits(), self._old
        self._await(lambda: commits.commits.idle, "commits that are under way must end")
        commit, epoch = commits.commits.next_move()
        self._registry.tell(old, PrepareToLeave(commit, epoch))
        self._await(lambda: old.leaving == commit, "the old slot must know when to leave")
        commits.commit_with_move(self._limit, self._watch)
        self._await(lambda: old.left is not None and old.left.epoch == epoch, "the old slot must leave")
        self._reached("stored")

    def _merge(self) -> None:
        start, registry, worker, old, new = self._start, self._registry, self._worker, self._old, self._new
        assert old.left is not None
        self._stoppable, self._limit = False, start.settings.lifecycle.start_timeout
        state = start.deployment.state
        state.look()
        registry.hand_over(worker, self._slot)
        registry.tell(old, CloseTasks())  # first, for both may use one thing outside, as a transaction or a file
        self._await(lambda: old.closed, "the tasks must close on the old node")
        self._reached("mapped")
        tasks = registry.share(worker, state.tasks())
        registry.tell(new, OpenTasks(registry.nodes(), state.generation, old.left.epoch, tasks, old.left.handover))
        for order in start.migrations.current_routes():
            registry.tell(new, order)
        self._await(lambda: new.ready, "the tasks must open on the new node")
        self._reached("merged")

    def _switch(self) -> None:
        self._send_to(self._slot)
        self._reached("switched")

    # ---- what they have in common ----------------------------------------------------------------------

    def _send_to(self, *slots: WorkerId) -> None:
        """Have all workers of the stage before send to these slots, and wait until they do."""
        numbers, worker = [slot.index for slot in slots], self._worker
        for sender in self._senders:
            self._registry.tell(sender, RouteWorker(worker.index, numbers))
        self._await(
            lambda: all(sender.sending.get(worker.index) == numbers for sender in self._senders),
            f"all workers of stage {worker.stage - 1} must send to the slots {numbers}",
        )

    def _give_up(self, why: str) -> None:
        """The old slot has had everything, and goes on. The new one may still get a copy of something, and is not
        used again."""
        registry = self._registry
        log.warning("worker %s stays on %s: %s", self._worker, self._old.hello.node, why)
        self._new.problem = self._new.problem or why
        for sender in self._senders:
            registry.tell(sender, RouteWorker(self._worker.index, [self._old_slot.index]))
        self._old.left, self._old.leaving = None, 0
        registry.tell(self._old, CancelLeave())
        registry.tell(self._new, CloseTasks())

    def _await(self, condition: Callable[[], bool], rule: str) -> None:
        old, new, deadline = self._old, self._new, time.monotonic() + self._limit

        def over() -> bool:
            return condition() or bool(new.problem or old.problem) or self._registry.broken

        while not self._start.wait(over, LOOK):
            self._watch()
            if time.monotonic() > deadline:
                raise _Stuck(f"{rule} within {self._limit:g} s")
        self._watch()
        if not condition():
            raise _Stuck(new.problem or old.problem or f"{rule}: a worker is gone")

    @property
    def _senders(self) -> list[WorkerConnection]:
        return [each for id, each in self._registry.workers.items() if id.stage == self._worker.stage - 1]

    def _watch(self) -> None:
        """While nobody has the worker, also who is told to stop waits: what is there can be ended then."""
        if self._stoppable:
            self._go_on()
        self._start.raise_if_dead()
        self._start.raise_if_silent()

    def _reached(self, step: str) -> None:
        """The step has been done. Crash tests die here."""
        self._times[step] = time.monotonic()
        self._crash(step, self._number)
