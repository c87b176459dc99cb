"""Backpressure, decided: what a task says about its queue, and what a sender makes of it (SPEC 3.1).

An *overload detector* looks at one task's inbox and says what is to be told to the tasks that send to it. A *rate
limiter* stands in a sender, one for each component it sends to, takes those messages and says how many tuples may
go. There is a pair for each mode: ``step`` (A algorithm 1), ``spout`` (Storm 1.x, Heron) and ``credit`` (Flink);
``none`` has neither. All are driven by the caller's clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from penstock.control.flow_states import DetectorState, LimiterState
from penstock.control.pace import Meter, Pace
from penstock.control.signals import TaskMessage

LOAD_FACTOR = 0.8  # L; ours, A gives no value
STEP = 2.0  # v'; ours too
SHORTEST = 0.01  # seconds; a signal's way there and back: a shorter sensitivity judges what it has not changed yet
LONGEST = 1.0  # seconds; for a queue that fills slowly, or whose rate is not known
_MOST_STEPS = 10  # a thousandth of the rate is as good as none, and ten cancels bring it back
_TELLING_GROWTH = 0.1  # share of its capacity by which a queue has grown or shrunk, not just swayed
_TELLING_TRAFFIC = 1.0  # share of its capacity that has come and gone: by then a growth of a few percent shows
_FEW_FRAMES = 32  # tuples: two of the smallest frames that slowed senders send
_GRANT_SHARE = 8  # a sender's credit is renewed when an eighth of it is used: eight messages per full inbox

Messages = list[tuple[int, str, float]]
"""Target task, kind, value."""


class OverloadDetector(ABC):
    """Judges one task's inbox. ``upstream``: the tasks that send to it."""

    def __init__(self, upstream: Collection[int], capacity: int) -> None:
        self.upstream, self.capacity = tuple(upstream), capacity

    def resize(self, capacity: int) -> None:
        """The inbox holds so many from now on."""
        self.capacity = capacity

    @abstractmethod
    def observe(self, now: float, length: int, arrived: int) -> Messages:
        """What to say, now that ``length`` tuples wait, overflow included, and ``arrived`` ever came."""

    def record_consumed(self, source: int, rows: int) -> None:  # noqa: B027 - only credits care
        """Tuples of that sender were taken from the inbox."""

    def on_sender_adjusted(self) -> None:  # noqa: B027 - only steps care
        """A sender has done what it was told."""

    def handover(self) -> DetectorState:
        """What it has told its senders: for the detector that continues in its place in another process."""
        return DetectorState()

    def restore(self, state: DetectorState) -> None:  # noqa: B027 - only where there is something to remember
        """Continue from a ``handover``."""

    @property
    def demand(self) -> float:
        """Tuples a second it was sent before it slowed its senders; 0 while it does not."""
        return 0.0

    @property
    def due(self) -> float:
        """When to look again even if nothing comes or goes; inf: not for that."""
        return math.inf


