"""Manifests: the newest intact one decides, pruning keeps what is needed, and one driver at a time may write."""

import dataclasses
import logging
import threading
import uuid

import pytest

from penstock import signing
from penstock.errors import SnapshotCorrupt, StateError, StateRemoved, StateUnavailable, Superseded
from penstock.state import manifest as manifest_module
from penstock.state.generations import Ownership
from penstock.state.manifest import Manifest, Name, TaskEntry, epochs, history, newest, nothing, prune, sweep
from penstock.state.savepoints import write_savepoint
from penstock.state.snapshots import SnapshotPart, SnapshotWriter, epoch_of, read_parts, snapshot_name
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


@pytest.fixture
def other(store, tmp_path):
    """Another store of the same kind."""
    folder, _, _ = store.url.rpartition("/")
    return StateStore(f"{folder}/other" if str(tmp_path) in store.url else f"memory://{uuid.uuid4().hex}")


def manifest(epoch, chains=None, tokens=(), generation=1, base=(0, 0)):
    tasks = {task: TaskEntry(states, list(tokens)) for task, states in (chains or {}).items()}
    return Manifest("words", epoch, "exactly_once", generation, base, 1e9 + epoch, tasks, {"count": len(tasks)})


def file(epoch, generation=1):
    return Name(generation, (0, 0), epoch).file


def snapshots(store):
    return [epoch_of(name) for name in store.list("snapshots/")]


class Topology:
    """A task that counts, takes snapshots and commits."""

    def __init__(self, store):
        self.store, self.writer, self.state = store, SnapshotWriter(store), TaskState()
        self.counts = self.state.map("counts", default=0)
        self.counts.update((number, 0) for number in range(100))

    def snapshot(self, epoch, full=False):
        self.counts[epoch] += 1
        snapshot = self.state.snapshot(full)
        return manifest(epoch, self.writer.write(snapshot_name(epoch, 1, 0, 0), {"count/0": snapshot}))

    def commit(self, epoch, full=False):
        made = self.snapshot(epoch, full)
        made.write(self.store)
        return made


def test_what_is_written_is_read(store):
    part = SnapshotPart("snapshots/x.bin", 1, 2, "3a", "full", 4)
    written = manifest(7, {"count/0": {"counts": [part, part]}, "sink/0": {}}, ["token", {"file": 1}, None])
    written.write(store)
    assert store.list() == [file(7)]
    assert Manifest.read(store, written.name) == written == newest(store)
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
    with pytest.raises(
        SnapshotCorrupt, match=r"manifest .*2.json: its content does not match its checksum.*previous epoch"
    ):
        Manifest.read(store, Name(1, (0, 0), 2))
    assert newest(store).epoch == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "epoch 2 counts as not committed" in record.message


def test_a_manifest_of_another_version_is_refused_with_the_reason(store, monkeypatch):
    """It has a field that this version does not know."""
    own = vars(manifest(1))
    monkeypatch.setattr(manifest_module, "vars", lambda _: {**own, "letters": []}, raising=False)
    manifest(1).write(store)
    with pytest.raises(SnapshotCorrupt, match=r"it was not written by this version of Penstock .*'letters'"):
        Manifest.read(store, Name(1, (0, 0), 1))


def test_with_all_manifests_damaged_it_does_not_start_from_nothing(store):
    manifest(1).write(store)
    store.write(file(1), b"x")
    with pytest.raises(SnapshotCorrupt, match=r"its only manifest cannot be read"):
        newest(store)


def test_a_later_generation_decides_from_what_it_took_over(store):
    """The first driver wrote the manifest of epoch 6 after the second had started from epoch 5."""
    for epoch in (4, 5):
        manifest(epoch).write(store)
    newest(store).taken_over(2).write(store)
    manifest(6).write(store)
    assert [(name.generation, name.epoch) for name in history(store)] == [(2, 5), (1, 5), (1, 4)]
    assert newest(store).generation == 2
    manifest(6, generation=2, base=(1, 5)).write(store)
    assert [(name.generation, name.epoch) for name in history(store)] == [(2, 6), (2, 5), (1, 5), (1, 4)]
    assert epochs(store) == [4, 5, 6]
    assert newest(store, before=5).epoch == 4


def test_what_begins_from_nothing_has_no_history(store):
    for epoch in (4, 5):
        manifest(epoch).write(store)
    nothing("words", "exactly_once", 2, 0.0).write(store)
    assert newest(store).epoch == 0
    assert epochs(store) == []
    assert newest(store, before=0) is None


