"""The output of a worker: rows for the next stage, frames for later stages that the worker relays, and the time
at which waiting tuples are sent."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa

from penstock.clock import Clock
from penstock.frames.header import HEADER_BYTES, Header, Kind, MarkerFlag, with_epoch
from penstock.plan.model import Plan, WorkerId
from penstock.protocol.events import WorkerRouted
from penstock.settings import Settings
from penstock.worker.link_meter import PROBE_BYTES, PROBES

Row = tuple[int, bytes | pa.Buffer | None]
"""⟨Slot of the next stage, frame⟩. None instead of a frame is a nudge, an empty row: Spark delivers a row only
when the next one follows."""
Send = Callable[[Header, bytes | pa.Buffer], None]
NO_FLAGS = MarkerFlag(0)


class Outgoing:
    """Rows for the next stage, in order. They are collected by receiving worker; ``take`` addresses them to
    slots. Used by the worker's loop only."""

    def __init__(
        self, worker: WorkerId, plan: Plan, clock: Clock, linger: float, slots: Sequence[Sequence[int]] = ()
    ) -> None:
        """``slots``: the slots of each worker of the next stage. If it is empty, each worker has the slot with
        its own index."""
        self._slots = [list(each) for each in slots]
        self._routed: list[Row] = []
        """Rows that are addressed to slots already. They are sent before all others."""
        self._worker, self._plan, self._now, self._linger = worker, plan, clock.monotonic, linger
        self._rows: list[Row] = []
        self._epoch = 0
        """The epoch after the worker's last marker; 0 before its first. Frames of earlier epochs that were
        overtaken by a marker are sent with this epoch."""
        self._unseen: dict[int, float] = {}
        """Workers whose last row has no successor yet, and when that row was sent (monotonic)."""
        last = worker.stage + 1 == len(plan.stages)
        self._next = range(0 if last else plan.stages[worker.stage + 1].workers)

    def send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        hop = self._plan.next_hop(self._worker, WorkerId(header.target_stage, header.target_worker))
        self._rows.append((hop, frame if header.epoch >= self._epoch else with_epoch(frame, self._epoch)))
        self._unseen[hop] = self._now()

    def mark(self, epoch: int, flags: MarkerFlag = NO_FLAGS) -> None:
        """Send the end marker of the epoch to every worker of the next stage."""
        for worker in self._next:
            self._rows += [(worker, self._own(Kind.MARKER, worker, epoch, flags)), (worker, None)]
            self._unseen.pop(worker, None)
        self._epoch = epoch + 1

    def warm_up(self) -> None:
        """Send a frame over every channel to the next stage, so that Spark opens it before the first tuple."""
        for worker in self._next:
            self._rows += [(worker, self._own(Kind.WARM, worker)), (worker, None)]

    def probe(self) -> None:
        """Send the frames that measure the bandwidth of every channel to the next stage."""
        padding = os.urandom(PROBE_BYTES - HEADER_BYTES)
        for worker in self._next:
            self._rows += [(worker, self._own(Kind.PROBE, worker) + padding)] * PROBES
            self._rows.append((worker, None))

    def route(self, worker: int, slots: list[int]) -> WorkerRouted:
        """Send rows for that worker of the next stage to ``slots`` from now on. A new slot first gets a frame
        that warms up its channel; a slot that is no longer used gets a last frame that says so."""
        before, self._slots[worker] = self._slots[worker], list(slots)
        for changed, kind in ((set(slots) - set(before), Kind.WARM), (set(before) - set(slots), Kind.LAST)):
            frame = self._own(kind, worker)
            self._routed += [row for slot in changed for row in ((slot, frame), (slot, None))]
        return WorkerRouted(worker, slots)

    def nudge(self, idle: bool) -> None:
        """Send an empty row to each worker whose last frame has no successor: at once if this worker is ``idle``,
        otherwise when it has sent no frame to that worker for the duration of the linger."""
        if not self._unseen:
            return
        limit = self._now() - self._linger
        for worker in [worker for worker, sent in self._unseen.items() if idle or sent <= limit]:
            self._rows.append((worker, None))
            del self._unseen[worker]

    def take(self) -> list[Row]:
        """Remove and return all rows, addressed to slots."""
        rows, self._rows = self._rows, []
        if self._slots:
            rows = [(slot, frame) for worker, frame in rows for slot in self._slots[worker]]
        if self._routed:
            rows, self._routed = self._routed + rows, []
        return rows

    def wait(self) -> float:
        """Seconds until ``nudge`` is due; infinity if it is not needed."""
        return min(self._unseen.values()) + self._linger - self._now() if self._unseen else math.inf

    @property
    def needs_nudge(self) -> bool:
        """True while the last frame to a worker has no successor."""
        return bool(self._unseen)

    def _own(self, kind: Kind, worker: int, epoch: int = 0, flags: MarkerFlag = NO_FLAGS) -> bytes:
        here = self._worker
        return Header(kind, here.stage + 1, worker, here.stage, here.index, epoch=epoch, rows=int(flags)).pack()


