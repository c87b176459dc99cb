"""Inboxes and what overflows them: order, limits, counts, disk."""

import random
import threading

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.frames.header import Header, Kind
from penstock.worker import inbox as inboxes
from penstock.worker import spill as spills
from penstock.worker.inbox import Inbox
from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill


def parcel(number, rows=1, size=10):
    """A frame that says which it is."""
    content = number.to_bytes(8, "little") + bytes(max(0, size - 8))
    return Parcel(Header(Kind.DATA, 1, 0, 0, 0, sequence=number, rows=rows), pa.py_buffer(content))


def number_of(found):
    assert int.from_bytes(found.content.to_pybytes()[:8], "little") == found.header.sequence, "content of another"
    return found.header.sequence


@pytest.fixture
def small(monkeypatch):
    """A few parcels fill memory, a few more a file."""
    monkeypatch.setattr(inboxes, "_OVERFLOW_MEMORY", 50)
    monkeypatch.setattr(spills, "_SEGMENT", 100)


# ---- spills ------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(8, 60))), max_size=120))
def test_a_spill_keeps_order_and_counts(script):
    """None takes one; a pair adds one of so many rows and bytes."""
    spill, inside, number = Spill(100), [], 0
    segment, spills._SEGMENT = spills._SEGMENT, 150
    try:
        for step in script:
            if step is not None:
                inside.append(parcel(number, *step))
                spill.add(inside[-1])
                number += 1
            elif inside:
                wanted = inside.pop(0)
                found = spill.first()
                assert number_of(found) == number_of(wanted)
                assert found.content.equals(wanted.content)
                assert found is spill.first()
                spill.drop()
            else:
                assert spill.first() is None
            assert bool(spill) == bool(inside)
            assert spill.rows == sum(each.header.rows for each in inside)
            assert spill.bytes == sum(each.content.size for each in inside)
            in_memory = sum(each.content.size for each in spill._head)
            assert in_memory <= 100 + 60, "the limit, and one that was read back"
            assert spill.rows_on_disk == spill.rows - sum(each.header.rows for each in spill._head)
            assert sum(len(each._parcels) for each in spill._segments) + len(spill._head) == len(inside)
    finally:
        spill.close()
        spills._SEGMENT = segment


def test_files_go_as_they_are_read(small):
    spill, files = Spill(0), []
    for number in range(40):
        spill.add(parcel(number))
    files = [segment._file for segment in spill._segments]
    assert len(files) == 4, "ten parcels each"
    for number in range(40):
        assert number_of(spill.first()) == number
        spill.drop()
        assert sum(file.closed for file in files) == (number + 1) // 10
    assert not spill
    spill.add(parcel(99))
    assert number_of(spill.first()) == 99


def test_a_queue_that_never_runs_empty_holds_no_more_disk_than_it_has_parcels(small):
    spill = Spill(50)
    for number in range(2000):
        spill.add(parcel(number))
        if number >= 30:
            assert number_of(spill.first()) == number - 30
            spill.drop()
        assert len(spill._segments) <= 5


def test_closing_gives_the_disk_back(small):
    spill = Spill(0)
    for number in range(15):
        spill.add(parcel(number))
    files = [segment._file for segment in spill._segments]
    spill.close()
    assert all(file.closed for file in files)


def test_a_full_disk_is_an_error_that_has_a_hint(monkeypatch):
    def refuse(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spills.tempfile, "TemporaryFile", refuse)
    spill = Spill(0)
    with pytest.raises(PenstockError, match=r"(?s)No space left.*flow.overflow_bytes"):
        spill.add(parcel(1))
    assert (spill.rows, spill.bytes, bool(spill), spill.first()) == (0, 0, False, None)


@pytest.mark.parametrize("count", [12, 13])  # a new file would be begun; one would be gone on with
def test_a_disk_that_fills_up_while_writing_loses_nothing_that_was_taken(small, monkeypatch, count):
    spill = Spill(20)
    for number in range(count):
        spill.add(parcel(number))

    def refuse(self, parcel):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spills._SpillFile, "write", refuse)
        with pytest.raises(PenstockError):
            spill.add(parcel(count))
    found = []
    while (first := spill.first()) is not None:
        found.append(number_of(first))
        spill.drop()
    assert found == list(range(count))


