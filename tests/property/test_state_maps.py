"""After any operations on a state, a restore from any snapshot equals a plain dict at that moment."""

import copy
import tempfile
import uuid

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.state.manifest import Manifest, TaskEntry, epochs, history, newest, prune
from penstock.state.snapshots import SnapshotWriter, read_parts, snapshot_name
from penstock.state.store import StateStore
from penstock.state.values import TaskState

keys = st.one_of(st.integers(-2, 8), st.text("ab", max_size=2), st.tuples(st.integers(0, 2)), st.none())
plain = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=3), st.none())
values = st.one_of(plain, st.tuples(plain, plain), st.lists(plain, max_size=3))
pairs = st.lists(st.tuples(keys, values), max_size=6)

operations = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.sampled_from(["delete", "pop", "get", "append"]), keys),
    st.tuples(st.just("setdefault"), keys, values),
    st.tuples(st.sampled_from(["update", "ior", "update_columns"]), pairs),
    st.tuples(st.sampled_from(["popitem", "clear", "len", "list"])),
    st.tuples(st.just("fill"), st.integers(0, 30)),
    st.tuples(st.just("value"), values),
)
ends = st.tuples(st.sampled_from(["snapshot", "snapshot", "full snapshot", "failing snapshot", "restart"]))
steps = st.lists(st.tuples(st.lists(operations, max_size=4), ends), max_size=10).map(
    lambda rounds: [step for operations, end in rounds for step in [*operations, end]]
)


def do(things, step):
    """Perform one step on a map or a dict. Returns the result or the error."""
    name, *rest = step
    try:
        match name, *rest:
            case "set", key, value:
                things[key] = copy.deepcopy(value)
            case "append", key:
                things[key].append(1)
                things[key] = things[key]  # assigned again, as the contract requires
            case "delete", key:
                del things[key]
            case "pop", key:
                return things.pop(key)
            case "get", key:
                return things.get(key, "none"), key in things, things[key]
            case "setdefault", key, value:
                return copy.deepcopy(things.setdefault(key, copy.deepcopy(value)))
            case "update", items:
                things.update(copy.deepcopy(items))
            case "ior", items:
                things |= dict(copy.deepcopy(items))
            case "update_columns", items if not isinstance(things, dict):
                items = copy.deepcopy(items)
                things.update_columns([key for key, _ in items], [value for _, value in items])
            case "update_columns", items:
                things.update(copy.deepcopy(items))
            case ("popitem",):
                return things.popitem()
            case ("clear",):
                things.clear()
            case ("len",):
                return len(things)
            case ("list",):
                return list(things), copy.deepcopy(list(things.values()))
            case "fill", count:
                things.update((number, number) for number in range(count))
    except (KeyError, AttributeError) as error:
        return type(error)
    return None


class Broken(StateStore):
    """A store that fails its next write on demand."""

    fails = False

    def write(self, name, data):
        if self.fails:
            self.fails = False
            raise OSError("no space")
        super().write(name, data)


@pytest.mark.parametrize("where", ["memory", "local"])
@settings(max_examples=150)
@given(steps=steps, large=st.sampled_from([0, 10, 100]), touched=st.booleans())
def test_a_restore_from_any_snapshot_equals_a_dict_of_that_time(where, steps, large, touched):
    """``large``: the map is large enough for deltas; ``touched``: the component asks for restored states."""
    with tempfile.TemporaryDirectory() as folder:
        store = Broken(folder if where == "local" else f"memory://{uuid.uuid4().hex}")
        writer, state, expected, value = SnapshotWriter(store), TaskState(), {}, "default"
        committed, epoch = [], 0
        for step in [("fill", large), ("snapshot",), *steps, ("snapshot",)]:
            match step:
                case "value", value:
                    state.value("value", "default").value = value
                case ("snapshot" | "full snapshot" | "failing snapshot" as kind,):
                    epoch += 1
                    snapshot = state.snapshot(full=kind == "full snapshot" or writer.broken)
                    store.fails = kind == "failing snapshot"
                    lists = (
                        [kept for kept in state.map("map").values() if isinstance(kept, list)] if touched else []
                    )
                    for kept in lists:
                        kept.append("after the snapshot")
                    try:
                        chains = writer.write(snapshot_name(epoch, 1, 0, 0), {"task/0": snapshot})
                    except OSError:
                        continue
                    finally:
                        for kept in lists:
                            kept.pop()
                    committed.append((chains, copy.deepcopy(expected), value))
                case ("restart",):
                    chains, expected, value = copy.deepcopy(committed[-1]) if committed else ({}, {}, "default")
                    state, writer = TaskState(), SnapshotWriter(store)
                    state.restore(read_parts(store, chains).get("task/0", {}))
                    writer.adopt(chains)
                case _:
                    assert do(state.map("map"), step) == do(expected, step)
            if "map" in state._states:  # a restored state that was not asked for is kept as well
                assert state.map("map") == expected
        for chains, then, value_then in committed:
            again = TaskState()
            again.restore(read_parts(store, chains).get("task/0", {}))
            assert again.map("map") == then
            assert all(type(again.map("map")[key]) is type(then[key]) for key in then)
            assert again.value("value", "default").value == value_then


