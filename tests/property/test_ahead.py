"""State that is prefetched in any number of steps equals state that is read at once."""

import operator
import uuid
from unittest.mock import patch

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SnapshotCorrupt
from penstock.faults import CrashPoint
from penstock.plan.model import WorkerId
from penstock.plan.owners import OwnerRule
from penstock.protocol.task_states import InheritedTask, SavedTask
from penstock.state import maps
from penstock.state.snapshots import SnapshotWriter, read_part, snapshot_name
from penstock.state.store import StateStore
from penstock.state.values import TaskState
from penstock.topology.hashing import hash_keys
from penstock.worker import archive as archives
from penstock.worker.archive import WorkerArchive

words = st.text("abcdef", min_size=1, max_size=2)
steps = st.one_of(
    st.tuples(st.just("put"), words, st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=2))),
    st.tuples(st.just("put"), words, st.integers(0, 9)),
    st.tuples(st.just("drop"), words),
    st.tuples(st.sampled_from(["snapshot", "snapshot", "full snapshot", "snapshot changes", "ahead", "forget"])),
)
numbers = st.integers(1, 4)


class Before:
    """The previous tasks. Each change goes to the owner of a word."""

    def __init__(self, store, tasks, owners):
        self.tasks, self.owners, self._writer, self._epoch = tasks, owners, SnapshotWriter(store), 0
        self.states = [TaskState() for _ in range(tasks)]
        self.chains = {f"count/{index}": {} for index in range(tasks)}

    def owner(self, word):
        if not self.owners.fields:
            return 0 if self.owners.first else len(word) % self.tasks
        return int(hash_keys(pa.array([word]), 1)[0] % np.uint64(self.tasks))

    def put(self, word, value):
        state = self.states[self.owner(word)]
        state.map("counts")[word] = value
        state.map("windows")[len(word), word] = value
        state.value("last").value = "the same"
        state.map("unasked")[word] = value

    def drop(self, word):
        state = self.states[self.owner(word)]
        state.map("counts").pop(word, None)
        state.map("windows").pop((len(word), word), None)
        state.map("unasked").pop(word, None)

    def snapshot(self, full=False, compact=True):
        self._epoch += 1
        snapshots = {f"count/{index}": state.snapshot(full, compact) for index, state in enumerate(self.states)}
        self.chains = self._writer.write(snapshot_name(self._epoch, 1, 0, 0), snapshots)

    def entries(self, now):
        """The initial state of all tasks if there are ``now`` of them."""
        if now == self.tasks:
            return {key: SavedTask(states) for key, states in self.chains.items()}
        return {
            f"count/{index}": InheritedTask(
                self.tasks,
                now,
                self.owners,
                {
                    source: self.chains[f"count/{source}"]
                    for source in self.owners.share(index, self.tasks, now).sources
                },
            )
            for index in range(now)
        }


def archive(store):
    return WorkerArchive(store.url, WorkerId(1, 0), CrashPoint("", "1.0"))


def begun(archive, entries):
    states = {}
    for key, restored in archive.restore(entries, 2).items():
        states[key] = state = TaskState()
        if restored.share is None:
            state.restore(restored.parts)
        else:
            state.inherit(restored.sources, restored.share)
    return states


def all_of(state):
    """Everything that is observable in the state of a task, including the order and the next snapshot."""
    counts = state.map("counts", merge=merged)
    windows = state.map("windows", merge=merged, owner=lambda pair: pair[1])
    seen = [list(counts.items()), list(windows.items()), counts.taken_over, state.value("last").value]
    seen.append((counts._plain, counts._base_rows, counts._delta_rows, counts._deltas))
    counts["new"] = 1
    snapshot = state.snapshot()
    return [
        *seen,
        snapshot.full,
        {name: (change.kind, change.encode()) for name, change in snapshot.changes.items()},
    ]


def merged(one, other):
    return one


