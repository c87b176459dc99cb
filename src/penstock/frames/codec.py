"""Encodes record batches as frames and decodes them.

A frame consists of a header, a schema (only if a field of the stream has no declared type), the lineage and an
Arrow body. Schemas repeat from frame to frame, so both ends cache them by their bytes. A frame may contain pickled
columns: it comes from the shuffle, whose ends have authenticated each other as parts of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa

from penstock.columns import plain_schema, trusted_schema
from penstock.errors import FrameError
from penstock.frames.header import HEADER_BYTES, Header

_ALIGN = 8  # Arrow reads buffers in place only if they are aligned


def declared_schema(fields: Sequence[tuple[str, pa.DataType | None]]) -> pa.Schema | None:
    """The schema of all frames of a stream. None if a type must be inferred."""
    if any(kind is None for _, kind in fields):
        return None
    return pa.schema([(name, kind) for name, kind in fields])


def encode(header: Header, batch: pa.RecordBatch, schema: pa.Schema | None, lineage: bytes = b"") -> bytes:
    """Encode one frame. ``schema`` is the declared schema of the stream; with None the schema of the batch is
    included. ``lineage`` contains the data for acks; its length must be a multiple of 8 bytes."""
    described = b"" if schema is not None else _schema_bytes(batch.schema)
    header = header._replace(rows=batch.num_rows, schema_bytes=len(described), lineage_bytes=len(lineage))
    return b"".join((header.pack(), described, lineage, batch.serialize()))


def lineage_of(header: Header, frame: pa.Buffer) -> memoryview:
    """The lineage in a frame."""
    begin = HEADER_BYTES + header.schema_bytes
    return memoryview(frame)[begin : begin + header.lineage_bytes]


def decode(header: Header, frame: pa.Buffer, schema: pa.Schema | None) -> pa.RecordBatch:
    """Decode the tuples of a frame without copying. The batch keeps the memory of the frame alive."""
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
    # The cache treats schemas that differ only in metadata as equal, so metadata is not written.
    data: bytes = plain_schema(schema).serialize().to_pybytes()
    return data + bytes(-len(data) % _ALIGN)


@lru_cache(maxsize=256)
def _read_schema(data: bytes) -> pa.Schema:
    return trusted_schema(pa.ipc.read_schema(pa.py_buffer(data)))
