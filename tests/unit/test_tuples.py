"""Tuples as bolts see them."""

import copy
import pickle

import pytest

from penstock import Tuple
from penstock.topology.tuples import TICK, tuple_type

Word = tuple_type("split", "words", 7, ("word", "count"))


def test_values_by_position_name_and_unpacking():
    tup = Word(("storm", 3))
    word, count = tup
    assert (word, count) == (tup[0], tup[1]) == (tup.word, tup.count) == ("storm", 3)
    assert tup.value("word") == "storm"
    assert tup == ("storm", 3)
    assert isinstance(tup, Tuple)


def test_where_a_tuple_comes_from():
    tup = Word(("storm", 3))
    assert (tup.source_component, tup.source_stream, tup.source_task) == ("split", "words", 7)
    assert tup.fields == ("word", "count")
    assert not tup.is_tick


def test_names_that_are_no_identifiers():
    tup = tuple_type("a", "default", 1, ("full name", "class"))(("x", "y"))
    assert tup.value("full name") == "x"
    assert tup.value("class") == "y"


@pytest.mark.parametrize("read", [lambda tup: tup.wrod, lambda tup: tup.value("wrod")])
def test_an_unknown_field_names_those_there_are(read):
    with pytest.raises(
        AttributeError, match="no field 'wrod' in a tuple of split:words; its fields are word, count"
    ):
        read(Word(("storm", 3)))


def test_repr():
    assert repr(Word(("storm", 3))) == "Tuple(word='storm', count=3)"


@pytest.mark.parametrize("clone", [lambda tup: pickle.loads(pickle.dumps(tup)), copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_tuple(clone):
    tup = clone(Word(("storm", [3])))
    assert tup == ("storm", [3])
    assert type(tup) is Word
    assert tup.word == "storm"


def test_a_fields_names_come_before_a_tuple_s_methods():
    tup = tuple_type("a", "default", 1, ("index", "count"))((4, 5))
    assert (tup.index, tup.count) == (4, 5)
    assert tup.value("count") == 5


def test_one_class_per_source_task_and_stream():
    assert tuple_type("split", "words", 7, ("word", "count")) is Word
    assert tuple_type("split", "words", 8, ("word", "count")) is not Word


def test_the_tick():
    assert TICK.is_tick
    assert TICK == ()
    assert pickle.loads(pickle.dumps(TICK)).is_tick
