"""The wire format: headers and Arrow bodies are encoded and decoded, and invalid data is rejected."""

import random
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock import FrameError
from penstock.columns import is_pickled, to_column, to_values
from penstock.frames.codec import declared_schema, decode, encode
from penstock.frames.header import HEADER_BYTES, Header, Kind, unpack

HEADER = Header(Kind.DATA, 3, 7, 1, 2, target_task=9, source_task=4, stream=5, born=1234.5, sequence=8)


def batch_of(**columns):
    return pa.RecordBatch.from_arrays([to_column(values, None) for values in columns.values()], list(columns))


def there_and_back(batch, schema=None):
    frame = encode(HEADER, batch, schema)
    return decode(unpack(frame), pa.py_buffer(frame), schema)


def rows(batch):
    return list(zip(*map(to_values, batch.columns), strict=True))


# ---- header ----------------------------------------------------------------------------------------------


def test_a_header_is_72_bytes_and_comes_back_whole():
    numbers = 2**32 - 1, 2**32 - 2, 3, 4, 5, 6, 0.25, 2**64 - 1, 8, 9, 10, 2**64 - 2
    full = Header(1, 65535, 65534, 65533, 65532, *numbers)
    assert len(full.pack()) == HEADER_BYTES == 72
    assert unpack(full.pack()) == full


def test_a_header_is_read_from_the_front_of_a_frame():
    assert unpack(memoryview(HEADER.pack() + b"body")) == HEADER


@pytest.mark.parametrize("length", [0, 1, 71])
def test_too_short_for_a_header(length):
    with pytest.raises(FrameError, match=f"it has {length} bytes, less than a header of 72 bytes"):
        unpack(HEADER.pack()[:length])


def test_bytes_of_somebody_else():
    with pytest.raises(
        FrameError, match="begins with 0x4141 and version 65 instead of 0x5053 and version 2"
    ) as caught:
        unpack(b"A" * 100)
    assert "same version of penstock" in str(caught.value)


def test_another_version_of_the_format():
    data = bytearray(HEADER.pack())
    data[2] = 3
    with pytest.raises(FrameError, match="version 3 instead of 0x5053 and version 2"):
        unpack(data)


# ---- body ------------------------------------------------------------------------------------------------


def test_typed_columns_travel_without_a_schema():
    schema = declared_schema([("word", pa.string()), ("n", pa.int32())])
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a", None, "ü"]), pa.array([1, 2, None], pa.int32())], schema=schema
    )
    frame = encode(HEADER, batch, schema)
    assert unpack(frame)._replace(rows=0) == HEADER
    assert (unpack(frame).rows, unpack(frame).schema_bytes) == (3, 0)
    assert decode(unpack(frame), pa.py_buffer(frame), schema).equals(batch)


def test_one_untyped_field_makes_the_schema_travel():
    assert declared_schema([("word", pa.string()), ("n", None)]) is None
    batch = batch_of(word=["a", "b"], n=[1.5, None])
    frame = encode(HEADER, batch, None)
    assert unpack(frame).schema_bytes % 8 == 0
    assert unpack(frame).schema_bytes > 0
    assert decode(unpack(frame), pa.py_buffer(frame), None).equals(batch)


def test_pickled_columns_keep_their_values():
    values = [{"a": [1, 2]}, Decimal("1.50"), None, "text", 2**80]
    batch = there_and_back(batch_of(key=["a", "b", "c", "d", "e"], any=values))
    assert rows(batch) == list(zip("abcde", values, strict=True))
    assert [type(value) for value in to_values(batch.column(1))] == [dict, Decimal, type(None), str, int]


def test_a_slice_of_a_batch_sends_its_own_rows_only():
    batch = batch_of(word=[f"word {n}" for n in range(1000)], any=[{n} for n in range(1000)])
    part = batch.slice(500, 3)
    assert rows(there_and_back(part)) == [(f"word {n}", {n}) for n in (500, 501, 502)]
    assert len(encode(HEADER, part, None)) < len(encode(HEADER, batch, None)) / 20


def test_no_rows():
    assert there_and_back(batch_of(word=[])).num_rows == 0


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.array([[1], [], None]),
        pa.array([{"x": 1}, {"x": 2}, None]),
        pa.array([0, 1, 2], pa.timestamp("us", "UTC")),
        pa.nulls(3),
    ],
    ids=lambda column: str(column.type)[:20],
)
def test_what_a_batch_component_may_emit_in_an_untyped_field(column):
    batch = pa.RecordBatch.from_arrays([column], ["x"])
    assert there_and_back(batch).column(0).to_pylist() == column.to_pylist()


# ---- garbage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [True, False])
def test_every_truncation_is_an_error(typed):
    batch = batch_of(word=["one", "two", None], n=[1, 2, 3])
    schema = batch.schema if typed else None
    frame = encode(HEADER, batch, schema)
    for length in range(HEADER_BYTES, len(frame) - 64, 7):
        with pytest.raises(FrameError):
            decode(unpack(frame), pa.py_buffer(frame[:length]), schema)


def test_random_bytes_after_a_header_are_an_error():
    draw = random.Random(1)
    schema = declared_schema([("word", pa.string())])
    for length in (0, 1, 8, 64, 500):
        header = HEADER._replace(rows=1, schema_bytes=draw.choice([0, 8, 2**31]))
        frame = header.pack() + draw.randbytes(length)
        with pytest.raises(FrameError, match="Arrow record batch"):
            decode(unpack(frame), pa.py_buffer(frame), schema)


def test_the_header_tells_the_number_of_rows():
    frame = encode(HEADER, batch_of(word=["a", "b"]), None)
    lying = unpack(frame)._replace(rows=5)
    with pytest.raises(FrameError, match="announces 5 tuples, but it has 2"):
        decode(lying, pa.py_buffer(frame), None)


def test_a_frame_without_its_schema():
    schema = declared_schema([("word", pa.string())])
    frame = encode(HEADER, batch_of(word=["a"]), schema)
    with pytest.raises(FrameError):
        decode(unpack(frame), pa.py_buffer(frame), None)


def test_a_frame_of_another_stream_s_schema():
    frame = encode(HEADER, batch_of(n=[1, 2]), batch_of(n=[1]).schema)
    with pytest.raises(FrameError):
        decode(unpack(frame), pa.py_buffer(frame), declared_schema([("a", pa.string()), ("b", pa.string())]))


# ---- pickled columns ---------------------------------------------------------------------------------------


def test_a_frame_brings_pickled_columns_as_such():
    sent = batch_of(word=[{"a": 1}, None], n=[1, 2])
    back = there_and_back(sent)
    assert back.schema == sent.schema
    assert is_pickled(back.column(0))
    assert rows(back) == [({"a": 1}, 1), (None, 2)]


def test_bytes_that_claim_to_be_pickled_are_bytes_behind_a_frame():
    """A batch from a file may have such metadata. The cached schema is equal to one without it."""
    claim = {b"ARROW:extension:name": b"penstock.pickled"}
    name = "only here"  # its schema is not cached yet
    field = pa.field(name, pa.binary(), metadata=claim)
    inside = pa.field("inside", pa.struct([field]))
    claimed = pa.record_batch([[b"x"], [{name: b"x"}]], schema=pa.schema([field, inside]))
    for batch in (claimed, claimed.replace_schema_metadata({"a": "b"})):
        back = there_and_back(batch)
        assert not any(map(is_pickled, back.columns))
        assert rows(back) == [(b"x", {name: b"x"})]
