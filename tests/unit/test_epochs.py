"""Epochs, part by part: what the keeper decides, commits do, a worker holds back, recovery finds."""

import argparse
import json
import math
import queue
import threading
import uuid
from collections import Counter, deque
from dataclasses import replace

import msgspec
import pyarrow as pa
import pytest

from penstock import BasicBolt, Delivery, Settings, TopologyBuilder
from penstock.cli import savepoint
from penstock.driver.commit_thread import CommitLoop, CommitThread
from penstock.driver.commits import Commits, write_published
from penstock.driver.epochs import Abandon, EpochKeeper, Overtake, SnapshotBolts, StartCommit, WriteManifest
from penstock.driver.recovery import StateDirectory
from penstock.driver.savepoint_requests import request, save_at_rest
from penstock.errors import (
    NotRunning,
    PenstockError,
    SettingError,
    SnapshotCorrupt,
    StateError,
    StateMissing,
    Superseded,
)
from penstock.faults import STEPS, CrashPoint
from penstock.frames.header import Header, Kind, unpack
from penstock.plan.model import WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol.commands import EndEpoch, EpochCommitted, TakeSnapshot
from penstock.protocol.events import EpochPublished, SnapshotWritten, SpoutsSnapshotted
from penstock.protocol.task_states import OvertakenTuples
from penstock.state import manifest as manifests
from penstock.state.generations import Ownership
from penstock.state.lease import this_process
from penstock.state.snapshots import SnapshotPart, epoch_of
from penstock.state.store import StateStore
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.worker.alignment import Alignment
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill
from tests.consistency.components import INTERVAL, WORLDS, Count, Crash, Numbers, Outside, World, counts, die
from tests.helpers import Driven, Pass, settings_with

A, B, C = WorkerId(0, 0), WorkerId(0, 1), WorkerId(1, 0)


# ---- the keeper --------------------------------------------------------------------------------------------


def keeper(aligned=True, committed=0):
    return EpochKeeper([A, B, C], [A, B], aligned, committed, interval=10.0)


def test_epochs_begin_by_the_clock():
    made = keeper(committed=4)
    assert made.tick(100.0) == []
    assert made.tick(109.9) == []
    assert made.tick(110.0) == [StartCommit(5)]
    assert made.tick(110.1) == []
    assert made.newest == 5


def test_the_marker_overtakes_in_an_epoch_that_takes_too_long():
    made = EpochKeeper([A, B, C], [A, B], True, 0, interval=10.0, overtake_after=2.0)
    assert made.start_commit(0.0) == [StartCommit(1)]
    assert made.tick(1.9) == []
    assert made.tick(2.0) == [Overtake(1)]
    assert made.tick(2.1) == [], "once is enough"
    for worker in (A, B, C):
        last = made.snapshot_written(worker, 1, {})
    assert last == [WriteManifest(1, {})]
    assert made.tick(9.9) == [], "the next epoch is aligned again"
    assert made.tick(10.0) == [StartCommit(2)]


def test_a_request_may_have_less_patience_than_usual():
    made = EpochKeeper([A, B, C], [A, B], True, 0, interval=10.0, overtake_after=2.0)
    assert made.start_commit(0.0) == [StartCommit(1)]
    assert made.start_commit(0.5, patience=0.0) == [StartCommit(2), Overtake(2)], "earlier epochs end before it"
    assert made.start_commit(0.6, patience=0.0) == [], "two are in progress"
    assert made.tick(3.0) == []
    made = EpochKeeper([A, B, C], [A, B], True, 0, interval=10.0)
    made.start_commit(0.0)
    made.start_commit(0.0)
    assert made.start_commit(0.0, patience=0.2) == []
    assert made.tick(0.2) == [Overtake(2)], "it waits for those in progress"
    made = EpochKeeper([A, B, C], [A, B], True, 0, interval=10.0, overtake_after=2.0)
    assert made.start_commit(0.0, patience=math.inf) == [StartCommit(1)]
    assert made.tick(9.0) == [], "the next form could not process what waits"


def test_nothing_is_overtaken_without_markers():
    made = EpochKeeper([A, B, C], [A, B], False, 0, interval=10.0, overtake_after=0.0)
    assert made.start_commit(0.0, patience=0.0) == [StartCommit(1)]
    assert made.tick(5.0) == []


def test_what_waited_nearer_to_its_task_comes_first():
    made = keeper()
    made.start_commit(0.0)
    written = {}
    for number, worker in enumerate((A, C, B)):
        part = SnapshotPart(f"snapshots/{worker}", 0, 1, "", "frames", 1)
        written[worker] = part
        last = made.snapshot_written(worker, 1, {}, {"bolt/0": OvertakenTuples([part], [number])})
    (commit,) = last
    assert commit.overtaken == {"bolt/0": OvertakenTuples([written[C], written[A], written[B]], [0, 1, 2])}


def test_an_epoch_is_committed_when_all_workers_have_written():
    made = keeper()
    made.start_commit(0.0)
    assert made.snapshot_written(C, 1, {"c/0": 3}) == []
    assert made.snapshot_written(A, 1, {"a/0": 1}) == []
    assert made.snapshot_written(B, 1, {"a/1": 2}) == [WriteManifest(1, {"a/0": 1, "a/1": 2, "c/0": 3})]