class StepDetector(OverloadDetector):
    """A algorithm 1, on one queue.

    Where the queue is above L·QML, a timer of ``sensitivity`` = (QML − q) / (2·V) runs; at its end each sender is
    told to slow. Below (1 − L)·QML the same with a cancel, until all is taken back. Three things A leaves open: at
    the end of the timer a queue that is on its way back already is left alone; a timer starts only when the last
    signal has been acted upon (or for a second no one answered); and once senders are slowed, a timer that has
    ended goes on until so much has come and gone that the queue's way is known, for frames come and are taken
    whole, and a slow task takes none for a while. Without them the rate swings by many steps around what is
    sustainable.
    """

    def __init__(
        self,
        upstream: Collection[int],
        capacity: int,
        load_factor: float = LOAD_FACTOR,
        step: float = STEP,
        shortest: float = SHORTEST,
    ) -> None:
        super().__init__(upstream, capacity)
        self.steps = 0
        """Signals sent and not taken back; at most ``_MOST_STEPS``, where a further signal repeats the last."""
        self._step, self._load_factor = step, load_factor
        self._shortest = shortest
        self._meter = Meter()
        self._arrived = self._gone = 0
        self._lump = 0
        """The most tuples that came or went between two looks since the timer began: a frame, as a rule."""
        self._rate = 0.0
        """V: at which it was sent to before the backpressure."""
        self._timer: _Timer | None = None
        self._answer_by: float | None = None

    @property
    def demand(self) -> float:
        return self._rate if self.steps else 0.0

    @property
    def due(self) -> float:
        timer, answer_by = self._timer, self._answer_by
        return timer.due if timer is not None else math.inf if answer_by is None else answer_by

    def sensitivity(self, length: int) -> float:
        if self._rate <= 0:
            return LONGEST
        return min(LONGEST, max(self._shortest, (self.capacity - length) / (2 * self._rate)))

    def observe(self, now: float, length: int, arrived: int) -> Messages:
        came, went = arrived - self._arrived, arrived - length - self._gone
        self._arrived, self._gone, self._lump = arrived, arrived - length, max(self._lump, came, went)
        if came:
            self._meter.add(came, now)
        wanted = self._wanted(length)
        if wanted is None:
            self._timer = None
            return []
        answer_by = self._answer_by  # read once: ``on_sender_adjusted`` comes from another thread
        if answer_by is not None:
            if now < answer_by:
                return []
            self._answer_by = None
        timer = self._timer
        if timer is None or timer.kind != wanted:
            if not self.steps:
                self._rate = self._meter.rate(now)
            self._timer, self._lump = _Timer(wanted, now + self.sensitivity(length), length, arrived), 0
            return []
        if now < timer.due:
            return []
        verdict = self._verdict(timer, now, length, arrived)
        if verdict is None:
            return []
        self._timer = None
        if not verdict:
            return []
        self.steps = min(self.steps + 1, _MOST_STEPS) if wanted == "slow" else self.steps - 1
        self._answer_by = now + LONGEST
        return [(task, wanted, float(self.steps)) for task in self.upstream]

    def handover(self) -> DetectorState:
        return DetectorState(steps=self.steps, rate=self._rate)

    def restore(self, state: DetectorState) -> None:
        self.steps, self._rate = state.steps, state.rate

    def on_sender_adjusted(self) -> None:
        self._answer_by = None

    def _verdict(self, timer: _Timer, now: float, length: int, arrived: int) -> bool | None:
        """The timer has ended: signal? None: not to be said yet."""
        came, grown = arrived - timer.arrived, length - timer.length
        if not self.steps:
            return grown >= 0
        telling = max(1, 2 * self._lump)  # more than a frame that has just come or is still to be taken
        if timer.kind == "slow":
            telling = max(telling, int(_TELLING_GROWTH * self.capacity))  # but a cancel must not find it empty
        if abs(grown) >= telling:
            return (grown > 0) == (timer.kind == "slow")
        if timer.kind == "slow":
            return None  # if it grows, it will have grown
        if not came or not (length or timer.length):
            # Nothing comes, or all is taken at once. Is it for good, or between two frames?
            patience = min(LONGEST, _FEW_FRAMES * self._step**self.steps / max(self._rate, 1.0))
        else:
            patience = LONGEST if 2 * came - grown < _TELLING_TRAFFIC * self.capacity else 0.0
        return None if now < timer.due + patience else grown <= self._lump

    def _wanted(self, length: int) -> str | None:
        if length > self._load_factor * self.capacity:
            return "slow"
        if length < (1 - self._load_factor) * self.capacity and self.steps:
            return "cancel"
        return None

    def validate(self) -> None:
        assert 0 <= self.steps <= _MOST_STEPS
        assert self._timer is None or self._answer_by is None, "no timer before the last signal is answered"


@dataclass(frozen=True)
class _Timer:
    kind: str
    due: float
    length: int
    """Of the queue when it was started."""
    arrived: int
    """Ever, by then."""


class SpoutDetector(OverloadDetector):
    """Storm 1.x and Heron: a queue above the mark stops the spouts, all of them, until it is below the other."""

    def __init__(self, spouts: Collection[int], capacity: int, load_factor: float = LOAD_FACTOR) -> None:
        super().__init__(spouts, capacity)
        self._load_factor = load_factor
        self._holds = False

    def observe(self, now: float, length: int, arrived: int) -> Messages:
        holds = length > (1 - self._load_factor if self._holds else self._load_factor) * self.capacity
        if holds == self._holds:
            return []
        self._holds = holds
        return [(task, "hold" if holds else "resume", 0.0) for task in self.upstream]

    def handover(self) -> DetectorState:
        return DetectorState(holds=self._holds)

    def restore(self, state: DetectorState) -> None:
        self._holds = state.holds


