"""What a marker overtakes is stored, and who gets it when the number of tasks has changed."""

import os
from collections import Counter

import pyarrow as pa
import pytest

from penstock import BasicBolt, CustomGrouping, TopologyBuilder
from penstock.columns import ColumnBatch, to_values
from penstock.driver.overtaken import check_waiting, waiting_of, why_not_overtaken
from penstock.errors import StateError
from penstock.frames import codec
from penstock.frames.header import UNNUMBERED, Header, Kind, unpack, with_epoch
from penstock.plan.planner import make_plan
from penstock.state.manifest import OvertakenEntry, OvertakenFrames
from penstock.state.snapshots import SnapshotPart
from penstock.testing import FeederSpout
from penstock.topology.hashing import hash_keys
from penstock.worker.inbox import Inbox
from penstock.worker.overtaking import Recording, stored_frames
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill
from penstock.worker.waiting import WaitingFrames

FIELDS = [("key", None)]


class Rows(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("key")

    def execute(self, tup, collector):
        collector.emit(tup)


class First(CustomGrouping):
    def prepare(self, targets):
        self._tasks = targets.tasks

    def choose(self, values):
        return [self._tasks[0]]


def plan_of(grouping, tasks):
    builder = TopologyBuilder()
    builder.set_spout("spout", FeederSpout("key"), 2)
    declarer = builder.set_bolt("bolt", Rows(), tasks)
    match grouping:
        case "fields":
            declarer.fields_grouping("spout", "key")
        case "partial":
            declarer.partial_key_grouping("spout", "key")
        case "custom":
            declarer.grouping("spout", First())
        case _:
            getattr(declarer, f"{grouping}_grouping")("spout")
    return make_plan(builder.build("t"))


def frame_for(plan, index, rows, source=0, sequence=0, epoch=3):
    stream = next(number for number, stream in enumerate(plan.streams) if stream.component == "spout")
    task, sender = plan.tasks_of["bolt"][index], plan.tasks_of["spout"][source]
    worker = plan.routes.worker_of[task]
    batch = pa.RecordBatch.from_arrays([pa.array(rows)], names=["key"])
    header = Header(Kind.DATA, worker.stage, worker.index, 0, source, task, sender, stream)
    header = header._replace(epoch=epoch, sequence=sequence, rows=len(rows))
    return Parcel(header, pa.py_buffer(codec.encode(header, batch, None)))


def rows_of(parcel):
    header = unpack(memoryview(parcel.content))
    assert header.rows == parcel.header.rows
    return to_values(codec.decode(header, parcel.content, None).column(0))


def stored(recording):
    """⟨Key of the task, its rows, those of them that are executed⟩ of each stored frame."""
    return [
        (
            chunk.task,
            codec.decode(unpack(memoryview(each.frame)), each.frame, None).column(0).to_pylist(),
            each.executed,
        )
        for chunks in recording.files()
        for chunk in chunks
        for each in stored_frames(chunk.data)
    ]


def restored(before, after, parcels):
    """The rows that each task of ``after`` gets of what waited in ``before``, by index."""
    recording = Recording(3, before)
    recording.add_waiting(parcels)
    files, entries = {}, {}
    for number, chunks in enumerate(recording.files()):
        for chunk in chunks:
            part = SnapshotPart(f"{number}-{chunk.task}", 0, len(chunk.data), "", "frames", chunk.rows)
            files[part.file] = chunk.data
            entry = entries.setdefault(chunk.task, OvertakenEntry([], sorted(chunk.streams)))
            entry.parts.append(part)
    streams = [
        (each.component, each.name, [(f.name, str(f.type)) for f in each.fields]) for each in before.streams
    ]
    overtaken = OvertakenFrames(streams, {task.id: task.key for task in before.tasks}, entries)
    found = {}
    for worker in after.worker_ids():
        tasks = after.routes.tasks_of(worker)
        inboxes = {task: Inbox(1000) for task in tasks}
        waiting = waiting_of(after, worker, overtaken)
        if waiting is not None:
            WaitingFrames(worker, after, waiting, inboxes).restore(lambda part: stored_frames(files[part.file]))
        for task, inbox in inboxes.items():
            if after.task[task].component == "bolt":
                rows = found[after.task[task].index] = []
                while (parcel := inbox.take()) is not None:
                    assert parcel.header.sequence == UNNUMBERED
                    assert not parcel.is_numbered
                    assert after.task[parcel.header.source_task].component == "spout"
                    rows += rows_of(parcel)
    return found


def test_frames_are_stored_as_they_are_and_what_is_executed_is_left_out():
    plan = plan_of("shuffle", 2)
    recording = Recording(3, plan)
    recording.add_executing(frame_for(plan, 0, ["a", "b", "c"]), 2)
    spill = Spill(0)  # everything is on disk
    for rows in (["d"], ["e", "f"]):
        spill.add(frame_for(plan, 1, rows))
    recording.add_waiting(spill.view())
    spill.close()  # the queue has gone on meanwhile
    recording.add_arrival(frame_for(plan, 0, ["g"]))
    recording.add_arrival(frame_for(plan, 0, ["of the next epoch"], epoch=4))
    assert stored(recording) == [
        ("bolt/0", ["a", "b", "c"], 2),
        ("bolt/0", ["g"], 0),
        ("bolt/1", ["d"], 0),
        ("bolt/1", ["e", "f"], 0),
    ]
    recording.close()


def test_tuples_from_the_same_worker_are_encoded_with_their_senders():
    plan = plan_of("shuffle", 1)
    (task,), senders = plan.tasks_of["bolt"], plan.tasks_of["spout"]
    header = frame_for(plan, 0, ["x"]).header._replace(rows=4)
    values = [1, "two", None, b"4"]
    parcel = Parcel(header, ColumnBatch(FIELDS, [values]), sources=((senders[0], 3), (senders[1], 1)))
    recording = Recording(3, plan)
    recording.add_executing(parcel, 1)
    frames = [each.frame for chunks in recording.files() for chunk in chunks for each in stored_frames(chunk.data)]
    headers = [unpack(memoryview(frame)) for frame in frames]
    assert [(header.target_task, header.source_task, header.rows) for header in headers] == [
        (task, senders[0], 2),
        (task, senders[1], 1),
    ]
    assert restored(plan, plan, [parcel]) == {0: values}


def test_large_queues_are_written_in_several_files(monkeypatch):
    monkeypatch.setattr("penstock.worker.overtaking._CHUNK", 1000)
    plan = plan_of("shuffle", 2)
    recording = Recording(3, plan)
    recording.add_waiting([frame_for(plan, n % 2, [f"row {n}"]) for n in range(40)])
    files = list(recording.files())
    assert len(files) > 5
    assert all(sum(len(chunk.data) for chunk in chunks) < 2000 for chunks in files)
    monkeypatch.undo()
    recording = Recording(3, plan)
    recording.add_waiting([frame_for(plan, n % 2, [f"row {n}"]) for n in range(40)])
    assert [rows for task, rows, _ in stored(recording) if task == "bolt/1"] == [
        [f"row {n}"] for n in range(1, 40, 2)
    ]


def test_files_that_cannot_be_written_leave_nothing_open(monkeypatch):
    monkeypatch.setattr("penstock.worker.overtaking._CHUNK", 1)
    monkeypatch.setattr("penstock.worker.overtaking._ARRIVALS_IN_MEMORY", 0)
    before = set(os.listdir("/proc/self/fd"))
    plan = plan_of("shuffle", 2)
    recording = Recording(3, plan)
    for n in range(4):
        recording.add_arrival(frame_for(plan, n % 2, [f"row {n}"]))
        recording.add_relayed(frame_for(plan, n % 2, [f"row {n}"]))
    files = recording.files()
    next(files)  # the store is away, so the others are not asked for
    recording.close()
    assert set(os.listdir("/proc/self/fd")) == before


def owner_of(key, tasks):
    return int(hash_keys(pa.array([key]), 1)[0]) % tasks


GROUPINGS = ("shuffle", "fields", "partial", "global", "all", "custom", "none", "local_or_shuffle")


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(("before", "now"), [(1, 4), (2, 2), (4, 1), (2, 3), (3, 2)])
def test_every_tuple_goes_to_one_task_whatever_the_numbers_of_tasks(grouping, before, now):
    old, new = plan_of(grouping, before), plan_of(grouping, now)
    parcels, rows = [], Counter()
    for n in range(12):
        keys = [f"k{n}-{each}" for each in range(1 + n % 5)]
        index = 0 if grouping in ("global", "custom") else n % before
        if grouping == "fields":  # at its owner, as the grouping sends it
            for owner in range(before):
                mine = [key for key in keys if owner_of(key, before) == owner]
                if mine:
                    parcels.append(frame_for(old, owner, mine, sequence=n))
        else:
            parcels.append(frame_for(old, index, keys, source=n % 2, sequence=n))
        rows.update(keys)
    found = restored(old, new, parcels)
    assert Counter(row for each in found.values() for row in each) == rows
    if grouping == "fields":
        assert all(owner_of(key, now) == index for index, got in found.items() for key in got)
    if grouping in ("all", "custom") and before > now:
        assert not any(index >= now for index in found)
    if grouping in ("shuffle", "none", "local_or_shuffle") and now > before:
        assert min(map(len, found.values())) > rows.total() / now / 2, "the load is shared"
    if grouping == "global":
        assert not any(found[index] for index in found if index)


def test_frames_keep_their_order_within_a_key():
    old, new = plan_of("fields", 1), plan_of("fields", 3)
    parcels = [frame_for(old, 0, [f"k{n % 5}", f"k{n % 5}"], sequence=n) for n in range(20)]
    for rows in restored(old, new, parcels).values():
        assert len(set(rows)) * 8 == len(rows)


@pytest.mark.parametrize("grouping", ["all", "custom"])
def test_state_behind_such_a_grouping_keeps_its_number_of_tasks(grouping):
    old, new = plan_of(grouping, 2), plan_of(grouping, 3)
    assert "does not say whose they are" in why_not_overtaken(old, new)
    assert why_not_overtaken(old, plan_of(grouping, 2)) == ""
    streams = [(each.component, each.name, [(f.name, str(f.type)) for f in each.fields]) for each in old.streams]
    number = frame_for(old, 0, ["a"]).header.stream
    waiting = OvertakenFrames(
        streams, {task.id: task.key for task in old.tasks}, {"bolt/0": OvertakenEntry([], [number])}
    )
    check_waiting(new, waiting, frozenset(), "here")  # without state, any task may process them
    with pytest.raises(
        StateError, match=r"'bolt': tuples wait for it in here, but it has 3 tasks now instead of 2"
    ):
        check_waiting(new, waiting, frozenset({"bolt"}), "here")


def test_another_grouping_cannot_take_over_what_was_overtaken():
    assert why_not_overtaken(plan_of("fields", 2), plan_of("fields", 4)) == ""
    assert "another grouping" in why_not_overtaken(plan_of("shuffle", 2), plan_of("fields", 2))


def test_an_overtaken_frame_is_sent_with_the_next_epoch():
    plan = plan_of("shuffle", 1)
    parcel = frame_for(plan, 0, ["a"], sequence=7)
    frame = pa.py_buffer(with_epoch(parcel.content, 9))
    assert unpack(memoryview(frame)) == unpack(memoryview(parcel.content))._replace(epoch=9)
    assert rows_of(Parcel(parcel.header, frame)) == ["a"]
