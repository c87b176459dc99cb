"""Conversion of Python values to columns and back."""

import datetime
import enum
import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from penstock.columns import PICKLED, is_pickled, to_column, to_values
from penstock.state.encoding import apply_map, encode_map
from penstock.topology.streams import OutputDeclarer
from penstock.worker.arrow_collectors import as_batch


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("values", "type"),
    [
        (["a", "b"], pa.string()),
        ([1, None, 3], pa.int64()),
        ([1.5, None], pa.float64()),
        ([True, False], pa.bool_()),
        ([b"x", None], pa.binary()),
    ],
)
def test_plain_values_of_one_type_become_a_plain_column(values, type):
    column = to_column(values, None)
    assert column.type == type
    assert to_values(column) == values


@pytest.mark.parametrize(
    "values",
    [
        [1, "a"],
        [1, 1.0, True],
        [None, None],
        [2**70, 1],
        ["fine", "\ud800"],
        [{"a": 1}],
        [(1, "x"), [2]],
        [Colour.RED],
        [np.int64(3)],
        [datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)],
        [],
    ],
    ids=str,
)
def test_anything_else_travels_pickled_and_comes_back_the_same(values):
    column = to_column(values, None)
    assert column.type == PICKLED
    assert is_pickled(column)
    back = to_values(column)
    assert back == values
    assert list(map(type, back)) == list(map(type, values))


def test_a_slice_of_a_pickled_column():
    assert to_values(to_column([{n} for n in range(5)], None)[1:3]) == [{1}, {2}]


@pytest.mark.parametrize(
    ("value", "type"),
    [
        ("text", pa.int64()),
        (1.5, pa.int64()),
        (2**63, pa.int64()),
        (300, pa.int8()),
        (1, pa.string()),
        ("1.5", pa.float64()),
        (1, pa.bool_()),
        ({}, pa.string()),
    ],
)
def test_what_does_not_fit_a_declared_type_raises(value, type):
    with pytest.raises((pa.ArrowException, TypeError, OverflowError)):
        to_column([value], type)


def test_what_fits_a_declared_type():
    assert to_values(to_column([1, None, 2.0], pa.float64())) == [1.0, None, 2.0]
    assert to_column([1, 2], pa.int8()).type == pa.int8()
    assert not is_pickled(to_column(["a"], pa.string()))


def test_a_value_nobody_can_pickle():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        to_column([lambda: 0], None)


# ---- where a pickled column may come from ----------------------------------------------------------------------


class Bomb:
    """Records that it was unpickled."""

    went_off = 0

    def __reduce__(self):
        return _explode, ()


def _explode():
    Bomb.went_off += 1


def claiming(*objects):
    """A table that anyone can write without this package: bytes that claim to be a pickled column, also inside a
    struct."""
    claim = {b"ARROW:extension:name": b"penstock.pickled", b"ARROW:extension:metadata": b""}
    field = pa.field("word", pa.binary(), metadata=claim)
    data = pa.array([pickle.dumps(each) for each in objects], pa.binary())
    inside = pa.StructArray.from_arrays([data], fields=[field])
    schema = pa.schema([field, pa.field("inside", inside.type)])
    return pa.table([data, inside], schema=schema)


def through_parquet(table):
    file = io.BytesIO()
    pq.write_table(table, file)
    return pq.read_table(file)


def through_ipc(table):
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(out.getvalue()).read_all()


def untyped(*names):
    declarer = OutputDeclarer("spout")
    declarer.declare(*names)
    return declarer.streams["default"]


@pytest.mark.parametrize("read", [through_parquet, through_ipc])
def test_a_column_from_a_file_is_never_unpickled(read):
    Bomb.went_off = 0
    [found] = read(claiming(Bomb())).to_batches()
    emitted = as_batch(untyped("word", "inside"), found)
    for column in (*found.columns, *emitted.columns):
        assert not is_pickled(column)
        assert to_values(column) in ([pickle.dumps(Bomb())], [{"word": pickle.dumps(Bomb())}])
    assert Bomb.went_off == 0


def test_a_pickled_column_that_was_written_to_a_file_comes_back_as_bytes():
    for read in (through_parquet, through_ipc):
        column = read(pa.table({"word": to_column([{"a": 1}], None)})).column(0).chunk(0)
        assert column.type == pa.binary()
        assert to_values(column) == [pickle.dumps({"a": 1}, 5)]


def test_a_bolt_may_pass_on_a_pickled_column_it_received():
    values = [{"a": number} for number in range(4)]
    batch = pa.record_batch({"word": to_column(values, None), "n": to_column([0, 1, 2, 3], None)})
    large = pc.greater(batch.column("n"), 1)
    for some in (
        batch.filter(large),
        batch.filter(pc.field("n") > 1),
        batch.take(pa.array([2, 3])),
        pa.concat_batches([batch.slice(2, 1), batch.slice(3)]),
        pa.Table.from_batches([batch]).sort_by("n").slice(2).combine_chunks().to_batches()[0],
        pickle.loads(pickle.dumps(batch.slice(2))),
        pa.Table.from_batches([batch]).filter(large),
        {"word": batch.column("word").slice(2), "n": [2, 3]},
    ):
        passed_on = as_batch(untyped("word", "n"), some)
        assert to_values(passed_on.column(0)) == values[2:]


def test_state_keeps_pickled_keys_and_values():
    items = {(1, "a"): {"b": 2}, (2,): None, "c": 3}
    found = {}
    assert apply_map(encode_map("words", items), found) == 3
    assert found == items
