"""Alignment of epochs in a slot (exactly once): a slot works on one epoch until the marker of its end has come
from every slot of the stage before, and holds back what belongs to later ones.

Reading must go on meanwhile, for all channels share one iterator and the missing marker may sit behind a frame
that is held. So what is held is bounded in memory, not in number: beyond a limit it goes to a temporary file.
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pyarrow as pa

from penstock.frames.header import Header
from penstock.runtime.inbox import Parcel

_MOST_IN_MEMORY = 64 * 1024 * 1024  # bytes of held frames; about 500 full ones


class Alignment:
    """Which epoch a slot works on. ``marker`` and ``hold`` are called by the slot's reader, the rest by its
    main loop."""

    def __init__(self, upstream: int, epoch: int) -> None:
        self.epoch = epoch
        self._upstream = upstream
        self._markers: defaultdict[int, set[int]] = defaultdict(set)
        self._held: defaultdict[int, HeldFrames] = defaultdict(HeldFrames)
        self._lock = threading.Lock()

    def marker(self, epoch: int, source_slot: int) -> None:
        """The last frame of the epoch from that slot of the stage before has come."""
        with self._lock:
            self._markers[epoch].add(source_slot)

    def hold(self, parcel: Parcel) -> bool:
        """Keep a frame if it belongs to a later epoch. False: it belongs to this one."""
        with self._lock:
            if parcel.header.epoch <= self.epoch:
                return False
            self._held[parcel.header.epoch].add(parcel)
            return True

    @property
    def complete(self) -> bool:
        """Every frame of this epoch has come."""
        return self._upstream > 0 and len(self._markers.get(self.epoch, ())) == self._upstream

    def advance(self, put: Callable[[Parcel], None]) -> None:
        """Go on to the next epoch, and put what was held for it where it belongs, in the order it came. The
        reader waits meanwhile: a frame that comes now must not overtake them."""
        with self._lock:
            self._markers.pop(self.epoch, None)
            self.epoch += 1
            held = self._held.pop(self.epoch, None)
            for parcel in () if held is None else held.drain():
                put(parcel)

    @property
    def held(self) -> int:
        """Tuples held back."""
        with self._lock:
            return sum(frames.rows for frames in self._held.values())


class HeldFrames:
    """A queue of frames, in memory up to a limit and then on disk."""

    def __init__(self, most_in_memory: int = _MOST_IN_MEMORY) -> None:
        self.rows = 0
        self._most = most_in_memory
        self._bytes = 0
        self._frames: deque[Parcel] = deque()
        self._spilled: deque[tuple[Header, int]] = deque()
        self._file: BinaryIO | None = None

    def add(self, parcel: Parcel) -> None:
        self.rows += parcel.header.rows
        assert isinstance(parcel.content, pa.Buffer)
        if self._bytes + parcel.content.size <= self._most:
            self._bytes += parcel.content.size
            self._frames.append(parcel)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="penstock-held-")  # noqa: SIM115 - closed when drained
        self._file.write(parcel.content)
        self._spilled.append((parcel.header, parcel.content.size))
        self._most = 0  # those after it must stay behind it

    def drain(self) -> Iterator[Parcel]:
        """Give them out, oldest first."""
        yield from self._frames
        if self._file is not None:
            with self._file as file:
                file.seek(0)
                for header, size in self._spilled:
                    yield Parcel(header, pa.py_buffer(file.read(size)))