def test_a_manifest_is_written_once(store):
    made = manifest(1)
    made.write(store)
    made.write(store)  # an attempt that received no answer
    with pytest.raises(StateError, match=r"manifest .*there is another manifest of that name"):
        dataclasses.replace(made, created=2.0).write(store)
    assert newest(store) == made


def test_a_manifest_of_another_key_is_not_read(store):
    manifest(1).write(store)
    key = signing.deployment_key()
    signing.use_key(bytes(32))
    try:
        with pytest.raises(SnapshotCorrupt, match=r"signed with the key of another deployment.*PENSTOCK_KEY_FILE"):
            Manifest.read(store, Name(1, (0, 0), 1))
    finally:
        signing.use_key(key)


def test_a_manifest_under_another_name_is_not_read(store):
    """Someone who can write to the store cannot replay an old manifest under a newer name."""
    manifest(1).write(store)
    store.write(Name(7, (0, 0), 9).file, store.read(file(1)))
    with pytest.raises(SnapshotCorrupt, match="was written under another name"):
        Manifest.read(store, Name(7, (0, 0), 9))


def test_pruning_keeps_what_the_kept_manifests_need(store):
    topology = Topology(store)
    for epoch in range(1, 6):
        topology.commit(epoch)
    prune(store, 1)
    assert epochs(store) == [4, 5]
    assert snapshots(store) == [1, 2, 3, 4, 5]  # the chain starts in 1
    topology.commit(6, full=True)
    prune(store, 1)
    assert snapshots(store) == [1, 2, 3, 4, 5, 6]  # 5 still needs them
    committed = topology.commit(7)
    under_way = topology.snapshot(8)
    prune(store, 1)
    assert epochs(store) == [6, 7]
    assert snapshots(store) == [6, 7, 8]
    read_parts(store, committed.chains)
    under_way.write(store)
    prune(store, 1, keep=1)
    assert epochs(store) == [8]
    state = TaskState()
    state.restore(read_parts(store, newest(store).chains)["count/0"])
    assert state.map("counts") == topology.counts


def test_pruning_without_a_whole_manifest_removes_nothing(store):
    topology = Topology(store)
    topology.snapshot(1)
    prune(store, 1)
    topology.commit(2)
    store.write(file(2), b"x")
    prune(store, 1)
    assert snapshots(store) == [1, 2]
    assert epochs(store) == [2]


def test_pruning_counts_whole_manifests_only(store):
    topology = Topology(store)
    for epoch in (1, 2, 3, 4):
        topology.commit(epoch)
    store.write(file(4), b"x")
    prune(store, 1, keep=2)
    assert epochs(store) == [2, 3, 4]
    assert newest(store).epoch == 3


def test_a_snapshot_of_an_attempt_that_lost_goes(store):
    topology = Topology(store)
    topology.commit(1)
    store.write(f"snapshots/{snapshot_name(2, 0, 0, 0)}.bin", b"of a process that did not know it was replaced")
    topology.commit(2)
    prune(store, 1)
    assert len(store.list("snapshots/")) == 2


def test_a_savepoint_stands_alone(store, other):
    topology = Topology(store)
    topology.commit(1)
    committed = topology.commit(2)
    write_savepoint(store, committed, other)
    topology.commit(3, full=True)
    prune(store, 1, keep=1)
    saved = newest(other)
    assert (saved.epoch, saved.base, len(saved.files)) == (2, (0, 0), 2)
    assert other.list() == ["generations/00000001", saved.name.file, *sorted(saved.files)]
    state = TaskState()
    state.restore(read_parts(other, saved.chains)["count/0"])
    assert state.map("counts")[2] == 1


def test_a_savepoint_of_damaged_files_is_refused(store, other):
    topology = Topology(store)
    committed = topology.commit(1)
    write_savepoint(store, committed, other)
    before = newest(other)
    (name,) = store.list("snapshots/")
    store.write(name, store.read(name)[:-1])
    with pytest.raises(SnapshotCorrupt, match="the file ends 1 bytes early"):
        write_savepoint(store, committed, other)
    assert newest(other) == before, "the savepoint that was there still holds"
    read_parts(other, before.chains)