def test_two_epochs_overlap_and_no_more():
    made = keeper()
    assert made.start_commit(0.0) == [StartCommit(1)]
    assert made.start_commit(0.0) == [StartCommit(2)]
    assert made.start_commit(0.0) == []
    for worker in (A, B, C):
        last = made.snapshot_written(worker, 1, {})
    assert last == [WriteManifest(1, {})]
    assert made.start_commit(0.0) == [StartCommit(3)]


def test_epochs_are_committed_in_order():
    made = keeper()
    made.start_commit(0.0)
    made.start_commit(0.0)
    for worker in (A, B, C):
        assert made.snapshot_written(worker, 2, {}) == []
    made.snapshot_written(A, 1, {})
    made.snapshot_written(B, 1, {})
    assert made.snapshot_written(C, 1, {}) == [WriteManifest(1, {}), WriteManifest(2, {})]


def test_an_epoch_that_cannot_be_written_is_abandoned_when_all_have_answered():
    made = keeper()
    made.start_commit(0.0)
    assert made.snapshot_failed(B, 1, "disk full") == []
    made.snapshot_written(A, 1, {})
    assert made.snapshot_written(C, 1, {}) == [Abandon(1, ("worker 0.1: disk full",))]
    assert made.start_commit(0.0) == [StartCommit(2)]


def test_the_epoch_after_an_abandoned_one_is_committed():
    made = keeper()
    made.start_commit(0.0)
    made.start_commit(0.0)
    for epoch in (2, 1):
        made.snapshot_written(A, epoch, {})
        made.snapshot_written(B, epoch, {})
    assert made.snapshot_written(C, 2, {}) == []
    assert made.snapshot_failed(C, 1, "no") == [Abandon(1, ("worker 1.0: no",)), WriteManifest(2, {})]


def test_doubled_and_late_reports_change_nothing():
    made = keeper()
    made.start_commit(0.0)
    made.snapshot_written(A, 1, {})
    assert made.snapshot_written(A, 1, {}) == []
    assert made.snapshot_written(A, 7, {}) == []
    assert made.snapshot_failed(A, 7, "what epoch?") == []
    made.snapshot_written(B, 1, {})
    assert len(made.snapshot_written(C, 1, {})) == 1
    assert made.snapshot_written(C, 1, {}) == []
    assert made.spouts_snapshotted(A, 1) == []


def test_at_least_once_bolts_are_snapshotted_when_all_spouts_are():
    made = keeper(aligned=False)
    assert made.start_commit(0.0) == [StartCommit(1)]
    assert made.start_commit(0.0) == [], "one at a time"
    assert made.spouts_snapshotted(A, 1) == []
    assert made.spouts_snapshotted(A, 1) == [], "said twice"
    assert made.snapshot_written(A, 1, {"s/0": 1}) == []
    assert made.spouts_snapshotted(B, 1) == [SnapshotBolts(1)]
    assert made.spouts_snapshotted(B, 1) == []
    made.snapshot_written(B, 1, {"s/1": 2})
    made.snapshot_written(C, 1, {"c/0": 3})
    assert made.snapshot_written(A, 1, {}) == [], "B still owes what was fused with its spouts"
    assert made.snapshot_written(B, 1, {}) == [WriteManifest(1, {"s/0": 1, "s/1": 2, "c/0": 3})]


def test_an_epoch_is_published_when_all_sinks_say_so():
    made = EpochKeeper([A, B, C], [A, B], True, committed=3, interval=10.0, published=3)
    assert made.published == 3
    made.epoch_published(A, 4)
    made.epoch_published(B, 5)
    assert made.published == 3
    made.epoch_published(C, 5)
    assert made.published == 4
    made.epoch_published(A, 5)
    assert made.published == 5


def test_an_epoch_that_a_run_begins_with_is_not_assumed_to_be_published():
    made = keeper(committed=3)
    assert made.published == 0
    for worker in (A, B, C):
        made.epoch_published(worker, 4)
    assert made.published == 4


# ---- commits -----------------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return StateStore(f"memory://{uuid.uuid4().hex}")


