"""What the queue holds: batches of rows, each with the name that tells a second delivery from a new one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import EnvironmentFault

_HEADER = struct.Struct("<4sQQIH")  # magic, incarnation, number, rows, length of the writer's name
_MAGIC = b"pst1"


class EntryDamaged(EnvironmentFault):
    """Bytes in the queue are not an entry."""


@dataclass(frozen=True)
class QueueEntry:
    """Rows that were put together. ⟨writer, incarnation, number⟩ is theirs alone: put or read a second time, they
    are known by it. A writer has one incarnation after another, each with a greater number, and counts its entries
    upwards within each."""

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
    """An entry as bytes."""
    rows = rows.combine_chunks()  # one message, however many batches the rows came in
    out = pa.BufferOutputStream()
    name = writer.encode()
    head = _HEADER.pack(_MAGIC, incarnation, number, rows.num_rows, len(name)) + name
    out.write(head.ljust(_aligned(len(head)), b"\0"))
    with pa.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    packed: bytes = out.getvalue().to_pybytes()
    return packed


def unpack(data: bytes) -> QueueEntry:
    """An entry from its bytes; its rows are decoded when they are asked for."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise EntryDamaged(
            "the delayed persistent queue",
            f"it holds something that this version of Penstock did not put there: {len(data)} "
            f"bytes that begin with {data[:8]!r}",
            "Let nothing else write to the queue, and drain it with the version that filled it.",
        )
    _, incarnation, number, rows, length = _HEADER.unpack_from(data)
    end = _HEADER.size + length
    writer = data[_HEADER.size : end].decode()
    return QueueEntry(writer, incarnation, number, rows, pa.py_buffer(data)[_aligned(end) :])


def _aligned(size: int) -> int:
    """Where the rows begin behind a head of that size: Arrow wants its buffers aligned."""
    return -(-size // 64) * 64


def split(rows: pa.Table, most_bytes: int) -> Iterator[pa.Table]:
    """The rows in parts of at most about so many bytes, always the same ones for the same rows; a row is never
    divided."""
    parts = max(1, -(-rows.nbytes // most_bytes))
    size = max(1, -(-rows.num_rows // parts))
    for begin in range(0, rows.num_rows, size):
        part = rows.slice(begin, size)
        if part.num_rows > 1 and part.nbytes > most_bytes:  # rows of very different sizes
            yield from split(part, most_bytes)
        else:
            yield part
