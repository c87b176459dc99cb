"""Overload detectors: the receiver's side of backpressure. One watches the inbox of one task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from penstock.control.flow_states import DetectorState
from penstock.control.pace import Meter

LOAD_FACTOR = 0.8
"""Share of the queue's capacity above which a task is overloaded: L in Lu 2020, which gives no value."""
STEP = 2.0
"""The factor by which one step lowers a rate: v' in Lu 2020, which gives no value."""
MIN_SENSITIVITY = 0.01
"""Seconds. A signal and its answer take about this long, so a shorter sensitivity would judge a queue before the
signal took effect."""
MAX_SENSITIVITY = 1.0
"""Seconds, for a queue that fills slowly, or whose arrival rate is unknown."""
MAX_STEPS = 10
"""With the default factor of 2, ten steps leave a thousandth of the rate, and ten cancels restore it."""
_TREND_GROWTH = 0.1
"""Share of the capacity. A queue that has grown or shrunk by this much has a trend and does not just fluctuate."""
_TREND_TRAFFIC = 1.0
"""Share of the capacity that has arrived and left. After that much traffic a growth of a few percent is
visible."""
_FEW_FRAMES = 32
"""Tuples: two of the smallest frames that slowed senders send."""
_GRANT_SHARE = 8
"""A sender's credit is renewed when an eighth of it is used, that is with eight messages per full inbox."""

Messages = list[tuple[int, str, float]]
"""Target task, kind, value."""


class OverloadDetector(ABC):
    """Watches the inbox of one task. ``upstream``: the tasks that send to it. The worker serialises calls of
    ``observe``, which come from its main loop and its reader thread; ``on_sender_adjusted`` may be called at the
    same time from the other thread."""

    def __init__(self, upstream: Collection[int], capacity: int) -> None:
        self.upstream, self.capacity = tuple(upstream), capacity
        self.service: float | None = None

    def resize(self, capacity: int, service: float | None = None) -> None:
        """Set the number of tuples that the inbox holds, and the tuples per second that its task takes, if
        known."""
        self.capacity, self.service = capacity, service

    @abstractmethod
    def observe(self, now: float, length: int, arrived: int) -> Messages:
        """Return the messages to send, given that ``length`` tuples are queued (including overflow) and
        ``arrived`` tuples have arrived in total."""

    def record_consumed(self, source: int, rows: int) -> None:  # noqa: B027 - only mode credit uses it
        """Record that tuples of this sender were taken from the inbox."""

    def on_sender_adjusted(self) -> None:  # noqa: B027 - only mode step uses it
        """Record that a sender has applied the last message."""

    def handover(self) -> DetectorState:
        """The messages in force, for the detector that continues in another process."""
        return DetectorState()

    def restore(self, state: DetectorState) -> None:  # noqa: B027 - some modes have no state
        """Continue from the handover state of the previous process."""

    @property
    def demand(self) -> float:
        """Tuples per second that arrived before the senders were slowed. 0 while they are not slowed."""
        return 0.0

    @property
    def due(self) -> float:
        """The time of the next ``observe`` if nothing arrives or leaves before. ``inf``: none is needed."""
        return math.inf