def small(tasks=2, count=60, sink=None, spouts=2, **settings):
    """Spouts, counts, and maybe a sink."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(count), spouts)
    builder.set_bolt("count", Count(), tasks).fields_grouping("numbers", "key")
    if sink is not None:
        builder.set_bolt("sink", sink).shuffle_grouping("count")
    return builder.build("t", settings_with(**{"delivery": "exactly_once", "epoch_interval": INTERVAL} | settings))


class Answers:
    """Workers that do at once what they are told: snapshot, write, publish."""

    def __init__(self, store, delivery="exactly_once", crash=""):
        self.plan, self.said = make_plan(small()), []
        owner = Ownership("t")
        owner.claim(store)
        self.late = deque()
        settings = Settings(delivery=Delivery(delivery))
        point = CrashPoint(crash, "driver", die)
        self.commits = Commits(
            self.plan,
            settings.delivery.guarantee,
            settings.delivery.epoch_interval,
            store,
            owner,
            0,
            self._send,
            point,
        )

    def _send(self, message, to):
        self.said.append(message)
        for worker in self.plan.worker_ids() if to is None else [to]:
            if isinstance(message, TakeSnapshot) and message.what == "spouts":
                self.late.append((self.commits.snapshot_written, worker, message.epoch, {}))
                self.late.append((self.commits.spouts_snapshotted, worker, message.epoch))
            elif isinstance(message, TakeSnapshot):
                self.late.append((self.commits.snapshot_written, worker, message.epoch, {}))
            elif isinstance(message, EpochCommitted):
                self.late.append((self.commits.epoch_published, worker, message.epoch))
            elif isinstance(message, EndEpoch) and worker == A:
                for each in self.plan.worker_ids():
                    self.late.append((self.commits.snapshot_written, each, message.epoch, {}))

    def epoch(self):
        assert self.commits.start_commit(0.0)
        while self.late:
            call, *args = self.late.popleft()
            call(*args)

    def kinds(self):
        return [type(message).__name__ for message in self.said]


def test_a_commit_writes_a_manifest_and_tells_the_workers(store):
    workers = Answers(store)
    workers.epoch()
    assert workers.kinds() == ["EndEpoch", "EndEpoch", "EpochCommitted"]
    assert manifests.newest(store).epoch == workers.commits.committed == workers.commits.published == 1


def test_at_least_once_a_commit_snapshots_spouts_then_bolts(store):
    workers = Answers(store, "at_least_once")
    workers.epoch()
    assert workers.said == [
        TakeSnapshot(1, "spouts"),
        TakeSnapshot(1, "spouts"),
        TakeSnapshot(1, "bolts"),
        EpochCommitted(1),
    ]
    assert manifests.newest(store).epoch == 1


def test_who_was_superseded_commits_no_more(store):
    workers = Answers(store)
    workers.epoch()
    Ownership("t").claim(store)
    with pytest.raises(Superseded, match=r"another driver has taken over .*generation 2, .*generation 1"):
        workers.epoch()
    assert manifests.newest(store).epoch == 1


def test_who_is_superseded_while_writing_publishes_nothing(store, monkeypatch):
    """The other may have looked for manifests just before: it then does the epoch again."""
    workers = Answers(store)
    create = StateStore.create

    def taken_over(self, name, data):
        created = create(self, name, data)
        if name.startswith("manifests/"):
            monkeypatch.undo()
            Ownership("t").claim(store)
        return created

    monkeypatch.setattr(StateStore, "create", taken_over)
    with pytest.raises(Superseded):
        workers.epoch()
    assert "EpochCommitted" not in workers.kinds()


def failing(monkeypatch, verb, part):
    """Let a store refuse names with ``part`` in them; undo with ``monkeypatch.undo``."""
    real = getattr(StateStore, verb)

    def refuse(self, name, *rest):
        if part in name:
            raise StateError(f"file {name}", "the disk is full")
        return real(self, name, *rest)

    monkeypatch.setattr(StateStore, verb, refuse)


@pytest.mark.parametrize(("verb", "part"), [("create", "manifests/"), ("list", "generations/")])
def test_a_manifest_that_cannot_be_written_leaves_it_to_the_next_epoch(store, monkeypatch, caplog, verb, part):
    workers = Answers(store)
    failing(monkeypatch, verb, part)
    workers.epoch()
    assert workers.kinds() == ["EndEpoch", "EndEpoch"]
    assert "epoch 1 was not committed" in caplog.text
    monkeypatch.undo()
    workers.epoch()
    assert manifests.newest(store).epoch == workers.commits.committed == workers.commits.published == 2


def test_two_manifests_are_kept(store):
    workers = Answers(store)
    for _ in range(5):
        workers.epoch()
    assert manifests.epochs(store) == [4, 5]


def test_old_snapshots_that_cannot_be_removed_do_no_harm(store, monkeypatch, caplog):
    workers = Answers(store)
    failing(monkeypatch, "remove", "manifests/")
    for _ in range(4):
        workers.epoch()
    assert "old snapshots could not be removed" in caplog.text
    assert workers.commits.published == 4


@pytest.mark.parametrize("folder", ["snapshots/epoch-000000000002", "manifests/epoch-000000000002"])
def test_nothing_is_lost_when_an_epoch_cannot_be_written(folder, store, monkeypatch):
    """What changed in that epoch is in the next snapshots, and what sinks prepared for it is published then."""
    WORLDS[store.url] = World()
    runner = LocalRunner(small(sink=Outside(store.url)), folder=store.url)
    failing(monkeypatch, "write", folder)
    while runner.commits.committed < 3:
        runner.run(INTERVAL)
    monkeypatch.undo()
    runner = LocalRunner(small(sink=Outside(store.url)), folder=store.url)
    assert sum(counts(runner).values()) == len(WORLDS[store.url].rows) > 0
    runner.run(INTERVAL)
    runner.run_until_idle()
    runner.run(5 * INTERVAL)
    assert sum(counts(runner).values()) == len(set(WORLDS.pop(store.url).rows)) == 120


def test_crash_points():
    def dies(spec, where, step, epoch):
        try:
            CrashPoint(spec, where, die)(step, epoch)
        except Crash:
            return True
        return False

    assert not any(dies("", "", step, 1) for step in STEPS)
    assert dies("snapshotted:3", "1.0", "snapshotted", 3)
    assert not dies("snapshotted:3", "1.0", "snapshotted", 2)
    assert not dies("snapshotted:3", "1.0", "written", 3)
    assert dies("snapshotted:3:1.0", "1.0", "snapshotted", 3)
    assert not dies("snapshotted:3:1.1", "1.0", "snapshotted", 3)


# ---- alignment ---------------------------------------------------------------------------------------------


def parcel(number, epoch=1, rows=1, source=0, size=100):
    header = Header(Kind.DATA, 1, 0, 0, source, target_task=7, epoch=epoch, rows=rows, sequence=number)
    return Parcel(header, pa.py_buffer(bytes([number % 256]) * size))


def test_frames_of_later_epochs_are_held_and_released_in_turn():
    alignment = Alignment(upstream=2, epoch=1)
    assert not alignment.hold(parcel(0, epoch=1))
    assert alignment.hold(parcel(1, epoch=2, rows=3))
    assert alignment.hold(parcel(2, epoch=3, rows=5))
    assert alignment.hold(parcel(3, epoch=2))
    assert alignment.held == 9
    released = []

    def put(each):
        released.append(each)
        return True

    alignment.advance(put)
    assert [each.header.sequence for each in released] == [1, 3]
    assert (alignment.epoch, alignment.held) == (2, 5)
    assert not alignment.hold(parcel(4, epoch=2)), "it is of this epoch now"
    alignment.advance(put)
    assert [each.header.sequence for each in released] == [1, 3, 2]
    alignment.advance(put)
    assert (alignment.epoch, alignment.held, len(released)) == (4, 0, 3)


def test_an_epoch_is_complete_with_the_markers_of_all_upstream_workers():
    alignment = Alignment(upstream=2, epoch=1)
    assert not alignment.complete
    alignment.marker(1, 0)
    alignment.marker(1, 0)
    assert not alignment.complete, "the same one twice"
    alignment.marker(2, 0)
    alignment.marker(2, 1)
    assert not alignment.complete, "of a later epoch"
    alignment.marker(1, 1)
    assert alignment.complete
    alignment.advance(lambda parcel: True)
    assert alignment.complete, "its markers came before it began"
    alignment.advance(lambda parcel: True)
    assert not alignment.complete


def test_the_first_stage_has_no_markers_to_wait_for():
    assert not Alignment(upstream=0, epoch=1).complete


def test_a_frame_that_comes_while_others_are_released_does_not_overtake_them():
    alignment = Alignment(upstream=1, epoch=1)
    order, readers = [], []
    for number in range(3):
        alignment.hold(parcel(number, epoch=2))

    def read():
        if not alignment.hold(parcel(9, epoch=2)):
            order.append(9)

    def put(each):
        if not readers:  # the reader thread, just then
            readers.append(threading.Thread(target=read))
            readers[0].start()
            readers[0].join(0.05)  # as far as it gets
        order.append(each.header.sequence)
        return True

    alignment.advance(put)
    readers[0].join()
    assert order == [0, 1, 2, 9]


def test_after_closing_frames_are_dropped_and_no_file_is_made():
    alignment = Alignment(upstream=1, epoch=1)
    alignment.hold(parcel(0, epoch=2))
    alignment.close()
    assert alignment.hold(parcel(1, epoch=2))
    assert alignment.hold(parcel(2, epoch=1)), "dropped too: the inboxes are closed as well"
    assert alignment.held == 1


def test_what_is_held_comes_back_only_as_fast_as_there_is_room():
    alignment = Alignment(upstream=1, epoch=1)
    for number in range(4):
        alignment.hold(parcel(number, epoch=2))
    alignment.marker(2, 0)
    inbox = []

    def put(each):
        if len(inbox) == 2:
            return False
        inbox.append(each.header.sequence)
        return True

    alignment.advance(put)
    assert inbox == [0, 1]
    assert alignment.waiting
    assert alignment.hold(parcel(4, epoch=2)), "of this epoch, but others wait before it"
    assert not alignment.complete, "frames of the epoch still wait"
    inbox.clear()
    alignment.refill(put)
    assert inbox == [2, 3]
    inbox.clear()
    alignment.refill(put)
    assert inbox == [4]
    assert not alignment.waiting
    assert alignment.complete


def test_frames_that_came_before_the_worker_opened_are_not_forgotten():
    alignment = Alignment(upstream=1, epoch=1)
    alignment.hold(parcel(0, epoch=8))
    released = []
    alignment.begin(8, lambda each: released.append(each) or True)
    assert len(released) == 1


def test_a_disk_that_refuses_held_frames_is_named(monkeypatch):
    held = Spill(memory=10)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **more: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(PenstockError, match=r"waiting frames.*No space left.*Free space"):
        held.add(parcel(0, size=100_000))


def test_held_frames_spill_to_disk_in_order():
    held = Spill(memory=1000)
    sizes = [300, 300, 900, 10, 1, 500, 400, 0, 7]  # the small ones after the large would fit, but wait behind it
    for number, size in enumerate(sizes):
        held.add(parcel(number, size=size, rows=2))
    assert held.rows == 2 * len(sizes)
    assert len(held._head) == 2
    assert held.bytes == sum(sizes)
    drained = []
    while (each := held.first()) is not None:
        drained.append(each)
        held.drop()
    assert not held
    assert held.rows == 0
    assert not held._segments  # read, and so deleted
    assert [each.header.sequence for each in drained] == list(range(len(sizes)))
    assert [bytes(each.content) for each in drained] == [
        bytes([number]) * size for number, size in enumerate(sizes)
    ]


# ---- a worker ------------------------------------------------------------------------------------------------


def kinds(rows):
    """What a worker sends, nudges left out: ⟨kind, stage it is for, epoch⟩."""
    headers = [unpack(memoryview(frame)) for _, frame in rows if frame is not None]
    return [(Kind(header.kind).name, header.target_stage, header.epoch) for header in headers]


def relayed():
    """Two spout workers, a middle one, an end that both feed: {worker id: worker}."""
    builder = TopologyBuilder()
    builder.set_spout("s", FeederSpout(("n", int), rows=[[n] for n in range(8)]), 2)
    builder.set_bolt("middle", Pass(("n", int))).shuffle_grouping("s")
    builder.set_bolt("end", CaptureBolt()).shuffle_grouping("middle").shuffle_grouping("s")
    folder = f"memory://relayed-{uuid.uuid4().hex}"
    runner = LocalRunner(builder.build("t", Settings(delivery=Delivery("exactly_once"))), folder=folder)
    return runner, {id: Driven(worker) for id, worker in runner.workers.items()}


def epochs_of(worker):
    """Of the snapshots that it has taken."""
    return [job.snapshot.epoch for job in worker.jobs]


def frames(worker, epoch):
    """All that a spout worker sends until it has ended the epoch."""
    rows = list(worker.turn())
    worker.tell(EndEpoch(epoch))
    sent = [pa.py_buffer(frame) for _, frame in [*rows, *worker.turn()] if frame is not None]
    return {
        "middle": [f for f in sent if kinds([(0, f)])[0][:2] == ("DATA", 1)],
        "relay": [f for f in sent if kinds([(0, f)])[0][:2] == ("DATA", 2)],
        "marker": [f for f in sent if kinds([(0, f)])[0][0] == "MARKER"],
    }


def test_a_relayed_frame_that_comes_just_before_the_last_marker_leaves_before_ours(monkeypatch):
    _, workers = relayed()
    middle = workers[C]
    first, second = frames(workers[A], 1), frames(workers[B], 1)
    assert first["relay"], "a frame that passes the middle"
    assert second["relay"]
    for frame in [*first["middle"], *first["relay"], *first["marker"], *second["middle"]]:
        assert middle.offer(frame)
    while kinds(middle.turn()):
        pass
    late = [*second["relay"], *second["marker"]]
    run_bolts = middle.worker._tasks.run_bolts

    def and_meanwhile():  # the reader thread gets them while the turn is under way, its relaying done
        worked = run_bolts()
        while late:
            middle.offer(late.pop(0))
        return worked

    monkeypatch.setattr(middle.worker._tasks, "run_bolts", and_meanwhile)
    assert kinds(middle.turn()) == [("DATA", 2, 1), ("MARKER", 2, 1)]


def test_a_worker_ahead_does_not_mix_epochs():
    """The end of the epoch has come from one worker only: what that one sends next waits."""
    runner, workers = relayed()
    middle = workers[C]
    first, second = frames(workers[A], 1), frames(workers[B], 1)
    runner.component("s")[0].feed([[100]])
    again = frames(workers[A], 2)
    early = [*first["middle"], *first["marker"], *again["middle"], *again["marker"]]
    for frame in [*early, *second["middle"]]:
        assert middle.offer(frame)
    sent = []
    for _ in range(5):
        sent += kinds(middle.turn())
    assert ("DATA", 2, 2) not in sent
    assert ("MARKER", 2, 1) not in sent
    assert middle.now.pending == sum(unpack(memoryview(frame)).rows for frame in again["middle"])
    middle.offer(second["marker"][0])
    sent = kinds(middle.turn())
    assert ("MARKER", 2, 1) in sent
    for _ in range(5):
        sent += kinds(middle.turn())
    assert sent.index(("MARKER", 2, 1)) < sent.index(("DATA", 2, 2))
    assert epochs_of(middle) == [1]
    assert not middle.now.errors, "nothing was lost, doubled or overtaken"


def test_two_ends_announced_at_once_are_two_epochs():
    """As after a spout that was held back for the time of two epochs."""
    _, workers = relayed()
    worker = workers[A]
    worker.tell(EndEpoch(1))
    worker.tell(EndEpoch(2))
    worker.turn()
    assert worker.wait == 0.0, "the second is due"
    worker.turn()
    assert epochs_of(worker) == [1, 2]
    worker.turn()
    assert epochs_of(worker) == [1, 2]


class AlwaysLast(LocalRunner):
    """Says of every epoch that it is the last."""

    def _command(self, message, to):
        if isinstance(message, EndEpoch | TakeSnapshot):
            message = msgspec.structs.replace(message, last=True)
        super()._command(message, to)


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("kind", [LocalRunner, AlwaysLast])
def test_the_last_epoch_before_a_switch_holds_changes_only(kind, delivery, store):
    """In every stage: all keys change in every epoch, and else would be written whole."""
    often = {"linger": 0.0, "busy_linger": INTERVAL / 4}
    runner = kind(small(count=100_000, delivery=delivery, **often), folder=store.url)
    while runner.commits.committed < 8:
        runner.run(INTERVAL / 4)
    manifest = manifests.newest(store.child("t"))
    kinds = [part.kind for index in range(2) for part in manifest.tasks[f"count/{index}"].parts["counts"]]
    assert kinds.count("full") == 2
    assert (kinds.count("delta") > 0) == (kind is AlwaysLast)


class Unpicklable(BasicBolt):
    def prepare(self, conf, context):
        self._value = context.state.value("value")

    def execute(self, tup, collector):
        self._value.value = threading.Lock()


def test_state_that_cannot_be_pickled_ends_the_topology_and_names_the_component(store):
    builder = TopologyBuilder()
    builder.set_spout("s", FeederSpout("n", rows=[[1]]))
    builder.set_bolt("bad", Unpicklable()).shuffle_grouping("s")
    settings = Settings(delivery=Delivery("exactly_once", epoch_interval=INTERVAL))
    runner = LocalRunner(builder.build("t", settings), folder=store.url)
    with pytest.raises(StateError, match="pickle"):
        runner.run(1.0)


# ---- recovery ----------------------------------------------------------------------------------------------


def committed(store, epochs=3, **shape):
    """Run until so many epochs are committed."""
    runner = LocalRunner(small(**shape), folder=store.url)
    while runner.commits.committed < epochs:
        runner.run(INTERVAL / 4)
    return runner


def directory(store, **shape):
    topology = small(**shape)
    return StateDirectory(make_plan(topology), topology, store.url)


def test_recovery_goes_on_from_the_newest_manifest(store):
    before = committed(store, count=10_000)
    found = directory(store)
    found.recover()
    assert found.epoch == before.commits.committed
    assert set(found.tasks()) == {"numbers/0", "numbers/1", "count/0", "count/1"}
    assert found.generation == 2


def test_nothing_committed_is_epoch_nought(store):
    found = directory(store)
    found.recover()
    assert (found.epoch, found.tasks()) == (0, {})


def corrupt(store, epoch):
    child = store.child("t")
    for name in child.list("snapshots/"):
        if epoch_of(name) != epoch:
            continue
        data = bytearray(child.read(name))
        data[len(data) // 2] ^= 0xFF
        child.write(name, bytes(data))


def test_a_corrupt_snapshot_falls_back_to_the_epoch_before(store, caplog):
    newest = committed(store, count=10_000).commits.committed
    corrupt(store, newest)
    with pytest.raises(SnapshotCorrupt):
        LocalRunner(small(count=10_000), folder=store.url)
    found = directory(store)
    found.recover()
    found.fall_back("its files are broken.")
    assert "FALLING BACK" in caplog.text
    runner = LocalRunner(small(count=10_000), folder=store.url)
    assert runner.commits.committed == newest - 1
    positions = sum(spout.position.value for spout in runner.component("numbers"))
    assert sum(counts(runner).values()) == positions > 0, "state and positions of one moment"


def test_with_nothing_to_fall_back_to_recovery_ends(store):
    committed(store, epochs=1)
    found = directory(store)
    found.recover()
    assert found.epoch == 1
    with pytest.raises(StateError, match="there is no older one"):
        found.fall_back("broken")


def test_state_of_a_component_that_is_gone_is_refused(store):
    committed(store)
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10), 2)
    topology = builder.build("t", Settings(delivery=Delivery("exactly_once")))
    with pytest.raises(StateError, match="no such component"):
        StateDirectory(make_plan(topology), topology, store.url).recover()


def test_a_component_without_state_may_have_any_number_of_tasks(store):
    def topology(tasks):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(100), 2)
        builder.set_bolt("end", CaptureBolt(), tasks).shuffle_grouping("numbers")
        return builder.build("t", Settings(delivery=Delivery("exactly_once", epoch_interval=INTERVAL)))

    LocalRunner(topology(2), folder=store.url).commit()
    assert LocalRunner(topology(3), folder=store.url).commits.committed >= 1


def test_a_fresh_start_forgets_all(store):
    committed(store)
    directory(store).clear()
    runner = LocalRunner(small(), folder=store.url)
    assert runner.commits.committed == 0
    assert not counts(runner)
    assert store.child("t").list("snapshots/") == []


def test_a_start_from_a_savepoint(store):
    committed(store, count=10_000)
    savepoint = StateStore(f"memory://{uuid.uuid4().hex}")
    epoch = save_at_rest(store.child("t"), savepoint)
    runner = LocalRunner(small(count=10_000), folder=store.url)
    expected = counts(runner)
    runner.run(3 * INTERVAL)  # what comes after it does not count
    assert runner.commits.committed > epoch

    for target in (store, StateStore(f"memory://{uuid.uuid4().hex}")):
        assert directory(target).adopt(savepoint) == epoch
        again = LocalRunner(small(count=10_000), folder=target.url)
        assert again.commits.committed == epoch
        assert counts(again) == expected
        again.run(INTERVAL)
        assert again.commit() > epoch


def test_a_savepoint_that_does_not_fit_leaves_what_is_there(store):
    committed(store)
    savepoint = StateStore(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(StateMissing, match=r"there is no savepoint here\. Check the path"):
        directory(store).adopt(savepoint)
    save_at_rest(store.child("t"), savepoint)
    with pytest.raises(
        StateError, match=r"'numbers': it has 5 tasks now, but .* holds state of 2 tasks, and it is a spout"
    ):
        directory(store, spouts=5).adopt(savepoint)
    assert manifests.newest(store.child("t")).epoch > 0


def test_a_savepoint_of_nothing_is_refused(store):
    with pytest.raises(StateError, match="it holds no committed epoch"):
        save_at_rest(store, StateStore(f"memory://{uuid.uuid4().hex}"))


def test_a_savepoint_leaves_published_transactions_behind(store):
    WORLDS[store.url] = World()
    runner = committed(store, sink=Outside(store.url), count=10_000)
    while runner.commits.published < runner.commits.committed:
        runner.run(0.0005)
    newest = manifests.newest(store.child("t"))
    assert newest.tasks["sink/0"].tokens
    savepoint = StateStore(f"memory://{uuid.uuid4().hex}")
    save_at_rest(store.child("t"), savepoint)
    saved = manifests.newest(savepoint)
    assert saved.tasks["sink/0"].tokens == []
    for chain, copied in zip(newest.chains["count/0"].values(), saved.chains["count/0"].values(), strict=True):
        assert [part.signature for part in copied] == [part.signature for part in chain]
    del WORLDS[store.url]


# ---- the thread that commits -------------------------------------------------------------------------------


class Running:
    """A commit thread whose workers answer at once; ``wait`` looks whenever the thread did something."""

    def __init__(self, store, delivery="exactly_once"):
        self._changed = threading.Condition()
        self.events = queue.SimpleQueue()
        self.plan = make_plan(small())
        owner = Ownership("t")
        owner.claim(store)
        settings = Settings(delivery=Delivery(delivery, epoch_interval=3600.0))
        commits = Commits(
            self.plan,
            settings.delivery.guarantee,
            settings.delivery.epoch_interval,
            store,
            owner,
            0,
            self._send,
            CrashPoint(""),
        )
        self.loop = CommitLoop(commits, store, self.events, self._notify)
        self.thread = CommitThread(self.loop)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.thread.stop()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, 30)

    def _notify(self):
        with self._changed:
            self._changed.notify_all()

    def _send(self, message, to):
        for worker in self.plan.worker_ids():
            if to not in (None, worker):
                continue
            if isinstance(message, EndEpoch):
                for each in self.plan.worker_ids():
                    if worker == A:
                        self.events.put((each, SnapshotWritten(message.epoch, {})))
            elif isinstance(message, TakeSnapshot):
                self.events.put((worker, SnapshotWritten(message.epoch, {})))
                if message.what == "spouts":
                    self.events.put((worker, SpoutsSnapshotted(message.epoch)))
            elif isinstance(message, EpochCommitted):
                self.events.put((worker, EpochPublished(message.epoch)))


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_an_epoch_can_be_asked_for(store, delivery):
    with Running(store, delivery) as running:
        assert running.loop.commit_now(30.0) == 1
        assert running.loop.commit_now(30.0) == 2
    assert manifests.newest(store).epoch == 2


def test_a_request_after_the_end_is_answered_at_once(store):
    with Running(store) as running:
        assert running.loop.commit_now(30.0) == 1
    with pytest.raises(StateError, match="the topology ended before the epoch was committed"):
        running.loop.commit_now(30.0)


def test_a_savepoint_is_asked_for_by_a_file(store):
    target = f"memory://{uuid.uuid4().hex}"
    store.write("requests/one.json", request("requests/one.json", target))
    with Running(store) as running:
        running.wait(lambda: "requests/one.done" in store.list("requests/"))
        running.wait(lambda: "requests/one.json" not in store.list("requests/"))
    assert json.loads(store.read("requests/one.done")) == {"epoch": 1}
    assert manifests.newest(StateStore(target)).epoch == 1


@pytest.mark.parametrize(
    "request_", [b"", b"no json", b"[]", b"{}", b'"text"', b'{"to": 1, "signature": 2}', b'{"to": "memory://x"}',
     "nosuch://there", "relative/path"],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_answered_and_does_no_harm(store, request_):
    asked = request("requests/bad.json", request_) if isinstance(request_, str) else request_
    store.write("requests/bad.json", asked)
    with Running(store) as running:
        running.wait(lambda: "requests/bad.done" in store.list("requests/"))
        assert running.loop.commit_now(30.0)
        assert running.loop.error is None
    assert json.loads(store.read("requests/bad.done"))["error"]


@pytest.mark.parametrize("forged", ["unsigned", "of another key", "another target", "another name"])
def test_a_request_of_a_stranger_copies_nothing_and_resolves_no_secret(store, forged, monkeypatch):
    """Who can only write to the state directory cannot have state or secrets sent elsewhere."""
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    resolved = []
    monkeypatch.setattr("penstock.credentials._value", lambda name, where: resolved.append(name) or "hunter2")
    target = "memory://stolen-${DB_PASSWORD}"
    asked = json.loads(request("requests/bad.json", target))
    match forged:
        case "unsigned":
            del asked["signature"]
        case "of another key":
            asked["signature"] = "00" * 16
        case "another target":
            asked = {**json.loads(request("requests/bad.json", "memory://mine")), "to": target}
        case "another name":
            asked = json.loads(request("requests/other.json", target))
    store.write("requests/bad.json", json.dumps(asked).encode())
    with Running(store) as running:
        running.wait(lambda: "requests/bad.done" in store.list("requests/"))
    assert "lacks this deployment's signature" in json.loads(store.read("requests/bad.done"))["error"]
    assert resolved == []
    assert "hunter2" not in str(store.read("requests/bad.done"))


def test_who_waits_for_a_commit_hears_of_the_end(store):
    with Running(store) as running:
        Ownership("t").claim(store)
        with pytest.raises(Superseded):
            running.loop.commit_now(30.0)
        running.wait(lambda: running.loop.error is not None)
    assert isinstance(running.loop.error, Superseded)


def test_who_waits_for_a_commit_is_not_told_of_an_older_one(store, monkeypatch):
    with Running(store) as running:
        assert running.loop.commit_now(30.0) == 1
        monkeypatch.setattr(running, "_send", lambda message, to: None, raising=False)
        monkeypatch.setattr(running.loop.commits, "_send", lambda message, to: None)
        with pytest.raises(StateError, match=r"within 0\.2 s"):
            running.loop.commit_now(0.2)


def test_a_savepoint_at_rest_wants_published_sinks(store):
    WORLDS[store.url] = World()
    committed(store, sink=Outside(store.url), count=10_000)
    newest = manifests.newest(store.child("t"))
    write_published(store.child("t"), newest.generation, newest.epoch - 1)
    with pytest.raises(
        StateError, match=f"published epoch {newest.epoch - 1} only, and not yet epoch {newest.epoch}. Start it"
    ):
        save_at_rest(store.child("t"), StateStore(f"memory://{uuid.uuid4().hex}"))
    del WORLDS[store.url]


def test_a_savepoint_where_an_older_life_left_one(store):
    committed(store)
    target = StateStore(f"memory://{uuid.uuid4().hex}")
    first = save_at_rest(store.child("t"), target)
    replace(manifests.newest(target), epoch=900).write(target)
    assert save_at_rest(store.child("t"), target) == first
    assert manifests.newest(target).epoch == first
    assert len(target.list("manifests/")) == 1


def test_a_request_is_answered_when_the_topology_ends_before_it_is_met(store, monkeypatch):
    store.write("requests/one.json", request("requests/one.json", f"memory://{uuid.uuid4().hex}"))
    monkeypatch.setattr(Running, "_send", lambda self, message, to: None)  # workers that never answer
    with Running(store) as running:
        running.wait(lambda: running.loop.commits.newest == 1)
    assert (
        "the topology ended before the epoch was committed" in json.loads(store.read("requests/one.done"))["error"]
    )


def test_counts_are_those_of_a_run_without_epochs(store):
    """The simplest oracle: the same topology with nothing committed."""
    plain = LocalRunner(small(delivery="at_most_once"))
    plain.run(INTERVAL)
    plain.run_until_idle()
    runner = committed(store)
    runner.run_until_idle()
    assert counts(runner) == counts(plain) == Counter({f"k{n}": 2 * len(range(n, 60, 7)) for n in range(7)})


def test_a_fresh_start_forgets_where_spouts_began(store):
    topology = small()
    found = directory(store)
    begun, kept = "tasks/numbers-0/start.json", "tasks/numbers-0/replay/about.json"
    for name in (begun, kept):
        found.store.write(name, b"{}")
    StateDirectory(make_plan(topology), topology, store.url).clear()
    assert found.store.list("tasks/") == [kept]


def test_a_relative_savepoint_path_is_one_of_the_command(tmp_path, monkeypatch):
    """The driver has another working directory."""
    monkeypatch.chdir(tmp_path)
    store = StateStore(str(tmp_path / "state")).child("t")
    Ownership("t", this_process()).claim(store)
    asked, write = [], StateStore.write
    monkeypatch.setattr(StateStore, "write", lambda self, *file: (asked.append(file), write(self, *file)))
    parser = argparse.ArgumentParser()
    savepoint.add_parser(parser.add_subparsers())
    words = ["savepoint", "t", "backup/one", "--state-dir", str(tmp_path / "state"), "--timeout", "0"]
    with pytest.raises(StateError, match="did not answer within 0 s"):
        savepoint.handle(parser.parse_args(words))
    assert [json.loads(data)["to"] for name, data in asked] == [str(tmp_path / "backup" / "one")]


def ask_for_savepoint(folder, *more):
    parser = argparse.ArgumentParser()
    savepoint.add_parser(parser.add_subparsers())
    words = ["savepoint", "t", str(folder / "copy"), "--state-dir", str(folder / "state"), *more]
    return savepoint.handle(parser.parse_args(words))


@pytest.mark.parametrize("target", ["state", "state/copy", "state/t", "."])
def test_a_savepoint_in_the_state_directory_is_refused(tmp_path, target):
    Ownership("t", this_process()).claim(StateStore(str(tmp_path / "state")).child("t"))
    parser = argparse.ArgumentParser()
    savepoint.add_parser(parser.add_subparsers())
    words = ["savepoint", "t", str(tmp_path / target), "--state-dir", str(tmp_path / "state")]
    with pytest.raises(SettingError, match="it overlaps with the state directory"):
        savepoint.handle(parser.parse_args(words))


@pytest.mark.parametrize("end", ["released", "died"])
def test_a_savepoint_of_a_topology_that_does_not_run_is_refused_at_once(tmp_path, end):
    store = StateStore(str(tmp_path / "state")).child("t")
    owner = Ownership("t", {**this_process(), "started": "1"} if end == "died" else this_process())
    owner.claim(store)
    if end == "released":
        owner.release(store)
    with pytest.raises(NotRunning) as error:
        ask_for_savepoint(tmp_path)
    assert (
        str(error.value) == "topology 't': it is not running. Add --at-rest to copy the last epoch it committed."
    )
    assert error.value.exit_code == 2
    assert store.list("requests/") == []


def test_a_topology_that_ends_before_its_answer_leaves_no_request(tmp_path, monkeypatch):
    store = StateStore(str(tmp_path / "state")).child("t")
    owner = Ownership("t", this_process())
    owner.claim(store)
    monkeypatch.setattr(savepoint, "_ALIVE_INTERVAL", 0.0)
    monkeypatch.setattr(savepoint.time, "sleep", lambda seconds: owner.release(store))
    with pytest.raises(NotRunning, match="it is not running"):
        ask_for_savepoint(tmp_path)
    assert store.list("requests/") == []


def test_who_is_interrupted_while_waiting_for_a_savepoint_leaves_no_request(tmp_path, monkeypatch):
    store = StateStore(str(tmp_path / "state")).child("t")
    Ownership("t", this_process()).claim(store)

    def interrupted(seconds):
        assert len(store.list("requests/")) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(savepoint.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask_for_savepoint(tmp_path)
    assert store.list("requests/") == []


def test_a_savepoint_of_an_unknown_topology_is_bad_input(tmp_path):
    with pytest.raises(StateMissing, match=r"state contains no state of it\. Check the topology's name") as error:
        ask_for_savepoint(tmp_path)
    assert error.value.exit_code == 2
