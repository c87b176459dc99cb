"""Python values to columns and back."""

import datetime
import enum
import pickle

import numpy as np
import pyarrow as pa
import pytest

from penstock.columns import PICKLED, is_pickled, to_column, to_values


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
