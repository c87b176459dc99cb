"""Values and maps: changes are written, unchanged states are not, and later changes do not affect a snapshot."""

import collections
import copy
import heapq
import json
import operator
import pickle
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import StateError
from penstock.state import encoding, maps
from penstock.state.shares import Share
from penstock.state.values import TaskState


def kinds(snapshot):
    return {name: (kind, rows) for name, (kind, rows, _) in snapshot.encode().items()}


def restored(*snapshots):
    """A state restored from the chain of these snapshots."""
    chain: dict[str, list[bytes]] = {}
    for snapshot in snapshots:
        for name, (kind, _, data) in snapshot.encode().items():
            chain[name] = [data] if kind == "full" else [*chain[name], data]
    state = TaskState()
    state.restore(chain)
    return state


def test_a_map_works_as_a_dict():
    counts = TaskState().map("counts")
    with pytest.raises(KeyError, match="a"):
        counts["a"]
    with pytest.raises(KeyError):
        del counts["a"]
    counts["a"] = 1
    counts["a"] += 1
    assert counts["a"] == 2
    assert "a" in counts
    assert "b" not in counts
    assert len(counts) == 1
    assert counts.get("b") is None
    assert counts.get("b", 5) == 5
    assert counts.get("a", 5) == 2
    assert counts.setdefault("a", 9) == 2
    assert counts.setdefault("b", 9) == 9
    assert counts.pop("b") == 9
    assert counts.pop("b", None) is None
    with pytest.raises(KeyError, match="b"):
        counts.pop("b")
    counts.update({"c": 3}, d=4)
    counts.update([("e", 5)])
    counts |= {"f": 6}
    counts |= [("g", 7)]
    assert counts == {"a": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}
    assert list(counts) == list("acdefg")
    assert list(reversed(counts)) == list("gfedca")
    assert counts.popitem() == ("g", 7)
    assert counts | {"z": 1} == {"a": 2, "c": 3, "d": 4, "e": 5, "f": 6, "z": 1}
    assert repr(counts) == "MapState({'a': 2, 'c': 3, 'd': 4, 'e': 5, 'f': 6})"
    assert isinstance(counts, collections.abc.MutableMapping)
    assert isinstance(counts, maps.MapState)
    assert counts != {"a": 2}
    assert counts != 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(counts)
    counts.clear()
    assert not counts
    assert counts == {} == TaskState().map("other") == counts


def test_code_that_knows_dicts_sees_the_whole_map():
    """It is not a dict, because C code would bypass its methods: code for mappings works, code that requires a
    dict raises."""
    counts = TaskState().map("counts")
    counts.update(dict(zip("abc", range(3), strict=True)))
    len(counts)
    counts["d"] = 3
    whole = {"a": 0, "b": 1, "c": 2, "d": 3}
    assert dict(counts) == whole == {**counts} == collections.Counter(counts) == copy.copy(counts)
    assert pickle.loads(pickle.dumps(counts)) == whole
    assert heapq.nlargest(2, counts.items(), key=operator.itemgetter(1)) == [("d", 3), ("c", 2)]
    assert sorted(counts) == list("abcd")
    assert max(counts, key=counts.get) == "d"
    assert sum(counts.values()) == 6
    assert json.dumps(counts.copy()) == '{"a": 0, "b": 1, "c": 2, "d": 3}'
    with pytest.raises(TypeError):
        json.dumps(counts)


def test_views_are_live():
    counts = TaskState().map("counts")
    counts.update(a=1, b=2)
    items, values, keys = counts.items(), counts.values(), counts.keys()
    counts["a"] = 5
    counts["c"] = 6
    assert list(items) == [("a", 5), ("b", 2), ("c", 6)]
    assert list(values) == [5, 2, 6]
    assert list(keys) == list("abc")
    seen = []
    for key, value in counts.items():
        counts["c"] = 60
        seen.append((key, value))
    assert seen[-1] == ("c", 60)


def test_a_map_with_a_default_counts_from_it():
    counts = TaskState().map("counts", default=0)
    counts["a"] += 1
    assert counts["nothing"] == 0
    assert "nothing" not in counts
    assert len(counts) == 1
    assert counts.get("nothing") is None
    assert counts.setdefault("x", 7) == 7
    assert counts["x"] == 7
    state = TaskState()
    again = state.map("counts", default=0)
    again["b"] += 1
    assert "a" not in again


COLUMNS = [list, tuple, pa.array, np.array, lambda values: pa.chunked_array([values[:1], values[1:]])]


