"""Records are decoded as they were encoded, with their exact types."""

from __future__ import annotations

import json
import math
import pickle
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import signing
from penstock.replay.records import ReplayRecord, decode, decode_dead_letter, encode, encode_dead_letter
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
    """A value with its types, to distinguish True from 1 and tuples from lists."""
    if isinstance(value, (list, tuple)):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return dict, [(shape(key), shape(item)) for key, item in value.items()]
    return type(value), value


@given(st.lists(values, max_size=4), st.integers(0, 99), st.text(), st.text(max_size=5), st.floats(0, 1e10))
def test_any_record_survives(payload, attempts, error, component, first_failed):
    record = ReplayRecord(tuple(payload), attempts, error, component, first_failed)
    again = decode(encode(record))
    assert again == record
    assert shape(again.payload) == shape(record.payload)


@given(st.lists(scalars, max_size=4))
def test_plain_values_are_not_pickled(payload):
    assert encode(ReplayRecord(tuple(payload)))[:1] == b"J"


def test_other_programs_can_read_plain_records():
    data = encode(ReplayRecord(("Zürich", 7, [1.5, None]), 2, "boom", "split", 3.0))
    assert json.loads(data[1:]) == [["Zürich", 7, [1.5, None]], [], 2, "boom", "split", 3.0]


def test_nan_and_very_large_numbers():
    assert math.isnan(decode(encode(ReplayRecord((math.nan,)))).payload[0])
    assert decode(encode(ReplayRecord((math.inf, 10**5000)))).payload == (math.inf, 10**5000)


class Marker:
    """Unpickling an instance leaves a mark, which shows that foreign code has run."""

    ran: ClassVar[list[int]] = []

    def __reduce__(self):
        return Marker.ran.append, (1,)


def test_a_class_that_is_gone_makes_a_damaged_record():
    pickled = b"cno.such.module\nThing\n."  # a pickle that names it
    data = b"P" + signing.sign("replay record", pickled) + pickled
    found = decode(data)
    assert (found.damaged, found.payload) == (True, (data,))
    assert "ModuleNotFoundError: No module named 'no'" in found.error


@pytest.mark.parametrize("key", ["none", "another"])
def test_a_pickled_record_that_is_not_signed_with_our_key_is_never_unpickled(key):
    pickled = pickle.dumps((Marker(), 0, "", "", 0.0))
    if key == "none":
        data = b"P" + pickled
    else:
        mine = signing.deployment_key()
        signing.use_key(bytes(32))
        try:
            data = b"P" + signing.sign("replay record", pickled) + pickled
        finally:
            signing.use_key(mine)
    Marker.ran.clear()
    for read in (decode, decode_dead_letter):
        found = read(data)
        assert (found.damaged, found.payload) == (True, (data,))
        assert "not signed with this deployment's key, so it is not unpickled" in found.error
    assert Marker.ran == []


def test_a_signature_for_another_purpose_does_not_count():
    pickled = pickle.dumps((Marker(), 0, "", "", 0.0))
    Marker.ran.clear()
    assert decode(b"P" + signing.sign("persist spec", pickled) + pickled).damaged
    assert Marker.ran == []


BAD = [None, b"", b"J", b"J{", b"J[]", b'J[["a"]]', b'J["a",[],0,"","",0]', b'J[["a"],[3],0,"","",0]', b"\xff\xff"]
BAD += [b'J[["a"],[],"0","","",0]', b'J[["a"],[],0,"","",0,1,2]', b"P", b"J" + b"[" * 100_000, b"Jnull"]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_bytes_that_are_no_record_make_a_damaged_one(data):
    found = decode(data)
    assert found.damaged
    assert found.error
    assert found.payload == (data or b"",)


@given(st.binary())
def test_any_bytes_are_read_as_something(data):
    record = decode(data)
    assert decode_dead_letter(encode_dead_letter(record)) == record


def test_a_damaged_record_that_is_sent_back_is_read_once_more():
    good = encode(ReplayRecord((1, "a")))
    dead_letter = ReplayRecord((good,), 1, "the key was another", "replay queue", 5.0, damaged=True)
    assert decode_dead_letter(encode_dead_letter(dead_letter)) == dead_letter
    assert decode(encode(dead_letter.reset())) == ReplayRecord((1, "a"))


def test_a_record_keeps_the_time_of_its_first_failure():
    once = ReplayRecord(("x",)).failed(Failure("split", "one"), 10.0)
    twice = once.failed(Failure("", "timed out"), 20.0)
    assert twice == ReplayRecord(("x",), 2, "timed out", "", 10.0)
    assert twice.reset() == ReplayRecord(("x",), 0, "timed out", "", 10.0)
