"""Flow control in a slot: lanes for what its tasks send, watches over what they receive.

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
from penstock.control.backpressure import CreditWatch, Gate, SpoutGate, StepGate, Watch, make_gate, make_watch
from penstock.control.pace import Meter
from penstock.control.signals import TaskMessage, TaskState
from penstock.frames.header import Header
from penstock.plan.model import Plan, SlotId
from penstock.runtime.inbox import Inbox
from penstock.runtime.parcel import Parcel
from penstock.runtime.spill import Spill
from penstock.settings import Settings

_HELD_MEMORY = 1024 * 1024  # bytes a lane holds in memory: a few frames
_FRAME_TIME = 0.05  # seconds of its rate a frame on a slowed lane carries: small steps; at 10 ms they cost 4 %
_LEAST_ROWS = 16  # tuples of such a frame; fewer would cost more than they smooth
_AT_ONCE = 4 * 1024 * 1024  # bytes a lane releases in one turn; all it may hold would not fit in memory
_VERDICT_PAUSE = 0.02  # seconds between two looks at a queue whose timer has ended and whose way is not known yet

Dispatch = Callable[[Header, bytes | pa.Buffer], None]


class Lane:
    """From one task to one component. What may go now goes; what may not waits here, in order."""

    def __init__(
        self,
        component: str,
        targets: Sequence[int],
        gate: Gate,
        limit: int,
        longest: float,
        dispatch: Dispatch,
        clock: Clock,
    ) -> None:
        self.component, self.targets, self.gate = component, tuple(targets), gate
        self.meter = Meter()
        self._limit, self._longest = limit if gate.patient else 0, longest
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
        late = math.isfinite(self._longest) and held.rows > self.gate.rate * self._longest
        return late or held.bytes >= self._limit

    @property
    def frame_rows(self) -> float:
        """How many tuples a frame should carry at most."""
        rate = self.gate.rate
        return math.inf if math.isinf(rate) else max(_LEAST_ROWS, rate * _FRAME_TIME)

    def room(self) -> float:
        """Tuples that may go now."""
        if self._held:
            return 0.0
        now = self._now()
        return min(self.gate.room(target, now) for target in self.targets)

    def send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        if self._held or self.gate.room(header.target_task, self._now()) <= 0:
            self._held.add(Parcel(header, frame if isinstance(frame, pa.Buffer) else pa.py_buffer(frame)))
        else:
            self._send(header, frame)

    def release(self, everything: bool = False) -> None:
        """Send what may go by now, a few megabytes of it; ``everything``: whether it may or not, at the end of an
        epoch, for its marker must not overtake it."""
        left = _AT_ONCE
        while left > 0 and (parcel := self._held.first()) is not None:
            if not everything and self.gate.room(parcel.header.target_task, self._now()) <= 0:
                return
            self._held.drop()
            left -= parcel.bytes
            self._send(parcel.header, parcel.content)

    def close(self) -> None:
        self._held.close()

    def wait(self) -> float:
        """Seconds until ``release`` has something to do."""
        return self.gate.wait(self._now())

    def _send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        self.gate.sent(header.target_task, header.rows)
        self.meter.add(header.rows, self._now())
        self._dispatch(header, frame)


class Outlets:
    """All a task sends through: a lane for each component in another slot, the inboxes of those in its own; and
    the gate that stops it whatever it sends where (mode ``spout``)."""

    def __init__(self, lanes: Sequence[Lane], chained: Sequence[Inbox], whole: Gate) -> None:
        self.lanes, self.chained, self._whole = lanes, chained, whole
        self._patient = all(lane.gate.patient for lane in lanes)

    @property
    def held_back(self) -> bool:
        """The task must not run. A task that sends to several components goes on as long as one of them takes
        what it is sent: what is for the others waits on disk, within a limit."""
        if any(inbox.full for inbox in self.chained):
            return True
        waiting = 0
        for lane in self.lanes:
            if lane.held:
                if lane.full:
                    return True
                waiting += 1
        return waiting > 0 and waiting == len(self.lanes) and not self.chained

    def room(self) -> float:
        """How many tuples the task may emit now, one more than fit."""
        if self.held_back or not self._whole.rate:
            return 0.0
        if not self.lanes or (self.chained and self._patient):
            return math.inf
        rooms = [lane.room() for lane in self.lanes]
        return max(rooms) if self._patient else min(rooms)

    def wait(self) -> float:
        """Seconds until there may be room."""
        return min((lane.wait() for lane in self.lanes), default=math.inf)


class Flow:
    """Lanes and watches of one slot, and what they have to say to others."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        clock: Clock,
        inboxes: dict[int, Inbox],
        dispatch: Dispatch,
        slot: SlotId,
    ) -> None:
        self.messages: deque[TaskMessage] = deque()
        """To be posted on the board."""
        self.states: deque[TaskState] = deque()
        """To be published there."""
        self._plan, self._settings, self._clock = plan, settings, clock
        self._inboxes, self._dispatch = inboxes, dispatch
        tracked = settings.delivery == "at_least_once"
        self._patience = settings.message_timeout / 2 if tracked else math.inf
        """Seconds a tuple may wait in a lane: as long again in an inbox, and it counts as failed."""
        self._asked_to_wait: set[tuple[int, int]] = set()
        """Tasks of this slot and senders that are epochs ahead of the others."""
        self._whole: dict[int, Gate] = {}
        """By task: shared by all its lanes where the mode knows only stop and go."""
        self._lanes: dict[int, dict[str, Lane]] = {}
        self._lane_of: dict[int, dict[int, Lane]] = {}
        self._watches: dict[int, Watch] = {}
        self._peaks: dict[int, int] = {}
        self._taken: dict[int, tuple[Meter, int]] = {task: (Meter(), 0) for task in inboxes}
        """How fast each task takes tuples, and how many it had taken."""
        self._observing = threading.Lock()
        self._frozen = False
        """Another goes on from the memo: nothing more is said."""
        for task in plan.routes.tasks_of(slot):
            self._add(task)

    def _add(self, task: int) -> None:
        plan, settings = self._plan, self._settings
        component = plan.task[task].component
        spout = component in plan.spouts
        whole = self._whole[task] = SpoutGate() if settings.flow == "spout" and spout else Gate()
        lanes: dict[str, Lane] = {}
        for target in plan.downstream_of[component]:
            gate = whole if settings.flow == "spout" else make_gate(settings.flow, settings.step_factor)
            targets = plan.tasks_of[target]
            lanes[target] = Lane(
                target, targets, gate, settings.overflow_bytes, self._patience, self._dispatch, self._clock
            )
        self._lanes[task] = lanes
        self._lane_of[task] = {target: lane for lane in lanes.values() for target in lane.targets}
        if plan.upstream_of[component]:
            upstream = [each for source in plan.upstream_of[component] for each in plan.tasks_of[source]]
            spouts = [each for source in plan.spouts for each in plan.tasks_of[source]]
            watch = make_watch(
                settings.flow,
                upstream,
                spouts,
                settings.inbox_capacity,
                settings.load_factor,
                settings.step_factor,
            )
            if watch is not None:
                self._watches[task] = watch

    def outlets(self, task: int) -> Outlets:
        """Where a task's tuples leave."""
        chained = [self._inboxes[target] for target in self._plan.chained_tasks(task)]
        return Outlets(list(self._lanes[task].values()), chained, self._whole[task])

    def lane(self, source_task: int, target_task: int) -> Lane:
        return self._lane_of[source_task][target_task]

    def watch(self, task: int) -> Watch | None:
        return self._watches.get(task)

    # ---- what the slot drives --------------------------------------------------------------------------

    def observe(self, ahead: Collection[tuple[int, int]] = ()) -> None:
        """Look at the inboxes. Called by the reader and the main loop; one at a time is enough. ``ahead``: tasks
        and senders of which so much of a later epoch has come that they must wait for the others."""
        if not self._watches or not self._observing.acquire(blocking=False):
            return
        try:
            if self._frozen:
                return
            now = self._clock.monotonic()
            for task, watch in self._watches.items():
                inbox = self._inboxes[task]
                self._resize(task, inbox, watch, now)
                if inbox.length > self._peaks.get(task, 0):
                    self._peaks[task] = inbox.length
                for target, kind, value in watch.observe(now, inbox.length, inbox.arrived):
                    self.messages.append(TaskMessage(task, target, kind, value))
            if ahead or self._asked_to_wait:
                self._let_wait(set(ahead))
        finally:
            self._observing.release()

    def _resize(self, task: int, inbox: Inbox, watch: Watch, now: float) -> None:
        """An inbox holds a tenth of a second's work, if that is more than the setting says: at two million tuples
        a second the default would be empty before a signal has come anywhere."""
        taken = inbox.arrived - inbox.length
        meter, before = self._taken[task]
        if taken > before:
            meter.add(taken - before, now)
            self._taken[task] = (meter, taken)
        capacity = max(self._settings.inbox_capacity, int(meter.rate(now) * self._settings.inbox_time))
        if capacity != inbox.capacity:
            inbox.capacity = capacity
            if not isinstance(watch, CreditWatch):  # whose shares are given out already
                watch.resize(capacity)

    def _let_wait(self, ahead: set[tuple[int, int]]) -> None:
        for task, sender in ahead - self._asked_to_wait:
            self.messages.append(TaskMessage(task, sender, "wait"))
        for task, sender in self._asked_to_wait - ahead:
            self.messages.append(TaskMessage(task, sender, "proceed"))
        self._asked_to_wait = ahead

    def release(self, everything: bool = False) -> bool:
        """Let the lanes send what they may. True: none holds anything now."""
        for lanes in self._lanes.values():
            for lane in lanes.values():
                if lane.held:
                    lane.release(everything)
        return not self.held

    def close(self) -> None:
        """Give the disk back."""
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.close()

    def wait(self) -> float:
        """Seconds until a lane that holds something may send it, or a queue is to be looked at."""
        now = self._clock.monotonic()
        waits = [lane.wait() for lanes in self._lanes.values() for lane in lanes.values() if lane.held]
        waits += [max(watch.due - now, _VERDICT_PAUSE) for watch in self._watches.values()]
        return min(waits, default=math.inf)

    @property
    def held(self) -> int:
        """Tuples that wait in lanes."""
        return sum(lane.held for lanes in self._lanes.values() for lane in lanes.values())

    def rate(self, task: int) -> float:
        """The least rate a task is held to at the moment."""
        return min((lane.gate.rate for lane in self._lanes[task].values()), default=self._whole[task].rate)

    def pressure(self, task: int) -> tuple[int, float]:
        """The longest its inbox has been since the last call, and the rate it was sent to before it slowed its
        senders; 0 while it does not."""
        inbox = self._inboxes[task]
        peak, self._peaks[task] = max(self._peaks.get(task, 0), inbox.length), inbox.length
        watch = self._watches.get(task)
        return peak, 0.0 if watch is None else watch.demand

    # ---- going on in another process -------------------------------------------------------------------

    def memo(self) -> dict[str, Any]:
        """What was told and heard, as JSON. What lanes hold is not in it: they must be empty. Nothing more is said
        from now on, until ``thaw``."""
        with self._observing:
            self._frozen = True
        return {
            "watches": {str(task): watch.memo() for task, watch in self._watches.items()},
            "gates": {
                str(task): {component: lane.gate.memo() for component, lane in lanes.items()}
                for task, lanes in self._lanes.items()
            },
            "asked_to_wait": sorted(self._asked_to_wait),
        }

    def thaw(self) -> None:
        """Nobody else goes on."""
        self._frozen = False

    def restore(self, memo: Mapping[str, Any]) -> None:
        """Go on from there."""
        now = self._clock.monotonic()
        for task, watch in self._watches.items():
            watch.restore(memo["watches"][str(task)])
        for task, lanes in self._lanes.items():
            for component, lane in lanes.items():
                lane.gate.restore(memo["gates"][str(task)][component], now)
        self._asked_to_wait = {(task, sender) for task, sender in memo["asked_to_wait"]}

    # ---- what others say -------------------------------------------------------------------------------

    def receive(self, message: TaskMessage) -> None:
        """A message for one of the slot's tasks."""
        component = self._plan.task[message.source].component
        now = self._clock.monotonic()
        if message.kind in ("hold", "resume"):
            gate, measured = self._whole[message.target], 0.0  # also where all it sends stays in the slot
        else:
            lane = self._lanes[message.target][component]
            gate, measured = lane.gate, lane.meter.rate(now)
        changed = gate.take(message, now, measured)
        if changed or message.kind in ("slow", "cancel"):  # an answer to those, for the next is not sent before
            self.states.append(TaskState(message.target, component, gate.rate))

    def heard(self, state: TaskState) -> None:
        """What a task somewhere did about its messages."""
        for task in self._plan.tasks_of.get(state.towards, ()):
            watch = self._watches.get(task)
            if watch is not None:
                watch.enacted()

    def pass_by(self, source_task: int, component: str, tasks: Sequence[int]) -> None:
        """Nothing is sent to these tasks at the moment (migration)."""
        gate = self._lanes[source_task][component].gate
        if isinstance(gate, StepGate):
            gate.pass_by(tasks, self._clock.monotonic())
