"""What runs in C for whole columns gives the same as the pure form: columns that may be shared, rows divided by
key, hashes of texts."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import columns, native
from penstock.columns import ColumnBatch, passes_unchanged
from penstock.topology import groupings, hashing
from penstock.topology.groupings import Fields, Targets

pytestmark = pytest.mark.skipif(native.FORM is None, reason="there is no native form here")

texts = st.text(st.characters(codec=None), max_size=6)  # lone surrogates included
values = st.one_of(
    st.none(),
    st.booleans(),
    texts,
    st.binary(max_size=3),
    st.floats(),
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from([1 << 63, -(1 << 63), (1 << 63) - 1, -(1 << 63) + 1]),
    st.lists(st.integers(), max_size=1),
)
rows = st.one_of(
    st.lists(values, min_size=1, max_size=8), st.lists(texts, min_size=1), st.lists(st.integers(), min_size=1)
)
declared = st.sampled_from([None, pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.binary(), pa.int32()])


def pure(monkeypatch):
    for module in (columns, groupings, hashing):
        monkeypatch.setattr(module.native, "FORM", None)


@given(rows, declared)
def test_the_same_columns_may_be_shared(column, kind):
    with pytest.MonkeyPatch.context() as patch:
        found = passes_unchanged(column, kind)
        pure(patch)
        assert bool(found) == passes_unchanged(column, kind)


@given(st.lists(st.tuples(texts, st.integers(0, 9)), min_size=1, max_size=200), st.integers(1, 7), st.booleans())
def test_rows_are_divided_by_key_as_in_pure_python(pairs, tasks, both):
    batch = ColumnBatch([("word", None), ("n", None)], [list(column) for column in zip(*pairs, strict=True)])
    grouping = Fields("word", "n") if both else Fields("n")
    router = grouping.router(Targets(tuple(range(tasks))))
    divided = [router.divide(batch) for _ in range(2)][1]  # the second time all keys are known
    with pytest.MonkeyPatch.context() as patch:
        pure(patch)
        expected = grouping.router(Targets(tuple(range(tasks)))).divide(batch)
    assert [position for position, _, _ in divided] == [position for position, _, _ in expected]
    numbers = np.arange(batch.num_rows)
    for (_, rows, part), (_, wanted, same) in zip(divided, expected, strict=True):
        assert numbers[rows].tolist() == numbers[wanted].tolist()
        assert part.values == same.values


@given(st.lists(st.one_of(st.none(), st.text(max_size=40)), min_size=1), st.integers(0, 3), st.booleans())
def test_texts_have_the_same_hash(words, left_out, large):
    column = pa.array(words, pa.large_string() if large else pa.string())[left_out:]
    found = hashing.hash_column(column)
    with pytest.MonkeyPatch.context() as patch:
        pure(patch)
        assert hashing.hash_column(column).tolist() == found.tolist()


@given(st.lists(st.text(max_size=3), min_size=1, max_size=100), st.integers(2, 9))
def test_batches_are_divided_as_in_pure_python(words, tasks):
    batch = pa.RecordBatch.from_pydict({"word": pa.array(words, pa.string())})
    found = Fields("word").router(Targets(tuple(range(tasks)))).split(batch)
    with pytest.MonkeyPatch.context() as patch:
        pure(patch)
        expected = Fields("word").router(Targets(tuple(range(tasks)))).split(batch)
    numbers = np.arange(len(words))
    assert [(t, numbers[rows].tolist()) for t, rows in found] == [
        (t, numbers[rows].tolist()) for t, rows in expected
    ]


def test_wrong_arguments_are_refused():
    form = native.FORM
    assert form.distribute({"a": 0}, ["a", "b"], (["x", "y"],), 1) is None
    for known, keys, several, count in (
        ({"a": 5}, ["a"], (["x"],), 2),
        ({"a": -1}, ["a"], (["x"],), 2),
        ({"a": 0}, ["a"], (["x", "y"],), 2),
        ({"a": 0}, ["a"], (["x"],), 0),
        ({"a": 0}, ["a"], (["x"],), 70_000),
    ):
        with pytest.raises(ValueError, match="distribute needs"):
            form.distribute(known, keys, several, count)
    with pytest.raises(ValueError, match="offsets within the data"):
        form.hash_bytes(np.array([0, 9], np.int64), b"abc")
    with pytest.raises(TypeError, match="passes needs"):
        form.passes((1, 2), int)
    assert form.hash_bytes(np.array([3, -5, 3], np.int64), b"abc")
    for count in (0, 70_000):
        with pytest.raises(ValueError, match="order_by_target needs"):
            form.order_by_target(np.array([1], np.uint64), count)
