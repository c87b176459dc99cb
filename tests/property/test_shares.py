"""Any change of the number of tasks: every key has one owner before and after, and its value is kept."""

import operator
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.columns import to_column
from penstock.errors import StateError
from penstock.plan.owners import OwnerRule
from penstock.state.shares import Share, sources
from penstock.state.values import TaskState
from penstock.topology.groupings import ALL_ROWS, Fields, Targets
from penstock.topology.hashing import hash_keys, hash_rows

texts = st.text("abcdef", max_size=4)
keys = st.one_of(
    st.sets(texts, max_size=30),
    st.sets(st.integers(-5, 200), max_size=30),
    st.sets(st.one_of(texts, st.integers(0, 9), st.none()), max_size=30),
)
tasks = st.integers(1, 9)


def parts(state):
    """The stored parts of a task, as a restart reads them."""
    return {name: [data] for name, (_, _, data) in state.snapshot(full=True).encode().items()}


def owner(key, count):
    return int(hash_keys(to_column([key, object()], None)[:1], 1)[0] % np.uint64(count))


def spread(items, count, fill):
    """The items, distributed to their owners among so many tasks."""
    states = [TaskState() for _ in range(count)]
    for key, value in items.items():
        fill(states[owner(key, count)], key, value)
    return states


def inherited(before, now, hash):
    """The states of the new tasks, made from those of the previous tasks."""
    old = [parts(state) for state in before]
    result = []
    for index in range(now):
        share = Share(index, len(old), now, hash)
        state = TaskState()
        state.inherit({source: old[source] for source in share.sources}, share)
        result.append(state)
    return result


def by_field(column):
    return hash_keys(column, 1)


@given(keys, tasks, tasks)
def test_every_key_is_with_the_task_that_the_grouping_sends_it_to(names, before, now):
    items = {name: number for number, name in enumerate(names)}
    old = spread(items, before, lambda state, key, value: state.map("counts").__setitem__(key, value))
    new = inherited(old, now, by_field)
    found = [dict(state.map("counts", default=0).items()) for state in new]
    assert {key: value for each in found for key, value in each.items()} == items
    assert sum(map(len, found)) == len(items), "one owner each"
    for index, each in enumerate(found):
        assert all(owner(key, now) == index for key in each)
    # The grouping itself agrees.
    column = to_column([*items, object()], None)[: len(items)]
    router = Fields("word").router(Targets(tuple(range(now)), 0))
    for position, rows in router.split(pa.record_batch([column], names=["word"])) if items else ():
        chosen = list(items) if rows is ALL_ROWS else [list(items)[row] for row in rows]
        assert set(chosen) == set(found[position])


@given(st.lists(st.tuples(texts, st.integers(0, 5)), unique=True, max_size=30), tasks, tasks)
def test_keys_that_begin_with_the_grouped_field_follow_it(pairs, before, now):
    states = [TaskState() for _ in range(before)]
    for number, (word, minute) in enumerate(pairs):
        states[owner(word, before)].map("windows")[word, minute] = number
    new = inherited(states, now, by_field)
    found = [dict(state.map("windows", owner=itemgetter(0)).items()) for state in new]
    assert sum(map(len, found)) == len(pairs)
    for index, each in enumerate(found):
        assert all(owner(word, now) == index for word, _ in each)


@given(st.lists(st.tuples(texts, st.integers(0, 5)), unique=True, max_size=20), tasks, tasks)
def test_keys_of_two_grouped_fields(pairs, before, now):
    def place(pair, count):
        columns = [pa.array([pair[0]]), pa.array([pair[1]])]
        return int(hash_rows(columns)[0] % np.uint64(count))

    states = [TaskState() for _ in range(before)]
    for pair in pairs:
        states[place(pair, before)].map("pairs")[pair] = 1
    new = inherited(states, now, lambda column: hash_keys(column, 2))
    for index, state in enumerate(new):
        assert all(place(pair, now) == index for pair in state.map("pairs"))
    assert sum(len(state.map("pairs")) for state in new) == len(pairs)


@given(st.sets(st.integers(0, 10_000), min_size=1), tasks, tasks)
def test_an_owner_of_ones_own(numbers, before, now):
    states = [TaskState() for _ in range(before)]
    for number in numbers:
        states[owner(f"w{number % 7}", before)].map("rows")[number] = number
    for index, state in enumerate(inherited(states, now, by_field)):
        rows = state.map("rows", owner=lambda number: f"w{number % 7}")
        assert all(owner(f"w{number % 7}", now) == index for number in rows)


