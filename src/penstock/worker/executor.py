"""An executor runs one task's spout or bolt for a moment at a time.

``run`` does at most about ``QUANTUM`` seconds of work and returns, so that the worker can look at its clock,
send what is due and serve the other tasks. How many calls fit is learnt from how long they took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from penstock.clock import Clock
from penstock.metrics.stats import TaskStats
from penstock.state.values import TaskSnapshot
from penstock.topology.components import Component, Conf, Context
from penstock.worker.calls import CurrentCall
from penstock.worker.epoch_dead_letters import EpochDeadLetters
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.flow_control import SendQueues
from penstock.worker.outputs import StreamOutput
from penstock.worker.tracking import Tracker

QUANTUM = 0.002  # seconds; the linger's order of magnitude: no more often is anything due
_MOST_CALLS = 4096  # between two looks at the clock, however short the calls

C = TypeVar("C", bound=Component)
Report = Callable[[Exception], None]


class Executor(ABC, Generic[C]):
    """One task: its component's instance, what it has emitted, what it has counted."""

    def __init__(
        self,
        component: C,
        context: Context,
        outputs: dict[str, StreamOutput],
        stats: TaskStats,
        clock: Clock,
        tracker: Tracker | None,
        send_queues: SendQueues,
        call: CurrentCall,
    ) -> None:
        self.component, self.context, self.outputs, self.stats = component, context, outputs, stats
        self.send_queues = send_queues
        self.tracker = tracker
        """The account for acks; None where they are not tracked."""
        self._clock = clock
        self._buffers = list(outputs.values())
        self.waiting: Callable[[], int] = (
            self._buffers[0].waiting if len(self._buffers) == 1 else self._count_waiting
        )
        """Rows emitted and not yet sent. Asked after every ``next_tuple``, hence the short way for one."""
        self.given_up = EpochDeadLetters(context, clock) if context.delivery == "exactly_once" else None
        """Tuples that nobody emits again; None where spouts do, and where the guarantee allows to lose them."""
        if self.given_up is not None:
            for buffer in self._buffers:
                buffer.give_up = self._give_up
        self._calls = 16
        self._call = call
        self.report: Report = self._raise

    @abstractmethod
    def open(self, conf: Conf) -> None:
        """Call the component's own ``open`` or ``prepare``."""

    @abstractmethod
    def run(self) -> bool:
        """Work for a moment. False: there was nothing to do."""

    @abstractmethod
    def close(self) -> None:
        """Call the component's own ``close`` or ``cleanup``."""

    def flush(self, only_full: bool = False) -> None:
        if only_full and self.tracker is not None and any(buffer.full() for buffer in self._buffers):
            only_full = False  # acks wait until nothing waits: one full stream takes the others along
        for buffer in self._buffers:
            if not only_full or buffer.full():
                buffer.flush()

    # ---- state -----------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The task's name in manifests."""
        return f"{self.context.component}/{self.context.index}"

    def snapshot(self, full: bool, compact: bool = True) -> TaskSnapshot:
        """What changed in the task's state since the last snapshot."""
        self._guard("before_snapshot", self.component.before_snapshot)
        return self.context.state.snapshot(full, compact)

    def on_epoch_end(self, epoch: int) -> None:
        """The epoch's last tuple is done with and its state snapshotted (exactly once)."""

    def on_committed(self, epoch: int) -> None:
        """The epoch is committed, and all before it."""
        self._guard("after_commit", self.component.after_commit)

    # ---- shared ----------------------------------------------------------------------------------------

    def _store_dead_letters_if_full(self) -> bool:
        """There is room for tuples that are given up."""
        return self.given_up is None or not self.given_up.full or self.given_up.store()

    def _give_up(self, values: Iterable[Any], error: str) -> None:
        if self.given_up is not None:
            self.given_up.add(tuple(values), error)

    def _count_waiting(self) -> int:
        return sum(buffer.waiting() for buffer in self._buffers)

    def _guard(self, call: str, function: Callable[..., None], *args: Any) -> None:
        """Call user code; what it raises becomes an error that names the component."""
        try:
            function(*args)
        except USER_ERRORS as error:  # user code may raise anything
            raise blame(self.context.component, call, error) from error

    def _note_birth(self, born: float) -> None:
        """What was just emitted stems from tuples that left their spout at ``born``."""
        for buffer in self._buffers:
            if buffer.waiting() and (buffer.born is None or buffer.born > born):
                buffer.born = born

    def _learn(self, calls: int, seconds: float) -> None:
        self.stats.busy += seconds
        fitting = int(calls * QUANTUM / seconds) if seconds > 0 else _MOST_CALLS
        self._calls = max(1, min(_MOST_CALLS, fitting, self._calls * 4))

    @staticmethod
    def _raise(error: Exception) -> None:
        raise error
