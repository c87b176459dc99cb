"""Aligns the input of a worker at the ends of epochs.

A worker processes one epoch until it has received the end marker of that epoch from every worker of the previous
stage. Frames of later epochs are buffered. With exactly-once delivery an epoch ends with every commit, otherwise
only when a worker moves to another slot.

An epoch may also end before its markers have arrived (``worker.overtaking``). Frames of that epoch that are still
buffered, or arrive later, are then processed in the next one.

All channels share one iterator, and a missing marker may follow a frame that is buffered, so the reader must
never stop. The buffer therefore has a limit for memory but not for its length: beyond the limit frames go to a
temporary file.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill, SpillView

_MOST_IN_MEMORY = 64 * 1024 * 1024
"""Bytes of buffered frames that are kept in memory for each epoch: about 500 full frames, more than a short
delay of one sender causes."""


class Alignment:
    """The epoch that a worker processes, and the frames of later epochs. The reader's thread calls ``marker``
    and ``hold``, the worker's loop all other methods."""

    def __init__(self, upstream: int, epoch: int) -> None:
        self.epoch = epoch
        self.first = 0
        """Frames of earlier epochs are dropped, because the worker that this one replaces has processed them."""
        self._upstream = upstream
        self._markers: defaultdict[int, set[int]] = defaultdict(set)
        self._held: defaultdict[int, Spill] = defaultdict(lambda: Spill(_MOST_IN_MEMORY))
        self._rows: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """Number of buffered tuples, by epoch and receiving task."""
        self._senders: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        """⟨Receiving task, sending task⟩ of the buffered frames, by epoch."""
        self._closed = False
        self._lock = threading.Lock()

    def marker(self, epoch: int, source_worker: int) -> None:
        """Record that ``source_worker`` of the previous stage has sent its last frame of the epoch."""
        with self._lock:
            if epoch >= self.first:
                self._markers[epoch].add(source_worker)

    def hold(self, parcel: Parcel) -> bool:
        """Buffer a frame of a later epoch, or of this one if earlier frames of it are still buffered. A frame of
        an epoch before ``first`` is dropped, and every frame after ``close``. Returns False if the caller has to
        put the frame into its inbox."""
        with self._lock:
            epoch = parcel.header.epoch
            if self._closed or epoch < self.first:
                return True
            if epoch <= self.epoch:
                if self._first_due() is None:
                    return False
                epoch = self.epoch  # behind the frames that wait already
            self._held[epoch].add(parcel)
            self._rows[epoch][parcel.header.target_task] += parcel.header.rows
            self._senders[epoch].add((parcel.header.target_task, parcel.header.source_task))
            return True

    @property
    def complete(self) -> bool:
        """True when every frame of this epoch has arrived and none is buffered."""
        return self._ended(self.epoch) and self._first_due() is None

    def has_ended(self, epoch: int) -> bool:
        """True when every worker of the previous stage has sent its last frame of the epoch. Also for an epoch
        that this worker has ended already, until ``forget`` is called."""
        return not self._upstream or self._ended(epoch)

    def forget(self, epoch: int) -> None:
        """The markers up to this epoch are not asked for any more."""
        with self._lock:
            for each in [each for each in self._markers if each <= epoch]:
                del self._markers[each]

    def begin(self, epoch: int, put: Callable[[Parcel], bool]) -> None:
        """Process ``epoch`` from now on. ``put`` receives its buffered frames as in ``refill``."""
        with self._lock:
            self.epoch = epoch
        self.refill(put)

    def take_over(self, epoch: int, put: Callable[[Parcel], bool]) -> None:
        """Begin with ``epoch`` in a worker that replaces another. Frames of earlier epochs are dropped: they are
        copies of frames that the other worker has processed."""
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
        """Delete the temporary files. The loop calls it while the reader may still hold frames."""
        with self._lock:
            self._closed = True
            for frames in self._held.values():
                frames.close()

    def advance(self, put: Callable[[Parcel], bool]) -> None:
        """Process the next epoch from now on."""
        self.begin(self.epoch + 1, put)

    def views(self, epoch: int) -> list[SpillView]:
        """The frames that are buffered now and belong to this epoch or an earlier one, in order."""
        with self._lock:
            return [self._held[each].view() for each in sorted(self._held) if each <= epoch]

    def refill(self, put: Callable[[Parcel], bool]) -> None:
        """Pass the buffered frames of this epoch and of earlier ones to ``put`` in their order of arrival, until
        ``put`` returns False. The reader waits for the lock meanwhile, so that a new frame cannot overtake
        them."""
        if self._first_due() is None:
            return
        with self._lock:
            while (epoch := self._first_due()) is not None:
                frames = self._held[epoch]
                while (parcel := frames.first()) is not None and put(parcel):
                    frames.drop()
                    self._rows[epoch][parcel.header.target_task] -= parcel.header.rows
                if frames:
                    return
                self._held.pop(epoch).close()
                self._rows.pop(epoch)
                self._senders.pop(epoch)

    def _first_due(self) -> int | None:
        """The earliest epoch with buffered frames that may be processed now; None if there is none."""
        if not self._held:
            return None
        return min((epoch for epoch in list(self._held) if epoch <= self.epoch), default=None)

    @property
    def waiting(self) -> bool:
        """True while frames of this epoch are buffered because their inbox has no room."""
        return self._first_due() is not None

    def behind(self) -> Counter[int]:
        """Number of buffered tuples of each task that only this worker delays: those of this epoch, and those of
        each later epoch whose predecessors have all their markers. The other buffered tuples wait for a slow
        worker elsewhere, and flow control must not slow down their senders."""
        total: Counter[int] = Counter()
        if self._held:
            with self._lock:
                epoch = self.epoch
                for each in [each for each in self._rows if each < epoch]:
                    total += self._rows[each]
                while True:
                    total += self._rows.get(epoch, Counter())
                    if not self._ended(epoch):
                        break
                    epoch += 1
        return total

    def _ended(self, epoch: int) -> bool:
        """True when every worker of the previous stage has sent its last frame of the epoch."""
        return len(self._markers.get(epoch, ())) == self._upstream > 0

    @property
    def next_task(self) -> int | None:
        """The receiver of the first buffered frame of this epoch; None if there is none."""
        with self._lock:
            due = self._first_due()
            first = None if due is None else self._held[due].first()
            return None if first is None else first.header.target_task

    def ahead(self) -> set[tuple[int, int]]:
        """⟨Receiving task, sending task⟩ of the frames of later epochs, once the buffer has reached the disk.
        These senders are ahead of the sender whose marker is missing and should wait for it. The missing sender
        is never in the result: a sender that waits would never send its marker."""
        if not any(frames.rows_on_disk for frames in list(self._held.values())):
            return set()
        with self._lock:
            return {pair for epoch, pairs in self._senders.items() if epoch > self.epoch for pair in pairs}

    @property
    def held(self) -> int:
        """Number of buffered tuples."""
        with self._lock:
            return sum(frames.rows for frames in self._held.values())