@pytest.mark.parametrize("column", COLUMNS)
def test_columns(column):
    counts = TaskState().map("counts")
    counts.update_columns(column(["a", "b", "a"]), column([1, 2, 3]))
    assert counts == {"a": 3, "b": 2}
    assert counts.get_columns(column(["b", "z", "a"])) == [2, None, 3]
    assert counts.get_columns(column(["z", "a"]), 7) == [7, 3]
    counts.add_columns(column(["a", "z", "a", "z"]), column([1, 10, 100, 1000]))
    assert counts == {"a": 104, "b": 2, "z": 1010}
    counts.add_columns(column(["a", "z", "a"]))
    assert counts == {"a": 106, "b": 2, "z": 1011}
    assert {type(value) for value in counts.values()} == {int}
    assert {type(key) for key in counts} == {str}


def test_columns_add_as_plus_equals_would():
    amounts = [0.1, 0.2, 0.3, 1e16, 1.0]
    counts, expected = TaskState().map("counts", default=0.5), collections.defaultdict(lambda: 0.5)
    for _ in range(3):
        counts.add_columns(pa.array(["a"] * 5), pa.array(amounts))
        for amount in amounts:
            expected["a"] += amount
    assert counts == expected
    counts.add_columns(pa.array(["big", "big"]), pa.array([2**62, 2**62]))
    assert counts["big"] == 2**63 + 0.5
    counts.add_columns([None, "x"], [1, 2])
    counts.add_columns(pa.array([None, "x"]), 1)
    assert counts[None] == 2.5
    assert counts["x"] == 3.5
    counts.add_columns(pa.array([], pa.string()), pa.array([], pa.int64()))


def test_columns_of_two_lengths_are_an_error():
    counts = TaskState().map("counts")
    for call in (counts.update_columns, counts.add_columns):
        with pytest.raises(StateError, match=r"state 'counts', .*_columns: the columns have different lengths, 2"):
            call(["a", "b"], [1])
    assert not counts


def test_only_changes_are_written():
    state = TaskState()
    counts, position = state.map("counts"), state.value("position", 0)
    assert kinds(state.snapshot()) == {}
    counts.update((number, 0) for number in range(100))
    assert kinds(state.snapshot()) == {"counts": ("full", 100)}
    assert not state.snapshot()
    counts[7] += 1
    del counts[8]
    position.value = 5
    assert kinds(state.snapshot()) == {"counts": ("delta", 2), "position": ("full", 1)}
    position.value = 5
    assert kinds(state.snapshot()) == {}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda counts: operator.setitem(counts, 1, 7), 1),
        (lambda counts: counts.__delitem__(1), 1),
        (lambda counts: counts.pop(1), 1),
        (lambda counts: counts.popitem(), 99),
        (lambda counts: counts.setdefault(100, 7), 100),
        (lambda counts: counts.update({1: 7}), 1),
        (lambda counts: counts.update([(1, 7)]), 1),
        (lambda counts: operator.ior(counts, {1: 7}), 1),
        (lambda counts: counts.update_columns([1], [7]), 1),
        (lambda counts: counts.add_columns([1], [7]), 1),
        (lambda counts: counts.add_columns(pa.array([1]), pa.array([7])), 1),
    ],
)
def test_every_change_is_noted(change, key):
    state = TaskState()
    counts = state.map("counts")
    counts.update((number, 0) for number in range(100))
    first = state.snapshot()
    change(counts)
    second = state.snapshot()
    assert kinds(second) == {"counts": ("delta", 1)}
    after = restored(first, second).map("counts")
    assert after == counts
    assert counts.get(key) in (7, None)


def test_clearing_writes_a_full_copy_of_nothing():
    state = TaskState()
    counts = state.map("counts")
    counts.update((number, 0) for number in range(100))
    first = state.snapshot()
    counts.clear()
    second = state.snapshot()
    assert kinds(second) == {"counts": ("full", 0)}
    assert restored(first, second).map("counts") == {}


def test_changes_beyond_half_of_the_full_copy_become_one():
    state = TaskState()
    counts = state.map("counts")
    counts.update((number, 0) for number in range(100))
    written = [kinds(state.snapshot())["counts"]]
    for number in range(7):
        counts.update((number * 10 + index, 1) for index in range(10))
        written.append(kinds(state.snapshot())["counts"])
    assert written == [("full", 100)] + 5 * [("delta", 10)] + [("full", 100), ("delta", 10)]


def test_many_small_changes_become_a_full_copy_too():
    state = TaskState()
    counts = state.map("counts")
    counts.update((number, 0) for number in range(1000))
    state.snapshot()
    written = []
    for _ in range(maps.MAX_DELTAS + 1):
        counts[1] += 1
        written.append(kinds(state.snapshot())["counts"][0])
    assert written == maps.MAX_DELTAS * ["delta"] + ["full"]


def test_a_restored_map_goes_on_with_changes():
    state = TaskState()
    state.map("counts").update((number, 0) for number in range(100))
    again = restored(state.snapshot())
    assert kinds(again.snapshot()) == {}
    again.map("counts")[1] = 5
    assert kinds(again.snapshot()) == {"counts": ("delta", 1)}