@given(steps=steps)
def test_a_map_keeps_the_order_of_a_dict(steps):
    state, expected = TaskState(), {}
    for step in steps:
        if "snapshot" in step[0]:
            state.snapshot(step[0] == "full snapshot")
        assert do(state.map("map"), step) == do(expected, step)
    assert list(state.map("map").items()) == list(expected.items())


def test_a_restored_map_has_the_order_of_a_dict():
    """A key that is deleted and assigned again comes last, also after a restart."""
    store, state, expected = StateStore(f"memory://{uuid.uuid4().hex}"), TaskState(), {}
    writer, counts = SnapshotWriter(store), state.map("map")
    for things in (counts, expected):
        things.update((number, number) for number in range(10))
    writer.write(snapshot_name(1, 1, 0, 0), {"task/0": state.snapshot()})
    for things in (counts, expected):
        things["new"] = 1
        del things[0]
        things[0] = 2
    chains = writer.write(snapshot_name(2, 1, 0, 0), {"task/0": state.snapshot()})
    again = TaskState()
    again.restore(read_parts(store, chains)["task/0"])
    assert list(again.map("map").items()) == list(expected.items())


@given(steps=steps, later=steps)
def test_nothing_done_after_a_snapshot_is_in_it(steps, later):
    state, expected = TaskState(), {}
    for step in steps:
        do(state.map("map"), step)
        do(expected, step)
    snapshot = state.snapshot(full=True)
    for step in later:
        do(state.map("map"), step)
        for changing in filter(lambda kept: isinstance(kept, list), state.map("map").values()):
            changing.append("later")
        if "snapshot" in step[0]:
            state.snapshot(step[0] == "full snapshot")
    again = TaskState()
    again.restore({name: [data] for name, (_, _, data) in snapshot.encode().items()})
    assert again.map("map") == expected


@given(
    batches=st.lists(
        st.lists(st.tuples(st.text("abc", max_size=1), st.integers(-(2**63), 2**63 - 1)), max_size=20), max_size=5
    ),
    arrow=st.booleans(),
)
def test_columns_add_up(batches, arrow):
    counts, expected = TaskState().map("counts", default=0), {}
    for batch in batches:
        names, amounts = [name for name, _ in batch], [amount for _, amount in batch]
        for name, amount in batch:
            expected[name] = expected.get(name, 0) + amount
        if arrow:
            counts.add_columns(pa.array(names, pa.string()), pa.array(amounts, pa.int64()))
        else:
            counts.add_columns(names, amounts)
        assert counts.get_columns(list("abc")) == [expected.get(name, 0) for name in "abc"]
    assert counts == expected


@given(fulls=st.lists(st.booleans(), min_size=1, max_size=12), keep=st.integers(1, 4))
def test_pruning_never_removes_what_a_kept_manifest_needs(fulls, keep):
    store = StateStore(f"memory://{uuid.uuid4().hex}")
    writer, state = SnapshotWriter(store), TaskState()
    counts = state.map("counts", default=0)
    counts.update((number, 0) for number in range(20))
    for epoch, full in enumerate(fulls, 1):
        counts[epoch] += 1
        parts = writer.write(snapshot_name(epoch, 1, 0, 0), {"count/0": state.snapshot(full)})["count/0"]
        prune(store, 1, keep)  # while a snapshot is in progress
        tasks = {"count/0": TaskEntry(parts)}
        Manifest("t", epoch, "exactly_once", 1, (0, 0), 0.0, tasks, {"count": 1}).write(store)
        prune(store, 1, keep)
        assert epochs(store) == list(range(max(1, epoch - keep + 1), epoch + 1))
        before = None
        while (manifest := newest(store, before)) is not None:
            restored = TaskState()
            restored.restore(read_parts(store, manifest.chains)["count/0"])
            assert sum(restored.map("counts").values()) == manifest.epoch
            before = manifest.epoch
        needed = {file for name in history(store) for file in Manifest.read(store, name).files}
        assert set(store.list("snapshots/")) == needed
