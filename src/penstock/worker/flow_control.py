"""The sending half of flow control in a worker: send queues and their rate limiters.

``control.rate_limiters`` decides how much may be sent; this module applies the decisions to frames and tasks. A
task is not run while a send queue has no room for the tuples that it may emit. The receiving half is
``worker.overload``.
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
    queue_time,
)
from penstock.control.flow_states import LimiterState
from penstock.control.pace import Meter
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.frames.header import Header
from penstock.plan.model import Plan, WorkerId
from penstock.settings import Settings
from penstock.worker.inbox import Inbox
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill, SpillView

_HELD_MEMORY = 1024 * 1024
"""Bytes of waiting frames that a send queue keeps in memory: a few frames. The others are on disk."""
_FRAME_TIME = 0.05
"""Seconds: while a send queue is slowed down, a frame carries the tuples that it may send in this time. Short, so
that tuples arrive steadily; at 10 ms the small frames cost the loop of the receiving bolt 4 %."""
LEAST_ROWS = 16
"""Tuples of such a frame, however low the rate is: smaller frames would cost more than the steadier arrival is
worth. Fewer only if these would be a large part of what may wait."""
_FRAMES_IN_QUEUE = 4
"""The least number of frames that make up what may wait in a send queue."""
_RELEASED_PER_TURN = 4 * 1024 * 1024
"""Bytes that a send queue releases in one turn. All frames that may wait on disk would not fit in memory."""

Dispatch = Callable[[Header, bytes | pa.Buffer], None]


class SendQueue:
    """The frames of one task for one component. A frame is sent at once if the rate limiter permits it; otherwise
    it waits here, in order."""

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
        """``limit``: bytes that may wait, if the limiter is ``patient``; otherwise the queue is full as soon as a
        frame waits. ``longest``: seconds that a tuple may wait. ``dispatch`` sends a frame."""
        self.component, self.targets, self.limiter = component, tuple(targets), limiter
        self.meter = Meter()
        self._limit, self._longest_wait = limit if limiter.patient else 0, longest
        self._held = Spill(_HELD_MEMORY)
        self._dispatch, self._now = dispatch, clock.monotonic

    @property
    def held(self) -> int:
        """Number of waiting tuples."""
        return self._held.rows

    @property
    def full(self) -> bool:
        """True if the task must not run, even if it could send to other components: more bytes wait than the limit
        allows, or more tuples than can be sent in the time that a tuple may wait."""
        held = self._held
        if not held:
            return False
        late = math.isfinite(self._longest_wait) and held.rows > self.limiter.rate * self._longest_wait
        return late or held.bytes >= self._limit

    @property
    def slack(self) -> float:
        """How many more tuples may wait before the queue is full; infinity while the rate is not limited."""
        rate = self.limiter.rate
        if rate == math.inf or self._longest_wait == math.inf:
            return math.inf
        return max(0.0, rate * self._longest_wait - self._held.rows)

    @property
    def frame_rows(self) -> float:
        """The maximum number of tuples that a frame should carry at the current rate."""
        rate = self.limiter.rate
        if math.isinf(rate):
            return math.inf
        least = max(1.0, min(LEAST_ROWS, rate * self._longest_wait / _FRAMES_IN_QUEUE)) if rate else LEAST_ROWS
        return max(least, rate * _FRAME_TIME)

    def room(self) -> float:
        """Number of tuples that may be sent now; 0 while others wait."""
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
        """Send waiting frames, at most a few megabytes in one call. With ``everything`` the rate limiter is
        ignored: at the end of an epoch all frames must leave, because the marker must not overtake them."""
        left = _RELEASED_PER_TURN
        while left > 0 and (parcel := self._held.first()) is not None:
            if not everything and self.limiter.room(parcel.header.target_task, self._now()) <= 0:
                return
            self._held.drop()
            left -= parcel.bytes
            self._send(parcel.header, parcel.frame)

    def view(self) -> SpillView:
        """The frames that wait now. The caller closes the view."""
        return self._held.view()

    def close(self) -> None:
        self._held.close()

    def wait(self) -> float:
        """Seconds until ``release`` can send a frame; infinity if that depends on a message."""
        return self.limiter.wait(self._now())

    def _send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        self.limiter.record_sent(header.target_task, header.rows)
        self.meter.add(header.rows, self._now())
        self._dispatch(header, frame)


class SendQueues:
    """The ways by which a task sends tuples: a send queue for each component in other workers, and the inboxes of
    the tasks that are fused with it. ``task_limiter`` stops the whole task (mode ``spout``)."""

    def __init__(self, queues: Sequence[SendQueue], fused: Sequence[Inbox], task_limiter: RateLimiter) -> None:
        self.queues, self.fused, self._task_limiter = queues, fused, task_limiter
        self._patient = all(queue.limiter.patient for queue in queues)

    @property
    def held_back(self) -> bool:
        """True if the task must not run. A task that sends to several components continues as long as one of them
        accepts tuples; tuples for the others wait on disk, within a limit."""
        for inbox in self.fused:
            if inbox.full:
                return True
        waiting = 0
        for queue in self.queues:
            if queue.held:
                if queue.full:
                    return True
                waiting += 1
        return waiting > 0 and waiting == len(self.queues) and not self.fused

    def room(self) -> float:
        """Number of tuples that the task may emit now. It may be a fraction; the caller rounds it up."""
        if self.held_back or not self._task_limiter.rate:
            return 0.0
        inside = min((inbox.capacity - inbox.length for inbox in self.fused), default=math.inf)
        if not self.queues or (self.fused and self._patient):
            return inside
        rooms = [queue.room() for queue in self.queues]
        return min(inside, max(rooms) if self._patient else min(rooms))

    def wait(self) -> float:
        """Seconds until a rate limiter permits more tuples; infinity if that depends on a message."""
        return min((queue.wait() for queue in self.queues), default=math.inf)


class FlowControl:
    """The send queues of all tasks of a worker. Passes the messages of receiving tasks to their rate limiters.
    Used by the worker's loop only."""

    def __init__(self, plan: Plan, settings: Settings, clock: Clock, dispatch: Dispatch, worker: WorkerId) -> None:
        self._states: list[TaskFlowState] = []
        self._plan, self._settings, self._clock, self._dispatch = plan, settings, clock, dispatch
        tracked = settings.delivery.guarantee == "at_least_once"
        self._longest_wait = queue_time(settings, plan.hops) if tracked else math.inf
        """Seconds that a tuple may wait in a send queue."""
        self._task_limiters: dict[int, RateLimiter] = {}
        """By task. In mode ``spout``, which stops or resumes a whole task, all send queues of the task share
        it."""
        self._queues: dict[int, dict[str, SendQueue]] = {}
        """By sending task and receiving component."""
        self._queue_of: dict[int, dict[int, SendQueue]] = {}
        """By sending task and receiving task."""
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
            receivers = plan.receivers_of(task, target)
            queues[target] = SendQueue(
                target, receivers, limiter, flow.overflow_bytes, self._longest_wait, self._dispatch, self._clock
            )
        self._task_limiters[task] = task_limiter
        self._queues[task] = queues
        self._queue_of[task] = {
            target: queue for component, queue in queues.items() for target in plan.tasks_of[component]
        }

    def send_queues(self, task: int, fused: Sequence[Inbox]) -> SendQueues:
        """The ways by which a task sends tuples. ``fused``: the inboxes of the tasks in this worker to which it
        sends."""
        return SendQueues(list(self._queues[task].values()), fused, self._task_limiters[task])

    def send_queue(self, source_task: int, target_task: int) -> SendQueue:
        return self._queue_of[source_task][target_task]

    # ---- sending ---------------------------------------------------------------------------------------

    def release(self, everything: bool = False) -> bool:
        """Call ``release`` on all send queues. Returns True if no tuple waits now."""
        for queues in self._queues.values():
            for queue in queues.values():
                if queue.held:
                    queue.release(everything)
        return not self.held

    def views(self) -> list[SpillView]:
        """The frames that wait in each send queue now. The caller closes the views."""
        return [queue.view() for queues in self._queues.values() for queue in queues.values() if queue.held]

    def close(self) -> None:
        """Delete the temporary files."""
        for queues in self._queues.values():
            for queue in queues.values():
                queue.close()

    def wait(self) -> float:
        """Seconds until a waiting frame may be sent; infinity if none waits."""
        waits = [queue.wait() for queues in self._queues.values() for queue in queues.values() if queue.held]
        return min(waits, default=math.inf)

    @property
    def held(self) -> int:
        """Number of tuples that wait in send queues."""
        return sum(queue.held for queues in self._queues.values() for queue in queues.values())

    def rate(self, task: int) -> float:
        """The lowest rate to which a task is limited now, in tuples per second; infinity if it is not limited."""
        return min(
            (queue.limiter.rate for queue in self._queues[task].values()), default=self._task_limiters[task].rate
        )

    # ---- moving to another process ---------------------------------------------------------------------

    def handover(self) -> dict[int, dict[str, LimiterState]]:
        """The state of the rate limiters, by sending task and receiving component. The send queues must be
        empty."""
        return {
            task: {component: queue.limiter.handover() for component, queue in queues.items()}
            for task, queues in self._queues.items()
        }

    def restore(self, limiters: Mapping[int, Mapping[str, LimiterState]]) -> None:
        """Continue from the result of ``handover`` in another process."""
        now = self._clock.monotonic()
        for task, queues in self._queues.items():
            for component, queue in queues.items():
                queue.limiter.restore(limiters[task][component], now)

    # ---- signals ---------------------------------------------------------------------------------------

    def on_message(self, message: TaskMessage) -> None:
        """Apply the message of a receiving task that asks one of the worker's tasks to slow down or to
        continue."""
        component = self._plan.task[message.source].component
        now = self._clock.monotonic()
        if message.kind in ("hold", "resume"):
            # not a send queue's limiter: a task whose receivers are all in its worker has no send queue
            limiter, measured = self._task_limiters[message.target], 0.0
        else:
            queue = self._queues[message.target][component]
            limiter, measured = queue.limiter, queue.meter.rate(now)
        changed = limiter.handle(message, now, measured)
        # the receiver sends its next signal when these two are answered
        if changed or message.kind in ("slow", "cancel"):
            self._states.append(TaskFlowState(message.target, component, limiter.rate))

    def take_states(self) -> list[TaskFlowState]:
        """Remove and return the new flow states of tasks that have handled messages since the last call. The host
        publishes them on the message board."""
        states, self._states = self._states, []
        return states

    def exclude_tasks(self, source_task: int, component: str, tasks: Sequence[int]) -> None:
        """Ignore the signals of these tasks (mode ``step``), because nothing is sent to them during a
        migration."""
        limiter = self._queues[source_task][component].limiter
        if isinstance(limiter, StepLimiter):
            limiter.exclude_tasks(tasks, self._clock.monotonic())