@settings(max_examples=200, deadline=None)
@given(
    st.lists(steps, max_size=40),
    numbers,
    numbers,
    st.sampled_from([OwnerRule(fields=1), OwnerRule(), OwnerRule(first=True)]),
    st.sampled_from([2, 50]),
)
def test_what_was_read_ahead_is_what_would_have_been_read(history, tasks, now, owners, most):
    store = StateStore(f"memory://{uuid.uuid4().hex}")
    with patch.object(maps, "MAX_DELTAS", most):  # so that a short history includes compactions
        before, early = Before(store, tasks, owners), archive(store)
        for word in ("a", "b", "cd", "ef", "f", "ad"):
            before.put(word, 0)
        for step in [*history, ("snapshot",)]:
            match step:
                case "put", word, value:
                    before.put(word, value)
                case "drop", word:
                    before.drop(word)
                case ("ahead",):
                    early.prefetch(before.entries(now))
                case ("forget",):
                    early = archive(store)
                case (kind,):
                    before.snapshot(full=kind == "full snapshot", compact=kind != "snapshot changes")
        entries = before.entries(now)
        found = {key: all_of(state) for key, state in begun(early, entries).items()}
        assert found == {key: all_of(state) for key, state in begun(archive(store), entries).items()}
        words = [word for seen in found.values() for word, _ in seen[0]]
        assert sorted(words) == sorted(key for state in before.states for key in state.map("counts"))
    fsspec.filesystem("memory").rm(store.url, recursive=True)


def grown(tmp_path, tasks=2):
    before = Before(StateStore(str(tmp_path)), tasks, OwnerRule(fields=1))
    for number in range(200):
        before.put(f"word {number}", number)
    before.snapshot()
    return before


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    before, early, read = grown(tmp_path), archive(StateStore(str(tmp_path))), []
    monkeypatch.setattr(
        archives, "read_part", lambda store, part: read.append(part.kind) or read_part(store, part)
    )
    early.prefetch(before.entries(4))
    assert set(read) == {"full"}
    for word in ("word 1", "word 2", "word 3", "word 4"):
        before.drop(word)
    before.snapshot()
    read.clear()
    early.prefetch(before.entries(4))
    early.prefetch(before.entries(4))
    assert read
    assert set(read) == {"delta"}
    read.clear()
    states = begun(early, before.entries(4))
    assert read == []
    assert sum(len(state.map("counts")) for state in states.values()) == 196
    before.snapshot(full=True)
    begun(early, before.entries(4))
    assert set(read) == {"full"}, "what was read ahead belongs to the tasks it was given to"


def test_nothing_is_decoded_again_at_the_switch(tmp_path, monkeypatch):
    for now in (2, 4, 1):
        before, early = grown(tmp_path / str(now)), archive(StateStore(str(tmp_path / str(now))))
        early.prefetch(before.entries(now))
        states = begun(early, before.entries(now))
        monkeypatch.setattr(maps, "apply_map", lambda *args: pytest.fail("a part was decoded"))
        found = [state.map("counts") for state in states.values()]
        monkeypatch.undo()
        assert sum(map(len, found)) == 200


def test_files_that_are_gone_are_left_to_the_restore(tmp_path):
    store = StateStore(str(tmp_path))
    before, early = grown(tmp_path), archive(store)
    old = before.entries(4)
    gone = store.list("snapshots/")
    before.snapshot(full=True)
    for name in gone:
        store.remove(name)
    early.prefetch(old)
    assert sum(len(state.map("counts")) for state in begun(early, before.entries(4)).values()) == 200
    with pytest.raises(SnapshotCorrupt, match="no such file"):
        early.restore(old, 2)


def test_a_share_that_changes_is_read_anew(tmp_path):
    before, early = grown(tmp_path), archive(StateStore(str(tmp_path)))
    early.prefetch(before.entries(4))
    states = begun(early, before.entries(3))
    assert sum(len(state.map("counts")) for state in states.values()) == 200


def test_values_that_go_with_keys_go_to_all_who_get_some():
    old = []
    for number in range(2):
        state = TaskState()
        state.value("over").value = state.value("own").value = number
        old.append({name: [data] for name, (_, _, data) in state.snapshot().encode().items()})
    found = []
    for index in range(4):
        state, share = TaskState(), OwnerRule(fields=1).share(index, 2, 4)
        state.inherit({source: old[source] for source in share.sources}, share)
        found.append((state.value("over", merge=max, with_keys=True).value, state.value("own").value))
        assert state.value("over").before == {index % 2: index % 2}
    assert found == [(0, 0), (1, 1), (0, None), (1, None)]
    state, share = TaskState(), OwnerRule(fields=1).share(0, 2, 1)
    state.inherit(dict(enumerate(old)), share)
    assert state.value("over", merge=max, with_keys=True).value == 1
    assert state.value("own", merge=operator.add).value == 1
