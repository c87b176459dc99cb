"""Snapshot files: chains grow, full parts restart them, damage is detected, and a failed write leaves no gap."""

import json
import uuid
from pathlib import Path

import pytest

from penstock.errors import SnapshotCorrupt, StateError
from penstock.state.snapshots import SnapshotPart, SnapshotWriter, epoch_of, read_parts, snapshot_name
from penstock.state.store import StateStore
from penstock.state.values import TaskState


class FullDisk(StateStore):
    """A store that can be set to have no space left."""

    full = False

    def write(self, name, data):
        if self.full:
            raise StateError(
                f"state store {self.url}, file {name}", "it cannot be written (No space left on device)"
            )
        super().write(name, data)


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return FullDisk(str(tmp_path / "state") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def state():
    state = TaskState()
    state.map("counts", default=0).update((number, 0) for number in range(100))
    return state


def restored(store, chains, task="count/0"):
    state = TaskState()
    state.restore(read_parts(store, chains)[task])
    return state


def name(epoch):
    return snapshot_name(epoch, 1, 0, 0)


def test_the_name_tells_the_epoch():
    assert name(12) == "gen-00000001-epoch-000000000012-stage-000-worker-0000"
    assert epoch_of(f"snapshots/{name(12)}.bin") == 12
    assert (
        len({snapshot_name(*numbers) for numbers in ((1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1))}) == 4
    )


def test_a_part_goes_through_json():
    part = SnapshotPart("snapshots/x.bin", 1, 2, "3a", "full", 4)
    assert SnapshotPart.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_chains_grow_and_a_full_part_starts_anew(store, state):
    writer, counts = SnapshotWriter(store), state.map("counts")
    one = writer.write(name(1), {"count/0": state.snapshot()})
    counts[1] += 1
    two = writer.write(name(2), {"count/0": state.snapshot()})
    assert [part.kind for part in two["count/0"]["counts"]] == ["full", "delta"]
    assert two["count/0"]["counts"][0] == one["count/0"]["counts"][0]
    assert len(one["count/0"]["counts"]) == 1  # chains returned earlier do not change
    three = writer.write(name(3), {"count/0": state.snapshot(full=True)})
    assert [part.kind for part in three["count/0"]["counts"]] == ["full"]
    assert restored(store, one).map("counts")[1] == 0
    assert restored(store, two).map("counts") == restored(store, three).map("counts") == counts


def test_one_file_for_the_worker_and_none_for_nothing(store, state):
    writer, other = SnapshotWriter(store), TaskState()
    other.value("position").value = 7
    chains = writer.write(name(1), {"count/0": state.snapshot(), "count/1": other.snapshot()})
    assert store.list() == [f"snapshots/{name(1)}.bin"]
    assert restored(store, chains, "count/1").value("position").value == 7
    assert writer.write(name(2), {"count/0": state.snapshot(), "count/1": other.snapshot()}) == chains
    assert store.list() == [f"snapshots/{name(1)}.bin"]
    size = sum(part.length for states in chains.values() for chain in states.values() for part in chain)
    assert size == len(store.read(f"snapshots/{name(1)}.bin"))


def test_after_a_restore_the_chain_goes_on(store, state):
    chains = SnapshotWriter(store).write(name(1), {"count/0": state.snapshot()})
    again, writer = restored(store, chains), SnapshotWriter(store)
    writer.adopt(chains)
    # the component has not asked for the map yet
    assert writer.write(name(2), {"count/0": again.snapshot()}) == chains
    again.map("counts")[5] = 50
    chains = writer.write(name(3), {"count/0": again.snapshot()})
    assert [part.kind for part in chains["count/0"]["counts"]] == ["full", "delta"]
    assert restored(store, chains).map("counts") == {**state.map("counts"), 5: 50}


def test_a_failed_write_asks_for_full_snapshots(store, state):
    writer, counts, other = SnapshotWriter(store), state.map("counts"), TaskState()
    other.value("position").value = 1
    before = writer.write(name(1), {"count/0": state.snapshot(), "count/1": other.snapshot()})
    counts[1] = 1
    store.full, lost = True, state.snapshot()
    counts[2] = 2
    taken_meanwhile = state.snapshot()  # the next snapshot was taken before the write of this one failed
    with pytest.raises(StateError, match="No space left"):
        writer.write(name(2), {"count/0": lost})
    assert writer.broken
    store.full = False
    with pytest.raises(
        StateError, match=r"after a failed write the next snapshot .* must be full, but .* of count/0"
    ):
        writer.write(name(3), {"count/0": taken_meanwhile})
    other.value("position").value = 2
    chains = writer.write(name(3), {"count/1": other.snapshot()})  # a task that lost nothing continues
    assert writer.broken
    assert chains["count/0"] == before["count/0"]
    chains = writer.write(name(4), {"count/0": state.snapshot(full=True)})
    assert not writer.broken
    assert restored(store, chains).map("counts") == counts
    assert restored(store, chains, "count/1").value("position").value == 2
    counts[3] = 3
    chains = writer.write(name(5), {"count/0": state.snapshot()})
    assert restored(store, chains).map("counts") == counts


def test_a_value_that_cannot_be_written_breaks_the_chain_too(store, state):
    writer = SnapshotWriter(store)
    writer.write(name(1), {"count/0": state.snapshot()})
    state.map("counts")[store.__init__.__code__] = 1  # a key is pickled when the map is encoded
    with pytest.raises(StateError, match="state 'counts': a code in it cannot be pickled"):
        writer.write(name(2), {"count/0": state.snapshot()})
    assert writer.broken


DAMAGE = {
    "cut short": (
        lambda data: data[:-100],
        "the .* bytes at .* are not what was written there: the file ends 100 b",
    ),
    "changed": (lambda data: data[:-100] + b"!" + data[-99:], "their signature differs"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(store, state, damage):
    change, message = DAMAGE[damage]
    chains = SnapshotWriter(store).write(name(1), {"count/0": state.snapshot()})
    file = f"snapshots/{name(1)}.bin"
    store.write(file, change(store.read(file)))
    with pytest.raises(SnapshotCorrupt, match=message) as caught:
        read_parts(store, chains)
    assert f"{store.url}/{file}" in caught.value.where
    assert "start from an earlier epoch or a savepoint" in caught.value.hint


def test_a_lost_file_is_damage(store, state):
    chains = SnapshotWriter(store).write(name(1), {"count/0": state.snapshot()})
    store.remove(f"snapshots/{name(1)}.bin")
    with pytest.raises(SnapshotCorrupt, match="there is no such file"):
        read_parts(store, chains)


def test_a_file_that_cannot_be_read_is_not_taken_for_damage(tmp_path, state):
    store = StateStore(str(tmp_path))
    chains = SnapshotWriter(store).write(name(1), {"count/0": state.snapshot()})
    file = Path(tmp_path, f"snapshots/{name(1)}.bin")
    file.unlink()
    file.mkdir()
    with pytest.raises(StateError, match=r"the attempt to read it failed \(IsADirectoryError") as caught:
        read_parts(store, chains)
    assert not isinstance(caught.value, SnapshotCorrupt)
