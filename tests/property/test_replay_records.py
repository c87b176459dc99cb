"""Records come back as they were written, to the type."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replay.queues import QueueDamaged
from penstock.replay.records import Record, decode, encode
from penstock.topology.components import Failure

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
surrogates = st.text(st.characters(categories=["Cs", "Lu"]), max_size=3)
values = st.recursive(
    scalars | surrogates,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=6,
)


def shape(value):
    """A value with its types, to compare True with 1 and tuples with lists."""
    if isinstance(value, (list, tuple)):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return dict, [(shape(key), shape(item)) for key, item in value.items()]
    return type(value), value


@given(st.lists(values, max_size=4), st.integers(0, 99), st.text(), st.text(max_size=5), st.floats(0, 1e10))
def test_any_record_survives(payload, attempts, error, component, first_failed):
    record = Record(tuple(payload), attempts, error, component, first_failed)
    again = decode(encode(record))
    assert again == record
    assert shape(again.payload) == shape(record.payload)


@given(st.lists(scalars, max_size=4))
def test_plain_values_are_not_pickled(payload):
    assert encode(Record(tuple(payload)))[:1] == b"J"


def test_other_programs_can_read_plain_records():
    data = encode(Record(("Zürich", 7, [1.5, None]), 2, "boom", "split", 3.0))
    assert json.loads(data[1:]) == [["Zürich", 7, [1.5, None]], [], 2, "boom", "split", 3.0]


def test_nan_and_very_large_numbers():
    assert math.isnan(decode(encode(Record((math.nan,)))).payload[0])
    assert decode(encode(Record((math.inf, 10**5000)))).payload == (math.inf, 10**5000)


def test_a_class_that_is_gone_is_said():
    broken = b"P" + b"cno.such.module\nThing\n."  # a pickle that names it
    with pytest.raises(QueueDamaged, match=r"must unpickle .*; got ModuleNotFoundError: .* Bring back the class"):
        decode(broken)


def test_a_record_keeps_the_time_of_its_first_failure():
    once = Record(("x",)).failed(Failure("split", "one"), 10.0)
    twice = once.failed(Failure("", "timed out"), 20.0)
    assert twice == Record(("x",), 2, "timed out", "", 10.0)
    assert twice.forgiven() == Record(("x",), 0, "timed out", "", 10.0)
