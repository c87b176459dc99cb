"""A crash between any two steps: another process opens the folder as it was at that moment."""

from __future__ import annotations

import contextlib
import os
import shutil

import numpy as np
import pytest

from penstock.replay import embedded
from penstock.replay.dead_letters import send_back
from penstock.replay.embedded import DiskPointer, DiskQueue, EmbeddedStore, open_beside
from penstock.replay.queues import ReplayRecord
from penstock.storage import segments
from penstock.storage.segments import QueueDamaged, SegmentLog
from penstock.topology.components import Context


def records(*values):
    return [ReplayRecord((value,)) for value in values]


def payloads(found):
    return [record.payload[0] for _, record in found]


class Crash(Exception):
    """Stands for the end of the process."""


def crash_at(monkeypatch, owner, name, call):
    """The ``call``-th call of a function, counted from 1, is not carried out, and nothing after it is."""
    real, count = getattr(owner, name), iter(range(1, 1000))

    def maybe(*args, **kwargs):
        if next(count) == call:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, maybe)


# -- append: (1) lock (2) find the end (3) new segment (4) write (5) fdatasync


def test_every_cut_of_a_torn_append_keeps_whole_records_only(tmp_path):
    queue = DiskQueue(tmp_path / "q")
    queue.append(records("kept"))
    [segment] = (tmp_path / "q").glob("*.seg")
    before = segment.stat().st_size
    queue.append(records("one", "two", "three"))
    whole = segment.read_bytes()
    queue.close()
    for cut in range(before, len(whole) + 1):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(tmp_path / "q", tmp_path / "c")
        (tmp_path / "c" / segment.name).write_bytes(whole[:cut])
        crashed = DiskQueue(tmp_path / "c")
        survived = payloads(crashed.read(10))
        assert survived == ["kept", "one", "two", "three"][: len(survived)]
        assert len(survived) >= 1
        crashed.append(records("after"))
        assert payloads(crashed.read(10)) == ["after"]
        crashed.close()
        again = DiskQueue(tmp_path / "c")
        assert payloads(again.read(10)) == [*survived, "after"]
        again.close()


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"garbage that is no record at all", b"\x05\0\0\0crc!five5"])
def test_rubbish_at_the_end_is_cut_off(tmp_path, tail):
    queue = DiskQueue(tmp_path)
    queue.append(records(1, 2))
    queue.close()
    [segment] = tmp_path.glob("*.seg")
    with segment.open("ab") as file:
        file.write(tail)
    again = DiskQueue(tmp_path)
    assert payloads(again.read(10)) == [1, 2]
    assert again.empty
    again.append(records(3))
    assert payloads(again.read(10)) == [3]
    again.close()