class Linger:
    """Decides when waiting tuples are sent. Every frame has a fixed cost on every hop, so it pays to wait for more
    tuples while frames follow each other closely. A tuple that follows a pause is sent at once. Used by the
    worker's loop only."""

    def __init__(self, settings: Settings, targets: int) -> None:
        """``targets``: the largest number of tasks in other workers to which one task sends. Each of them gets a
        frame of its own."""
        self._busy = settings.transport.busy_linger
        linger = settings.transport.linger
        self._spacing = max(linger, min(linger * targets, self._busy))
        """Least seconds between two times that an idle worker sends what waits: the more frames that takes, the
        longer. A bolt has one linger less, because its input was already collected in frames."""
        self._linger = linger
        self._oldest: float | None = None
        self._sent = -math.inf

    @property
    def waiting(self) -> bool:
        return self._oldest is not None

    def is_due(self, now: float, idle: bool, emits: bool) -> bool:
        """True if all waiting tuples are to be sent now. A worker without further work (``idle``) sends them at
        once if its last frames left long enough ago; ``emits``: a spout of the worker may emit more. A busy
        worker waits longer, because it soon has enough tuples to fill frames."""
        spacing = self._spacing if emits else self._spacing - self._linger
        if idle and now - self._sent >= spacing:
            return True
        return self._oldest is not None and now - self._oldest >= (self._spacing if idle else self._busy)

    def sent(self, now: float) -> None:
        """Called when all waiting tuples have been sent."""
        self._sent = now

    def note(self, now: float, waits: bool) -> None:
        """Record whether any tuple waits now."""
        if not waits:
            self._oldest = None
        elif self._oldest is None:
            self._oldest = now

    def wait(self, now: float, emits: bool) -> float:
        """Seconds until ``is_due`` becomes true for an idle worker; infinity if nothing waits."""
        if self._oldest is None:
            return math.inf
        spacing = self._spacing if emits else self._spacing - self._linger
        return min(self._oldest + self._spacing, self._sent + spacing) - now


class Relay:
    """Frames for later stages, which the worker only passes on. The reader's thread adds them, the worker's loop
    sends them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames: deque[tuple[Header, pa.Buffer]] = deque()
        self._later: deque[tuple[Header, pa.Buffer]] = deque()
        """Frames of epochs that the worker which replaces this one may have to relay."""

    def offer(self, header: Header, frame: pa.Buffer, unlimited: bool) -> bool:
        """Add a frame. Returns False if ``most`` frames wait, unless ``unlimited``."""
        if len(self._frames) >= self._most and not unlimited:
            return False
        self._frames.append((header, frame))
        return True

    def release(self, send: Send, first: int, last: float = math.inf) -> None:
        """Send the frames of the epochs from ``first`` to ``last``. Earlier frames are dropped, because the
        worker that this one replaces has relayed them; later frames are set aside."""
        while self._frames:
            header, frame = self._frames.popleft()
            if header.epoch > last:
                self._later.append((header, frame))
            elif header.epoch >= first:
                send(header, frame)

    def requeue_set_aside(self) -> None:
        """Put the frames that were set aside back at the head of the queue."""
        self._frames.extendleft(reversed(self._later))
        self._later.clear()

    def __len__(self) -> int:
        return len(self._frames)