@given(st.integers(1, 64))
def test_doubling_moves_half_of_the_keys_to_one_new_task_each(before):
    hashes = hash_rows([pa.array(range(4_000))])
    old, new = hashes % np.uint64(before), hashes % np.uint64(2 * before)
    moved = new != old
    assert np.all(new[moved] == old[moved] + np.uint64(before))
    assert 0.45 < moved.mean() < 0.55
    for index in range(2 * before):
        assert sources(index, before, 2 * before) == (index % before,)
    for index in range(before):
        assert sources(index, 2 * before, before) == (index, index + before)


@given(tasks, tasks)
def test_the_sources_of_a_task_are_those_that_have_keys_of_it(before, now):
    numbers = range(before * now)
    for index in range(now):
        assert set(sources(index, before, now)) == {n % before for n in numbers if n % now == index}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), tasks)
def test_behind_a_shuffle_what_tasks_have_is_kept_and_put_together(amounts, now):
    states = []
    for amount in amounts:
        state = TaskState()
        state.map("seen", default=0)["all"] = amount
        state.value("total", 0).value = amount
        states.append(state)
    new = inherited(states, now, None)
    seen = sum(state.map("seen", default=0, merge=operator.add)["all"] for state in new)
    assert seen == sum(amounts)
    assert sum(state.value("total", 0, merge=operator.add).value for state in new) == sum(amounts)


def test_what_cannot_be_put_together_is_refused():
    states = []
    for number in range(2):
        state = TaskState()
        state.map("seen")["x"] = number
        state.value("last").value = number
        states.append(state)
    (one,) = inherited(states, 1, None)
    with pytest.raises(
        StateError, match=r"state 'seen': .* does not say how to merge its values.*merge=operator.add"
    ):
        one.map("seen")
    (one,) = inherited(states, 1, None)
    with pytest.raises(
        StateError, match=r"state 'last': tasks that are merged have different values, 0 and 1.*merge"
    ):
        one.value("last")


def test_keys_that_have_nothing_to_do_with_the_grouping_are_refused():
    states = [TaskState() for _ in range(2)]
    for number in range(20):
        states[number % 2].map("rows")[f"row {number}"] = 1
    new = inherited(states, 4, by_field)
    with pytest.raises(
        StateError, match=r"state 'rows': the keys of a map must be or begin with the fields .*owner="
    ):
        new[0].map("rows")


def test_a_tuple_behind_a_grouping_by_one_field_needs_an_owner():
    """It could be the value of the field, or begin with it. A wrong guess would lose state."""
    pairs = [(n, "x") for n in range(40)]
    state = TaskState()
    state.map("pairs").update(dict.fromkeys(pairs, 1))
    for index in range(2):
        share = OwnerRule(fields=1).share(index, 1, 2)
        for owner, value in ((lambda key: key, lambda key: key), (itemgetter(0), itemgetter(0))):
            new = TaskState()
            new.inherit({0: parts(state)}, share)
            assert set(new.map("pairs", owner=owner)) == {p for p in pairs if place(value(p), 2) == index}
        new = TaskState()
        new.inherit({0: parts(state)}, share)
        with pytest.raises(StateError) as refused:
            new.map("pairs")
        assert str(refused.value) == (
            "state 'pairs': the input is grouped by one field, but the map has the tuple (0, 'x') as a key and"
            " does not say which part of it is the field. Use state.map(..., owner=lambda key: key)"
            " if the value of the field is the whole tuple, or owner=lambda key: key[0] if the tuple begins"
            " with it."
        )


def place(value, count):
    """The position to which fields grouping sends a value."""
    column = to_column([value, object()], None)[:1]
    ((position, _),) = Fields("x").router(Targets(tuple(range(count)), 0)).split(pa.record_batch([column], ["x"]))
    return position


def test_keys_with_fewer_parts_than_grouped_fields_are_refused():
    state = TaskState()
    state.map("rows")["x",] = 1
    (new, _) = inherited([state], 2, lambda column: hash_keys(column, 2))
    with pytest.raises(
        StateError, match=r"state 'rows': the keys of a map must be .* but a key has fewer parts .*owner="
    ):
        new.map("rows")


@given(keys, tasks, tasks, tasks)
def test_what_was_inherited_is_in_a_snapshot_whole_and_can_be_inherited_again(names, first, second, third):
    items = {name: number for number, name in enumerate(names)}
    old = spread(items, first, lambda state, key, value: state.map("counts").__setitem__(key, value))
    # the second tasks' components never asked for their states
    last = inherited(inherited(old, second, by_field), third, by_field)
    assert {key: value for state in last for key, value in state.map("counts").items()} == items
