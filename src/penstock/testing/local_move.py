"""Moves a worker of the local runner to another slot, with the same commands as a move on Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.clock import Clock
from penstock.driver.commits import Commits
from penstock.driver.recovery import StateDirectory
from penstock.driver.registry import WorkerRegistry
from penstock.plan.model import WorkerId
from penstock.protocol.commands import (
    CancelLeave,
    CloseTasks,
    Command,
    OpenTasks,
    PrepareToLeave,
    RouteWorker,
)


class LocalMove:
    """One move. ``run_until`` lets the topology run until a condition holds."""

    def __init__(
        self,
        worker: WorkerId,
        spare: WorkerId,
        registry: WorkerRegistry,
        commits: Commits,
        state: StateDirectory,
        clock: Clock,
        run_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        """``spare``: the slot that the worker moves to."""
        self._worker, self._spare, self._registry = worker, spare, registry
        self._commits, self._state, self._clock, self._run_until = commits, state, clock, run_until
        self._old_slot = registry.slot_of_worker[worker]
        self._old, self._new = registry.workers[worker], registry.slots[spare]
        self._old.left = None

    def carry_out(self, patience: float, routes: Sequence[Command]) -> bool:
        """Carry out the move. Returns False if the worker stays, because it did not stop within ``patience``
        seconds. ``routes``: the migration routes, which the new slot does not know yet."""
        registry, old, new = self._registry, self._old, self._new
        registry.stand_by(self._worker, self._spare)
        self._route([self._old_slot.index, self._spare.index])
        if not self._leave(patience):
            registry.send_to(old, CancelLeave())
            registry.send_to(new, CloseTasks())
            self._route([self._old_slot.index])
            return False
        assert old.left is not None
        handover, state = old.left.handover, self._state
        registry.hand_over(self._worker, self._spare)
        registry.send_to(old, CloseTasks())
        self._run_until(lambda: old.closed)
        state.inspect()
        tasks = registry.share(self._worker, state.tasks())
        registry.send_to(new, OpenTasks(registry.nodes(), state.generation, handover.epoch, tasks, handover))
        for each in routes:
            registry.send_to(new, each)
        self._run_until(lambda: new.ready)
        self._route([self._spare.index])
        return True

    def _leave(self, patience: float) -> bool:
        """Make the worker stop with a commit. Returns whether it did in time."""
        commits, old, clock = self._commits, self._old, self._clock
        self._registry.send_to(old, PrepareToLeave(*commits.next_move()))
        self._run_until(lambda: commits.start_commit(clock.now(), moves=True))
        epoch, end = commits.newest, clock.now() + patience

        def done() -> bool:
            return old.left is not None and commits.published >= epoch

        self._run_until(lambda: done() or clock.now() >= end)
        return done()

    def _route(self, slots: list[int]) -> None:
        """Make the workers of the previous stage send to these slots, and wait until they do."""
        registry, worker = self._registry, self._worker
        senders = [each for each in registry.workers if each.stage == worker.stage - 1]
        for sender in senders:
            registry.send(RouteWorker(worker.index, slots), sender)
        self._run_until(lambda: all(registry.workers[each].sending.get(worker.index) == slots for each in senders))