def test_a_savepoint_replaces_no_state_directory(store, other):
    committed = Topology(store).commit(1)
    Ownership("orders", {"pid": 7, "host": "there"}).claim(other)
    with pytest.raises(
        StateError, match=r"the state directory of a topology that was started by process 7 on there"
    ):
        write_savepoint(store, committed, other)


@pytest.mark.parametrize("place", ["", "inside", "snapshots/x"])
def test_a_savepoint_is_apart_from_the_state_directory(store, place):
    committed = Topology(store).commit(1)
    with pytest.raises(StateError, match="it overlaps with the topology's own state directory"):
        write_savepoint(store, committed, store.child(place) if place else StateStore(f"{store.url}/"))
    around = StateStore("memory://" if store.url.startswith("memory") else store.url.rpartition("/")[0])
    with pytest.raises(StateError, match="it overlaps with"):
        write_savepoint(store, committed, around)


def test_a_store_has_one_owner(store):
    first, second = Ownership("words"), Ownership("words", {"pid": 7, "host": "there"})
    assert first.claim(store) == 1
    first.check(store)
    assert second.claim(store) == 2
    message = r"topology 'words': another driver has taken over .*: generation 2 \(process 7 on there\), and this"
    with pytest.raises(Superseded, match=message):
        first.check(store)
    with pytest.raises(Superseded, match=message):
        first.claim(store)
    with pytest.raises(Superseded, match=message):
        first.beat(store)
    first.release(store)
    second.check(store)
    assert second.claim(store) == 3
    assert store.list() == ["generations/00000003"]


def test_a_removed_directory_is_reported_as_such(store):
    owner = Ownership("words")
    owner.claim(store)
    owner.claim(store)
    store.remove("generations/00000002")
    for call in (owner.check, owner.claim, owner.beat):
        with pytest.raises(StateRemoved, match=r"was removed while the topology ran: it contains no generation"):
            call(store)
    Ownership("words").claim(store)
    with pytest.raises(
        StateRemoved, match=r"was reset to an earlier copy while the topology ran: it contains generation 1"
    ):
        owner.check(store)


def test_a_claim_whose_answer_was_lost_is_ones_own(store):
    class NoAnswer(StateStore):
        lost = False

        def create(self, name, data):
            created = super().create(name, data)
            if self.lost:
                self.lost = False
                raise StateUnavailable("store", "it does not answer")
            return created

    deaf, owner = NoAnswer(store.url), Ownership("words")
    owner.claim(deaf)
    deaf.lost = True
    with pytest.raises(StateUnavailable):
        owner.claim(deaf)
    assert owner.claim(deaf) == 2
    owner.check(deaf)


def test_of_many_claims_at_once_one_holds(tmp_path):
    store, start, held = StateStore(str(tmp_path)), threading.Barrier(8), []

    def run():
        owner = Ownership("words")
        start.wait()
        owner.claim(store)
        held.append(owner)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held.sort(key=lambda owner: owner.generation)
    assert len({owner.generation for owner in held}) == 8
    held[-1].check(store)
    for owner in held[:-1]:
        with pytest.raises(Superseded):
            owner.check(store)


def test_a_claim_made_on_an_old_look_is_made_again(store):
    """Between the listing and the creation, others claimed higher numbers and removed the lower ones."""

    class Late(StateStore):
        overtaken = False

        def create(self, name, data):
            if not self.overtaken:
                self.overtaken = True
                for _ in range(3):
                    Ownership("words").claim(store)
                store.remove("generations/00000001")
            return super().create(name, data)

    assert Ownership("words").claim(Late(store.url)) == 4
    assert store.list() == ["generations/00000004"]


def test_of_two_that_created_one_generation_the_later_holds(store):
    """If the store has no exclusive creation, both succeed."""
    if store.exclusive:
        pytest.skip("this store decides by itself")
    first, second = Ownership("words"), Ownership("words")
    first.claim(store)
    store.write("generations/00000001", second._record())
    with pytest.raises(Superseded):
        first.check(store)


def test_a_superseded_driver_sweeps_nothing_of_its_successor(tmp_path):
    folder, store = tmp_path / "manifests", StateStore(str(tmp_path))
    folder.mkdir()
    for generation in (1, 2, 3):
        (folder / f".tmp-gen-{generation:08d}-epoch-0f").write_bytes(b'{"top')
    sweep(store, 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".tmp-gen-00000002-epoch-0f",
        ".tmp-gen-00000003-epoch-0f",
    ]