def test_what_was_in_place_changed_after_the_snapshot_is_not_in_it():
    state = TaskState()
    lists, value = state.map("lists"), state.value("value", [])
    lists["a"] = [1]
    lists["t"] = (1, [2])
    value.value.append(1)
    snapshot = state.snapshot()
    lists["a"].append(2)
    lists["t"][1].append(3)
    lists["b"] = []
    value.value.append(2)
    before = restored(snapshot)
    assert before.map("lists") == {"a": [1], "t": (1, [2])}
    assert before.value("value").value == [1]
    lists["a"] = lists["a"]
    lists["t"] = lists["t"]
    after = restored(snapshot, state.snapshot())
    assert after.map("lists") == lists == {"a": [1, 2], "t": (1, [2, 3]), "b": []}
    assert after.value("value").value == [1, 2]


def test_a_snapshot_is_encoded_in_another_thread_while_the_state_goes_on():
    state = TaskState()
    counts = state.map("counts", default=0)
    counts.update((number, number) for number in range(50_000))
    snapshot, encoded, running = state.snapshot(), [], threading.Event()

    def encode():
        running.set()
        encoded.append(snapshot.encode()["counts"])

    thread = threading.Thread(target=encode)
    thread.start()
    running.wait()
    while thread.is_alive():
        for number in range(60_000):
            counts[number] += 1
        len(counts)
        counts.clear()
    thread.join()
    again = TaskState()
    again.restore({"counts": [encoded[0][2]]})
    assert again.map("counts") == {number: number for number in range(50_000)}


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and self.x == other.x

    def __hash__(self):
        return hash(self.x)


@pytest.mark.parametrize(
    "value",
    [
        0,
        2**70,
        None,
        "text",
        "\ud800",
        b"bytes",
        (1, ("a", None)),
        [1, {"a": {2}}],
        Point(3),
        np.arange(3).tolist(),
        pa.array([1, None, 3]),
        pa.table({"a": [1, 2], "b": ["x", "y"]}),
        pa.record_batch({"a": [1.5]}),
    ],
)
def test_any_picklable_value_survives(value):
    state = TaskState()
    state.value("value", "default").value = value
    state.map("map").update({1: value, "x": value, 2: 0})
    again = restored(state.snapshot())
    assert again.value("value").value == value
    assert type(again.value("value").value) is type(value)
    assert again.map("map").copy() == {1: value, "x": value, 2: 0}


def test_keys_of_any_kind_survive():
    state = TaskState()
    expected = {1: "a", "1": "b", (1, 2): "c", None: "d", Point(4): "e", 1.5: "f", b"x": "g", 2**80: "h"}
    state.map("map").update(expected)
    first = state.snapshot()
    del state.map("map")[(1, 2)]
    again = restored(first, state.snapshot())
    assert again.map("map") == {key: value for key, value in expected.items() if key != (1, 2)}


def test_a_value_at_its_default_is_not_written_and_an_assigned_one_is():
    state = TaskState()
    value = state.value("value", 5)
    assert state.value("value", 6) is value
    assert value.value == 5
    assert repr(value) == "ValueState(5)"
    assert not state.snapshot(full=True)
    value.value = 6
    first = state.snapshot()
    assert kinds(first) == {"value": ("full", 1)}
    value.value = 5
    second = state.snapshot()
    assert restored(first, second).value("value", 9).value == 5
    assert kinds(state.snapshot(full=True)) == {"value": ("full", 1)}


def test_a_full_snapshot_stands_alone():
    state = TaskState()
    counts = state.map("counts")
    counts.update((number, 0) for number in range(100))
    state.snapshot()
    counts[1] = [5]
    state.snapshot()
    snapshot = state.snapshot(full=True)
    assert snapshot.full
    assert kinds(snapshot) == {"counts": ("full", 100)}
    assert restored(snapshot).map("counts") == counts
    counts[2] = 1
    assert kinds(state.snapshot()) == {"counts": ("delta", 1)}


def test_a_restored_state_nobody_asks_for_is_kept():
    state = TaskState()
    state.map("counts").update((number, 0) for number in range(100))
    state.value("position").value = 7
    first = state.snapshot()
    state.map("counts")[1] = 5
    state.value("position").value = 8
    del state.map("counts")[2]
    again = restored(first, state.snapshot())
    assert again
    assert again.keys == 103
    again.value("other").value = 1
    assert kinds(again.snapshot()) == {"other": ("full", 1)}
    full = again.snapshot(full=True)
    assert kinds(full) == {"counts": ("full", 102), "position": ("full", 1), "other": ("full", 1)}
    third = restored(full)
    assert third.map("counts") == state.map("counts")
    assert third.value("position").value == 8
    assert again.map("counts") == state.map("counts")


