"""The sending half of flow control in a worker: send queues and their rate limiters.

``control.rate_limiters`` decides how much may be sent; this module applies it to frames and tasks. A task is not
run while a send queue has no room for what it may emit. The receiving half is ``worker.overload``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from penstock.clock import Clock
from penstock.control.backpressure import (
    RateLimiter,
    SpoutLimiter,
    StepLimiter,
    make_limiter,
)
from penstock.control.flow_states import LimiterState
from penstock.control.pace import Meter
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.frames.header import Header
from penstock.plan.model import Plan, WorkerId
from penstock.settings import Settings
from penstock.worker.inbox import Inbox
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill

_HELD_MEMORY = 1024 * 1024  # bytes a send queue holds in memory: a few frames
# seconds of its rate a frame on a slowed send queue carries: small steps; at 10 ms they cost 4 %
_FRAME_TIME = 0.05
_LEAST_ROWS = 16  # tuples of such a frame; fewer would cost more than they smooth
_AT_ONCE = 4 * 1024 * 1024  # bytes a send queue releases in one turn; all it may hold would not fit in memory

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
    """The send queues of a worker's tasks: what they may send now, what waits, and what their receivers have asked
    for. Used by the worker's loop only."""

    def __init__(self, plan: Plan, settings: Settings, clock: Clock, dispatch: Dispatch, worker: WorkerId) -> None:
        self._states: list[TaskFlowState] = []
        self._plan, self._settings, self._clock, self._dispatch = plan, settings, clock, dispatch
        tracked = settings.delivery.guarantee == "at_least_once"
        self._patience = settings.delivery.message_timeout / 2 if tracked else math.inf
        """Seconds that a tuple may wait in a send queue. After as long again in an inbox it counts as failed."""
        self._task_limiters: dict[int, RateLimiter] = {}
        """By task: shared by all its send queues in mode ``spout``, which knows only stop and go."""
        self._queues: dict[int, dict[str, SendQueue]] = {}
        """By task and by the component that it sends to."""
        self._queue_of: dict[int, dict[int, SendQueue]] = {}
        """By task and by the task that it sends to."""
        for task in plan.routes.tasks_of(worker):
            self._add(task)

    def _add(self, task: int) -> None:
        plan, flow = self._plan, self._settings.flow
        component = plan.task[task].component
        stops_spouts = flow.mode == "spout"
        task_limiter = SpoutLimiter() if stops_spouts and component in plan.spouts else RateLimiter()
        queues: dict[str, SendQueue] = {}
        for target in plan.downstream_of[component]:
            limiter = task_limiter if stops_spouts else make_limiter(flow.mode, flow.step_factor)
            targets = plan.tasks_of[target]
            queues[target] = SendQueue(
                target, targets, limiter, flow.overflow_bytes, self._patience, self._dispatch, self._clock
            )
        self._task_limiters[task] = task_limiter
        self._queues[task] = queues
        self._queue_of[task] = {target: queue for queue in queues.values() for target in queue.targets}

    def send_queues(self, task: int, fused: Sequence[Inbox]) -> SendQueues:
        """Where a task's tuples leave. ``fused``: the inboxes of the tasks that it sends to inside the worker."""
        return SendQueues(list(self._queues[task].values()), fused, self._task_limiters[task])

    def send_queue(self, source_task: int, target_task: int) -> SendQueue:
        return self._queue_of[source_task][target_task]

    # ---- what the worker drives ------------------------------------------------------------------------

    def release(self, everything: bool = False) -> bool:
        """Let the send queues send what they may. True: none holds anything now."""
        for queues in self._queues.values():
            for queue in queues.values():
                if queue.held:
                    queue.release(everything)
        return not self.held

    def close(self) -> None:
        """Delete what waits on disk."""
        for queues in self._queues.values():
            for queue in queues.values():
                queue.close()

    def wait(self) -> float:
        """Seconds until a send queue that holds something may send it."""
        waits = [queue.wait() for queues in self._queues.values() for queue in queues.values() if queue.held]
        return min(waits, default=math.inf)

    @property
    def held(self) -> int:
        """Tuples that wait in send queues."""
        return sum(queue.held for queues in self._queues.values() for queue in queues.values())

    def rate(self, task: int) -> float:
        """The lowest rate that a task is limited to now."""
        return min(
            (queue.limiter.rate for queue in self._queues[task].values()), default=self._task_limiters[task].rate
        )

    # ---- moving to another process ---------------------------------------------------------------------

    def handover(self) -> dict[int, dict[str, LimiterState]]:
        """What the rate limiters were asked for, by task and component. The send queues must be empty."""
        return {
            task: {component: queue.limiter.handover() for component, queue in queues.items()}
            for task, queues in self._queues.items()
        }

    def restore(self, limiters: Mapping[int, Mapping[str, LimiterState]]) -> None:
        """Continue from a ``handover``."""
        now = self._clock.monotonic()
        for task, queues in self._queues.items():
            for component, queue in queues.items():
                queue.limiter.restore(limiters[task][component], now)

    # ---- signals ---------------------------------------------------------------------------------------

    def on_message(self, message: TaskMessage) -> None:
        """A receiver asks one of the worker's tasks to slow down, or to go on."""
        component = self._plan.task[message.source].component
        now = self._clock.monotonic()
        if message.kind in ("hold", "resume"):
            # Also where everything that the task sends stays in the worker.
            limiter, measured = self._task_limiters[message.target], 0.0
        else:
            queue = self._queues[message.target][component]
            limiter, measured = queue.limiter, queue.meter.rate(now)
        changed = limiter.handle(message, now, measured)
        if changed or message.kind in (
            "slow",
            "cancel",
        ):  # the receiver sends the next one when these are answered
            self._states.append(TaskFlowState(message.target, component, limiter.rate))

    def take_states(self) -> list[TaskFlowState]:
        """What the tasks did about the messages since the last call; to be published on the message board."""
        states, self._states = self._states, []
        return states

    def exclude_tasks(self, source_task: int, component: str, tasks: Sequence[int]) -> None:
        """Nothing is sent to these tasks at the moment (migration)."""
        limiter = self._queues[source_task][component].limiter
        if isinstance(limiter, StepLimiter):
            limiter.exclude_tasks(tasks, self._clock.monotonic())