class CreditDetector(OverloadDetector):
    """Flink: each sender has an equal share of the inbox as credit, renewed as its tuples are taken from it."""

    def __init__(self, upstream: Collection[int], capacity: int) -> None:
        super().__init__(upstream, capacity)
        self.share = max(1, capacity // max(1, len(self.upstream)))
        self._consumed = dict.fromkeys(self.upstream, 0)
        self._granted = dict.fromkeys(self.upstream, 0)

    def record_consumed(self, source: int, rows: int) -> None:
        self._consumed[source] += rows

    def observe(self, now: float, length: int, arrived: int) -> Messages:
        messages: Messages = []
        for task in self.upstream:
            total = self._consumed[task] + self.share
            if total - self._granted[task] >= max(1, self.share // _GRANT_SHARE):
                self._granted[task] = total
                messages.append((task, "grant", float(total)))
        return messages

    def handover(self) -> DetectorState:
        return DetectorState(credits=[(task, self._consumed[task], self._granted[task]) for task in self.upstream])

    def restore(self, state: DetectorState) -> None:
        for task, consumed, granted in state.credits:
            self._consumed[task], self._granted[task] = consumed, granted


# ---- the sender's side -----------------------------------------------------------------------------------


class RateLimiter:
    """Between a task and one component it sends to. This one is open, unless a task behind it says wait: it has
    more of a later epoch than it can keep, and this sender is ahead of the others (exactly once)."""

    patient = False
    """Tuples it holds back may wait while the task goes on with what is for other components."""

    def __init__(self) -> None:
        self.paused_by: frozenset[int] = frozenset()
        """Tasks behind it that said wait."""

    def handle(self, message: TaskMessage, now: float, measured: float) -> bool:
        """What a task behind it says; ``measured``: the rate it was sent to lately. True: the rate is another."""
        before = self.rate
        if message.kind == "wait":
            self.paused_by |= {message.source}
        elif message.kind == "proceed":
            self.paused_by -= {message.source}
        else:
            self._handle(message, now, measured)
        return self.rate != before

    def room(self, target: int, now: float) -> float:
        """How many tuples may go to that task now; the last may bring more than fit."""
        return 0.0 if self.paused_by else self._room(target, now)

    @property
    def rate(self) -> float:
        """Tuples a second that may go."""
        return 0.0 if self.paused_by else self._rate

    def _handle(self, message: TaskMessage, now: float, measured: float) -> None:
        """What the mode makes of a message."""

    def _room(self, target: int, now: float) -> float:
        return math.inf

    @property
    def _rate(self) -> float:
        return math.inf

    def record_sent(self, target: int, rows: int) -> None:
        """They went."""

    def wait(self, now: float) -> float:
        """Seconds until there may be room, where that is known; else inf: a message will tell."""
        return math.inf

    def handover(self) -> LimiterState:
        """What it was asked for: for the limiter that continues in its place in another process."""
        return LimiterState(paused_by=sorted(self.paused_by))

    def restore(self, state: LimiterState, now: float) -> None:
        """Continue from a ``handover``."""
        self.paused_by = frozenset(state.paused_by)


class StepLimiter(RateLimiter):
    """A algorithm 1 at the sender: remembers its initial rate at the first signal, halves it at each, doubles it
    at each cancel, and leaves the state when it is back.

    The tasks of the component signal each on its own; the one that asks for the most steps decides, so that four
    tasks with full queues do not cost four steps at once. A signal also says how many steps that task has asked
    for altogether, so one that is lost or doubled does no lasting harm.
    """

    patient = True

    def __init__(self, step: float = STEP) -> None:
        super().__init__()
        self.initial: float | None = None
        self.steps: dict[int, int] = {}
        """Asked for by each task, where there are any."""
        self.excluded: frozenset[int] = frozenset()
        """Tasks nothing is sent to at the moment (migration): their queues are no reason to slow."""
        self._step = step
        self._pace = Pace()

    def _handle(self, message: TaskMessage, now: float, measured: float) -> None:
        asked = dict(self.steps)  # a copy, put in place whole: reports read it from another thread
        if message.kind == "slow":
            if self.initial is None:
                if measured <= 0:
                    return  # who sends nothing cannot send less
                self.initial = measured
            asked[message.source] = min(asked.get(message.source, 0) + 1, int(message.value))
        elif message.kind == "cancel" and message.source in asked:
            asked[message.source] = min(asked[message.source] - 1, int(message.value))
        self.steps = {task: steps for task, steps in asked.items() if steps > 0}
        if not self.steps:
            self.initial = None
        self._pace.set(self._rate, now)

    def exclude_tasks(self, tasks: Iterable[int], now: float) -> None:
        """Nothing is sent to these from now on."""
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
        most = max((asked for task, asked in self.steps.items() if task not in self.excluded), default=0)
        return math.inf if initial is None or not most else initial / self._step**most

    def _room(self, target: int, now: float) -> float:
        return self._pace.room(now)

    def record_sent(self, target: int, rows: int) -> None:
        self._pace.spend(rows)

    def wait(self, now: float) -> float:
        return math.inf if self.paused_by else self._pace.wait(now)

    def validate(self) -> None:
        assert (self.initial is None) == (not self.steps), "in backpressure as long as a task asks for it"
        assert all(0 < asked <= _MOST_STEPS for asked in self.steps.values())


class SpoutLimiter(RateLimiter):
    """Closed as long as any task of the topology holds the spouts."""

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
    """Each task behind it says how many tuples it may be sent altogether; before its first word, nothing."""

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


def make_detector(
    mode: str,
    upstream: Collection[int],
    spouts: Collection[int],
    capacity: int,
    load_factor: float,
    step: float = STEP,
) -> OverloadDetector | None:
    """The overload detector of a mode over one task's inbox."""
    if mode == "step":
        return StepDetector(upstream, capacity, load_factor, step)
    if mode == "spout":
        return SpoutDetector(spouts, capacity, load_factor)
    return CreditDetector(upstream, capacity) if mode == "credit" else None


def make_limiter(mode: str, step: float) -> RateLimiter:
    """The rate limiter of a mode between a task and a component; in mode ``spout`` it is the spout's own that
    counts."""
    limiters: dict[str, Callable[[], RateLimiter]] = {"step": lambda: StepLimiter(step), "credit": CreditLimiter}
    return limiters.get(mode, RateLimiter)()
