"""The base class of executors. An executor runs one task.

``run`` works for about ``QUANTUM`` seconds and returns, so that the worker can send tuples that are due and run
its other tasks. The executor estimates the number of calls that fit from the duration of the previous calls.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Generic, TypeVar

from penstock.clock import Clock
from penstock.metrics.stats import TaskStats
from penstock.state.values import TaskSnapshot
from penstock.topology.components import Component, Conf, Context
from penstock.worker.call_timer import CallTimer
from penstock.worker.calls import CurrentCall
from penstock.worker.epoch_dead_letters import EpochDeadLetters
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.flow_control import SendQueue, SendQueues
from penstock.worker.outputs import StreamOutput
from penstock.worker.tracking import Tracker

QUANTUM = 0.002
"""Seconds of work in one ``run``: about as long as the linger, the shortest interval at which anything is due."""
_MOST_CALLS = 4096
"""Calls in one ``run``, however short they were: bounds the delay if they become slow."""

C = TypeVar("C", bound=Component)
Report = Callable[[Exception], None]


class Executor(ABC, Generic[C]):
    """One task: its component instance, its outputs and its counters. Used by the worker's loop only."""

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
        """The acks of this task; None if acks are not tracked."""
        self._clock = clock
        self._buffers = list(outputs.values())
        # Acks are sent only when no row waits. A control stream tells of tuples of other streams, and must not be
        # ahead of them.
        self._flushes_together = tracker is not None or getattr(component, "emits_partials", False)
        self.waiting: Callable[[], int] = (
            self._buffers[0].waiting if len(self._buffers) == 1 else self._count_waiting
        )
        """The number of rows emitted and not yet sent. It is called after every ``next_tuple``, so a task with
        one stream calls the stream directly."""
        self.dead_letters = EpochDeadLetters(context, clock) if context.delivery == "exactly_once" else None
        """Dead letters of tuples that no spout emits again; None if spouts do, or if the guarantee allows
        losses."""
        if self.dead_letters is not None:
            for buffer in self._buffers:
                buffer.add_dead_letter = self._add_dead_letter
        self._calls_per_run = 16
        self._executed = 0
        """Tuples executed since the task was opened here."""
        self.timer = CallTimer(stats, clock, call, context.task)
        self.report: Report = self._raise

    @abstractmethod
    def open(self, conf: Conf) -> None:
        """Call the component's ``open`` or ``prepare``. Raises the component's error as a ``PenstockError``."""

    @abstractmethod
    def run(self) -> bool:
        """Work for about ``QUANTUM`` seconds. Returns False if there was nothing to do."""

    @abstractmethod
    def close(self) -> None:
        """Call the component's ``close`` or ``cleanup``. Raises as ``open`` does."""

    def flush(self, only_full: bool = False) -> None:
        """Send the waiting rows of all streams, or only of streams that have a full frame."""
        if only_full and self._flushes_together and any(buffer.full() for buffer in self._buffers):
            only_full = False
        for buffer in self._buffers:
            if not only_full or buffer.full():
                buffer.flush()

    # ---- state -----------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The task's name in manifests."""
        return f"{self.context.component}/{self.context.index}"

    def snapshot(self, full: bool, compact: bool = True) -> TaskSnapshot:
        """Take a snapshot: the changes of the task's state since the last one, or all of it if ``full``. Without
        ``compact`` it contains only the changes, even if a full copy is due. Raises the component's error as a
        ``PenstockError``."""
        self._guard("before_snapshot", self.component.before_snapshot)
        return self.context.state.snapshot(full, compact)

    def on_epoch_end(self, epoch: int) -> None:
        """Exactly-once delivery only. Called when the task has processed all tuples of the epoch, before its
        snapshot is taken."""

    def on_committed(self, epoch: int) -> None:
        """Called when the epoch and all earlier ones are committed."""
        self._guard("after_commit", self.component.after_commit)

    # ---- shared ----------------------------------------------------------------------------------------

    def _store_dead_letters_if_full(self) -> bool:
        """Store the dead letters if there is no room for more. Returns False if there is still no room."""
        return self.dead_letters is None or not self.dead_letters.full or self.dead_letters.store()

    def _add_dead_letter(self, values: Iterable[Any], error: str) -> None:
        if self.dead_letters is not None:
            self.dead_letters.add(tuple(values), error)

    def _count_waiting(self) -> int:
        return sum(buffer.waiting() for buffer in self._buffers)

    def _guard(self, call: str, function: Callable[..., None], *args: Any) -> None:
        """Call user code. Whatever it raises is raised as an error that names the component."""
        try:
            function(*args)
        except USER_ERRORS as error:  # user code may raise anything
            raise blame(self.context.component, call, error) from error

    def _note_birth(self, born: float) -> None:
        """Record that the rows just emitted descend from tuples that left their spout at ``born`` (wall time)."""
        for buffer in self._buffers:
            if buffer.waiting() and (buffer.born is None or buffer.born > born):
                buffer.born = born

    def _learn(self, calls: int, seconds: float) -> None:
        """Adjust the number of calls in one ``run``."""
        fitting = int(calls * QUANTUM / seconds) if seconds > 0 else _MOST_CALLS
        self._calls_per_run = max(1, min(_MOST_CALLS, fitting, self._calls_per_run * 4))

    @cached_property
    def _feeds(self) -> list[tuple[SendQueue, list[StreamOutput]]]:
        """Each send queue with the streams whose rows go there."""
        return [
            (queue, [each for each in self._buffers if any(edge.send_queue is queue for edge in each.edges)])
            for queue in self.send_queues.queues
        ]

    def _calls_permitted(self) -> float:
        """How many times a bolt may be called now: it emits no more than may wait for slowed receivers, as far as
        earlier calls tell. 0: not at all."""
        if self.send_queues.held_back:
            return 0.0
        permitted = math.inf
        for queue, outputs in self._feeds:
            slack = queue.slack
            if slack == math.inf:
                continue
            waiting = sum(output.waiting() for output in outputs)
            if waiting >= slack:
                return 0.0
            emitted = waiting + sum(output.emitted for output in outputs)
            if emitted:
                permitted = min(permitted, max(1.0, (slack - waiting) * self._executed / emitted))
        return permitted

    @staticmethod
    def _raise(error: Exception) -> None:
        raise error
