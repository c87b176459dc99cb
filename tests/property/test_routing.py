"""Routers split every batch into a partition of its rows, in order."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.columns import to_column
from penstock.topology.groupings import (
    All,
    Fields,
    Global,
    LocalOrShuffle,
    NoneGrouping,
    PartialKey,
    Shuffle,
    Targets,
    by_position,
)

keys = st.one_of(st.none(), st.integers(0, 9), st.sampled_from("abcdef"), st.floats(0, 3, width=16))
batches = st.lists(st.lists(keys, max_size=40), min_size=1, max_size=5)
tasks = st.integers(1, 12)
targets = st.builds(
    lambda count, source, seed: Targets(tuple(range(10, 10 + count)), source, seed=seed),
    tasks,
    st.integers(0, 50),
    st.integers(0, 50),
)


def batch_of(values):
    return pa.RecordBatch.from_arrays(
        [to_column(values, None), pa.array(range(len(values)), pa.int64())], ["k", "n"]
    )


def rows_of(split, count):
    """Target position -> its rows. Checks that each target occurs once and its rows are in order."""
    result = {}
    for position, rows in split:
        assert position not in result
        chosen = list(range(count)[rows]) if isinstance(rows, slice) else rows.tolist()
        assert chosen == sorted(set(chosen))
        result[position] = chosen
    return result


def placed(router, batch, count):
    """Row -> position. Checks that each row occurs exactly once."""
    position_of = {}
    for position, rows in rows_of(router.split(batch), batch.num_rows).items():
        assert 0 <= position < count
        for row in rows:
            assert row not in position_of
            position_of[row] = position
    assert sorted(position_of) == list(range(batch.num_rows))
    return [position_of[row] for row in range(batch.num_rows)]


@given(batches, targets, st.sampled_from([Shuffle(), NoneGrouping(), LocalOrShuffle()]))
def test_shuffle_is_an_even_partition(values, to, grouping):
    router, counts = grouping.router(to), np.zeros(len(to), int)
    for chunk in values:
        for position in placed(router, batch_of(chunk), len(to)):
            counts[position] += 1
        assert counts.max() - counts.min() <= 1


@given(batches, targets)
def test_fields_is_a_partition_by_key(values, to):
    router, home = Fields("k").router(to), {}
    for chunk in values:
        for key, position in zip(chunk, placed(router, batch_of(chunk), len(to)), strict=True):
            assert home.setdefault(key, position) == position


@given(batches, targets)
def test_partial_key_is_a_partition_over_two_homes_a_key(values, to):
    router, homes = PartialKey("k").router(to), {}
    for chunk in values:
        for key, position in zip(chunk, placed(router, batch_of(chunk), len(to)), strict=True):
            homes.setdefault(key, set()).add(position)
    assert all(len(positions) <= 2 for positions in homes.values())


@given(st.integers(0, 300), tasks.filter(lambda count: count > 1))
def test_partial_key_halves_a_single_key(rows, count):
    router = PartialKey("k").router(Targets(tuple(range(count))))
    places = placed(router, batch_of(["hot"] * rows), count)
    counts = [places.count(position) for position in set(places)]
    assert len(counts) <= 2
    assert sum(counts) == rows
    assert abs(2 * max(counts, default=0) - rows) <= 1


@given(batches, targets)
def test_all_and_global(values, to):
    everywhere, first = All().router(to), Global().router(to)
    for chunk in values:
        batch = batch_of(chunk)
        whole = list(range(len(chunk)))
        assert rows_of(everywhere.split(batch), len(chunk)) == dict.fromkeys(range(len(to)), whole)
        assert rows_of(first.split(batch), len(chunk)) == {0: whole}


@given(st.data(), tasks)
def test_by_position_is_what_it_was_told(data, count):
    chosen = data.draw(st.lists(st.integers(0, count - 1), max_size=200))
    for kind in (np.uint64, np.int64):
        split = rows_of(by_position(np.array(chosen, kind), count), len(chosen))
        for position in range(count):
            assert split.get(position, []) == [row for row, told in enumerate(chosen) if told == position]


@given(batches)
def test_doubling_the_tasks_moves_a_key_by_the_old_number_or_not_at_all(values):
    for old in (1, 2, 3, 6):
        before, after = (Fields("k").router(Targets(tuple(range(count)))) for count in (old, 2 * old))
        for chunk in values:
            batch = batch_of(chunk)
            pairs = zip(placed(before, batch, old), placed(after, batch, 2 * old), strict=True)
            assert all(new in (place, place + old) for place, new in pairs)
