"""Moves one worker to a free slot on another node while the topology runs.

The move has these steps, with their names in parentheses. Until the end of step 3 it can be undone, and the worker
then continues where it was:

1. The process in a free slot on the node prepares to take over the worker, and prefetches the worker's committed
   state (``prefetched``).
2. The workers of the previous stage send everything for the worker to both slots from now on (``doubled``). The
   old process continues to produce the results. The new process emits nothing and buffers what arrives.
3. The driver ends an epoch, and the marker of every sender arrives. The old process processes everything that came
   before the markers, stores its state with the commit (``stored``), and then stops. After this step the move can
   no longer be undone.
4. The driver maps the worker to the new slot, so that commands go there from now on, and the old process closes
   the tasks (``mapped``). The new process opens them with the stored state, drops its copies of what came before
   the markers, and processes what came after them (``merged``).
5. The senders send to the new slot only (``switched``). The old slot becomes free when nothing can arrive there
   any more.

Every tuple is thus processed by exactly one of the two processes. If a process dies after step 3, the topology is
restarted from a committed epoch, as after any other loss. With at-most-once delivery there are usually no commits;
then commits are made only for the move.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from penstock.driver.query_run import QueryRun
from penstock.driver.query_runs import QueryRuns
from penstock.driver.registry import WorkerConnection
from penstock.driver.requests import Moved
from penstock.driver.steps import Cause, Ending, Problem, Settled, Step, StepsEnded, nothing
from penstock.errors import TopologyFailed
from penstock.plan.model import WorkerId
from penstock.protocol.commands import (
    CancelLeave,
    CloseTasks,
    OpenTasks,
    PrefetchState,
    PrepareToLeave,
    RouteWorker,
)

log = logging.getLogger("penstock.driver")


def movable(run: QueryRun, nodes: Mapping[WorkerId, str]) -> dict[WorkerId, str]:
    """Return those of the wanted moves that are possible. ``nodes``: the wanted node of each worker. A worker can
    move alone if it is not in the first stage and the node has a free slot of its stage. Each free slot is given
    to one worker only."""
    free = Counter((slot.stage, each.hello.node) for slot, each in run.registry.slots.items() if each.free)
    found = {}
    for worker, node in sorted(nodes.items()):
        now = run.registry.workers.get(worker)
        if worker.stage and now is not None and now.hello.node != node and free[worker.stage, node]:
            free[worker.stage, node] -= 1
            found[worker] = node
    return found


class WorkerMove:
    """The move of one worker, as a ``Change``. Made and carried out on the supervisor's thread."""

    kind = "move"

    def __init__(self, number: int, worker: WorkerId, node: str, runs: QueryRuns) -> None:
        """Raises ``TopologyFailed`` if the worker cannot move to the node."""
        self.number = number
        self._run, self._worker, self._runs = runs.current, worker, runs
        self._registry = registry = self._run.registry
        if worker not in movable(self._run, {worker: node}):
            raise self._refused(node)
        self._old_slot = registry.slot_of_worker[worker]
        self._new_slot = next(
            slot
            for slot, each in sorted(registry.slots.items())
            if each.free and slot.stage == worker.stage and each.hello.node == node
        )
        self.old: WorkerConnection = registry.workers[worker]
        self.new: WorkerConnection = registry.slots[self._new_slot]
        lifecycle = self._run.settings.lifecycle
        self._limit, self._open_limit = lifecycle.drain_timeout, lifecycle.start_timeout
        self._since = runs.now()

    def _refused(self, node: str) -> TopologyFailed:
        registry, worker = self._registry, self._worker
        free = {each.hello.node for id, each in registry.slots.items() if each.free and id.stage == worker.stage}
        now = registry.workers[worker].hello.node if worker in registry.workers else "no node"
        return TopologyFailed(
            self._run.where,
            f"worker {worker} on {now} cannot move to {node}: a worker can move if it runs only bolts, to another "
            f"node with a free slot for its stage; free slots are on {', '.join(sorted(free)) or 'no node'}",
            "Start it with --set placement.spare_slots=1 or more, or let it be replaced: handle.place().",
        )

    # ---- the steps -------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        run, old, epochs = self._run, self.old, self._run.epochs
        watch = (self._runs.watch(run, strict=True), _ProcessWatch(old, self.new))
        yield Step("handover_begun", epochs.begin_handover)
        commits = epochs.commit_shell().loop
        yield Step("slot_taken", lambda: self._registry.stand_by(self._worker, self._new_slot), undo=self._abandon)
        yield epochs.commit_step("ahead_committed", watch, _ignore_missing_epoch)
        yield self._wait(
            "prefetched", self._prefetch, self._is_prefetched, "the new process did not read the state ahead"
        )
        yield Step("commits_paused", commits.pause, undo=commits.resume)
        yield self._route("doubled", self._old_slot, self._new_slot, undo=self._stay)
        yield self._wait("commits_idle", nothing, lambda: commits.commits.idle, "commits under way did not end")
        commit, epoch = commits.commits.next_move()
        prepare = PrepareToLeave(commit, epoch)
        yield self._wait(
            "leave_prepared",
            lambda: self._registry.send_to(old, prepare),
            lambda: old.leaving == commit,
            "the old process did not prepare to leave",
        )
        yield epochs.commit_step("left_committed", watch, moves=True)
        yield self._wait(
            "stored",
            nothing,
            lambda: old.left is not None and old.left.epoch == epoch,
            "the old process did not leave",
        )
        yield from self._take_over()

    def _take_over(self) -> Iterator[Step]:
        """Steps 4 and 5. They cannot be cancelled, because no process runs the worker meanwhile. A request to end
        the topology is carried out after them."""
        yield Step("handed_over", self._hand_over, cancellable=False, point_of_no_return=True)
        # The old tasks close before the new ones open, because both may use the same external resource.
        yield self._wait(
            "mapped",
            lambda: self._registry.send_to(self.old, CloseTasks()),
            lambda: self.old.closed,
            "the tasks did not close on the old node",
            final=True,
        )
        yield self._wait(
            "merged", self._open, lambda: self.new.ready, "the tasks did not open on the new node", True
        )
        yield self._route("switched", self._new_slot, final=True)
        yield Step("commits_resumed", self._run.epochs.commit_shell().loop.resume, cancellable=False)

    def _wait(
        self,
        name: str,
        do: Callable[[], None],
        until: Callable[[], bool],
        expected: str,
        final: bool = False,
        undo: Callable[[], None] | None = None,
    ) -> Step:
        return Step(
            name,
            do,
            until,
            expected=expected,
            limit=self._open_limit if final else self._limit,
            watch=(self._runs.watch(self._run, strict=True), _ProcessWatch(self.old, self.new)),
            undo=undo,
            cancellable=not final,
        )

    def _prefetch(self) -> None:
        state = self._run.deployment.state
        state.inspect()
        tasks = self._registry.share(self._worker, state.tasks())
        self._registry.send_to(self.new, PrefetchState(state.epoch, tasks))

    def _is_prefetched(self) -> bool:
        return self.new.prefetched_epoch >= self._run.deployment.state.epoch

    def _route(
        self, name: str, *slots: WorkerId, final: bool = False, undo: Callable[[], None] | None = None
    ) -> Step:
        """Return the step that makes all workers of the previous stage send to these slots, and waits until they
        do."""
        numbers, worker = [slot.index for slot in slots], self._worker

        def tell() -> None:
            for sender in self._senders():
                self._registry.send_to(sender, RouteWorker(worker.index, numbers))

        return self._wait(
            name,
            tell,
            lambda: all(sender.sending.get(worker.index) == numbers for sender in self._senders()),
            f"not all workers of stage {worker.stage - 1} sent to the slots {numbers}",
            final,
            undo,
        )

    def _hand_over(self) -> None:
        assert self.old.left is not None
        self._run.deployment.state.inspect()
        self._registry.hand_over(self._worker, self._new_slot)

    def _open(self) -> None:
        registry, state, left = self._registry, self._run.deployment.state, self.old.left
        assert left is not None
        tasks = registry.share(self._worker, state.tasks())
        registry.send_to(self.new, OpenTasks(registry.nodes(), state.generation, left.epoch, tasks, left.handover))
        for routes in self._run.migrations.current_routes():
            registry.send_to(self.new, routes)

    def _senders(self) -> list[WorkerConnection]:
        return [each for id, each in self._registry.workers.items() if id.stage == self._worker.stage - 1]

    def _stay(self) -> None:
        """Undo ``doubled``: the old process, which has received everything, continues. Called before commits are
        resumed."""
        for sender in self._senders():
            self._registry.send_to(sender, RouteWorker(self._worker.index, [self._old_slot.index]))
        self.old.left, self.old.leaving = None, 0
        self._registry.send_to(self.old, CancelLeave())

    def _abandon(self) -> None:
        """Undo ``slot_taken``: close the new process's tasks. Its slot is not used again, because copies of frames
        may still arrive there."""
        self.new.problem = self.new.problem or "a move to it was given up"
        self._registry.send_to(self.new, CloseTasks())

    # ---- the end ---------------------------------------------------------------------------------------

    def settle(self, ended: StepsEnded) -> Settled:
        """Return the result of the move. Called once, after the steps."""
        old, new, problem = self.old, self.new, ended.problem
        if problem is None:
            return Settled(self._done(ended.times))
        where, target = self._run.where, new.hello.node
        if ended.ending is Ending.UNDONE:
            log.warning("worker %s stays on %s: %s", self._worker, old.hello.node, problem)
            text = f"worker {self._worker} could not move to {target}: {problem.error.problem}"
            return Settled(error=TopologyFailed(where, text, "It continues on its old node."))
        self._registry.hand_over(self._worker, self._old_slot)  # the restart places the worker on its old node
        text = f"worker {self._worker} could not continue on {target}: {problem.error.problem}"
        error = TopologyFailed(where, text, "The topology restarts with the worker on its old node.")
        return Settled(error=error, problem=Problem(Cause.LOST, error))

    def _done(self, times: Mapping[str, float]) -> Moved:
        old, at = self.old, times["merged"]
        steps = {step: time - self._since for step, time in times.items()}
        nodes = old.hello.node, self.new.hello.node
        return Moved(at, self._worker, *nodes, at - old.left_at, at - self._since, steps)


class _ProcessWatch:
    """Watches the old and the new process of the worker, as a ``Watch``."""

    def __init__(self, *connections: WorkerConnection) -> None:
        self._connections = connections

    def alarm(self) -> bool:
        return any(connection.problem for connection in self._connections)

    def check(self) -> Problem | None:
        problem = next((each.problem for each in self._connections if each.problem), "")
        return Problem(Cause.LOST, TopologyFailed("move", problem)) if problem else None


def _ignore_missing_epoch(problem: Problem) -> Problem | None:
    """Ignore that no epoch was committed in time, since an overloaded topology may take long for it. The new
    process then prefetches the newest committed epoch."""
    return None if problem.cause in (Cause.FAILED, Cause.TIMED_OUT) else problem
