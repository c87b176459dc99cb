"""Flow control in a worker: send queues for what its tasks send, overload detectors over what they receive.

The decisions are ``penstock.control.backpressure``'s; here they meet frames, inboxes and the clock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.clock import Clock
from penstock.control.backpressure import (
    CreditDetector,
    OverloadDetector,
    RateLimiter,
    SpoutLimiter,
    StepLimiter,
    make_detector,
    make_limiter,
)
from penstock.control.pace import Meter
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.frames.header import Header
from penstock.plan.model import Plan, WorkerId
from penstock.settings import Settings
from penstock.worker.inbox import Inbox
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill

_HELD_MEMORY = 1024 * 1024  # bytes a send queue holds in memory: a few frames
_FRAME_TIME = (
    0.05  # seconds of its rate a frame on a slowed send queue carries: small steps; at 10 ms they cost 4 %
)
_LEAST_ROWS = 16  # tuples of such a frame; fewer would cost more than they smooth
_AT_ONCE = 4 * 1024 * 1024  # bytes a send queue releases in one turn; all it may hold would not fit in memory
_VERDICT_PAUSE = 0.02  # seconds between two looks at a queue whose timer has ended and whose way is not known yet

Dispatch = Callable[[Header, bytes | pa.Buffer], None]


class SendQueue:
    """From one task to one component. What may go now goes; what may not waits here, in order."""

    def __init__(
        self,
        component: str,
        targets: Sequence[int],
        limiter: RateLimiter,
        limit: int,
        longest: float,
        dispatch: Dispatch,
        clock: Clock,
    ) -> None:
        self.component, self.targets, self.limiter = component, tuple(targets), limiter
        self.meter = Meter()
        self._limit, self._longest = limit if limiter.patient else 0, longest
        self._held = Spill(_HELD_MEMORY)
        self._dispatch, self._now = dispatch, clock.monotonic

    @property
    def held(self) -> int:
        """Tuples that wait."""
        return self._held.rows

    @property
    def full(self) -> bool:
        """So much waits that the task must not go on, whatever else it could do: more than may wait on disk, or
        more than can be sent in the time a tuple has."""
        held = self._held
        if not held:
            return False
        late = math.isfinite(self._longest) and held.rows > self.limiter.rate * self._longest
        return late or held.bytes >= self._limit

    @property
    def frame_rows(self) -> float:
        """How many tuples a frame should carry at most."""
        rate = self.limiter.rate
        return math.inf if math.isinf(rate) else max(_LEAST_ROWS, rate * _FRAME_TIME)

    def room(self) -> float:
        """Tuples that may go now."""
        if self._held:
            return 0.0
        now = self._now()
        return min(self.limiter.room(target, now) for target in self.targets)

    def send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        if self._held or self.limiter.room(header.target_task, self._now()) <= 0:
            self._held.add(Parcel(header, frame if isinstance(frame, pa.Buffer) else pa.py_buffer(frame)))
        else:
            self._send(header, frame)

    def release(self, everything: bool = False) -> None:
        """Send what may go by now, a few megabytes of it; ``everything``: whether it may or not, at the end of an
        epoch, for its marker must not overtake it."""
        left = _AT_ONCE
        while left > 0 and (parcel := self._held.first()) is not None:
            if not everything and self.limiter.room(parcel.header.target_task, self._now()) <= 0:
                return
            self._held.drop()
            left -= parcel.bytes
            self._send(parcel.header, parcel.content)

    def close(self) -> None:
        self._held.close()

    def wait(self) -> float:
        """Seconds until ``release`` has something to do."""
        return self.limiter.wait(self._now())

    def _send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        self.limiter.record_sent(header.target_task, header.rows)
        self.meter.add(header.rows, self._now())
        self._dispatch(header, frame)


class SendQueues:
    """All a task sends through: a send queue for each component in another worker, the inboxes of those in its
    own; and the rate limiter that stops it whatever it sends where (mode ``spout``)."""

    def __init__(self, queues: Sequence[SendQueue], fused: Sequence[Inbox], task_limiter: RateLimiter) -> None:
        self.queues, self.fused, self._task_limiter = queues, fused, task_limiter
        self._patient = all(queue.limiter.patient for queue in queues)

    @property
    def held_back(self) -> bool:
        """The task must not run. A task that sends to several components goes on as long as one of them takes
        what it is sent: what is for the others waits on disk, within a limit."""
        if any(inbox.full for inbox in self.fused):
            return True
        waiting = 0
        for queue in self.queues:
            if queue.held:
                if queue.full:
                    return True
                waiting += 1
        return waiting > 0 and waiting == len(self.queues) and not self.fused

    def room(self) -> float:
        """How many tuples the task may emit now, one more than fit."""
        if self.held_back or not self._task_limiter.rate:
            return 0.0
        if not self.queues or (self.fused and self._patient):
            return math.inf
        rooms = [queue.room() for queue in self.queues]
        return max(rooms) if self._patient else min(rooms)

    def wait(self) -> float:
        """Seconds until there may be room."""
        return min((queue.wait() for queue in self.queues), default=math.inf)


class FlowControl:
    """Send queues and overload detectors of one worker, and what they have to say to others."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        clock: Clock,
        inboxes: dict[int, Inbox],
        dispatch: Dispatch,
        worker: WorkerId,
    ) -> None:
        self.messages: deque[TaskMessage] = deque()
        """To be posted on the board."""
        self.states: deque[TaskFlowState] = deque()
        """To be published there."""
        self._plan, self._settings, self._clock = plan, settings, clock
        self._inboxes, self._dispatch = inboxes, dispatch
        tracked = settings.delivery.guarantee == "at_least_once"
        self._patience = settings.delivery.message_timeout / 2 if tracked else math.inf
        """Seconds a tuple may wait in a send queue: as long again in an inbox, and it counts as failed."""
        self._asked_to_wait: set[tuple[int, int]] = set()
        """Tasks of this worker and senders that are epochs ahead of the others."""
        self._task_limiters: dict[int, RateLimiter] = {}
        """By task: shared by all its send queues where the mode knows only stop and go."""
        self._queues: dict[int, dict[str, SendQueue]] = {}
        self._queue_of: dict[int, dict[int, SendQueue]] = {}
        self._detectors: dict[int, OverloadDetector] = {}
        self._peaks: dict[int, int] = {}
        self._taken: dict[int, tuple[Meter, int]] = {task: (Meter(), 0) for task in inboxes}
        """How fast each task takes tuples, and how many it had taken."""
        self._observing = threading.Lock()
        self._signals_stopped = False
        """Another goes on from the handover state: nothing more is said."""
        for task in plan.routes.tasks_of(worker):
            self._add(task)

    def _add(self, task: int) -> None:
        plan, settings = self._plan, self._settings
        component = plan.task[task].component
        spout = component in plan.spouts
        task_limiter = self._task_limiters[task] = (
            SpoutLimiter() if settings.flow.mode == "spout" and spout else RateLimiter()
        )
        queues: dict[str, SendQueue] = {}
        for target in plan.downstream_of[component]:
            limiter = (
                task_limiter
                if settings.flow.mode == "spout"
                else make_limiter(settings.flow.mode, settings.flow.step_factor)
            )
            targets = plan.tasks_of[target]
            queues[target] = SendQueue(
                target, targets, limiter, settings.flow.overflow_bytes, self._patience, self._dispatch, self._clock
            )
        self._queues[task] = queues
        self._queue_of[task] = {target: queue for queue in queues.values() for target in queue.targets}
        if plan.upstream_of[component]:
            upstream = [each for source in plan.upstream_of[component] for each in plan.tasks_of[source]]
            spouts = [each for source in plan.spouts for each in plan.tasks_of[source]]
            detector = make_detector(
                settings.flow.mode,
                upstream,
                spouts,
                settings.flow.inbox_capacity,
                settings.flow.load_factor,
                settings.flow.step_factor,
            )
            if detector is not None:
                self._detectors[task] = detector

    def send_queues(self, task: int) -> SendQueues:
        """Where a task's tuples leave."""
        fused = [self._inboxes[target] for target in self._plan.fused_tasks(task)]
        return SendQueues(list(self._queues[task].values()), fused, self._task_limiters[task])

    def send_queue(self, source_task: int, target_task: int) -> SendQueue:
        return self._queue_of[source_task][target_task]

    def overload_detector(self, task: int) -> OverloadDetector | None:
        return self._detectors.get(task)

    # ---- what the worker drives --------------------------------------------------------------------------

    def observe(self, ahead: Collection[tuple[int, int]] = ()) -> None:
        """Look at the inboxes. Called by the reader and the main loop; one at a time is enough. ``ahead``: tasks
        and senders of which so much of a later epoch has come that they must wait for the others."""
        if not self._detectors or not self._observing.acquire(blocking=False):
            return
        try:
            if self._signals_stopped:
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
        a second the default would be empty before a signal has come anywhere."""
        taken = inbox.arrived - inbox.length
        meter, before = self._taken[task]
        if taken > before:
            meter.add(taken - before, now)
            self._taken[task] = (meter, taken)
        capacity = max(self._settings.flow.inbox_capacity, int(meter.rate(now) * self._settings.flow.inbox_time))
        if capacity != inbox.capacity:
            inbox.capacity = capacity
            if not isinstance(detector, CreditDetector):  # whose shares are given out already
                detector.resize(capacity)

    def _request_waits(self, ahead: set[tuple[int, int]]) -> None:
        for task, sender in ahead - self._asked_to_wait:
            self.messages.append(TaskMessage(task, sender, "wait"))
        for task, sender in self._asked_to_wait - ahead:
            self.messages.append(TaskMessage(task, sender, "proceed"))
        self._asked_to_wait = ahead

    def release(self, everything: bool = False) -> bool:
        """Let the send queues send what they may. True: none holds anything now."""
        for queues in self._queues.values():
            for queue in queues.values():
                if queue.held:
                    queue.release(everything)
        return not self.held

    def close(self) -> None:
        """Give the disk back."""
        for queues in self._queues.values():
            for queue in queues.values():
                queue.close()

    def wait(self) -> float:
        """Seconds until a send queue that holds something may send it, or a queue is to be looked at."""
        now = self._clock.monotonic()
        waits = [queue.wait() for queues in self._queues.values() for queue in queues.values() if queue.held]
        waits += [max(detector.due - now, _VERDICT_PAUSE) for detector in self._detectors.values()]
        return min(waits, default=math.inf)

    @property
    def held(self) -> int:
        """Tuples that wait in send queues."""
        return sum(queue.held for queues in self._queues.values() for queue in queues.values())

    def rate(self, task: int) -> float:
        """The least rate a task is held to at the moment."""
        return min(
            (queue.limiter.rate for queue in self._queues[task].values()), default=self._task_limiters[task].rate
        )

    def pressure(self, task: int) -> tuple[int, float]:
        """The longest its inbox has been since the last call, and the rate it was sent to before it slowed its
        senders; 0 while it does not."""
        inbox = self._inboxes[task]
        peak, self._peaks[task] = max(self._peaks.get(task, 0), inbox.length), inbox.length
        detector = self._detectors.get(task)
        return peak, 0.0 if detector is None else detector.demand

    # ---- going on in another process -------------------------------------------------------------------

    def handover(self) -> dict[str, Any]:
        """What was told and heard, as JSON. What send queues hold is not in it: they must be empty. Nothing more
        is said from now on, until ``resume_signals``."""
        with self._observing:
            self._signals_stopped = True
        return {
            "overload_detectors": {str(task): detector.handover() for task, detector in self._detectors.items()},
            "rate_limiters": {
                str(task): {component: queue.limiter.handover() for component, queue in queues.items()}
                for task, queues in self._queues.items()
            },
            "asked_to_wait": sorted(self._asked_to_wait),
        }

    def resume_signals(self) -> None:
        """Nobody else goes on."""
        self._signals_stopped = False

    def restore(self, handover: Mapping[str, Any]) -> None:
        """Go on from there."""
        now = self._clock.monotonic()
        for task, detector in self._detectors.items():
            detector.restore(handover["overload_detectors"][str(task)])
        for task, queues in self._queues.items():
            for component, queue in queues.items():
                queue.limiter.restore(handover["rate_limiters"][str(task)][component], now)
        self._asked_to_wait = {(task, sender) for task, sender in handover["asked_to_wait"]}

    # ---- what others say -------------------------------------------------------------------------------

    def on_message(self, message: TaskMessage) -> None:
        """A message for one of the worker's tasks."""
        component = self._plan.task[message.source].component
        now = self._clock.monotonic()
        if message.kind in ("hold", "resume"):
            limiter, measured = (
                self._task_limiters[message.target],
                0.0,
            )  # also where all it sends stays in the worker
        else:
            queue = self._queues[message.target][component]
            limiter, measured = queue.limiter, queue.meter.rate(now)
        changed = limiter.handle(message, now, measured)
        if changed or message.kind in ("slow", "cancel"):  # an answer to those, for the next is not sent before
            self.states.append(TaskFlowState(message.target, component, limiter.rate))

    def on_state(self, state: TaskFlowState) -> None:
        """What a task somewhere did about its messages."""
        for task in self._plan.tasks_of.get(state.towards, ()):
            detector = self._detectors.get(task)
            if detector is not None:
                detector.on_sender_adjusted()

    def exclude_tasks(self, source_task: int, component: str, tasks: Sequence[int]) -> None:
        """Nothing is sent to these tasks at the moment (migration)."""
        limiter = self._queues[source_task][component].limiter
        if isinstance(limiter, StepLimiter):
            limiter.exclude_tasks(tasks, self._clock.monotonic())
