"""What passes between tasks of one worker: the same values, to the same tasks, as between workers."""

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.columns import ColumnBatch, passes_unchanged, to_column, to_values, values_of
from penstock.topology.groupings import Fields, PartialKey, Shuffle, Targets

PLAIN = [["a", "b", "a"], [1, 2, 3], [1.5, float("inf"), -0.0], [True, False, True], [b"x", b"", b"y"]]


@pytest.mark.parametrize(
    ("values", "declared", "unchanged"),
    [
        (["a", None], None, True),
        ([1, "a", 2.5, True, b"x", Decimal(1), datetime.date(2026, 1, 1)], None, True),
        ([["a"]], None, False),
        ([{"a": 1}], None, False),
        (["a", "b"], pa.string(), True),
        (["a", 1], pa.string(), False),
        (["\ud800"], pa.string(), False),
        (["ü", None], pa.string(), True),
        ([1, None, -(2**63) + 1], pa.int64(), True),
        ([2**63], pa.int64(), False),
        ([1], pa.int32(), False),
        ([1], pa.float64(), False),
        ([True], pa.int64(), False),
        ([None], pa.int64(), True),
        ([datetime.date(2026, 1, 1)], pa.date32(), False),
    ],
)
def test_only_what_nobody_can_change_is_shared(values, declared, unchanged):
    assert passes_unchanged(values, declared) is unchanged
    if unchanged:
        back = to_values(to_column(values, declared))
        assert back == values
        assert list(map(type, back)) == list(map(type, values))


def test_a_column_batch_is_its_arrow_batch():
    batch = ColumnBatch([(f"f{n}", None) for n in range(len(PLAIN))], PLAIN)
    assert values_of(batch.arrow()) == values_of(batch) == PLAIN
    assert values_of(batch.slice(1, 2)) == values_of(batch.arrow().slice(1, 2))
    assert values_of(batch.take([2, 0])) == values_of(batch.arrow().take(pa.array([2, 0])))
    assert values_of(batch.take([1])) == [[column[1]] for column in PLAIN]
    assert batch.nbytes > 0


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("tasks", [1, 2, 5])
@pytest.mark.parametrize(
    "keys",
    [
        lambda n: f"word{n % 7}",
        lambda n: n,
        lambda n: [n, float(n), n % 2 == 0][n % 3],
        lambda n: None if n % 3 else "x",
        lambda n: float("nan"),
    ],
    ids=["words", "all different", "mixed", "none", "nan"],
)
def test_fields_grouping_chooses_the_same_task_from_values_and_from_arrow(keys, tasks, rows):
    targets = Targets(tuple(range(1, tasks + 1)))
    inside, outside = Fields("k").router(targets), Fields("k").router(targets)
    for round in range(3):  # from the second round on the keys are known
        column = [keys(n + round) for n in range(rows)]
        batch = ColumnBatch([("k", None)], [column])
        assert as_lists(inside.split(batch), rows) == as_lists(outside.split(batch.arrow()), rows)


def test_fields_grouping_by_two_fields():
    targets = Targets((1, 2, 3))
    batch = ColumnBatch([("a", None), ("b", None)], [["x", "y", "x"] * 30, [1, 2, 3] * 30])
    router = Fields("a", "b").router(targets)
    for _ in range(2):
        assert as_lists(router.split(batch), 90) == as_lists(
            Fields("a", "b").router(targets).split(batch.arrow()), 90
        )


@pytest.mark.parametrize("grouping", [Shuffle(), PartialKey("k")])
def test_other_groupings_split_columns_as_they_split_arrow(grouping):
    targets = Targets((1, 2, 3), 7)
    batch = ColumnBatch([("k", None)], [[f"word{n % 9}" for n in range(50)]])
    assert as_lists(grouping.router(targets).split(batch), 50) == as_lists(
        grouping.router(targets).split(batch.arrow()), 50
    )


def test_keys_that_never_repeat_are_not_remembered():
    router = Fields("k").router(Targets((1, 2)))
    for start in range(0, 200_000, 10_000):
        router.split(ColumnBatch([("k", None)], [list(range(start, start + 10_000))]))
    assert len(router._known) < 60_000


def as_lists(split, rows):
    return [(position, list(range(rows))[chosen] if isinstance(chosen, slice) else chosen.tolist())
            for position, chosen in split]  # fmt: skip
