"""What leaves a worker, and when: rows for the next stage, and frames for later ones that only pass through."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa

from penstock.clock import Clock
from penstock.frames.header import Header, Kind
from penstock.plan.model import Plan, WorkerId
from penstock.protocol.events import WorkerRouted
from penstock.settings import Settings

Row = tuple[int, bytes | pa.Buffer | None]
"""A slot of the next stage, and a frame; None is a nudge: Spark hands a row on when it sees the next."""
Send = Callable[[Header, bytes | pa.Buffer], None]


class Outgoing:
    """Rows for the next stage, in order. Collected by worker, and given to the host by slot."""

    def __init__(
        self, worker: WorkerId, plan: Plan, clock: Clock, linger: float, slots: Sequence[Sequence[int]] = ()
    ) -> None:
        """``slots``: of each worker of the next stage; empty: each has the slot with its own index."""
        self._slots = [list(each) for each in slots]
        self._routed: list[Row] = []
        """Addressed to slots already; they leave before all others."""
        self._worker, self._plan, self._now, self._linger = worker, plan, clock.monotonic, linger
        self._rows: list[Row] = []
        self._unseen: dict[int, float] = {}
        """Workers whose last row nothing follows yet, and when it was sent."""
        last = worker.stage + 1 == len(plan.stages)
        self._next = range(0 if last else plan.stages[worker.stage + 1].workers)

    def send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        hop = self._plan.next_hop(self._worker, WorkerId(header.target_stage, header.target_worker))
        self._rows.append((hop, frame))
        self._unseen[hop] = self._now()

    def mark(self, epoch: int, last: bool) -> None:
        """The epoch ends here, for every worker of the next stage."""
        for worker in self._next:
            self._rows += [(worker, self._own(Kind.MARKER, worker, epoch, last)), (worker, None)]
            self._unseen.pop(worker, None)

    def warm_up(self) -> None:
        """Send a frame over every channel to the next stage."""
        for worker in self._next:
            self._rows += [(worker, self._own(Kind.WARM, worker)), (worker, None)]

    def route(self, worker: int, slots: list[int]) -> WorkerRouted:
        """Send rows for that worker of the next stage to these slots from now on. The first frame to a slot that
        is new warms its channel; the last one to a slot that is no longer used says so."""
        before, self._slots[worker] = self._slots[worker], list(slots)
        for changed, kind in ((set(slots) - set(before), Kind.WARM), (set(before) - set(slots), Kind.LAST)):
            frame = self._own(kind, worker)
            self._routed += [row for slot in changed for row in ((slot, frame), (slot, None))]
        return WorkerRouted(worker, slots)

    def nudge(self, idle: bool) -> None:
        """Follow the last frame to a worker by an empty row when nothing else does: at once when the worker has
        nothing to do, else when no frame has gone that way for the length of the linger."""
        if not self._unseen:
            return
        limit = self._now() - self._linger
        for worker in [worker for worker, sent in self._unseen.items() if idle or sent <= limit]:
            self._rows.append((worker, None))
            del self._unseen[worker]

    def take(self) -> list[Row]:
        """All rows that leave now, addressed to slots."""
        rows, self._rows = self._rows, []
        if self._slots:
            rows = [(slot, frame) for worker, frame in rows for slot in self._slots[worker]]
        if self._routed:
            rows, self._routed = self._routed + rows, []
        return rows

    def wait(self) -> float:
        """Seconds until a nudge is due; inf: none is."""
        return min(self._unseen.values()) + self._linger - self._now() if self._unseen else math.inf

    def __bool__(self) -> bool:
        """A nudge is due sooner or later."""
        return bool(self._unseen)

    def _own(self, kind: Kind, worker: int, epoch: int = 0, last: bool = False) -> bytes:
        here = self._worker
        return Header(kind, here.stage + 1, worker, here.stage, here.index, epoch=epoch, rows=int(last)).pack()


class Linger:
    """When tuples that wait in a worker leave it. A frame costs the same whatever is in it, and every hop anew."""

    def __init__(self, settings: Settings, targets: int) -> None:
        """``targets``: the most tasks in other workers that a task of the worker sends to; each gets a frame."""
        self._busy = settings.transport.busy_linger
        self._idle = max(settings.transport.linger, min(settings.transport.linger * targets, self._busy))
        self._spacing = self._idle - settings.transport.linger
        """Between two times a bolt sends at once; 0 where it sends to one task."""
        self._oldest: float | None = None
        self._sent = 0.0

    @property
    def waiting(self) -> bool:
        return self._oldest is not None

    def over(self, now: float, idle: bool, emits: bool) -> bool:
        """Whether all that waits leaves now. A bolt with nothing more to do (``idle``) sends at once: its input
        came in frames already; but one that sends to many tasks not all the time, for what follows multiplies its
        frames. Where a spout ``emits``, tuples wait for company as long as the linger says. A worker that never
        pauses waits longer: it has tuples enough."""
        at_once = idle and not emits and now - self._sent >= self._spacing
        return at_once or (self._oldest is not None and now - self._oldest >= (self._idle if idle else self._busy))

    def sent(self, now: float) -> None:
        self._sent = now

    def note(self, now: float, waits: bool) -> None:
        """Whether anything waits now."""
        if not waits:
            self._oldest = None
        elif self._oldest is None:
            self._oldest = now

    def wait(self, now: float, emits: bool) -> float:
        """Seconds until it is over; inf: nothing waits."""
        if self._oldest is None:
            return math.inf
        due = self._oldest + self._idle
        return (due if emits else min(due, self._sent + self._spacing)) - now


class Relay:
    """Frames for later stages, filled by the worker's reader, emptied by its main loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames: deque[tuple[Header, pa.Buffer]] = deque()
        self._later: deque[tuple[Header, pa.Buffer]] = deque()
        """Of epochs that another may have to relay."""

    def offer(self, header: Header, frame: pa.Buffer, however_many: bool) -> bool:
        if len(self._frames) >= self._most and not however_many:
            return False
        self._frames.append((header, frame))
        return True

    def release(self, send: Send, first: int, last: float = math.inf) -> None:
        """Send on what is of the epochs from ``first`` to ``last``. What is earlier another has relayed; what is
        later is set aside."""
        while self._frames:
            header, frame = self._frames.popleft()
            if header.epoch > last:
                self._later.append((header, frame))
            elif header.epoch >= first:
                send(header, frame)

    def requeue_set_aside(self) -> None:
        """What was set aside comes first again."""
        self._frames.extendleft(reversed(self._later))
        self._later.clear()

    def __len__(self) -> int:
        return len(self._frames)
