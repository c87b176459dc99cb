"""Rows as they go through Spark: a seat of the next stage, and a frame."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.worker.outgoing import Row

_NAMES = ["slot", "frame"]
_BINARY = pa.binary()
_LARGE = 32_768  # bytes; above it copying a frame costs more than a message of its own


def as_batches(rows: list[Row]) -> Iterator[pa.RecordBatch]:
    """Rows for Spark. Small ones travel together: a frame and its nudge then cost one message, not two. A large
    frame goes alone and uncopied."""
    slots: list[int] = []
    frames: list[bytes | None] = []
    for slot, frame in rows:
        if frame is not None and len(frame) >= _LARGE:
            if slots:
                yield _small(slots, frames)
                slots, frames = [], []
            yield _large(slot, frame)
        else:
            slots.append(slot)
            frames.append(frame.to_pybytes() if isinstance(frame, pa.Buffer) else frame)
    if slots:
        yield _small(slots, frames)


def _small(slots: list[int], frames: list[bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(slots, pa.int32()), pa.array(frames, _BINARY)], names=_NAMES)


def _large(slot: int, frame: bytes | pa.Buffer) -> pa.RecordBatch:
    buffer = frame if isinstance(frame, pa.Buffer) else pa.py_buffer(frame)
    offsets = pa.py_buffer(b"\0\0\0\0" + buffer.size.to_bytes(4, "little"))
    value = pa.Array.from_buffers(_BINARY, 1, [None, offsets, buffer])
    return pa.RecordBatch.from_arrays([pa.array([slot], pa.int32()), value], names=_NAMES)
