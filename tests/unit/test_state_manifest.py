"""Manifests: the newest whole one decides, cleaning up keeps what is needed, one process at a time may write."""

import logging
import threading
import uuid

import pytest

from penstock.errors import SnapshotCorrupt
from penstock.state.manifest import (
    Manifest,
    TaskEntry,
    claim,
    clear_later,
    copy,
    discard_after,
    epochs,
    newest,
    prune,
    still_mine,
)
from penstock.state.snapshots import Part, SnapshotWriter, epoch_of, read_parts, snapshot_name
from penstock.state.store import StateStore
from penstock.state.values import TaskState
from tests.unit import test_state_store  # noqa: F401 - registers folders://


@pytest.fixture(params=["local", "memory", "folders"])
def store(request, tmp_path):
    if request.param == "local":
        return StateStore(str(tmp_path / "state"))
    return StateStore(
        f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"folders://{tmp_path}/state"
    )


def manifest(epoch, chains=None, tokens=()):
    tasks = {task: TaskEntry(states, list(tokens)) for task, states in (chains or {}).items()}
    return Manifest("words", epoch, "exactly_once", 1, 1e9 + epoch, tasks, {"count": len(tasks)})


def file(epoch):
    return f"manifests/epoch-{epoch:012d}.json"


def snapshots(store):
    return [epoch_of(name) for name in store.list("snapshots/")]


class Topology:
    """A task that counts, snapshots and commits."""

    def __init__(self, store):
        self.store, self.writer, self.state = store, SnapshotWriter(store), TaskState()
        self.counts = self.state.map("counts", default=0)
        self.counts.update((number, 0) for number in range(100))

    def snapshot(self, epoch, full=False):
        self.counts[epoch] += 1
        cut = self.state.cut(full)
        return manifest(epoch, self.writer.write(snapshot_name(epoch, 1, 0, 0), {"count/0": cut}))

    def commit(self, epoch, full=False):
        made = self.snapshot(epoch, full)
        made.write(self.store)
        return made


def test_what_is_written_is_read(store):
    part = Part("snapshots/x.bin", 1, 2, 3, "full", 4)
    written = manifest(7, {"count/0": {"counts": [part, part]}, "sink/0": {}}, ["token", {"file": 1}, None])
    written.write(store)
    assert store.list() == [file(7)]
    assert Manifest.read(store, file(7)) == written == newest(store)
    assert written.chains == {"count/0": {"counts": [part, part]}, "sink/0": {}}


def test_the_newest_decides(store):
    assert newest(store) is None
    assert epochs(store) == []
    for epoch in (9, 10, 1_000_000):
        manifest(epoch).write(store)
    assert epochs(store) == [9, 10, 1_000_000]
    assert newest(store).epoch == 1_000_000
    assert newest(store, before=1_000_000).epoch == 10
    assert newest(store, before=9) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1][: len(data) // 2],
        lambda data: data.replace(b"words", b"swords"),
        lambda data: b"",
        lambda data: data[:-9],
    ],
)
def test_a_damaged_manifest_is_passed_over_loudly(store, caplog, damage):
    for epoch in (1, 2):
        manifest(epoch).write(store)
    store.write(file(2), damage(store.read(file(2))))
    with pytest.raises(SnapshotCorrupt, match=r"manifest .*2.json: must end with the checksum.*epoch before"):
        Manifest.read(store, file(2))
    assert newest(store).epoch == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "epoch 2 counts as not committed" in record.message


def test_with_all_manifests_damaged_it_does_not_start_from_nothing(store):
    manifest(1).write(store)
    store.write(file(1), b"x")
    with pytest.raises(
        SnapshotCorrupt, match=r"at least one of its manifests must be readable; got 1 that is not"
    ):
        newest(store)


def test_commits_are_taken_back(store):
    topology = Topology(store)
    for epoch in (1, 2, 3):
        topology.commit(epoch)
    discard_after(store, 1)
    assert epochs(store) == [1]
    clear_later(store, 1)
    assert snapshots(store) == [1]
    read_parts(store, newest(store).chains)


