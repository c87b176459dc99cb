"""Overload detectors: they look at the inboxes of a worker's tasks and tell the senders to slow down, or to go on.

The decisions are ``penstock.control.backpressure``'s; here they meet inboxes and the clock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Mapping

from penstock.clock import Clock
from penstock.control.backpressure import CreditDetector, OverloadDetector, make_detector
from penstock.control.flow_states import DetectorState
from penstock.control.pace import Meter
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.plan.model import Plan
from penstock.settings import Settings
from penstock.worker.inbox import Inbox

_VERDICT_PAUSE = (
    0.02  # seconds between two looks at a queue whose timer has ended and whose trend is not known yet
)


class OverloadDetectors:
    """One for each inbox of a worker. ``observe`` is called by the reader thread and by the loop, everything else
    by the loop."""

    def __init__(self, plan: Plan, settings: Settings, clock: Clock, inboxes: Mapping[int, Inbox]) -> None:
        self.messages: deque[TaskMessage] = deque()
        """To be posted on the message board, in this order, by whichever thread is there first."""
        self._plan, self._settings, self._clock, self._inboxes = plan, settings, clock, inboxes
        self._asked_to_wait: set[tuple[int, int]] = set()
        """Tasks of this worker and senders that are epochs ahead of the others."""
        self._peaks: dict[int, int] = {}
        self._taken: dict[int, tuple[Meter, int]] = {task: (Meter(), 0) for task in inboxes}
        """How fast each task takes tuples, and how many it had taken."""
        self._observing = threading.Lock()
        self._stopped = False
        """Another process continues from the handover state: no signal may be sent."""
        made = {task: self._make(plan.task[task].component) for task in inboxes}
        self._detectors = {task: detector for task, detector in made.items() if detector is not None}

    def _make(self, component: str) -> OverloadDetector | None:
        plan, flow = self._plan, self._settings.flow
        if not plan.upstream_of[component]:
            return None
        upstream = [each for source in plan.upstream_of[component] for each in plan.tasks_of[source]]
        spouts = [each for source in plan.spouts for each in plan.tasks_of[source]]
        return make_detector(flow.mode, upstream, spouts, flow.inbox_capacity, flow.load_factor, flow.step_factor)

    def of_task(self, task: int) -> OverloadDetector | None:
        return self._detectors.get(task)

    def observe(self, ahead: Collection[tuple[int, int]] = ()) -> None:
        """Look at the inboxes. One thread at a time is enough: a second one returns at once. ``ahead``: tasks and
        senders of which so much of a later epoch has come that they must wait for the others."""
        if not self._detectors or not self._observing.acquire(blocking=False):
            return
        try:
            if self._stopped:
                return
            now = self._clock.monotonic()
            for task, detector in self._detectors.items():
                inbox = self._inboxes[task]
                self._resize(task, inbox, detector, now)
                if inbox.length > self._peaks.get(task, 0):
                    self._peaks[task] = inbox.length
                for target, kind, value in detector.observe(now, inbox.length, inbox.arrived):
                    self.messages.append(TaskMessage(task, target, kind, value))
            if ahead or self._asked_to_wait:
                self._request_waits(set(ahead))
        finally:
            self._observing.release()

    def _resize(self, task: int, inbox: Inbox, detector: OverloadDetector, now: float) -> None:
        """An inbox holds a tenth of a second's work, if that is more than the setting says: at two million tuples
        a second the default would be empty before a signal arrives anywhere."""
        taken = inbox.arrived - inbox.length
        meter, before = self._taken[task]
        if taken > before:
            meter.add(taken - before, now)
            self._taken[task] = (meter, taken)
        flow = self._settings.flow
        capacity = max(flow.inbox_capacity, int(meter.rate(now) * flow.inbox_time))
        if capacity != inbox.capacity:
            inbox.capacity = capacity
            if not isinstance(detector, CreditDetector):  # its shares are given out already
                detector.resize(capacity)

    def _request_waits(self, ahead: set[tuple[int, int]]) -> None:
        for task, sender in ahead - self._asked_to_wait:
            self.messages.append(TaskMessage(task, sender, "wait"))
        for task, sender in self._asked_to_wait - ahead:
            self.messages.append(TaskMessage(task, sender, "proceed"))
        self._asked_to_wait = ahead

    def on_state(self, state: TaskFlowState) -> None:
        """A task somewhere has acted upon a signal."""
        for task in self._plan.tasks_of.get(state.towards, ()):
            detector = self._detectors.get(task)
            if detector is not None:
                detector.on_sender_adjusted()

    def wait(self) -> float:
        """Seconds until an inbox is to be looked at, even if nothing comes or goes."""
        now = self._clock.monotonic()
        return min((max(each.due - now, _VERDICT_PAUSE) for each in self._detectors.values()), default=math.inf)

    def pressure(self, task: int) -> tuple[int, float]:
        """The most tuples that have waited for a task since the last call, and the rate at which it was sent
        tuples before it slowed its senders; 0 while it does not."""
        inbox = self._inboxes[task]
        peak, self._peaks[task] = max(self._peaks.get(task, 0), inbox.length), inbox.length
        detector = self._detectors.get(task)
        return peak, 0.0 if detector is None else detector.demand

    # ---- moving to another process ---------------------------------------------------------------------

    def handover(self) -> tuple[dict[int, DetectorState], list[tuple[int, int]]]:
        """What was told to senders: by task, and who was asked to wait. No signal is sent from now on, until
        ``resume``."""
        with self._observing:
            self._stopped = True
        return {task: each.handover() for task, each in self._detectors.items()}, sorted(self._asked_to_wait)

    def resume(self) -> None:
        """The worker stays."""
        self._stopped = False

    def restore(self, states: Mapping[int, DetectorState], asked_to_wait: Collection[tuple[int, int]]) -> None:
        """Continue from a ``handover``."""
        for task, detector in self._detectors.items():
            detector.restore(states[task])
        self._asked_to_wait = set(asked_to_wait)
