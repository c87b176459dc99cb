"""What leaves a slot: rows for the next stage, and frames that only pass through on their way to a later one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from penstock.clock import Clock
from penstock.frames.header import Header, Kind
from penstock.plan.model import Plan, SlotId

Row = tuple[int, bytes | pa.Buffer | None]
"""The slot of the next stage, and a frame; None is a nudge: Spark hands a row on when it sees the next."""
Send = Callable[[Header, bytes | pa.Buffer], None]


class Outgoing:
    """Rows to be taken by whoever drives the slot, in order."""

    def __init__(self, slot: SlotId, plan: Plan, clock: Clock, linger: float) -> None:
        self._slot, self._plan, self._now, self._linger = slot, plan, clock.monotonic, linger
        self._rows: list[Row] = []
        self._unseen: dict[int, float] = {}
        """Slots whose last row nothing follows yet, and when it was sent."""
        last = slot.stage + 1 == len(plan.stages)
        self._next = range(0 if last else plan.stages[slot.stage + 1].slots)

    def send(self, header: Header, frame: bytes | pa.Buffer) -> None:
        hop = self._plan.next_hop(self._slot, SlotId(header.target_stage, header.target_slot))
        self._rows.append((hop, frame))
        self._unseen[hop] = self._now()

    def mark(self, epoch: int, last: bool) -> None:
        """The epoch ends here, for every slot of the next stage."""
        for slot in self._next:
            self._rows += [(slot, self._own(Kind.MARKER, slot, epoch, last)), (slot, None)]
            self._unseen.pop(slot, None)

    def warm_up(self) -> list[Row]:
        """A frame over every channel to the next stage."""
        return [row for slot in self._next for row in ((slot, self._own(Kind.WARM, slot)), (slot, None))]

    def nudge(self, idle: bool) -> None:
        """Follow the last frame to a slot by an empty row when nothing else does: at once when the slot has
        nothing to do, else when no frame has gone that way for the length of the linger."""
        if not self._unseen:
            return
        limit = self._now() - self._linger
        for slot in [slot for slot, sent in self._unseen.items() if idle or sent <= limit]:
            self._rows.append((slot, None))
            del self._unseen[slot]

    def take(self) -> list[Row]:
        rows, self._rows = self._rows, []
        return rows

    def wait(self) -> float:
        """Seconds until a nudge is due; inf: none is."""
        return min(self._unseen.values()) + self._linger - self._now() if self._unseen else math.inf

    def __bool__(self) -> bool:
        """A nudge is due sooner or later."""
        return bool(self._unseen)

    def _own(self, kind: Kind, slot: int, epoch: int = 0, last: bool = False) -> bytes:
        here = self._slot
        return Header(kind, here.stage + 1, slot, here.stage, here.slot, epoch=epoch, rows=int(last)).pack()


class Relay:
    """Frames for later stages, filled by the slot's reader, emptied by its main loop."""

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

    def take_back(self) -> None:
        """What was set aside comes first again."""
        self._frames.extendleft(reversed(self._later))
        self._later.clear()

    def __len__(self) -> int:
        return len(self._frames)