def test_pruning_keeps_what_the_kept_manifests_need(store):
    topology = Topology(store)
    for epoch in range(1, 6):
        topology.commit(epoch)
    prune(store)
    assert epochs(store) == [4, 5]
    assert snapshots(store) == [1, 2, 3, 4, 5]  # the chain begins in 1
    topology.commit(6, full=True)
    prune(store)
    assert snapshots(store) == [1, 2, 3, 4, 5, 6]  # 5 still needs them
    committed = topology.commit(7)
    under_way = topology.snapshot(8)
    prune(store)
    assert epochs(store) == [6, 7]
    assert snapshots(store) == [6, 7, 8]
    read_parts(store, committed.chains)
    under_way.write(store)
    prune(store, keep=1)
    assert epochs(store) == [8]
    state = TaskState()
    state.restore(read_parts(store, newest(store).chains)["count/0"])
    assert state.map("counts") == topology.counts


def test_pruning_without_a_whole_manifest_removes_nothing(store):
    topology = Topology(store)
    topology.snapshot(1)
    prune(store)
    topology.commit(2)
    store.write(file(2), b"x")
    prune(store)
    assert snapshots(store) == [1, 2]
    assert epochs(store) == [2]


def test_pruning_counts_whole_manifests_only(store):
    topology = Topology(store)
    for epoch in (1, 2, 3, 4):
        topology.commit(epoch)
    store.write(file(4), b"x")
    prune(store, keep=2)
    assert epochs(store) == [2, 3, 4]
    assert newest(store).epoch == 3


def test_a_snapshot_of_an_attempt_that_lost_goes(store):
    topology = Topology(store)
    topology.commit(1)
    store.write(f"snapshots/{snapshot_name(2, 0, 0, 0)}.bin", b"of a process that did not know it was replaced")
    topology.commit(2)
    prune(store)
    assert len(store.list("snapshots/")) == 2


def test_a_savepoint_stands_alone(store):
    topology, savepoint = Topology(store), store.child("savepoints/one")
    topology.commit(1)
    committed = topology.commit(2)
    copy(store, committed, savepoint)
    topology.commit(3, full=True)
    prune(store, keep=1)
    assert newest(savepoint) == committed
    assert savepoint.list() == [file(2), *(f"snapshots/{snapshot_name(epoch, 1, 0, 0)}.bin" for epoch in (1, 2))]
    state = TaskState()
    state.restore(read_parts(savepoint, committed.chains)["count/0"])
    assert state.map("counts")[2] == 1


def test_a_savepoint_of_damaged_files_is_refused(store):
    topology, savepoint = Topology(store), store.child("savepoints/one")
    committed = topology.commit(1)
    (name,) = store.list("snapshots/")
    store.write(name, store.read(name)[:-1])
    with pytest.raises(SnapshotCorrupt, match="got a file that ends 1 bytes early"):
        copy(store, committed, savepoint)
    assert savepoint.list("manifests/") == []


def test_a_store_has_one_owner(store):
    first = claim(store)
    assert still_mine(store, first)
    second = claim(store)
    assert second == first + 1
    assert not still_mine(store, first)
    assert still_mine(store, second)
    assert store.list() == [f"generations/{second:08d}"]
    store.remove(f"generations/{second:08d}")
    assert not still_mine(store, second)


def test_of_many_claims_at_once_one_holds(tmp_path):
    store, start, held = StateStore(str(tmp_path)), threading.Barrier(8), []

    def run():
        start.wait()
        held.append(claim(store))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(held)) == 8
    assert [still_mine(store, generation) for generation in sorted(held)] == 7 * [False] + [True]


def test_a_claim_made_on_an_old_look_is_made_again(store):
    """Between looking and creating, others came, claimed higher numbers and removed the lower ones."""

    class Late(StateStore):
        overtaken = False

        def create(self, name, data):
            if not self.overtaken:
                self.overtaken = True
                for _ in range(3):
                    claim(store)
                store.remove("generations/00000001")
            return super().create(name, data)

    late = Late(store.url)
    assert claim(late) == 4
    assert store.list() == ["generations/00000004"]


def test_claiming_sweeps_what_a_crash_left(tmp_path):
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / ".tmp-epoch-000000000001.json-0f").write_bytes(b'{"top')
    store = StateStore(str(tmp_path))
    assert epochs(store) == []
    claim(store)
    assert list((tmp_path / "manifests").iterdir()) == []
