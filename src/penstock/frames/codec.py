"""Record batches to frames and back.

A frame is header, schema (only where a field of the stream has no declared type), Arrow body. Schemas repeat
from frame to frame, so both ends keep them by their bytes. A frame may hold pickled columns: it comes from the
shuffle, whose ends have proved to each other that they belong to the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa

from penstock.columns import plain_schema, trusted_schema
from penstock.errors import FrameError
from penstock.frames.header import HEADER_BYTES, Header

_ALIGN = 8  # Arrow reads its buffers in place only where they are aligned


def declared_schema(fields: Sequence[tuple[str, pa.DataType | None]]) -> pa.Schema | None:
    """The schema every frame of a stream has, or None when a type is left to inference."""
    if any(kind is None for _, kind in fields):
        return None
    return pa.schema([(name, kind) for name, kind in fields])


def encode(header: Header, batch: pa.RecordBatch, schema: pa.Schema | None, lineage: bytes = b"") -> bytes:
    """One frame. ``schema`` is the stream's declared one; with None the batch's own travels along. ``lineage`` is
    what acks need to know, a multiple of 8 bytes."""
    described = b"" if schema is not None else _schema_bytes(batch.schema)
    header = header._replace(rows=batch.num_rows, schema_bytes=len(described), lineage_bytes=len(lineage))
    return b"".join((header.pack(), described, lineage, batch.serialize()))


def lineage_of(header: Header, frame: pa.Buffer) -> memoryview:
    """The lineage within a frame."""
    begin = HEADER_BYTES + header.schema_bytes
    return memoryview(frame)[begin : begin + header.lineage_bytes]


def decode(header: Header, frame: pa.Buffer, schema: pa.Schema | None) -> pa.RecordBatch:
    """The tuples of a frame, in place: the batch keeps the frame's memory alive."""
    begin = HEADER_BYTES
    try:
        if header.schema_bytes:
            schema = _read_schema(frame.slice(begin, header.schema_bytes).to_pybytes())
            begin += header.schema_bytes
        begin += header.lineage_bytes
        if schema is None:
            raise ValueError("no schema, and none declared")
        batch = pa.ipc.read_record_batch(frame.slice(begin), schema)
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError, IndexError) as error:
        raise FrameError("frame", f"its body is not an Arrow record batch of its stream ({error})") from error
    if batch.num_rows != header.rows:
        raise FrameError("frame", f"its header announces {header.rows} tuples, but it has {batch.num_rows}")
    return batch


@lru_cache(maxsize=256)
def _schema_bytes(schema: pa.Schema) -> bytes:
    # Schemas that differ in metadata alone are one key of this cache: none of it may be written.
    data: bytes = plain_schema(schema).serialize().to_pybytes()
    return data + bytes(-len(data) % _ALIGN)


@lru_cache(maxsize=256)
def _read_schema(data: bytes) -> pa.Schema:
    return trusted_schema(pa.ipc.read_schema(pa.py_buffer(data)))
