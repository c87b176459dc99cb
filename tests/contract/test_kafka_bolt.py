"""KafkaBolt against a real broker."""

import json
import secrets
import time
import uuid

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.connectors.kafka import KafkaBolt
from penstock.errors import ComponentError, SinkBusy
from tests.contract.kafka_helpers import SOURCE, context, read


@pytest.fixture
def bolt(kafka):
    """Makes bolts that write to the broker, and cleans them up."""
    made = []

    def make(*args, **options):
        made.append(KafkaBolt(kafka.bootstrap, *args, **options))
        made[-1].prepare({}, context("at_least_once"))
        made[-1].recover([])
        return made[-1]

    yield make
    for each in made:
        each.cleanup()


def batch(**columns):
    return pa.record_batch(columns)


def until_taken(writer, epoch, seconds=60.0):
    """Repeats the call while the sink is busy, as the executor does. Returns the first error message."""
    said = ""
    deadline = time.monotonic() + seconds
    while True:
        try:
            writer.prepare_commit(epoch)
        except SinkBusy as busy:
            said = said or str(busy)
            assert time.monotonic() < deadline, said
        else:
            return said


def test_what_is_written_is_there_after_prepare_commit(kafka, topic, bolt):
    name = topic(partitions=2)
    writer = bolt(name, key_field="word")
    writer.write(batch(word=["a", "b", "a"], n=[1, 2, 3]), SOURCE)
    token = writer.prepare_commit(1)
    writer.commit(token)
    assert token is None
    assert sorted(read(kafka, name)) == [(b"a", b"1"), (b"a", b"3"), (b"b", b"2")]


@pytest.mark.parametrize(
    ("options", "columns", "expected"),
    [
        ({}, {"line": ["é", None]}, ["é".encode(), None]),
        ({}, {"line": [b"\xff"]}, [b"\xff"]),
        ({}, {"a": [1], "b": ["x"]}, [b'{"a":1,"b":"x"}']),
        ({"value_field": "b"}, {"a": [1], "b": [1.5]}, [b"1.5"]),
        ({"value_field": "b"}, {"a": [1], "b": [[1, 2]]}, [b"[1,2]"]),
        ({"value": lambda row: f"{row['a']}!"}, {"a": [1], "b": ["x"]}, [b"1!"]),
    ],
)
def test_values(kafka, topic, bolt, options, columns, expected):
    name = topic()
    writer = bolt(name, **options)
    writer.write(batch(**columns), SOURCE)
    until_taken(writer, 1)
    assert [value for _, value in read(kafka, name)] == expected


def test_the_topic_may_depend_on_the_row(kafka, topic, bolt):
    left, right = topic(), topic()
    writer = bolt(lambda row: row["where"], value_field="what")
    writer.write(batch(where=[left, right, left], what=["1", "2", "3"]), SOURCE)
    until_taken(writer, 1)
    assert read(kafka, left) == [(None, b"1"), (None, b"3")]
    assert read(kafka, right) == [(None, b"2")]


def test_more_rows_than_its_queue_holds(kafka, topic, bolt):
    name = topic()
    writer = bolt(name, options={"queue.buffering.max.messages": 1000})
    writer.write(batch(n=list(range(10_000))), SOURCE)
    until_taken(writer, 1)
    assert [json.loads(value) for _, value in read(kafka, name)] == list(range(10_000))


def test_an_unknown_field_is_named(topic, bolt):
    writer = bolt(topic(), value_field="text")
    with pytest.raises(ComponentError) as caught:
        writer.write(batch(line=["a"]), SOURCE)
    assert str(caught.value) == (
        "component 'kafka' (task 10): the input has no field 'text', only line. "
        "Name one of these in key_field or value_field."
    )


def test_a_topic_that_is_made_late_is_waited_for_and_no_record_is_lost(kafka, topic, bolt):
    name, late = topic(), f"late-{uuid.uuid4().hex}"
    writer = bolt(lambda row: row["where"], value_field="what", timeout=1.0)
    writer.write(batch(where=[late, name], what=["1", "2"]), SOURCE)
    with pytest.raises(SinkBusy, match=rf"Kafka at {kafka.bootstrap}: Kafka did not accept every record"):
        writer.prepare_commit(1)
    kafka.create_topic(late)
    until_taken(writer, 1)
    assert (None, b"1") in read(kafka, late)
    assert (None, b"2") in read(kafka, name)
    assert writer.prepare_commit(2) is None


def test_a_record_that_kafka_rejects_is_a_dead_letter_alone(kafka):
    name, dead = f"small-{uuid.uuid4().hex}", []
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(name, 1, config={"max.message.bytes": "2000"})])[name].result(30)
    writer = KafkaBolt(kafka.bootstrap, name)
    add = lambda rows, failure: dead.extend((row[0], failure.error) for row in rows)  # noqa: E731
    writer.prepare({}, context("at_least_once", add_dead_letters=add))
    writer.recover([])
    writer.write(batch(line=["small", secrets.token_hex(3000), "last"]), SOURCE)
    until_taken(writer, 1)
    writer.cleanup()
    lines = [value for _, value in read(kafka, name)]
    assert b"small" in lines
    assert b"last" in lines
    assert [topic for topic, _ in dead] == [name]
    assert "Kafka rejects the record" in dead[0][1]


def test_a_task_without_input_commits(topic, bolt):
    assert bolt(topic()).prepare_commit(1) is None


def test_a_broker_that_is_down_is_waited_for(kafka, topic, bolt):
    name = topic()
    short, patient = bolt(name, timeout=5.0), bolt(name, timeout=60.0)  # the first record may take a second
    for writer in (short, patient):
        writer.write(batch(line=["before"]), SOURCE)
        until_taken(writer, 1)
    kafka.kill()
    for writer in (short, patient):
        writer.write(batch(line=["in the outage"]), SOURCE)
    for writer in (short, patient):
        with pytest.raises(SinkBusy, match="Kafka did not accept every record"):
            writer.prepare_commit(2)
    kafka.start()
    for writer in (short, patient):
        until_taken(writer, 2)
        writer.write(batch(line=["after"]), SOURCE)
        until_taken(writer, 3)
    lines = [value for _, value in read(kafka, name)]
    assert lines.count(b"before") == 2
    assert lines.count(b"in the outage") >= 2
    assert lines.count(b"after") >= 2
