"""Alignment of epochs in a worker: a worker works on one epoch until the marker of its end has come from every
worker of the stage before, and holds back what belongs to later ones. Exactly once an epoch ends with every
commit, otherwise only when a worker moves to another node.

Reading must go on meanwhile, for all channels share one iterator and the missing marker may sit behind a frame
that is held. So what is held is bounded in memory, not in number: beyond a limit it goes to a temporary file.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill

_MOST_IN_MEMORY = 64 * 1024 * 1024  # bytes of held frames; about 500 full ones


class Alignment:
    """Which epoch a worker works on. ``marker`` and ``hold`` are called by the worker's reader, the rest by its
    main loop."""

    def __init__(self, upstream: int, epoch: int) -> None:
        self.epoch = epoch
        self.first = 0
        """What belongs to earlier epochs is of no use: another did it, of which this worker took over."""
        self._upstream = upstream
        self._markers: defaultdict[int, set[int]] = defaultdict(set)
        self._held: defaultdict[int, Spill] = defaultdict(lambda: Spill(_MOST_IN_MEMORY))
        self._rows: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """Tuples held, by epoch and task."""
        self._senders: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        """Tasks something is held for and who sent it, by epoch."""
        self._lock = threading.Lock()

    def marker(self, epoch: int, source_worker: int) -> None:
        """The last frame of the epoch from that worker of the stage before has come."""
        with self._lock:
            if epoch >= self.first:
                self._markers[epoch].add(source_worker)

    def hold(self, parcel: Parcel) -> bool:
        """Keep a frame if it belongs to a later epoch, or if others of this one still wait; drop it if it is of no
        use. False: its inbox may have it."""
        with self._lock:
            epoch = parcel.header.epoch
            if epoch < self.first:
                return True
            if epoch < self.epoch or (epoch == self.epoch and not self._held.get(epoch)):
                return False
            self._held[epoch].add(parcel)
            self._rows[epoch][parcel.header.target_task] += parcel.header.rows
            self._senders[epoch].add((parcel.header.target_task, parcel.header.source_task))
            return True

    @property
    def complete(self) -> bool:
        """Every frame of this epoch has come, and none of them waits here."""
        return self._ended(self.epoch) and not self._held.get(self.epoch)

    def begin(self, epoch: int, put: Callable[[Parcel], bool]) -> None:
        """Work on this epoch from now on."""
        with self._lock:
            self._markers.pop(self.epoch, None)
            self.epoch = epoch
        self.refill(put)

    def take_over(self, epoch: int, put: Callable[[Parcel], bool]) -> None:
        """Begin with this epoch. What came of earlier ones was a copy of what another has done."""
        with self._lock:
            self.first = epoch
            for each in [each for each in self._held if each < epoch]:
                self._held.pop(each).close()
                self._rows.pop(each, None)
                self._senders.pop(each, None)
            for each in [each for each in self._markers if each < epoch]:
                del self._markers[each]
        self.begin(epoch, put)

    def close(self) -> None:
        """Give the disk back."""
        with self._lock:
            for frames in self._held.values():
                frames.close()

    def advance(self, put: Callable[[Parcel], bool]) -> None:
        """Go on to the next epoch."""
        self.begin(self.epoch + 1, put)

    def refill(self, put: Callable[[Parcel], bool]) -> None:
        """Put what was held for this epoch where it belongs, in the order it came, until that refuses. The
        reader waits meanwhile: a frame that comes now must not overtake them."""
        if self.epoch not in self._held:
            return
        with self._lock:
            frames = self._held[self.epoch]
            while (parcel := frames.first()) is not None and put(parcel):
                frames.drop()
                self._rows[self.epoch][parcel.header.target_task] -= parcel.header.rows
            if not frames:
                self._held.pop(self.epoch).close()
                self._rows.pop(self.epoch)
                self._senders.pop(self.epoch)

    @property
    def waiting(self) -> bool:
        """Frames of this epoch wait for room."""
        return self.epoch in self._held

    def behind(self) -> Counter[int]:
        """Tuples held for each task that wait for this worker alone: those of this epoch, and of each later one
        that all markers before it have come for. The others wait for a slow worker elsewhere, and who sends them
        is not to blame."""
        total: Counter[int] = Counter()
        if self._held:
            with self._lock:
                epoch = self.epoch
                while True:
                    total += self._rows.get(epoch, Counter())
                    if not self._ended(epoch):
                        break
                    epoch += 1
        return total

    def _ended(self, epoch: int) -> bool:
        """The last frame of the epoch has come from everywhere."""
        return len(self._markers.get(epoch, ())) == self._upstream > 0

    @property
    def next_task(self) -> int | None:
        """The task whose frame is the next to leave here."""
        with self._lock:
            first = self._held[self.epoch].first() if self.epoch in self._held else None
            return None if first is None else first.header.target_task

    def ahead(self) -> set[tuple[int, int]]:
        """Tasks and senders of later epochs, where more is held than fits in memory: they are ahead of a sender
        this worker still waits for, and should wait for it too. Not that sender: it would never come."""
        if not any(frames.rows_on_disk for frames in list(self._held.values())):
            return set()
        with self._lock:
            return {pair for epoch, pairs in self._senders.items() if epoch > self.epoch for pair in pairs}

    @property
    def held(self) -> int:
        """Tuples held back."""
        with self._lock:
            return sum(frames.rows for frames in self._held.values())
