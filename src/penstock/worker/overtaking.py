"""What a marker overtakes in a worker, for the snapshot of the epoch that the marker ends.

An overtaking marker ends an epoch although tuples of it still wait. The worker takes its snapshot at once, and the
tuples that wait are written with it, as frames:

- tuples for the worker's own tasks: the rest of the parcels that are being executed, inboxes with their overflow,
  and the buffer for later epochs, as far as it has frames of this epoch or an earlier one;
- frames for other workers that wait in send queues;
- frames of this epoch or an earlier one that arrive after the snapshot was taken, until the marker has come from
  all workers of the previous stage. Frames that the worker only relays are among them.

The worker processes and sends all of these as usual, and their effects belong to the next epoch: what it sends
from then on carries the next epoch. The stored frames are needed only by a query run that begins with this epoch.
Each overtaken frame is stored by exactly one worker: by the one where it was when that worker took its snapshot,
or by the first one that received it after its own snapshot.

A second marker may overtake what the first one has overtaken. Such frames are stored with both snapshots.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from penstock.frames import codec
from penstock.frames.header import unpack
from penstock.plan.model import Plan
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill, SpillView

_ARRIVALS_IN_MEMORY = 16 * 1024 * 1024
"""Bytes of frames that arrive during a recording and are kept in memory: more than the channels of Spark hold."""
_CHUNK = 8 * 1024 * 1024
"""Bytes of frames that are written, read and signed at once. A worker needs this much memory for them, however
many frames it stores."""
_PREFIX = struct.Struct("<QQ")
"""Precedes each stored frame: its size, and how many of its tuples are executed already."""


class StoredFrame(NamedTuple):
    """A frame that was stored with a snapshot."""

    frame: pa.Buffer
    executed: int
    """How many of its tuples, from the first on, are executed. Their effects are in the snapshot."""


class Chunk(NamedTuple):
    """Overtaken frames for one task, encoded for a file."""

    task: str
    """Its key."""
    data: bytes
    rows: int
    streams: frozenset[int]
    """The numbers of their streams."""


class Recording:
    """The frames that one marker overtakes. The reader's thread calls ``add_arrival`` until the recording is
    ``finished``, the worker's loop all other methods; then a background job calls ``files`` and ``close``."""

    def __init__(self, epoch: int, plan: Plan) -> None:
        self.epoch = epoch
        self.finished = False
        """True when the marker has come from all senders, so that no frame is missing."""
        self._plan = plan
        self._executing: list[tuple[Parcel, int]] = []
        self._waiting: list[Sequence[Parcel] | SpillView] = []
        self._arrivals, self._relayed = Spill(_ARRIVALS_IN_MEMORY), Spill(_ARRIVALS_IN_MEMORY)

    def add_executing(self, parcel: Parcel, executed: int) -> None:
        """Add a parcel whose first ``executed`` tuples are executed. Called before ``add_waiting``."""
        self._executing.append((parcel, executed))

    def add_waiting(self, parcels: Sequence[Parcel] | SpillView) -> None:
        """Add parcels that wait, oldest first."""
        self._waiting.append(parcels)

    def add_arrival(self, parcel: Parcel) -> None:
        """Add a frame for a task of this worker that has just arrived."""
        if parcel.header.epoch <= self.epoch:
            self._arrivals.add(parcel)

    def add_relayed(self, parcel: Parcel) -> None:
        """Add a frame that the worker relays."""
        if parcel.header.epoch <= self.epoch:
            self._relayed.add(parcel)

    def files(self) -> Iterator[list[Chunk]]:
        """The frames, encoded and grouped by receiving task, in lists of a few megabytes. The frames of one sender
        for one task are in the order in which they were sent."""
        groups: defaultdict[int, _Group] = defaultdict(_Group)
        size = 0
        for parcel, executed in self._parcels():
            for frame, skipped in self._frames(parcel, executed):
                size += groups[parcel.header.target_task].add(frame, skipped, parcel.header.stream)
                if size >= _CHUNK:
                    yield self._chunks(groups)
                    groups.clear()
                    size = 0
        if groups:
            yield self._chunks(groups)

    def close(self) -> None:
        """Release the files."""
        for each in self._waiting:
            if isinstance(each, SpillView):
                each.close()
        self._arrivals.close()
        self._relayed.close()

    def _chunks(self, groups: dict[int, _Group]) -> list[Chunk]:
        return [
            Chunk(self._plan.task[task].key, b"".join(group.pieces), group.rows, frozenset(group.streams))
            for task, group in groups.items()
        ]

    def _parcels(self) -> Iterator[tuple[Parcel, int]]:
        yield from self._executing
        self._waiting += [self._arrivals.view(), self._relayed.view()]  # ``close`` releases them, too
        for waiting in self._waiting:
            for parcel in waiting:
                yield parcel, 0
            if isinstance(waiting, SpillView):
                waiting.close()

    def _frames(self, parcel: Parcel, executed: int) -> Iterator[tuple[pa.Buffer | bytes, int]]:
        """The tuples of a parcel as frames, and how many tuples of each are executed. Frames stay as they are;
        tuples from the same worker are encoded, with a frame for each sender."""
        if isinstance(parcel.content, pa.Buffer):
            yield parcel.content, executed
            return
        content = parcel.content
        batch = content if isinstance(content, pa.RecordBatch) else content.arrow()
        stream = self._plan.streams[parcel.header.stream]
        schema = codec.declared_schema([(field.name, field.type) for field in stream.fields])
        begin = 0
        for task, rows in parcel.sources or ((parcel.header.source_task, batch.num_rows),):
            first = max(begin, executed)
            end = begin + rows
            if first < end:
                header = parcel.header._replace(source_task=task)
                yield codec.encode(header, batch.slice(first, end - first), schema), 0
            begin = end


class _Group:
    """Encoded frames for one task."""

    def __init__(self) -> None:
        self.pieces: list[bytes | pa.Buffer] = []
        self.rows = 0
        self.streams: set[int] = set()

    def add(self, frame: bytes | pa.Buffer, executed: int, stream: int) -> int:
        size = len(frame) if isinstance(frame, bytes) else int(frame.size)
        self.pieces += [_PREFIX.pack(size, executed), frame]
        self.rows += unpack(memoryview(frame)).rows - executed
        self.streams.add(stream)
        return size


def stored_frames(data: bytes) -> Iterator[StoredFrame]:
    """The frames of a chunk, in order."""
    buffer, at = pa.py_buffer(data), 0
    while at < len(data):
        size, executed = _PREFIX.unpack_from(data, at)
        at += _PREFIX.size
        yield StoredFrame(buffer.slice(at, size), executed)
        at += size