def test_one_name_is_one_thing():
    state = TaskState()
    state.value("position").value = 1
    with pytest.raises(StateError) as caught:
        state.map("position")
    assert str(caught.value) == (
        "state 'position': map('position') was called, but it is in use as a value. "
        "Give one of the two another name."
    )
    again = restored(state.snapshot())
    with pytest.raises(StateError, match=r"map\('position'\) was called, but it was restored as a value"):
        again.map("position")
    assert again.value("position").value == 1
    again.map("counts")
    with pytest.raises(StateError, match=r"value\('counts'\) was called, but it is in use as a map"):
        again.value("counts")


def test_what_cannot_be_pickled_is_said_and_nothing_is_lost():
    state = TaskState()
    counts, value = state.map("counts"), state.value("value")
    counts.update((number, 0) for number in range(100))
    first = state.snapshot()
    counts[1], value.value = 5, threading.Lock()
    with pytest.raises(StateError, match=r"state 'value': a lock in it cannot be pickled"):
        state.snapshot()
    value.value = 3
    second = state.snapshot()
    assert second.full
    assert restored(first, second).map("counts") == counts
    counts[threading] = 1
    with pytest.raises(StateError, match="state 'counts': a module in it cannot be pickled"):
        state.snapshot(full=True).encode()


def test_more_than_fits_an_arrow_array_is_said(monkeypatch):
    """Arrow returns several arrays if the text in one would exceed 2 GB."""
    monkeypatch.setattr(encoding, "to_column", lambda values, declared: pa.chunked_array([values[:1], values[1:]]))
    state = TaskState()
    state.map("texts").update(a="x", b="y")
    with pytest.raises(
        StateError, match=r"state 'texts': a block of 16,384 of its keys or values exceeds 2 GB.*context.folder"
    ):
        state.snapshot().encode()


def test_what_it_tells_of_itself():
    state = TaskState()
    assert not state
    assert state.keys == 0
    assert state.bytes == 0
    counts = state.map("counts")
    assert state
    state.value("position").value = 1
    counts.update((number, 0) for number in range(100))
    assert state.keys == 101
    first = state.snapshot()
    assert state.bytes == 0
    full = sum(len(data) for _, _, data in first.encode().values())
    assert state.bytes == full
    counts[1] = 1
    second = state.snapshot()
    assert state.bytes == full
    delta = sum(len(data) for _, _, data in second.encode().values())
    assert state.bytes == full + delta == restored(first, second).bytes


def test_many_rows_survive():
    state = TaskState()
    counts = state.map("counts")
    counts.update((f"word-{number}", number) for number in range(40_000))
    counts["odd"] = "one"  # one chunk has another type than the others
    first = state.snapshot()
    for number in range(18_000):
        del counts[f"word-{number}"]
    second = state.snapshot()
    assert kinds(second) == {"counts": ("delta", 18_000)}
    assert restored(first, second).map("counts") == counts


def test_counting_from_another_thread_takes_nothing_away():
    """A worker reports sizes from another thread while the component counts."""
    state = TaskState()
    counts = state.map("counts", 0)
    state.snapshot()
    stop = threading.Event()

    def report():
        while not stop.is_set():
            assert state.counted >= 0
            assert state.bytes >= 0

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        for number in range(100_000):
            counts[number % 100] += 1
    finally:
        stop.set()
        reporter.join()
        sys.setswitchinterval(before)
    assert sum(counts.values()) == 100_000
    state.snapshot()
    assert state.counted == 100


# ---- snapshots that others wait for -----------------------------------------------------------------------------


def test_a_snapshot_of_changes_only_does_not_write_all_again():
    state = TaskState()
    counts = state.map("counts", default=0)
    counts.update((number, 0) for number in range(10))
    assert state.snapshot(compact=False).changes["counts"].kind == "full", (
        "there is nothing yet that it could change"
    )
    counts.update((number, 1) for number in range(10))
    del counts[3]
    change = state.snapshot(compact=False).changes["counts"]
    assert (change.kind, change.rows) == ("delta", 10)
    counts[1] += 1
    assert state.snapshot(full=True, compact=False).changes["counts"].kind == "full", "asked for"
    for _ in range(60):
        counts[1] += 1
        assert state.snapshot(compact=False).changes["counts"].kind == "delta"
    counts[1] += 1
    assert state.snapshot().changes["counts"].kind == "full", "made up for"


def test_what_was_inherited_is_in_a_snapshot_whole_also_where_others_wait():
    state = TaskState()
    state.map("counts")["a"] = 1
    parts = {name: [data] for name, (_, _, data) in state.snapshot().encode().items()}
    again = TaskState()
    again.inherit({0: parts}, Share(0, 2, 1))
    snapshot = again.snapshot(compact=False)
    assert snapshot.full
    assert snapshot.changes["counts"].kind == "full"
