"""The routing header of every frame: 72 bytes, little endian."""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from penstock.errors import FrameError

_LAYOUT = struct.Struct("<HBBHHHHIIIIIIdQIIIQ")
HEADER_BYTES = _LAYOUT.size  # a multiple of 8, because Arrow reads buffers in place only if they are aligned
_EPOCH = struct.Struct("<I")
_EPOCH_AT = struct.calcsize("<HBBHHHHIII")
"""Where the epoch is in a header."""
UNNUMBERED = (1 << 64) - 1
"""The sequence number of a frame that was stored with a snapshot: its receiver does not check the order."""
_MAGIC = 0x5053
_VERSION = 2


class Kind(IntEnum):
    """The kind of a frame."""

    DATA = 1
    WARM = 2
    """Sent once over every channel at the start, so that the JVM opens and compiles the channel before data
    arrives."""
    MARKER = 3
    """Marks the end of an epoch of the sender. Carries no data."""
    LAST = 4
    """The last frame of this sender on this channel: its worker has moved to another slot."""
    PROBE = 5
    """One of several large frames that measure the bandwidth of the channel."""


class MarkerFlag(IntFlag):
    """What a marker says besides its epoch."""

    LAST = 1
    """The epoch is the last one of the sender."""
    OVERTAKES = 2
    """The receiver ends the epoch at once, without processing the tuples that wait."""


class Header(NamedTuple):
    """The destination and origin of a frame, and how to decode it."""

    kind: int
    target_stage: int
    target_worker: int
    source_stage: int
    source_worker: int
    target_task: int = 0
    source_task: int = 0
    stream: int = 0
    epoch: int = 0
    """The epoch of the sender, that is the frames between two of its markers. With exactly-once delivery, the unit
    of commit to which the tuples belong."""
    route: int = 0
    """The version of the route table by which the frame was addressed."""
    rows: int = 0
    """The number of tuples. In a marker: ``MarkerFlag`` values."""
    born: float = 0.0
    """Wall-clock time at which the oldest of the tuples left its spout."""
    sequence: int = 0
    """Numbers the frames from one task to another from 0, to detect lost, duplicated and reordered frames."""
    schema_bytes: int = 0
    """Length of the Arrow schema after the header. 0 if the types are declared."""
    lineage_bytes: int = 0
    """Length of the lineage after the schema. 0 if acks are not tracked."""
    range_length: int = 0
    """The length of the range of the source data to which the tuples belong. 0 if their number is not recorded,
    because the receiver's data is never migrated."""
    range_offset: int = 0
    """The position of the range in the source data (``control/segments.py``)."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, _VERSION, *self)


def with_epoch(frame: bytes | memoryview, epoch: int) -> bytes:
    """A copy of the frame that belongs to another epoch."""
    copy = bytearray(frame)
    _EPOCH.pack_into(copy, _EPOCH_AT, epoch)
    return bytes(copy)


def unpack(data: bytes | memoryview) -> Header:
    """Decode a header. Raises ``FrameError`` if the data is not a valid header."""
    if len(data) < HEADER_BYTES:
        raise FrameError("frame", f"it has {len(data)} bytes, less than a header of {HEADER_BYTES} bytes")
    magic, version, *rest = _LAYOUT.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise FrameError(
            "frame",
            f"it begins with {magic:#x} and version {version} instead of {_MAGIC:#x} and version {_VERSION}",
            "All nodes must run the same version of penstock.",
        )
    return Header(*rest)
