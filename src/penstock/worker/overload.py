"""Passes the state of a worker's inboxes to their overload detectors, and collects the signals that the detectors
send to the senders.

The detectors are pure (``penstock.control.overload_detectors``). This module connects them to inboxes and the
clock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Mapping

from penstock.clock import Clock
from penstock.control.backpressure import OverloadDetector, make_detector, queue_time
from penstock.control.flow_states import DetectorState
from penstock.control.pace import Meter, ServiceRate
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.plan.model import Plan
from penstock.settings import Settings
from penstock.worker.inbox import Inbox

_VERDICT_PAUSE = 0.02
"""Least seconds until an inbox is observed again if nothing arrives or leaves. A timer that has expired stays due
until the trend of the queue is known; without this pause the loop would run continuously until then."""

_LEAST_CAPACITY = 16
"""Tuples that the inbox of a very slow task holds. With fewer, each frame would be an overload."""


class OverloadDetectors:
    """The overload detectors of a worker, one for each inbox with senders in other workers; none in mode ``none``.
    The reader thread and the loop call ``observe``; only the loop calls the other methods."""

    def __init__(self, plan: Plan, settings: Settings, clock: Clock, inboxes: Mapping[int, Inbox]) -> None:
        self.messages: deque[TaskMessage] = deque()
        """Signals to be posted on the message board, in this order. Both threads append and post them."""
        self._plan, self._settings, self._clock, self._inboxes = plan, settings, clock, inboxes
        self._asked_to_wait: set[tuple[int, int]] = set()
        """⟨Task of this worker, sender⟩: the senders that were told to wait because they are epochs ahead of the
        others."""
        self._peaks: dict[int, int] = {}
        self._taken = {task: _Taken() for task in inboxes}
        self._queue_time = queue_time(settings, plan.hops)
        self._observing = threading.Lock()
        self._stopped = False
        """True: another process continues from the handover state, so this one must not send signals."""
        made = {task: self._make(task) for task in inboxes}
        self._detectors = {task: detector for task, detector in made.items() if detector is not None}

    def _make(self, task: int) -> OverloadDetector | None:
        plan, flow = self._plan, self._settings.flow
        upstream = plan.senders_to(task)
        if not upstream:
            return None
        spouts = [each for source in plan.spouts for each in plan.tasks_of[source]]
        return make_detector(flow.mode, upstream, spouts, flow.inbox_capacity, flow.load_factor, flow.step_factor)

    def of_task(self, task: int) -> OverloadDetector | None:
        return self._detectors.get(task)

    def observe(self, ahead: Collection[tuple[int, int]] = ()) -> None:
        """Observe all inboxes, and append the resulting signals to ``messages``. If the other thread is doing
        this already, the call returns at once. ``ahead``: pairs of a task and a sender that must wait for the
        other senders, because too many tuples of later epochs are buffered."""
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
                # What is left of the parcel that is being executed waits, too: it may be larger than the inbox.
                for target, kind, value in detector.observe(now, inbox.length + inbox.executing, inbox.arrived):
                    self.messages.append(TaskMessage(task, target, kind, value))
            if ahead or self._asked_to_wait:
                self._request_waits(set(ahead))
        finally:
            self._observing.release()

    def _resize(self, task: int, inbox: Inbox, detector: OverloadDetector, now: float) -> None:
        """Set the capacity of an inbox: ``flow.inbox_capacity``, but not more than the task takes in
        ``flow.queue_time`` seconds, since tuples would time out while they wait, and not less than it takes in
        ``flow.inbox_time`` seconds: at two million tuples per second, an inbox of the default capacity would be
        empty before a signal reaches a sender."""
        taken, flow = self._taken[task], self._settings.flow
        waiting = inbox.length + inbox.executing
        taken.observe(now, inbox.arrived - waiting, waiting)
        service = taken.service.rate(now)
        capacity = flow.inbox_capacity
        if service is not None:
            capacity = min(capacity, max(_LEAST_CAPACITY, int(service * self._queue_time)))
        capacity = max(capacity, int(taken.meter.rate(now) * flow.inbox_time))
        inbox.capacity = capacity
        detector.resize(capacity, service)

    def _request_waits(self, ahead: set[tuple[int, int]]) -> None:
        for task, sender in ahead - self._asked_to_wait:
            self.messages.append(TaskMessage(task, sender, "wait"))
        for task, sender in self._asked_to_wait - ahead:
            self.messages.append(TaskMessage(task, sender, "proceed"))
        self._asked_to_wait = ahead

    def on_state(self, state: TaskFlowState) -> None:
        """Called when a task, in any worker, has applied a signal."""
        for task in self._plan.tasks_of.get(state.towards, ()):
            detector = self._detectors.get(task)
            if detector is not None:
                detector.on_sender_adjusted()

    def wait(self) -> float:
        """Seconds until an inbox must be observed even if nothing arrives or leaves; infinity if none must."""
        now = self._clock.monotonic()
        return min((max(each.due - now, _VERDICT_PAUSE) for each in self._detectors.values()), default=math.inf)

    def pressure(self, task: int) -> tuple[int, float]:
        """The most tuples that have waited for a task since the last call, and the tuples per second that arrived
        before it slowed its senders; the latter is 0 while it does not slow them."""
        inbox = self._inboxes[task]
        peak, self._peaks[task] = max(self._peaks.get(task, 0), inbox.length), inbox.length
        detector = self._detectors.get(task)
        return peak, 0.0 if detector is None else detector.demand

    # ---- moving to another process ---------------------------------------------------------------------

    def handover(self) -> tuple[dict[int, DetectorState], list[tuple[int, int]]]:
        """The state of each task's detector, and the pairs of task and sender that were told to wait. No signal
        is sent from now on until ``resume`` is called."""
        with self._observing:
            self._stopped = True
        return {task: each.handover() for task, each in self._detectors.items()}, sorted(self._asked_to_wait)

    def resume(self) -> None:
        """Send signals again, because the worker does not move after all."""
        self._stopped = False

    def restore(self, states: Mapping[int, DetectorState], asked_to_wait: Collection[tuple[int, int]]) -> None:
        """Continue from a ``handover``."""
        for task, detector in self._detectors.items():
            detector.restore(states[task])
        self._asked_to_wait = set(asked_to_wait)


class _Taken:
    """How fast a task takes tuples."""

    def __init__(self) -> None:
        self.meter = Meter()
        """Over the last half second."""
        self.service = ServiceRate()
        """While tuples wait."""
        self._total = 0

    def observe(self, now: float, total: int, waiting: int) -> None:
        """``total``: tuples that the task has taken so far."""
        taken = total - self._total
        if taken > 0:
            self.meter.add(taken, now)
            self._total = total
        self.service.observe(now, max(0, taken), waiting)
