"""Columns return the values they were made from, including their types, also over the wire."""

import math

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.columns import to_column, to_values
from penstock.frames.codec import decode, encode
from penstock.frames.header import Header, Kind, unpack

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=10),
    st.binary(max_size=10),
    st.complex_numbers(),
    st.dates(),
    st.decimals(allow_nan=False),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)
one_type = st.sampled_from(
    [st.integers(), st.floats(), st.text(st.characters(), max_size=10), st.binary(max_size=10), st.booleans()]
).flatmap(lambda kind: st.lists(st.one_of(st.none(), kind), max_size=20))


def alike(one, other):
    """Equal and of the same type, including NaN and the sign of zero."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, complex):
        return alike(one.real, other.real) and alike(one.imag, other.imag)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return one == other


def over_the_wire(column):
    batch = pa.RecordBatch.from_arrays([column], ["x"])
    frame = encode(Header(Kind.DATA, 1, 0, 0, 0), batch, None)
    return decode(unpack(frame), pa.py_buffer(frame), None).column(0)


@given(st.lists(values, max_size=8))
def test_any_values_come_back(given_values):
    assert alike(to_values(to_column(given_values, None)), given_values)


@given(one_type)
def test_values_of_one_type_come_back(given_values):
    assert alike(to_values(to_column(given_values, None)), given_values)


@given(st.one_of(st.lists(values, max_size=5), one_type))
def test_values_come_back_over_the_wire(given_values):
    assert alike(to_values(over_the_wire(to_column(given_values, None))), given_values)


@given(one_type, st.data())
def test_slices_come_back(given_values, data):
    begin = data.draw(st.integers(0, len(given_values)))
    end = data.draw(st.integers(begin, len(given_values)))
    assert alike(to_values(to_column(given_values, None)[begin:end]), given_values[begin:end])


@given(st.lists(st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1))))
def test_declared_types_keep_values_that_fit(given_values):
    column = to_column(given_values, pa.int32())
    assert column.type == pa.int32()
    assert to_values(column) == given_values


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_a_declared_type_never_changes_a_value(given_values):
    try:
        column = to_column(given_values, pa.int64())
    except (pa.ArrowException, TypeError, OverflowError):
        assert any(value != int(value) or abs(value) >= 2.0**63 for value in given_values)
    else:
        assert to_values(column) == given_values
