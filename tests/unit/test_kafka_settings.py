"""Settings that the Kafka components reject when a topology is built, and how tasks share partitions; without a
broker."""

import numpy as np
import pyarrow as pa
import pytest

from penstock.connectors.inflight import InFlight
from penstock.connectors.kafka import KafkaBolt, KafkaSink, KafkaSpout
from penstock.connectors.kafka_client import BrokerErrors, client_library
from penstock.connectors.kafka_positions import owned
from penstock.errors import ComponentError, EnvironmentFault, TopologyError
from penstock.topology.streams import OutputDeclarer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": []}, "topics is [], not one or more different names. Name a topic."),
        ({"topics": ["a", "a"]}, "not one or more different names"),
        (
            {"start": "newest"},
            'which is neither "earliest", "latest", a datetime nor {(topic, partition): offset}',
        ),
        ({"fields": {}}, "every value must be a part of a record: value, key, topic"),
        ({"fields": {"line": "body"}}, "fields is {'line': 'body'}, and every value"),
        ({"decode": "json"}, 'decode is \'json\', neither "text" nor "bytes"'),
        ({"batch": 0}, "batch is 0, which is less than 1"),
        ({"max_attempts": 0}, "max_attempts is 0, which is less than 1"),
    ],
)
def test_a_spout_refuses(options, message):
    with pytest.raises(TopologyError) as caught:
        KafkaSpout("127.0.0.1:9092", options.pop("topics", "t"), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [KafkaBolt, KafkaSink])
@pytest.mark.parametrize(
    ("topic", "options", "message"),
    [
        ("", {}, "the topic '' is neither a name nor a function of the row. Name a topic."),
        ("t", {"value_field": "a", "value": str}, "value_field and value are both given."),
    ],
)
def test_a_sink_refuses(kind, topic, options, message):
    with pytest.raises(TopologyError) as caught:
        kind("127.0.0.1:9092", topic, **options)
    assert f"{kind.__name__}: {message}" in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka", None)
    with pytest.raises(EnvironmentFault, match=r'Install it with: pip install "penstock\[kafka\]"'):
        client_library()


def test_the_declared_fields_have_types():
    declarer = OutputDeclarer("kafka")
    KafkaSpout("b", "t", fields={"text": "value", "at": "timestamp"}).declare_output_fields(declarer)
    assert [(field.name, field.type) for field in declarer.streams["default"].fields] == [
        ("text", pa.string()),
        ("at", pa.int64()),
    ]


@pytest.mark.parametrize("tasks", [1, 2, 3, 5])
def test_every_partition_has_one_task_and_keeps_it(tasks):
    topics, before, after = ["b", "a"], {"b": 3, "a": 1}, {"b": 7, "a": 4}
    shares = [owned(topics, before, index, tasks) for index in range(tasks)]
    later = [owned([*topics, "c"], {**after, "c": 2}, index, tasks) for index in range(tasks)]
    assert sorted(each for share in shares for each in share) == [("a", 0), ("b", 0), ("b", 1), ("b", 2)]
    assert sum(map(len, later)) == 13
    assert all(set(share) <= set(more) for share, more in zip(shares, later, strict=True))
    assert max(map(len, later)) - min(map(len, later)) <= 2


def _rows(values):
    return pa.record_batch({"line": values})


def test_records_in_flight_are_let_go_with_the_last_ack():
    flight = InFlight(0)
    flight.add(np.arange(0, 3), _rows(["a", "b", "c"]))
    flight.add(np.array([3, 7, 8]), _rows(["d", "h", "i"]))  # a gap from 4 to 6
    assert flight.row(7).to_pylist() == [{"line": "h"}]
    flight.ack(np.array([3, 8, 7]))
    assert (flight.mark, flight.kept) == (0, 3)
    assert flight.row(1).to_pylist() == [{"line": "b"}]
    flight.ack(np.array([0, 1, 2]))
    assert (flight.mark, flight.kept) == (9, 0)


def test_broker_errors_are_logged_once_per_kind_and_hopeless_ones_raised(caplog):
    kafka = pytest.importorskip("confluent_kafka")
    errors = BrokerErrors("component 'k' (task 1)", "b:1")
    for _ in range(3):
        errors.note(kafka.KafkaError(kafka.KafkaError._ALL_BROKERS_DOWN))
    errors.check()
    assert errors.counts["_ALL_BROKERS_DOWN"] == 3
    assert len(caplog.records) == 1
    errors.clear()
    assert "works again" in caplog.records[-1].message
    errors.note(kafka.KafkaError(kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(ComponentError) as caught:
        errors.check()
    assert str(caught.value) == (
        "component 'k' (task 1), Kafka at b:1: Kafka refused the request: Broker: Topic authorization failed. "
        "Give the client credentials (options={'sasl.username': ...}) with the necessary rights."
    )