# ---- inboxes -----------------------------------------------------------------------------------------------


@given(
    st.integers(1, 30),
    st.sampled_from([0, 1, 40, 400]),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 12), st.integers(8, 40))), max_size=150),
)
@settings(max_examples=100)
def test_an_inbox_against_a_list(capacity, limit, script):
    before = inboxes._OVERFLOW_MEMORY
    inboxes._OVERFLOW_MEMORY = 50
    try:
        box, inside, number, arrived = Inbox(capacity, limit), [], 0, 0
    finally:
        inboxes._OVERFLOW_MEMORY = before
    for step in script:
        if step is None:
            found = box.take()
            assert (found is None) == (not inside)
            if found is not None:
                assert number_of(found) == number_of(inside.pop(0))
        else:
            given = parcel(number, *step)
            in_memory, overflow = box._inside, box._overflow.bytes
            taken = box.offer(given)
            assert taken == (overflow < limit or (in_memory < capacity and not overflow)), (
                "only then is it refused"
            )
            if taken:
                inside.append(given)
                arrived += given.header.rows
                number += 1
        rows = [each.header.rows for each in inside]
        assert box.length == sum(rows)
        assert box.arrived == arrived
        assert bool(box) == bool(inside), "what overflows is no use to who has nothing in front"
        assert box.full == (box.length >= capacity)
        assert box._inside < capacity + 12, "one parcel may reach over"
        assert box._overflow.bytes < limit + 40
        assert box.overflowing == box.length - box._inside
    box.close()


def test_without_overflow_a_full_inbox_refuses_and_what_is_offered_inside_too(small):
    box = Inbox(3)
    assert box.offer(parcel(0, rows=5)), "larger than the inbox, and it must get in"
    assert not box.offer(parcel(1))
    assert not box.offer_inside(parcel(1))
    box.take()
    assert box.offer_inside(parcel(1))


def test_what_is_offered_inside_never_overtakes_what_overflows(small):
    box = Inbox(2, 1000)
    assert [box.offer(parcel(number, rows=2)) for number in range(3)] == [True] * 3
    box.take()
    assert not box.offer_inside(parcel(9))
    box.take()
    assert [number_of(box.take()), box.take()] == [2, None]


@pytest.mark.parametrize("seed", range(2))
def test_offered_and_taken_in_two_threads(small, seed):
    box, count = Inbox(20, 300), 2000
    draw = random.Random(seed)
    parcels = [parcel(number, draw.randrange(1, 9), draw.randrange(8, 60)) for number in range(count)]
    found, broken = [], []

    def read():
        try:
            for each in parcels:
                while not box.offer(each):
                    pass
        except Exception as error:
            broken.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while len(found) < count and not broken:
        taken = box.take()
        if taken is not None:
            found.append(number_of(taken))
    reader.join()
    assert not broken
    assert found == list(range(count))
    assert (box.length, box.overflowing, box.arrived) == (0, 0, sum(each.header.rows for each in parcels))


def test_an_inbox_may_be_closed_while_the_reader_writes_to_its_file(small, monkeypatch):
    box, inside, closed, errors = Inbox(1, 1 << 30), threading.Event(), threading.Event(), []
    for number in range(8):
        box.offer(parcel(number))
    write = spills._SpillFile.write

    def slow_write(file, parcel):
        inside.set()
        closed.wait(0.2)  # set at once if close() does not wait for the reader
        write(file, parcel)

    monkeypatch.setattr(spills._SpillFile, "write", slow_write)

    def read():
        try:
            box.offer(parcel(8))
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert inside.wait(10)
    box.close()
    closed.set()
    reader.join()
    assert not errors


def test_a_closed_inbox_drops_frames_and_opens_no_new_file(small):
    box = Inbox(1, 1 << 30)
    for number in range(8):
        box.offer(parcel(number))
    box.close()
    assert all(box.offer(parcel(number)) for number in range(8, 30)), "a refused frame would block the senders"
    assert (box.arrived, len(box._overflow._segments)) == (8, 0)
