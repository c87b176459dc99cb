"""Acks without messages: if a spout's tuples cannot leave its worker, the worker keeps their ledgers itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.acking.ledger import Acker, pack, unpack
from penstock.acking.lineage import Entries
from penstock.plan.model import Plan, WorkerId
from penstock.worker.spouts import SpoutExecutor
from penstock.worker.tracking import FailedRoots


def stays_inside(plan: Plan, worker: WorkerId) -> bool:
    """True if the worker has spout tasks, and no tuple that stems from one of them can leave it."""
    mine = {plan.task[task].component for task in plan.routes.tasks_of(worker)}
    return bool(mine & set(plan.spouts)) and not any(plan.downstream_of[component] for component in mine)


class OwnAcker:
    """The ledgers of the spout tasks of one worker. It does what the acker on the driver does for all others. Used
    by the worker's loop only."""

    def __init__(self, key: int, spouts: Sequence[SpoutExecutor]) -> None:
        self._acker = Acker(key)
        self._spouts: Mapping[int, SpoutExecutor] = {spout.context.task: spout for spout in spouts}

    def apply(self, tallies: Sequence[Entries]) -> None:
        """Enter acks, and tell the spouts which of their messages are complete."""
        for task, numbers in self._acker.apply(*unpack(pack(tallies))).items():
            self._spouts[task].on_complete(numbers)
        for task, spout in self._spouts.items():
            if spout.pending is not None:
                self._acker.settled_below(task, spout.pending.oldest)

    def fail(self, failed: FailedRoots) -> None:
        """Tell the spouts that these messages have failed."""
        for task, numbers in self._acker.close(failed.first, failed.length).items():
            self._spouts[task].on_failed(numbers, failed.component, failed.error)