class StepDetector(OverloadDetector):
    """Lu 2020, algorithm 1, for one queue.

    While the queue is longer than L·QML, a timer of ``sensitivity`` = (QML − q) / (2·V) runs. When it expires,
    each sender gets a ``slow`` signal. Below (1 − L)·QML a ``cancel`` signal is sent in the same way, until all
    steps are cancelled.

    Lu 2020 leaves five cases open. Without these rules the rate oscillates by many steps around the sustainable
    rate:

    - If the queue is already recovering when the timer expires, no signal is sent.
    - A timer starts only after the last signal was applied, or one second after it if no sender answers.
    - A queue that is longer than the inbox asks for all steps at once that its task needs. At one step per signal
      a burst would be in the queue before the rate fits.
    - A cancel takes back all steps at once that the task does not need. At one step per signal the task would be
      idle meanwhile.
    - While senders are slowed, an expired timer continues until enough tuples have arrived and left to show the
      trend of the queue. Frames arrive and are taken as a whole, and a slow task takes none for a while.
    """

    def __init__(
        self,
        upstream: Collection[int],
        capacity: int,
        load_factor: float = LOAD_FACTOR,
        step: float = STEP,
        shortest: float = MIN_SENSITIVITY,
    ) -> None:
        super().__init__(upstream, capacity)
        self.steps = 0
        """Signals sent and not cancelled. At ``MAX_STEPS`` a further signal repeats the last one."""
        self._step, self._load_factor = step, load_factor
        self._shortest = shortest
        self._meter = Meter()
        self._arrived = self._gone = 0
        self._largest_frame = 0
        """The most tuples that arrived or left between two observations since the timer started; usually one
        frame."""
        self._rate = 0.0
        """V: tuples per second that arrived before the senders were slowed."""
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
            return MAX_SENSITIVITY
        return min(MAX_SENSITIVITY, max(self._shortest, (self.capacity - length) / (2 * self._rate)))

    def observe(self, now: float, length: int, arrived: int) -> Messages:
        arrivals, departures = arrived - self._arrived, arrived - length - self._gone
        self._arrived, self._gone, self._largest_frame = (
            arrived,
            arrived - length,
            max(self._largest_frame, arrivals, departures),
        )
        if arrivals:
            self._meter.add(arrivals, now)
        wanted = self._wanted(length)
        if wanted is None:
            self._timer = None
            return []
        answer_by = self._answer_by  # read once, because ``on_sender_adjusted`` is called from another thread
        if answer_by is not None:
            if now < answer_by:
                return []
            self._answer_by = None
        timer = self._timer
        if timer is None or timer.kind != wanted:
            if not self.steps:
                self._rate = self._meter.rate(now)
            self._timer, self._largest_frame = _Timer(wanted, now + self.sensitivity(length), length, arrived), 0
            return []
        if now < timer.due:
            return []
        decision = self._decision(timer, now, length, arrived)
        if decision is None:
            return []
        self._timer = None
        if not decision:
            return []
        if wanted == "slow":
            steps = range(min(self.steps + 1, MAX_STEPS), min(self._steps_needed(length), MAX_STEPS) + 1)
        else:
            steps = range(self.steps - 1, self._steps_kept() - 1, -1)
        self.steps = steps[-1]
        self._answer_by = now + MAX_SENSITIVITY
        return [(task, wanted, float(step)) for step in steps for task in self.upstream]

    def _steps_needed(self, length: int) -> int:
        """The steps after this signal. If the queue is longer than the inbox, by the formula for ``sensitivity``
        all further signals are due at once: as many as the task needs to keep up with the rate from before the
        backpressure."""
        needed = self._steps_of_service()
        return self.steps + 1 if needed is None or length <= self.capacity else max(self.steps + 1, needed)

    def _steps_kept(self) -> int:
        """The steps after this cancel: all that the task does not need are cancelled at once, because it would be
        idle before they are cancelled one by one."""
        needed = self._steps_of_service()
        return self.steps - 1 if needed is None else min(self.steps - 1, needed)

    def _steps_of_service(self) -> int | None:
        """The fewest steps at which no more arrives than the task takes. None if that is not known."""
        if not self.service or not self._rate:
            return None
        ratio = self._rate / self.service  # infinite if it has taken nothing for a quarter of an hour
        return MAX_STEPS if ratio >= self._step**MAX_STEPS else max(0, math.ceil(math.log(ratio, self._step)))

    def handover(self) -> DetectorState:
        return DetectorState(steps=self.steps, rate=self._rate)

    def restore(self, state: DetectorState) -> None:
        self.steps, self._rate = state.steps, state.rate

    def on_sender_adjusted(self) -> None:
        self._answer_by = None

    def _decision(self, timer: _Timer, now: float, length: int, arrived: int) -> bool | None:
        """Whether to signal when the timer has expired. None if the trend of the queue is not known yet."""
        arrivals, growth = arrived - timer.arrived, length - timer.length
        if not self.steps:
            return growth >= 0
        threshold = max(
            1, 2 * self._largest_frame
        )  # more than one frame that has just arrived or is about to be taken
        if timer.kind == "slow":
            # so that the queue is not empty when the cancel takes effect
            threshold = max(threshold, int(_TREND_GROWTH * self.capacity))
        if abs(growth) >= threshold:
            return (growth > 0) == (timer.kind == "slow")
        if timer.kind == "slow":
            return None  # a queue that grows will exceed the threshold later
        if not arrivals or not (length or timer.length):
            # Nothing arrives, or everything is taken at once. Wait to see whether this is permanent or a gap
            # between two frames.
            patience = min(MAX_SENSITIVITY, _FEW_FRAMES * self._step**self.steps / max(self._rate, 1.0))
        else:
            patience = MAX_SENSITIVITY if 2 * arrivals - growth < _TREND_TRAFFIC * self.capacity else 0.0
        return None if now < timer.due + patience else growth <= self._largest_frame

    def _wanted(self, length: int) -> str | None:
        if length > self._load_factor * self.capacity:
            return "slow"
        if not self.steps:
            return None
        low = (1 - self._load_factor) * self.capacity
        if self._timer is not None and self._timer.kind == "cancel":
            # In a small inbox one frame is more than that. It is taken at once, so it does not end the wait.
            low = max(low, self._largest_frame + 1)
        return "cancel" if length < low else None

    def validate(self) -> None:
        assert 0 <= self.steps <= MAX_STEPS
        assert self._timer is None or self._answer_by is None, "no timer before the last signal is answered"


@dataclass(frozen=True)
class _Timer:
    kind: str
    due: float
    length: int
    """The length of the queue when the timer started."""
    arrived: int
    """The total of arrived tuples when the timer started."""


class SpoutDetector(OverloadDetector):
    """The mode of Storm 1.x and Heron: a queue above the upper mark stops all spouts until it is below the lower
    mark."""

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
    """The mode of Flink: each sender gets an equal share of the inbox as credit, which is renewed as its tuples
    are taken."""

    def __init__(self, upstream: Collection[int], capacity: int) -> None:
        super().__init__(upstream, capacity)
        self.share = max(1, capacity // max(1, len(self.upstream)))
        self._consumed = dict.fromkeys(self.upstream, 0)
        self._granted = dict.fromkeys(self.upstream, 0)

    def resize(self, capacity: int, service: float | None = None) -> None:
        super().resize(capacity, service)
        self.share = max(1, capacity // max(1, len(self.upstream)))

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
