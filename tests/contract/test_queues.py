"""The contract of every replay queue, pointer and store of dead letters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.connectors.kafka_replay import Broker, KafkaDeadLetterStore, KafkaPointer, KafkaQueue
from penstock.replay.dead_letters import DeadLetterStore, DiskDeadLetterStore
from penstock.replay.embedded import DiskPointer, DiskQueue
from penstock.replay.queues import Pointer, ReplayQueue, ReplayRecord


@dataclass
class Place:
    """Opens the same queue, pointer or dead letters repeatedly, as one process after another would."""

    queue: Callable[[], ReplayQueue]
    pointer: Callable[[], Pointer]
    dead: Callable[[], DeadLetterStore]


@pytest.fixture(params=["disk", "kafka"])
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Place:
    if request.param == "kafka":
        bootstrap = request.getfixturevalue("kafka").bootstrap
        topic = request.getfixturevalue("topic")
        broker = Broker("test", bootstrap, {})
        queue, pointer, dead = topic(2), topic(2), topic(2)
        return Place(
            lambda: KafkaQueue(broker, queue, 1, f"{queue}.group"),
            lambda: KafkaPointer(broker, pointer, 1, f"{pointer}.group"),
            lambda: KafkaDeadLetterStore(broker, dead, 1, f"{dead}.group"),
        )
    return Place(
        lambda: DiskQueue(tmp_path / "queue", segment_bytes=200),
        lambda: DiskPointer(tmp_path / "pointer"),
        lambda: DiskDeadLetterStore(tmp_path / "dead"),
    )


def records(*values: Any) -> list[ReplayRecord]:
    return [ReplayRecord((value,), 1, "boom", "split", 12.5) for value in values]


def payloads(found: list[tuple[int, ReplayRecord]]) -> list[Any]:
    return [record.payload[0] for _, record in found]


def test_what_is_appended_is_read_in_order_and_whole(place: Place) -> None:
    queue = place.queue()
    odd = ReplayRecord(("ü", 7, 2.5, None, b"\x00\xff", [1, {"a": "b"}], (1, 2), {3}), 4, "why\n", "count", 99.25)
    queue.append([*records("a", "b"), odd])
    queue.append(records("c"))
    found = queue.read(10)
    assert [record for _, record in found] == [*records("a", "b"), odd, *records("c")]
    assert [type(value) for value in found[2][1].payload] == [type(value) for value in odd.payload]
    positions = [position for position, _ in found]
    assert all(before < after for before, after in itertools.pairwise(positions))
    queue.close()


def test_a_new_queue_is_empty(place: Place) -> None:
    queue = place.queue()
    assert queue.empty
    assert queue.read(5) == []
    queue.append([])
    assert queue.empty
    queue.release(queue.position)
    queue.close()


def test_reading_moves_the_cursor_and_respects_the_limit(place: Place) -> None:
    queue = place.queue()
    queue.append(records(*range(10)))
    assert not queue.empty
    assert payloads(queue.read(4)) == [0, 1, 2, 3]
    assert payloads(queue.read(4)) == [4, 5, 6, 7]
    assert not queue.empty
    assert payloads(queue.read(4)) == [8, 9]
    assert queue.empty
    queue.append(records(10))
    assert not queue.empty
    assert payloads(queue.read(4)) == [10]
    queue.close()


def test_an_appended_record_survives_without_commit_or_close(place: Place) -> None:
    place.queue().append(records(*range(30)))
    assert payloads(place.queue().read(100)) == list(range(30))


def test_the_position_passes_a_record_only_when_all_before_it_are_done(place: Place) -> None:
    queue = place.queue()
    queue.append(records(*range(6)))
    found = queue.read(6)
    position = [position for position, _ in found]
    queue.done([position[0], position[2], position[3]])
    assert queue.position == position[1]
    queue.close()
    second = place.queue()
    second.seek(position[1])
    again = second.read(10)
    assert payloads(again) == [1, 2, 3, 4, 5]
    assert [at for at, _ in again] == position[1:]
    second.done([position[1]])
    second.release(second.position)
    second.close()
    third = place.queue()
    third.seek(position[1])  # a position from an older state, which has been released since
    assert payloads(third.read(10)) == [2, 3, 4, 5]
    third.close()


def read_again(queue: ReplayQueue, positions: list[int]) -> list[ReplayRecord]:
    """All of them: one call may return the first ones only."""
    found: list[ReplayRecord] = []
    while len(found) < len(positions):
        some = queue.read_again(np.array(positions[len(found) :], np.int64))
        assert some
        found += some
    return found


def test_records_are_read_again_where_they_were_read(place: Place) -> None:
    queue = place.queue()
    for first in range(0, 60, 20):
        queue.append(records(*(f"{number} {'x' * (number % 7)}" for number in range(first, first + 20))))
    found = queue.read(50)
    for chosen in (found, found[::3], found[48:], [found[0], found[49]], found[7:9]):
        assert read_again(queue, [at for at, _ in chosen]) == [record for _, record in chosen]
    found += queue.read(50)  # which goes on where it was
    assert [record.payload[0].split()[0] for _, record in found] == [str(number) for number in range(60)]
    queue.done([at for at, _ in found[:41]])
    queue.release(queue.position)
    left = [*found[41:45], found[59]]
    assert read_again(queue, [at for at, _ in left]) == [record for _, record in left]
    queue.close()


def test_records_are_read_again_after_a_restart_in_the_middle(place: Place) -> None:
    queue = place.queue()
    queue.append(records(*range(40)))
    found = queue.read(40)
    queue.done([at for at, _ in found[:13]])
    position = queue.position
    queue.close()
    again = place.queue()
    again.seek(position)
    rest = again.read(100)
    assert rest == found[13:]
    assert read_again(again, [at for at, _ in rest[::5]]) == [record for _, record in rest[::5]]
    again.close()


def test_large_records_are_read_again_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.replay.second_reader.AGAIN_BYTES", 3000)
    monkeypatch.setattr("penstock.replay.second_reader._RUN", 2)
    monkeypatch.setattr("penstock.connectors.kafka_second_reader._AGAIN_BYTES", 3000)
    queue = place.queue()
    queue.append(records(*(str(number) * 1000 for number in range(10))))
    found = queue.read(10)
    positions = np.array([at for at, _ in found], np.int64)
    assert 1 <= len(queue.read_again(positions)) < 10
    assert read_again(queue, positions.tolist()) == [record for _, record in found]
    queue.close()


def test_a_record_that_another_removed_is_lost_and_says_where_it_was(place: Place) -> None:
    queue = place.queue()
    for number in range(20):
        queue.append(records(number))
    found = queue.read(20)
    other = place.queue()  # an operator, or an older process of the same task
    other.release(found[12][0])
    again = read_again(queue, [at for at, _ in found])
    lost = [record for record in again if record.damaged]
    assert again[len(lost) :] == [record for _, record in found[len(lost) :]]
    assert 6 <= len(lost) <= 12  # on disk whole segments are removed
    for (at, _), record in zip(found, lost, strict=False):
        assert str(at).encode() in record.payload[0]
        assert "can no longer be read: " in record.error
    queue.close()
    other.close()


def test_nothing_is_passed_that_was_not_released(place: Place) -> None:
    queue = place.queue()
    queue.append(records(*range(3)))
    queue.done([position for position, _ in queue.read(3)])
    queue.close()
    again = place.queue()
    assert payloads(again.read(3)) == [0, 1, 2]
    again.close()


def test_a_position_past_the_end_is_the_end(place: Place) -> None:
    queue = place.queue()
    queue.append(records(0))
    queue.seek(place.queue().position + 100)
    assert queue.empty
    queue.append(records(1))
    assert payloads(queue.read(5)) == [1]
    queue.close()


def test_release_gives_back_space_but_keeps_what_comes_after(place: Place) -> None:
    queue = place.queue()
    queue.append(records(*range(20)))
    found = queue.read(20)
    queue.done([position for position, _ in found])
    queue.append(records(20))  # another process appends just before
    queue.release(found[15][0])
    assert not queue.empty
    queue.close()
    second = place.queue()
    assert payloads(second.read(10)) == [15, 16, 17, 18, 19, 20]
    second.close()
    again = place.queue()
    again.seek(queue.position)
    [(position, record)] = again.read(10)
    assert record.payload == (20,)
    again.done([position])
    again.release(again.position)
    assert again.empty
    again.append(records(21))
    [(later, _)] = again.read(10)
    assert later > position  # a position is never used twice
    again.close()


def test_another_process_may_append_while_this_one_reads(place: Place) -> None:
    reader, writers = place.queue(), [place.queue(), place.queue()]
    expected = []
    for turn in range(12):
        writers[turn % 2].append(records(turn))
        expected.append(turn)
        assert not reader.empty
        found = reader.read(5)
        assert payloads(found) == expected[-len(found) :] == [turn]
        reader.done([position for position, _ in found])
        reader.release(reader.position)
    writers[0].append(records("after"))
    assert payloads(reader.read(5)) == ["after"]
    for queue in (reader, *writers):
        queue.close()


def test_the_pointer_keeps_what_it_was_told(place: Place) -> None:
    assert place.pointer().load() is False
    place.pointer().store(True)
    assert place.pointer().load() is True
    place.pointer().store(False)
    assert place.pointer().load() is False


def test_dead_letters_are_listed_and_taken_out_by_id(place: Place) -> None:
    dead = place.dead()
    assert dead.read_all() == []
    dead.add(records("a", "b"))
    dead.add(records("c"))
    dead_letters = dead.read_all()
    assert [dead_letter.record for dead_letter in dead_letters] == records("a", "b", "c")
    dead.remove([dead_letters[1].id, 999_999])
    other = place.dead()
    assert [dead_letter.record.payload for dead_letter in other.read_all()] == [("a",), ("c",)]
    other.remove([dead_letters[0].id, dead_letters[2].id])
    assert dead.read_all() == []
    dead.add(records("d"))
    [last] = other.read_all()
    assert last.record == records("d")[0]
    assert last.id not in {dead_letter.id for dead_letter in dead_letters}
    dead.close()
    other.close()
