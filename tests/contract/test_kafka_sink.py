"""KafkaSink against a real broker: an epoch is published once or not at all, whichever process dies."""

import json
import secrets
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.connectors.kafka import KafkaSink
from penstock.errors import ComponentError, EnvironmentFault, SinkRefused
from tests.contract.kafka_helpers import PATIENCE, SOURCE, context, read

CHILD = """
import json, os, sys
import pyarrow as pa
from penstock.connectors.kafka import KafkaSink
from tests.contract.kafka_helpers import SOURCE, context

bootstrap, topic, folder, component, death = sys.argv[1:]

class Doomed:
    def __init__(self, producer): self.producer = producer
    def __getattr__(self, name): return getattr(self.producer, name)
    def commit_transaction(self, timeout):
        self.producer.flush(20)  # the rows are at the broker
        if death == "after commit":
            self.producer.commit_transaction(timeout)
        os._exit(9)

sink = KafkaSink(bootstrap, topic)
sink.prepare({}, context("exactly_once", component=component, folder=folder))
sink.recover([])
sink.write(pa.record_batch({"line": ["a", "b"]}), SOURCE)
token = sink.prepare_commit(1)
print(json.dumps(token), flush=True)
sink._producer = Doomed(sink._producer)
sink.commit(token)
"""


@pytest.fixture
def sink(kafka, topic, tmp_path):
    """Starts a sink as a process of the task would; each call is a new process of the same task."""
    name = topic(partitions=2)

    def start(tokens=(), folder=tmp_path, **options):
        made = KafkaSink(kafka.bootstrap, options.pop("topic", name), **options)
        made.prepare({}, context("exactly_once", component=name, folder=str(folder)))
        made.recover(tokens)
        return made

    start.topic = name
    start.folder = tmp_path
    return start


def lines(kafka, sink, isolation="read_committed", under_way=False):
    return sorted(value.decode() for _, value in read(kafka, sink.topic, isolation, under_way))


def epoch(sink, number, values):
    sink.write(pa.record_batch({"line": values}), SOURCE)
    return sink.prepare_commit(number)


def test_rows_are_visible_after_commit_only(kafka, sink):
    one = sink()
    token = epoch(one, 1, ["a", "b"])
    assert lines(kafka, sink) == []
    one.commit(token)
    assert lines(kafka, sink) == ["a", "b"]
    one.commit(epoch(one, 2, ["c"]))
    assert lines(kafka, sink) == ["a", "b", "c"]
    assert one.published() == 2


def test_published_twice_is_once(kafka, sink):
    one = sink()
    token = epoch(one, 1, ["a"])
    one.commit(token)
    one.commit(token)
    again = sink([token])
    again.commit(token)
    assert again.published() == 1
    assert lines(kafka, sink) == ["a"]


def test_what_was_prepared_is_published_by_the_next_process(kafka, sink):
    token = json.loads(json.dumps(epoch(sink(), 1, ["a"])))
    sink([token])
    assert lines(kafka, sink) == ["a"]


def test_what_was_prepared_and_not_committed_is_dropped(kafka, sink):
    epoch(sink(), 1, ["a"])
    again = sink([])
    again.commit(epoch(again, 1, ["b"]))
    assert lines(kafka, sink) == ["b"]


@pytest.mark.parametrize("death", ["before commit", "after commit"])
def test_a_crash_around_the_transactions_commit(kafka, sink, death):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kafka.bootstrap, sink.topic, str(sink.folder), sink.topic, death],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    if death == "after commit":
        assert lines(kafka, sink) == ["a", "b"]
    else:
        assert lines(kafka, sink, "read_uncommitted") == ["a", "b"]  # in the topic, but not visible
        assert lines(kafka, sink, under_way=True) == []
    sink([json.loads(done.stdout)])
    assert lines(kafka, sink) == ["a", "b"]


