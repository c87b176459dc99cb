"""The routing header in front of every frame: 64 bytes, little endian."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from penstock.errors import FrameError

_LAYOUT = struct.Struct("<HBBHHHHIIIIIIdQII")
HEADER_BYTES = 64
_PAD = bytes(HEADER_BYTES - _LAYOUT.size)
_MAGIC = 0x5053
_VERSION = 1


class Kind(IntEnum):
    """What a frame carries."""

    DATA = 1
    WARM = 2
    """Sent once over every channel at the start, so that the JVM opens and compiles it before data comes."""
    MARKER = 3
    """The sender's epoch ends here; nothing follows."""
    LAST = 4
    """Nothing more comes from the sender this way: the worker has moved to another slot."""


class Header(NamedTuple):
    """Where a frame goes, where it comes from, and how to read what follows."""

    kind: int
    target_stage: int
    target_worker: int
    source_stage: int
    source_worker: int
    target_task: int = 0
    source_task: int = 0
    stream: int = 0
    epoch: int = 0
    """Frames between two markers of their sender; exactly once the unit of commit the tuples belong to."""
    route: int = 0
    """Version of the route table the frame was addressed with."""
    rows: int = 0
    """Tuples in it. Of a marker: 1 where the epoch is the sender's last."""
    born: float = 0.0
    """Wall time at which the oldest of the tuples left its spout."""
    sequence: int = 0
    """Counts the frames from one task to another, from 0: shows what was lost, doubled or overtaken."""
    schema_bytes: int = 0
    """Length of the Arrow schema after the header; 0 where the declared types tell it."""
    lineage_bytes: int = 0
    """Length of the ack columns after the schema; 0 without acks."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, _VERSION, *self) + _PAD


def unpack(data: bytes | memoryview) -> Header:
    """Read a header. Raises ``FrameError`` for anything that is not one."""
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
