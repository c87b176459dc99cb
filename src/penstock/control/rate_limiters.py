"""Rate limiters: the sender's side of backpressure. One limits what a task sends to one component."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from penstock.control.flow_states import LimiterState
from penstock.control.overload_detectors import MAX_STEPS, STEP
from penstock.control.pace import GrowingPace, Pace
from penstock.control.signals import TaskMessage


class RateLimiter:
    """Limits what a task sends to one component. This base class sets no limit except after a ``wait`` message:
    with exactly-once delivery a receiver sends it when this sender is epochs ahead of the others and too many
    tuples of later epochs are buffered. Called by the worker's loop."""

    patient = False
    """True: tuples for this component may be queued while the task continues to send to other components."""

    def __init__(self) -> None:
        self.paused_by: frozenset[int] = frozenset()
        """The receiving tasks whose ``wait`` is in force."""

    def handle(self, message: TaskMessage, now: float, measured: float) -> bool:
        """Apply a message of a receiving task. ``measured``: the recent rate of sending. Returns True if the rate
        has changed."""
        before = self.rate
        if message.kind == "wait":
            self.paused_by |= {message.source}
        elif message.kind == "proceed":
            self.paused_by -= {message.source}
        else:
            self._handle(message, now, measured)
        return self.rate != before

    def room(self, target: int, now: float) -> float:
        """How many tuples may be sent to this task now. The last frame may exceed it."""
        return 0.0 if self.paused_by else self._room(target, now)

    @property
    def rate(self) -> float:
        """Permitted tuples per second."""
        return 0.0 if self.paused_by else self._rate

    def _handle(self, message: TaskMessage, now: float, measured: float) -> None:
        """Apply a message of the mode."""

    def _room(self, target: int, now: float) -> float:
        return math.inf

    @property
    def _rate(self) -> float:
        return math.inf

    def record_sent(self, target: int, rows: int) -> None:
        """Record that tuples were sent."""

    def wait(self, now: float) -> float:
        """Seconds until tuples may be sent. ``inf`` if that depends on a message."""
        return math.inf

    def handover(self) -> LimiterState:
        """The messages in force, for the limiter that continues in another process."""
        return LimiterState(paused_by=sorted(self.paused_by))

    def restore(self, state: LimiterState, now: float) -> None:
        """Continue from the handover state of the previous process."""
        self.paused_by = frozenset(state.paused_by)


class StepLimiter(RateLimiter):
    """The sender's side of Lu 2020, algorithm 1. The first signal records the initial rate. Each signal divides
    the rate by ``step``, each cancel multiplies it by ``step``, and at the initial rate the limiter is inactive
    again.

    The tasks of the component send their signals independently. The task that requests the most steps determines
    the rate, so that four tasks with full queues do not cause four steps at once. A signal also carries the total
    of steps that its task requests, so a lost or duplicated signal has no lasting effect.

    While no task requests steps, only the growth of the rate is limited: a burst of a source, at the start or when
    the last step is cancelled, would be in the receivers' inboxes before their first signal is here.
    """

    patient = True

    def __init__(self, step: float = STEP) -> None:
        super().__init__()
        self.initial: float | None = None
        self.steps: dict[int, int] = {}
        """The steps that each task requests, without zeros."""
        self.excluded: frozenset[int] = frozenset()
        """Tasks to which nothing is sent during a migration. Their queues do not slow this sender."""
        self._step = step
        self._pace = Pace()
        self._growth = GrowingPace()

    def _handle(self, message: TaskMessage, now: float, measured: float) -> None:
        requested = dict(self.steps)  # a copy: ``steps`` is replaced at the end, without zeros
        if message.kind == "slow":
            if self.initial is None:
                if measured <= 0:
                    return  # the rate cannot be lowered
                self.initial = measured
            requested[message.source] = min(requested.get(message.source, 0) + 1, int(message.value))
        elif message.kind == "cancel" and message.source in requested:
            requested[message.source] = min(requested[message.source] - 1, int(message.value))
        self.steps = {task: steps for task, steps in requested.items() if steps > 0}
        if not self.steps and self.initial is not None:
            self._growth.restart(self.initial, now)
            self.initial = None
        self._pace.set(self._rate, now)

    def exclude_tasks(self, tasks: Iterable[int], now: float) -> None:
        """Record that nothing is sent to these tasks from now on."""
        self.excluded = frozenset(tasks)
        self._pace.set(self._rate, now)

    def handover(self) -> LimiterState:
        return replace(
            super().handover(), initial=self.initial, steps=dict(self.steps), excluded=sorted(self.excluded)
        )

    def restore(self, state: LimiterState, now: float) -> None:
        super().restore(state, now)
        self.initial, self.steps = state.initial, dict(state.steps)
        self.exclude_tasks(state.excluded, now)

    @property
    def _rate(self) -> float:
        initial = self.initial
        if initial is None:
            return math.inf
        most = max((requested for task, requested in self.steps.items() if task not in self.excluded), default=0)
        return initial / self._step**most if most else math.inf

    def _room(self, target: int, now: float) -> float:
        return min(self._pace.room(now), self._growth.room(now))

    def record_sent(self, target: int, rows: int) -> None:
        self._pace.spend(rows)
        self._growth.spend(rows)

    def wait(self, now: float) -> float:
        return math.inf if self.paused_by else max(self._pace.wait(now), self._growth.wait(now))

    def validate(self) -> None:
        assert (self.initial is None) == (not self.steps), "limited exactly while a task requests steps"
        assert all(0 < requested <= MAX_STEPS for requested in self.steps.values())


class SpoutLimiter(RateLimiter):
    """Permits nothing while any task of the topology holds the spouts."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: set[int] = set()

    def _handle(self, message: TaskMessage, now: float, measured: float) -> None:
        if message.kind == "hold":
            self.holders.add(message.source)
        elif message.kind == "resume":
            self.holders.discard(message.source)

    def _room(self, target: int, now: float) -> float:
        return self._rate

    @property
    def _rate(self) -> float:
        return 0.0 if self.holders else math.inf


class CreditLimiter(RateLimiter):
    """Permits the total that each receiving task has granted; nothing before the first grant."""

    def __init__(self) -> None:
        super().__init__()
        self._granted: dict[int, float] = {}
        self._sent: dict[int, int] = {}

    def _handle(self, message: TaskMessage, now: float, measured: float) -> None:
        if message.kind == "grant":
            self._granted[message.source] = max(message.value, self._granted.get(message.source, 0.0))

    def _room(self, target: int, now: float) -> float:
        return self._granted.get(target, 0.0) - self._sent.get(target, 0)

    def record_sent(self, target: int, rows: int) -> None:
        self._sent[target] = self._sent.get(target, 0) + rows

    def handover(self) -> LimiterState:
        return replace(super().handover(), granted=dict(self._granted), sent=dict(self._sent))

    def restore(self, state: LimiterState, now: float) -> None:
        super().restore(state, now)
        self._granted, self._sent = dict(state.granted), dict(state.sent)