@pytest.mark.parametrize("function", ["pwrite", "fdatasync"])
def test_a_failed_append_says_so_and_the_next_one_is_whole(tmp_path, monkeypatch, function):
    queue = DiskQueue(tmp_path)
    queue.append(records(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, function, lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            queue.append(records(2))
    queue.append(records(2))
    assert payloads(queue.read(10)) in ([1, 2], [1, 2, 2])
    queue.close()


def test_half_a_write_that_another_reader_saw_is_not_taken_back(tmp_path, monkeypatch):
    queue, reader = DiskQueue(tmp_path), DiskQueue(tmp_path)
    real = os.pwrite

    def half(file, data, offset):
        real(file, bytes(data)[: len(data) * 2 // 3], offset)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="Input/output"):
            queue.append(records("a", "b", "c"))
    seen = reader.read(10)
    assert payloads(seen) == ["a", "b"][: len(seen)]
    assert seen
    queue.append(records("d"))
    assert payloads(reader.read(10)) == ["d"]  # not under a number that was read already
    for each in (queue, reader):
        each.close()


def test_a_crash_after_a_new_segment_began(tmp_path, monkeypatch):
    queue = DiskQueue(tmp_path, segment_bytes=50)
    queue.append(records("first"))
    queue.append(records("second"))
    crash_at(monkeypatch, segments, "_write_all", 1)
    with pytest.raises(Crash):
        queue.append(records("third"))
    monkeypatch.undo()
    queue.close()
    again = DiskQueue(tmp_path, segment_bytes=50)
    assert payloads(again.read(10)) == ["first", "second"]
    again.append(records("third"))
    assert payloads(again.read(10)) == ["third"]
    again.close()


def test_a_damaged_record_in_the_middle_is_not_passed_over(tmp_path):
    queue = DiskQueue(tmp_path, segment_bytes=50)
    for value in range(4):
        queue.append(records(f"value {value}"))
    queue.close()
    first = sorted(tmp_path.glob("*.seg"))[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    again = DiskQueue(tmp_path)
    assert payloads(again.read(10)) == ["value 0"]
    with pytest.raises(
        QueueDamaged, match=r"the stored record at byte \d+ \(record 1\) is not what was written\. The"
    ):
        again.read(10)
    again.close()


# -- release: (1) replace the position file (2) begin an empty segment (3) remove segments


@pytest.mark.parametrize("call", range(1, 12))
def test_a_crash_anywhere_in_release(tmp_path, monkeypatch, call):
    queue = DiskQueue(tmp_path, segment_bytes=60)
    for value in range(6):
        queue.append(records(value))
    queue.done([position for position, _ in queue.read(6)])
    queue.append(records("unread"))
    real = {name: getattr(os, name) for name in ("open", "write", "fdatasync", "fsync", "replace", "unlink")}
    count = iter(range(1, 1000))

    def counted(name):
        def run(*args, **kwargs):
            if next(count) == call:
                raise Crash
            return real[name](*args, **kwargs)

        return run

    with monkeypatch.context() as patched:
        for name in real:
            patched.setattr(os, name, counted(name))
        with contextlib.suppress(Crash):
            queue.release(queue.position)
    again = DiskQueue(tmp_path)
    survived = payloads(again.read(10))
    assert survived in ([*range(6), "unread"], ["unread"])
    again.append(records("later"))
    assert payloads(again.read(10)) == ["later"]
    again.close()


@pytest.mark.parametrize("released", [False, True])
def test_a_position_past_records_that_did_not_survive_a_power_cut_skips_no_other(tmp_path, released):
    queue = DiskQueue(tmp_path)
    queue.append(records("kept"))
    [segment] = tmp_path.glob("*.seg")
    durable = segment.read_bytes()
    queue.append(records("read by another, then lost"))
    queue.done([position for position, _ in queue.read(10)])
    position = queue.position
    if released:
        queue.release(position)
    queue.close()
    segment.write_bytes(durable)
    again = DiskQueue(tmp_path)
    again.seek(position)  # as the task's state contains it
    assert again.empty
    again.append(records("new"))
    assert payloads(again.read(10)) == ["new"]
    again.close()


def test_a_pointer_is_old_or_new_never_neither(tmp_path, monkeypatch):
    pointer = DiskPointer(tmp_path / "pointer")
    pointer.store(True)
    for name in ("open", "pwrite", "fdatasync", "replace"):
        with monkeypatch.context() as patched:
            crash_at(patched, os, name, 1)
            with pytest.raises(Crash):
                pointer.store(False)
        assert DiskPointer(tmp_path / "pointer").load() is True
    pointer.store(False)
    assert DiskPointer(tmp_path / "pointer").load() is False


# -- send back: (1) append to From (2) mark the dead letter as removed


@pytest.mark.parametrize("step", [1, 2])
def test_a_dead_letter_sent_back_is_in_one_place_at_least(tmp_path, monkeypatch, step):
    queues = open_beside(tmp_path)
    queues.dead.add([ReplayRecord(("x",), 5, "boom")])
    crash_at(monkeypatch, SegmentLog, "append", step)
    with pytest.raises(Crash):
        send_back(queues, [0])
    monkeypatch.undo()
    after = open_beside(tmp_path)
    assert len(after.dead.read_all()) == 1
    assert payloads(after.from_.read(10)) == ["x"][: step - 1]


def test_the_embedded_store_leaves_no_lock_behind_when_it_fails(tmp_path, monkeypatch):
    context = Context("t", "s", 1, 0, {"s": (1,)}, delivery="at_least_once", folder=str(tmp_path))
    crash_at(monkeypatch, embedded, "DiskQueue", 1)
    with pytest.raises(Crash):
        EmbeddedStore().open(context)
    EmbeddedStore().open(context).close()


# -- read again: records that were whole when they were read


def read_again(queue, found):
    again, positions = [], np.array([at for at, _ in found], np.int64)
    while len(again) < len(positions):
        again += queue.read_again(positions[len(again) :])
    return again


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3] + b"###"), "is not what was written"),
        (lambda path: path.unlink(), "its file is missing or shorter than before"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "is not what was written"),
        (lambda path: path.write_bytes(b""), "its file is missing or shorter than before"),
    ],
)
def test_a_segment_that_is_damaged_after_it_was_read_costs_its_own_records_only(tmp_path, fault, reason):
    queue = DiskQueue(tmp_path, segment_bytes=150)
    for value in range(40):
        queue.append(records(f"value {value}"))
    found = queue.read(100)
    segments = sorted(tmp_path.glob("*.seg"))
    assert len(segments) > 8
    fault(segments[3])
    first, end = (int(segments[at].stem) for at in (3, 4))
    again = read_again(queue, found)
    lost = [at for at, record in enumerate(again) if record.damaged]
    assert lost
    assert set(lost) <= set(range(first, end))
    assert all(again[at] == found[at][1] for at in range(40) if at not in lost)
    assert f"record {lost[-1]} of {tmp_path} can no longer be read: " in again[lost[-1]].error
    assert reason in again[lost[-1]].error
    assert again == read_again(queue, found)  # and it is so next time
    queue.close()


def test_the_newest_segment_cut_off_after_it_was_read(tmp_path):
    queue = DiskQueue(tmp_path)
    queue.append(records(*range(10)))
    found = queue.read(10)
    [segment] = tmp_path.glob("*.seg")
    segment.write_bytes(segment.read_bytes()[:70])
    again = read_again(queue, found)
    assert not again[0].damaged
    assert all("its file is missing or shorter than before" in record.error for record in again[4:])
    queue.close()


def test_marks_of_records_that_are_done_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_MARK_BYTES", 100)
    queue = DiskQueue(tmp_path)
    for value in range(200):
        queue.append(records(value))
        [(at, record)] = queue.read(10)
        assert read_again(queue, [(at, record)]) == [record]
        queue.done([at])
    assert len(queue._marks) <= 2
    queue.close()
