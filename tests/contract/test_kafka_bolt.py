"""KafkaBolt against a real broker."""

import json

import pyarrow as pa
import pytest

from penstock.connectors.kafka import KafkaBolt
from penstock.errors import ComponentError
from tests.contract.kafka_helpers import SOURCE, context, read, write


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
    writer.prepare_commit(1)
    assert [value for _, value in read(kafka, name)] == expected


def test_the_topic_may_depend_on_the_row(kafka, topic, bolt):
    left, right = topic(), topic()
    writer = bolt(lambda row: row["where"], value_field="what")
    writer.write(batch(where=[left, right, left], what=["1", "2", "3"]), SOURCE)
    writer.prepare_commit(1)
    assert read(kafka, left) == [(None, b"1"), (None, b"3")]
    assert read(kafka, right) == [(None, b"2")]


def test_more_rows_than_its_queue_holds(kafka, topic, bolt):
    name = topic()
    writer = bolt(name, options={"queue.buffering.max.messages": 1000})
    writer.write(batch(n=list(range(10_000))), SOURCE)
    writer.prepare_commit(1)
    assert [json.loads(value) for _, value in read(kafka, name)] == list(range(10_000))


def test_an_unknown_field_is_named(topic, bolt):
    writer = bolt(topic(), value_field="text")
    with pytest.raises(ComponentError) as caught:
        writer.write(batch(line=["a"]), SOURCE)
    assert str(caught.value) == (
        "component 'kafka' (task 10): the field 'text' goes to Kafka; got a tuple with the fields line. "
        "Name one of these in key_field or value_field."
    )


def test_a_failed_flush_surfaces_and_the_next_epoch_starts_afresh(kafka, topic, bolt):
    name = topic()
    writer = bolt(lambda row: row["where"], value_field="what", timeout=1.0)
    writer.write(batch(where=["no-such-topic", name], what=["1", "2"]), SOURCE)
    with pytest.raises(ComponentError) as caught:
        writer.prepare_commit(1)
    assert f"Kafka at {kafka.bootstrap}: Kafka accepts each record within 1 s; got 1 not accepted" in str(
        caught.value
    )
    writer.write(batch(where=[name], what=["3"]), SOURCE)
    writer.prepare_commit(2)
    assert read(kafka, name)[-1] == (None, b"3")


def test_a_failure_that_write_finds_fails_the_batches_before_it_too(kafka, topic, bolt):
    name = topic()
    writer = bolt(lambda row: row["where"], value_field="what", timeout=1.0)
    writer.write(batch(where=["no-such-topic"], what=["1"]), SOURCE)
    while not writer._undelivered:
        writer._producer.poll(0.1)
    with pytest.raises(ComponentError, match="1 not accepted"):
        writer.write(batch(where=[name], what=["2"]), SOURCE)
    writer.write(batch(where=[name], what=["3"]), SOURCE)
    with pytest.raises(ComponentError, match="1 not accepted"):  # else batch 1 would be acked
        writer.prepare_commit(1)
    writer.write(batch(where=[name], what=["4"]), SOURCE)
    writer.prepare_commit(2)
    assert read(kafka, name)[-1] == (None, b"4")


def test_a_task_without_input_commits(topic, bolt):
    assert bolt(topic()).prepare_commit(1) is None


def test_a_dead_broker_surfaces_and_its_return_is_used(kafka, topic, bolt):
    name = topic()
    short, patient = bolt(name, timeout=5.0), bolt(name, timeout=60.0)  # the first record may take a second
    for writer in (short, patient):
        writer.write(batch(line=["before"]), SOURCE)
        writer.prepare_commit(1)
    kafka.kill()
    for writer in (short, patient):
        writer.write(batch(line=["in the outage"]), SOURCE)
    with pytest.raises(ComponentError, match=r"1 not accepted|no answer"):
        short.prepare_commit(2)
    kafka.start()
    patient.prepare_commit(2)
    short.write(batch(line=["after"]), SOURCE)
    write(kafka, name, ["the topic works"])
    for _ in range(60):  # its own reconnect may be a second away
        try:
            short.prepare_commit(3)
            break
        except ComponentError:
            short.write(batch(line=["after"]), SOURCE)
    lines = [value for _, value in read(kafka, name)]
    assert lines.count(b"before") == 2
    assert lines.count(b"in the outage") >= 1
    assert b"after" in lines