def test_a_topology_started_from_scratch_counts_epochs_anew(kafka, sink, tmp_path):
    one = sink()
    one.commit(epoch(one, 1, ["a"]))
    fresh = sink(folder=tmp_path / "fresh")
    assert fresh.published() == -1
    fresh.commit(epoch(fresh, 1, ["b"]))
    assert lines(kafka, sink) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "refused", "message"),
    [
        ({"value": lambda row: row["line"] + "!"}, None, "unsupported operand"),
        ({"value": lambda row: len(row["line"]) if row["line"] == "bad" else "good"}, "bad", "of type int"),
        ({}, "x" * 999_965, "has 999965 bytes of key and value, more than 999964"),
    ],
)
def test_a_row_that_cannot_become_a_record_is_refused_when_it_is_written(kafka, sink, options, refused, message):
    one = sink(**options)
    with pytest.raises((ComponentError, TypeError), match=message):
        one.write(pa.record_batch({"line": pa.array([refused], pa.string())}), SOURCE)
    one.commit(epoch(one, 1, ["good"]))
    assert one.published() == 1
    assert len(lines(kafka, sink)) == 1


def test_a_row_without_a_topic_is_refused_when_it_is_written(kafka, sink):
    one = sink(topic=lambda row: {"good": sink.topic}.get(row["line"]))
    with pytest.raises(
        ComponentError, match=r"the topic None is not a name. Let topic= return a name for each row"
    ):
        epoch(one, 1, ["bad"])
    one.commit(epoch(one, 1, ["good"]))
    assert lines(kafka, sink) == ["good"]


def test_the_largest_record_there_may_be(kafka, sink):
    one = sink()
    one.commit(epoch(one, 1, ["x" * 999_964]))
    assert one.published() == 1


def test_a_missing_key_field_is_refused_when_it_is_written(sink):
    one = sink(key_field="user")
    with pytest.raises(ComponentError, match="the input has no field 'user', only line"):
        epoch(one, 1, ["a"])
    assert one.prepare_commit(1) is None


def test_a_zombie_is_fenced_for_good_and_its_successor_is_not(kafka, sink):
    zombie = sink()
    token = epoch(zombie, 1, ["a"])
    live = sink([token])
    late = epoch(zombie, 2, ["b"])
    for _ in range(2):
        with pytest.raises(SinkRefused, match="Another run of this topology uses the same transactional id"):
            zombie.commit(late)
    live.commit(epoch(live, 2, ["c"]))
    assert lines(kafka, sink) == ["a", "c"]


SOON_BACK = {"reconnect.backoff.max.ms": 100}


