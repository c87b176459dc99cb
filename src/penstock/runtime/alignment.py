"""Alignment of epochs in a slot (exactly once): a slot works on one epoch until the marker of its end has come
from every slot of the stage before, and holds back what belongs to later ones.

Reading must go on meanwhile, for all channels share one iterator and the missing marker may sit behind a frame
that is held. So what is held is bounded in memory, not in number: beyond a limit it goes to a temporary file.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import BinaryIO

import pyarrow as pa

from penstock.errors import PenstockError
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
        """Keep a frame if it belongs to a later epoch, or if others of this one still wait. False: its inbox may
        have it."""
        with self._lock:
            epoch = parcel.header.epoch
            if epoch < self.epoch or (epoch == self.epoch and not self._held.get(epoch)):
                return False
            self._held[epoch].add(parcel)
            return True

    @property
    def complete(self) -> bool:
        """Every frame of this epoch has come, and none of them waits here."""
        came = len(self._markers.get(self.epoch, ())) == self._upstream > 0
        return came and not self._held.get(self.epoch)

    def begin(self, epoch: int, put: Callable[[Parcel], bool]) -> None:
        """Work on this epoch from now on."""
        with self._lock:
            self._markers.pop(self.epoch, None)
            self.epoch = epoch
        self.refill(put)

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
            if not frames:
                self._held.pop(self.epoch).close()

    @property
    def waiting(self) -> bool:
        """Frames of this epoch wait for room."""
        return self.epoch in self._held

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
        self._read = 0
        """Where the first spilled frame begins in the file."""

    def __bool__(self) -> bool:
        return bool(self._frames or self._spilled)

    def add(self, parcel: Parcel) -> None:
        """Append a frame. Raises ``PenstockError`` where the disk refuses it."""
        assert isinstance(parcel.content, pa.Buffer)
        if not self._spilled and self._bytes + parcel.content.size <= self._most:
            self._bytes += parcel.content.size
            self._frames.append(parcel)
        else:
            self._spill(parcel.header, parcel.content)
        self.rows += parcel.header.rows

    def first(self) -> Parcel | None:
        """The oldest frame."""
        if not self._frames and self._spilled:
            assert self._file is not None
            header, size = self._spilled.popleft()
            self._file.seek(self._read)
            self._read += size
            self._bytes += size
            self._frames.append(Parcel(header, pa.py_buffer(self._file.read(size))))
        return self._frames[0] if self._frames else None

    def drop(self) -> None:
        """Forget the oldest frame."""
        parcel = self._frames.popleft()
        self.rows -= parcel.header.rows
        self._bytes -= parcel.content.size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _spill(self, header: Header, content: pa.Buffer) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="penstock-held-")  # noqa: SIM115 - closed by close
            self._file.seek(0, os.SEEK_END)
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise PenstockError(
                "held frames",
                f"beyond {self._most:,} bytes they go to a temporary file",
                str(error),
                "Make room in the temporary folder, or speed up the branch the others wait for.",
            ) from error
        self._spilled.append((header, content.size))
