"""The entries of a queue: batches of rows, each with a name that identifies a repeated delivery."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import EnvironmentFault

_HEADER = struct.Struct("<4sQQIH")  # magic, incarnation, number, rows, length of the writer's name
_MAGIC = b"pst1"


class EntryDamaged(EnvironmentFault):
    """Bytes in the queue are not a valid entry."""


@dataclass(frozen=True)
class QueueEntry:
    """Rows that were put together. ⟨writer, incarnation, number⟩ identifies the entry, even if it is put or read
    twice. Each incarnation of a writer has a greater number than the one before, and numbers its entries in
    ascending order."""

    writer: str
    incarnation: int
    number: int
    rows: int
    content: pa.Buffer
    """The rows as an Arrow stream."""

    def table(self) -> pa.Table:
        with pa.ipc.open_stream(self.content) as reader:
            return reader.read_all()


def pack(writer: str, incarnation: int, number: int, rows: pa.Table) -> bytes:
    """The bytes of an entry."""
    rows = rows.combine_chunks()  # one Arrow message, however many batches the rows consist of
    out = pa.BufferOutputStream()
    name = writer.encode()
    head = _HEADER.pack(_MAGIC, incarnation, number, rows.num_rows, len(name)) + name
    out.write(head.ljust(_aligned(len(head)), b"\0"))
    with pa.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    packed: bytes = out.getvalue().to_pybytes()
    return packed


def unpack(data: bytes) -> QueueEntry:
    """The entry of these bytes; its rows are decoded by ``table``. Raises ``EntryDamaged``."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise EntryDamaged(
            "the delayed persistent queue",
            f"it contains something that this version of Penstock did not put there: {len(data)} "
            f"bytes that begin with {data[:8]!r}",
            "No other program may write to the queue. Drain it with the version of Penstock that filled it.",
        )
    _, incarnation, number, rows, length = _HEADER.unpack_from(data)
    end = _HEADER.size + length
    writer = data[_HEADER.size : end].decode()
    return QueueEntry(writer, incarnation, number, rows, pa.py_buffer(data)[_aligned(end) :])


def _aligned(size: int) -> int:
    """The offset of the rows after a header of that size: Arrow requires aligned buffers."""
    return -(-size // 64) * 64


def split(rows: pa.Table, most_bytes: int) -> Iterator[pa.Table]:
    """The rows in parts of at most about ``most_bytes``. The parts are always the same for the same rows; a row is
    never divided."""
    parts = max(1, -(-rows.nbytes // most_bytes))
    size = max(1, -(-rows.num_rows // parts))
    for begin in range(0, rows.num_rows, size):
        part = rows.slice(begin, size)
        if part.num_rows > 1 and part.nbytes > most_bytes:  # the rows differ much in size
            yield from split(part, most_bytes)
        else:
            yield part