def until_answered(call, *args):
    """Calls as the runtime does: an error is retried unless it is a SinkRefused."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            return call(*args)
        except EnvironmentFault:
            pass
    raise AssertionError("no answer")


def timed_out(kafka, sink, gap):
    """A sink whose commit of epoch 1 was not answered, and its token; the broker is back."""
    one = sink(timeout=2.0, options=SOON_BACK)
    token = epoch(one, 1, ["a", "b"])
    if gap == "before the rows are sent":
        kafka.kill()
    else:
        insist = one._retry_until

        def kill_first(call, deadline):
            one._retry_until = insist
            one._producer.flush(20)
            kafka.kill()
            insist(call, deadline)

        one._retry_until = kill_first
    with pytest.raises(EnvironmentFault, match="Kafka did not accept an epoch within 2 s"):
        one.commit(token)
    kafka.start()
    return one, token


GAPS = pytest.mark.parametrize("gap", ["before the rows are sent", "before the commit is sent"])


@GAPS
def test_an_epoch_that_timed_out_is_gone_on_with(kafka, sink, gap):
    one, token = timed_out(kafka, sink, gap)
    try:
        until_answered(one.commit, token)
    except SinkRefused:  # the broker ended the transaction, which was open for longer than 4 s
        one = sink([token])
    one.commit(epoch(one, 2, ["c"]))
    assert lines(kafka, sink) == ["a", "b", "c"]


@GAPS
def test_a_zombie_whose_epoch_timed_out_does_not_fence_its_successor(kafka, sink, gap):
    zombie, token = timed_out(kafka, sink, gap)
    rows = zombie._read(token)  # the rows it had read before its successor removed them
    live = sink([token])
    try:
        until_answered(zombie.publish, 1, rows)
    except SinkRefused:
        pass
    else:  # nothing of its transaction had reached Kafka: it read the epochs again and found its successor's
        assert zombie.published() == 1
    with pytest.raises(SinkRefused):
        until_answered(zombie.publish, 2, rows)
    live.commit(epoch(live, 2, ["c"]))
    assert lines(kafka, sink) == ["a", "b", "c"]


def test_what_fails_between_begin_and_commit_is_aborted(kafka, sink):
    broken = [True]
    one = sink(value=lambda row: row["line"] if not broken[0] or row["line"] == "a" else 1 / 0)
    broken[0] = False
    token = epoch(one, 1, ["a", "b"])
    broken[0] = True
    with pytest.raises(ZeroDivisionError):
        one.commit(token)
    broken[0] = False
    one.commit(token)
    assert lines(kafka, sink) == ["a", "b"]


def test_a_broker_that_restarts_is_waited_for(kafka, sink):
    one = sink(timeout=60.0)
    one.commit(epoch(one, 1, ["a"]))
    token = epoch(one, 2, [f"{n}" for n in range(1000)])
    kafka.kill()
    back = threading.Thread(target=kafka.start)
    back.start()
    one.commit(token)
    back.join()
    expected = sorted(["a", *(f"{n}" for n in range(1000))])
    # Kafka answers a commit before all partitions show it: a broker that has just started takes a moment.
    deadline = time.monotonic() + PATIENCE
    while (found := lines(kafka, sink)) != expected and time.monotonic() < deadline:
        pass
    assert found == expected


def test_a_broker_that_dies_in_the_middle_of_a_transaction(kafka, sink):
    one = sink(timeout=60.0)
    one.commit(epoch(one, 1, ["a"]))
    token = epoch(one, 2, [f"{n}" for n in range(1000)])
    back = threading.Thread(target=kafka.start)
    transact = one._retry_until

    def die_first(call, deadline):
        one._retry_until = transact
        one._producer.flush(20)
        kafka.kill()
        back.start()
        transact(call, deadline)

    one._retry_until = die_first
    one.commit(token)
    back.join()
    expected = sorted(["a", *(f"{n}" for n in range(1000))])
    # Kafka answers a commit before all partitions show it: a broker that has just started takes a moment.
    deadline = time.monotonic() + PATIENCE
    while (found := lines(kafka, sink)) != expected and time.monotonic() < deadline:
        pass
    assert found == expected


def test_a_topic_that_does_not_exist(kafka, sink):
    one = sink(topic="no-such-topic", timeout=2.0)
    with pytest.raises((ComponentError, EnvironmentFault)) as caught:
        one.commit(epoch(one, 1, ["a"]))
    assert "that the topic exists" in str(caught.value)


@pytest.fixture
def strict_topic(kafka):
    """A topic that accepts 2,000 bytes at a time, and no record without a key."""
    name = f"strict-{secrets.token_hex(4)}"
    config = {"max.message.bytes": "2000", "cleanup.policy": "compact"}
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(name, 1, config=config)])[name].result(PATIENCE)
    return name


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_records_that_the_broker_rejects_are_dead_letters_alone(kafka, strict_topic, tmp_path, delivery):
    dead, reported = [], []

    def add(rows, failures, once):
        for row, failure in zip(rows, failures, strict=True):
            dead.append((row, failure.error.partition(": ")[2].partition(":")[0]))

    one = KafkaSink(kafka.bootstrap, strict_topic, key_field="key", value_field="value")
    more = {"add_dead_letters": add, "report": reported.append, "folder": str(tmp_path)}
    one.prepare({}, context(delivery, component=strict_topic, **more))
    one.recover([])
    # Eight records that fit on their own but not together, two that are too large, one without a key.
    fit = [(f"k{n}", secrets.token_hex(300)) for n in range(8)]
    large = [(f"large{n}", secrets.token_hex(2000)) for n in range(2)]
    rows = [*fit[:3], large[0], *fit[3:5], (None, "no key"), *fit[5:], large[1]]
    keys, values = zip(*rows, strict=True)
    one.write(pa.record_batch({"key": pa.array(keys, pa.string()), "value": list(values)}), SOURCE)
    until_answered(one.commit, one.prepare_commit(1))
    assert len(dead) == 3
    assert set(dead) == {*((row, "MSG_SIZE_TOO_LARGE") for row in large), ((None, "no key"), "INVALID_RECORD")}
    assert [(key.decode(), value.decode()) for key, value in read(kafka, strict_topic)] == fit
    assert len(reported) == 1
    assert one.published() == 1
    one.cleanup()
