"""Reading records of a partition again when Kafka no longer has all of them. The consumer is scripted, because
when Kafka compacts a topic cannot be told; ``contract/test_kafka_replay.py`` reads from a real one."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.connectors import kafka_second_reader
from penstock.connectors.kafka_second_reader import KafkaSecondReader
from penstock.errors import ComponentError, SystemAway

confluent_kafka = pytest.importorskip("confluent_kafka")
KafkaError = confluent_kafka.KafkaError


class Record:
    def __init__(self, offset, size=1, error=None):
        self._offset, self._size, self._error = offset, size, error

    def offset(self):
        return self._offset

    def error(self):
        return self._error

    def __len__(self):
        return self._size


class Partition:
    """A consumer of a partition that has these offsets, from ``first`` to before ``end``."""

    def __init__(self, offsets, first=0, end=None, size=1):
        self.offsets, self.first, self.size = list(offsets), first, size
        self.end = end if end is not None else max(offsets, default=-1) + 1
        self.assigned, self.asked, self.faults, self.closed = [], [], [], False
        self.seems_to_end = None
        """The offset at which a new leader believes the partition to end."""
        self._at = None

    def assign(self, places):
        [place] = places
        self.assigned.append(place.offset)
        self._at = place.offset
        self._ended = False

    def unassign(self):
        self._at = None

    def consume(self, count, timeout):
        self.asked.append(count)
        if self.faults:
            return [Record(0, error=KafkaError(self.faults.pop(0)))]
        if not self.first <= self._at <= self.end:
            return [Record(0, error=KafkaError(KafkaError._AUTO_OFFSET_RESET))]
        end = self.end if self.seems_to_end is None else self.seems_to_end
        found = [offset for offset in self.offsets if self._at <= offset < end][:count]
        records = [Record(offset, self.size) for offset in found]
        if found:
            self._at = found[-1] + 1
        if len(found) < count and not self._ended:
            records.append(Record(end, error=KafkaError(KafkaError._PARTITION_EOF)))
            self._ended = True
        return records

    def get_watermark_offsets(self, place, timeout):
        return self.first, self.end

    def close(self):
        self.closed = True


def read(partition, *offsets):
    reader = KafkaSecondReader("component 's'", "broker:9092", lambda: partition)
    try:
        found = reader.read("t", 0, np.array(offsets, np.int64))
    finally:
        reader.close()
    assert partition.closed
    assert partition._at is None, "the consumer fetches no more"
    return [each if isinstance(each, str) else each.offset() for each in found]


COMPACTED, DELETED, SHORTER = (
    "Kafka has deleted it (compaction)",
    "Kafka has deleted it (retention)",
    "the topic is shorter than before",
)


def test_neighbours_are_read_together_and_distant_ones_by_requests_of_their_own():
    partition = Partition(range(5000))
    assert read(partition, 3, 4, 50, 51, 3000, 3001) == [3, 4, 50, 51, 3000, 3001]
    assert partition.assigned == [3, 3000]
    assert max(partition.asked) <= 128  # no more than lies between the first and the last of a run


def test_a_compacted_record_is_gone_and_those_around_it_are_not():
    assert read(Partition([0, 1, 4, 5, 9]), 1, 2, 4, 5, 8, 9) == [1, COMPACTED, 4, 5, COMPACTED, 9]
    assert read(Partition([0, 900]), 0, 700, 900) == [0, COMPACTED, 900]


def test_what_retention_has_deleted_is_gone():
    assert read(Partition(range(10, 20), first=10), 3, 9, 10, 12) == [DELETED, DELETED, 10, 12]
    assert read(Partition([], first=20, end=20), 3, 9) == [DELETED, DELETED]


def test_a_topic_that_is_shorter_than_before_has_lost_the_rest():
    assert read(Partition(range(5)), 3, 4, 5, 9) == [3, 4, SHORTER, SHORTER]
    assert read(Partition(range(5)), 7, 9) == [SHORTER, SHORTER]


def test_large_records_are_returned_in_parts(monkeypatch):
    monkeypatch.setattr(kafka_second_reader, "_AGAIN_BYTES", 1000)
    assert read(Partition(range(100), size=300), *range(0, 100, 2)) == [0, 2, 4, 6]


def test_the_end_of_a_partition_behind_the_last_record_with_room_loses_none(monkeypatch):
    """Offsets of transactions make the consumer ask for more records than there are, and so do large records."""
    monkeypatch.setattr(kafka_second_reader, "_UNKNOWN_BYTES", 100)
    monkeypatch.setattr(kafka_second_reader, "_AGAIN_BYTES", 1000)
    records = [10, 11, 13, 14]
    partition = Partition(records, end=16, size=600)
    assert read(partition, *records) == [10, 11]
    assert read(partition, *records[2:]) == [13, 14]


def test_a_new_leader_that_does_not_know_the_end_yet_loses_none():
    partition = Partition(range(20))
    partition.seems_to_end = 12
    with pytest.raises(SystemAway, match="t seems to end at offset 12, but it ends at 20"):
        read(partition, 10, 11, 12, 13)
    partition.seems_to_end = None
    assert read(partition, 10, 11, 12, 13) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (KafkaError._ALL_BROKERS_DOWN, SystemAway, "broker"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, ComponentError, "Kafka refused the request"),
    ],
)
def test_errors_of_the_broker_are_raised(code, error, text):
    partition = Partition(range(5))
    partition.faults = [code]
    with pytest.raises(error, match=text):
        read(partition, 1, 2)


def test_silence_is_an_error_after_a_while(monkeypatch):
    monkeypatch.setattr(kafka_second_reader, "ANSWER_SECONDS", -1.0)
    partition = Partition(range(5))
    partition.consume = lambda count, timeout: []
    with pytest.raises(SystemAway, match="no records of t from offset 1 on arrived"):
        read(partition, 1, 2)
