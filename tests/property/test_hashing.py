"""The hash of fields and partial key grouping: equal values have equal hashes, whatever the column type."""

import enum
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.columns import PICKLED, to_column
from penstock.topology.hashing import hash_column, hash_rows

small = st.integers(-(2**53), 2**53)
ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(st.none(), st.booleans(), ints, st.floats(allow_nan=False), texts, st.binary(max_size=20))


def pickled(values):
    """The values as a frame with mixed types contains them."""
    column = to_column([*values, object], None)
    assert column.type == PICKLED
    return column[: len(values)]


def same(one, other):
    return hash_column(one).tolist() == hash_column(other).tolist()


@given(st.lists(st.integers(-128, 127)))
def test_numbers_hash_alike_in_every_width(values):
    base = pa.array(values, pa.int64())
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.float32(), pa.float64()):
        assert same(base, base.cast(kind)), kind
    assert same(base, pickled(values))
    assert same(base, pickled([float(value) for value in values]))
    assert same(base, base.dictionary_encode())


@given(st.lists(st.booleans()))
def test_truths_hash_as_one_and_zero(values):
    assert same(pa.array(values, pa.bool_()), pa.array([int(value) for value in values], pa.int64()))
    assert same(pa.array(values, pa.bool_()), pickled(values))


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_unsigned_numbers_hash_as_signed_ones(values):
    assert same(pa.array(values, pa.uint64()), pa.array(values, pa.int64()))


@given(st.lists(ints.map(float).filter(lambda value: abs(value) < 2.0**63), min_size=1))
def test_a_whole_float_hashes_as_the_equal_int(values):
    whole = [int(value) for value in values]
    assert whole == values
    assert same(pa.array(values, pa.float64()), pa.array(whole, pa.int64()))


@given(st.lists(st.one_of(st.none(), texts)))
def test_texts_hash_alike_in_every_column_type(values):
    base = pa.array(values, pa.string())
    assert same(base, base.cast(pa.large_string()))
    assert same(base, base.dictionary_encode())
    assert same(base, base.cast(pa.binary()))
    assert same(base, pickled(values))


@given(st.lists(scalars))
def test_a_value_hashes_the_same_alone_and_in_company(values):
    alone = [hash_column(to_column([value], None))[0] for value in values]
    assert hash_column(pickled(values)).tolist() == alone


@given(st.lists(st.one_of(st.none(), texts), min_size=1), st.data())
def test_a_slice_hashes_as_its_values(values, data):
    begin = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(begin, len(values)))
    for make in (lambda chosen: pa.array(chosen, pa.string()), pickled):
        assert hash_column(make(values)[begin:end]).tolist() == hash_column(make(values)).tolist()[begin:end]
        assert same(make(values)[begin:end], make(values[begin:end]))


@given(st.lists(st.one_of(st.none(), ints), min_size=1), st.data())
def test_a_slice_of_numbers_hashes_as_its_values(values, data):
    begin = data.draw(st.integers(0, len(values) - 1))
    column = pa.array(values, pa.int64())
    assert hash_column(column[begin:]).tolist() == hash_column(column).tolist()[begin:]


@given(st.lists(st.one_of(st.integers(), st.floats(), texts), min_size=1))
def test_numbers_beyond_64_bits_do_not_change_their_neighbours_hash(values):
    with_giant = hash_column(pickled([*values, 2**70, -(2**70)]))[: len(values)]
    assert with_giant.tolist() == hash_column(pickled(values)).tolist()


def test_a_lone_surrogate_does_not_change_its_neighbours_hash():
    assert (
        hash_column(pickled(["a", "\ud800", "b"]))[[0, 2]].tolist() == hash_column(pa.array(["a", "b"])).tolist()
    )


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


EQUAL = {
    "zeros": (0.0, -0.0),
    "enum": (1, Colour.RED),
    "numpy int": (1, np.int64(1)),
    "numpy float": (1.5, np.float64(1.5)),
    "numpy text": ("a", np.str_("a")),
    "subclass": ("a", Name("a")),
    "decimals": (Decimal("1.0"), Decimal("1.00")),
    "tuples": ((1, "a"), (1.0, "a")),
    "shared parts": (("ab", "ab"), ("ab", "".join(["a", "b"]))),
    "big floats": (2**60, 2.0**60),
    "bigger floats": (2**80, 2.0**80),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_values_that_are_one_key_in_a_dict_hash_alike(pair):
    one, other = pair
    assert len({one: 1, other: 2}) == 1
    assert hash_column(to_column([one], None))[0] == hash_column(to_column([other], None))[0]


@given(st.lists(scalars, min_size=2, max_size=30))
def test_different_values_hash_differently(values):
    distinct = {("text" if isinstance(v, str) else "bytes" if isinstance(v, bytes) else "", v) for v in values}
    plain = [value for kind, value in distinct if kind != "bytes"]  # a text and its bytes share a hash
    assert len(set(hash_column(pickled(plain)).tolist())) == len(plain)


@given(st.lists(st.tuples(ints, texts), min_size=1))
def test_rows_hash_by_all_columns_in_order(rows):
    numbers, words = (list(column) for column in zip(*rows, strict=True))
    together = hash_rows([pa.array(numbers, pa.int64()), pa.array(words, pa.string())])
    for row, hash in zip(rows, together.tolist(), strict=True):
        alone = hash_rows([pa.array([row[0]], pa.int64()), pa.array([row[1]], pa.string())])
        assert alone.tolist() == [hash]
    assert len(set(together.tolist())) == len(set(rows))


@given(texts, texts)
def test_the_order_of_columns_counts(one, other):
    first = hash_rows([pa.array([one]), pa.array([other])])
    second = hash_rows([pa.array([other]), pa.array([one])])
    assert (first.tolist() == second.tolist()) == (one == other)


PINNED = [
    0,
    17360999193197444373,
    13859817610698646797,
    10451216379200822465,
    15481881892811333770,
    16241676933731211557,
    10451216379200822465,
    7790691224305936752,
    10451216379200822465,
]


def test_the_hash_never_changes():
    """The placement of state depends on it: a new value here would move every key of every stored topology."""
    column = to_column(["", "a", "storm", 1, 1.5, None, True, -7, b"\x00"], None)
    assert hash_column(column).tolist() == PINNED


@given(st.lists(st.one_of(ints, st.floats(allow_nan=False))), st.integers(1, 500))
def test_doubling_sends_a_key_to_its_place_or_that_plus_the_old_number(values, old):
    hashes = hash_column(pickled(values))
    before, after = hashes % np.uint64(old), hashes % np.uint64(2 * old)
    assert all(new in (place, place + old) for place, new in zip(before.tolist(), after.tolist(), strict=True))


def test_doubling_moves_about_half_of_the_keys():
    hashes = hash_column(pa.array([f"key {n}" for n in range(10_000)]))
    for old in (1, 3, 8):
        moved = np.count_nonzero(hashes % np.uint64(old) != hashes % np.uint64(2 * old))
        assert moved == pytest.approx(5000, abs=300)


@pytest.mark.parametrize("tasks", [2, 3, 7, 16])
@pytest.mark.parametrize("make", [str, int, float, lambda n: n * 1024, lambda n: f"{n:08d}"], ids=range(5))
def test_keys_spread_evenly(make, tasks):
    counts = np.bincount(
        (hash_column(to_column([make(n) for n in range(20_000)], None)) % np.uint64(tasks)).astype(int)
    )
    assert len(counts) == tasks
    assert abs(counts - 20_000 / tasks).max() < 5 * math.sqrt(20_000 / tasks)
