"""KafkaSpout against a real broker."""

import dataclasses
import logging
from datetime import UTC, datetime

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock import Delivery, Settings, TopologyBuilder
from penstock.connectors.kafka import KafkaSpout
from penstock.errors import ComponentError, EnvironmentFault
from penstock.testing import CaptureBolt, LocalRunner
from penstock.topology.components import Failure
from tests.contract.kafka_helpers import PATIENCE, Catch, Driven, context, write


@pytest.fixture
def drive(kafka):
    """Opens spouts and closes them at the end of the test."""
    opened = []

    def open(*args, **options):
        opened.append(Driven(kafka, *args, **options))
        return opened[-1]

    yield open
    for driven in opened:
        driven.close()


def test_two_tasks_share_all_partitions(kafka, topic):
    name = topic(partitions=3)
    for partition in range(3):
        write(kafka, name, [f"{partition}-{n}" for n in range(500)], partition)
    builder = TopologyBuilder()
    builder.set_spout(
        "kafka", KafkaSpout(kafka.bootstrap, name, fields={"line": "value", "partition": "partition"}), 2
    )
    builder.set_bolt("capture", CaptureBolt()).global_grouping("kafka")
    runner = LocalRunner(builder.build("read", Settings(delivery=Delivery(on_error="stop"))))
    for _ in range(2000):
        runner.run(0.05)
        if len(runner.captured("capture")) >= 1500:
            break
    runner.close()
    got = runner.captured("capture")
    by_partition = {partition: [tup for tup in got if tup[1] == partition] for partition in range(3)}
    for partition, tuples in by_partition.items():
        assert [tup[0] for tup in tuples] == [f"{partition}-{n}" for n in range(500)]
    tasks = [{tup.source_task for tup in tuples} for tuples in by_partition.values()]
    assert tasks[0] == tasks[2] != tasks[1]
    assert all(len(each) == 1 for each in tasks)


def test_all_parts_of_a_record(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["a", None], keys=["k", None])
    parts = ("value", "key", "topic", "partition", "offset", "timestamp")
    rows = drive(name, fields={f"f_{part}": part for part in parts}).until_rows(2).caught.rows
    assert rows[0][:5] == ("a", "k", name, 0, 0)
    assert rows[1][:5] == (None, None, name, 0, 1)
    assert abs(rows[0][5] / 1000 - datetime.now(UTC).timestamp()) < 600


def test_bytes_stay_as_they_are(kafka, topic, drive):
    name = topic()
    write(kafka, name, [b"\xff\x00"])
    assert drive(name, decode="bytes").until_rows(1).caught.lines == [b"\xff\x00"]


def test_text_that_is_not_utf8_is_mended_and_said(kafka, topic, drive, caplog):
    name = topic()
    write(kafka, name, [b"good", b"b\xffd", "\ufffd".encode()])
    driven = drive(name).until_rows(3)
    assert driven.caught.lines == ["good", "b\ufffdd", "\ufffd"]
    assert driven.spout.errors.counts["not text"] == 1
    assert f"{name} partition 0 offset 1 is not UTF-8" in caplog.text


def test_start_positions(kafka, topic, drive):
    name = topic(partitions=2)
    write(kafka, name, ["old 0", "old 1"], 0)
    noon = datetime.now(UTC)
    write(kafka, name, ["old 2"], 0)
    write(kafka, name, ["other"], 1)
    latest = drive(name, start="latest")
    later = drive(name, start=datetime(2100, 1, 1, tzinfo=UTC))
    write(kafka, name, ["new"], 0)
    assert drive(name).until_rows(5).caught.lines.count("new") == 1
    assert latest.until_rows(1).caught.lines == ["new"]
    assert later.until_rows(1).caught.lines == ["new"]
    assert sorted(drive(name, start=noon).until_rows(3).caught.lines) == ["new", "old 2", "other"]
    exact = drive(name, start={(name, 0): 1}).until_rows(4).caught.lines
    assert sorted(exact) == ["new", "old 1", "old 2", "other"]


def test_latest_is_fixed_by_the_first_snapshot(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["old"])
    state = drive(name, start="latest").snapshot()
    write(kafka, name, ["written while the topology stood still"])
    again = drive(name, start="latest", state=state)
    assert again.until_rows(1).caught.lines == ["written while the topology stood still"]


@pytest.mark.parametrize("start", ["latest", datetime(2100, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_crash_before_the_first_commit_loses_nothing(kafka, topic, drive, tmp_path, delivery, start):
    name = topic()
    write(kafka, name, ["old"])
    first = drive(name, delivery, start=start, folder=tmp_path, discover_interval=0.05)
    write(kafka, name, ["emitted, then the process is killed"])
    assert first.until_rows(1).caught.lines == ["emitted, then the process is killed"]
    kafka.add_partitions(name, 2)
    write(kafka, name, ["of a new partition"], 1)
    first.until_rows(2)
    again = drive(name, delivery, start=start, folder=tmp_path).until_rows(2)
    assert sorted(again.caught.lines) == ["emitted, then the process is killed", "of a new partition"]
    again.spout.ack_many(again.caught.ids)
    for _ in range(2):
        state = again.snapshot()
        again.spout.after_commit()
    assert list(tmp_path.iterdir()) == []  # the offsets are now in the committed state
    write(kafka, name, ["later"])
    assert drive(name, delivery, start=start, folder=tmp_path, state=state).until_rows(1).caught.lines == ["later"]


def test_the_group_is_told_of_nothing_that_came_after_the_committed_snapshot(kafka, topic, drive):
    name = topic()
    group = f"group-of-{name}"
    driven = drive(name, group=group, discover_interval=0.05)
    write(kafka, name, ["a", "b"])
    driven.until_rows(2)
    driven.spout.ack(driven.caught.ids[0])
    state = driven.snapshot()
    kafka.add_partitions(name, 2)
    write(kafka, name, ["of a partition that is in no state"], 1)
    driven.until_rows(3)
    driven.spout.ack_many(driven.caught.ids[1:])
    driven.spout.after_commit()
    driven.until(lambda: _committed(kafka, group, name) == 1)
    assert _committed(kafka, group, name, 1) < 0
    again = drive(name, group=group, state=state).until_rows(2)
    assert sorted(again.caught.lines) == ["b", "of a partition that is in no state"]


def test_exactly_once_the_group_is_not_told_of_an_epoch_that_is_still_open(kafka, topic, drive):
    name = topic()
    group = f"group-of-{name}"
    write(kafka, name, ["a"])
    driven = drive(name, "exactly_once", group=group).until_rows(1)
    driven.snapshot()
    write(kafka, name, ["b"])
    driven.until_rows(2)
    driven.snapshot()  # the snapshot of the next epoch, before the first is committed
    driven.spout.after_commit()
    driven.until(lambda: _committed(kafka, group, name) == 1)


def test_the_lag_of_each_partition(kafka, topic, drive, monkeypatch):
    monkeypatch.setattr("penstock.connectors.kafka_reader._LAG_SECONDS", 0.0)
    name = topic(partitions=2)
    write(kafka, name, ["a"], 0)
    write(kafka, name, [str(number) for number in range(100)], 1)
    driven = drive(name, batch=10)
    seen = []
    driven.until(lambda: seen.append(dict(driven.spout.lag())) or len(driven.caught.rows) == 101)
    assert any(lag.get(f"{name}/1", 0) >= 10 for lag in seen)
    assert driven.spout.lag() == {f"{name}/0": 0, f"{name}/1": 0}


def test_new_partitions_are_read_from_their_beginning(kafka, topic, drive):
    name = topic()
    tasks = [drive(name, start="latest", index=i, parallelism=2, discover_interval=0.05) for i in range(2)]
    kafka.add_partitions(name, 4)
    for partition in range(4):
        write(kafka, name, [f"p{partition}"], partition)
    assert sorted(tasks[0].until_rows(2).caught.lines) == ["p0", "p2"]
    assert sorted(tasks[1].until_rows(2).caught.lines) == ["p1", "p3"]


def test_partitions_made_while_the_topology_stood_still_are_read_whole(kafka, topic, drive):
    name = topic()
    states = [drive(name, start="latest", index=i, parallelism=2).snapshot() for i in range(2)]
    kafka.add_partitions(name, 2)
    write(kafka, name, ["new"], 1)
    again = drive(name, start="latest", index=1, parallelism=2, state=states[1])
    assert again.until_rows(1).caught.lines == ["new"]


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_restored_state_gives_no_gap_and_no_double(kafka, topic, drive, delivery):
    name = topic(partitions=2)
    lines = [f"line {n}" for n in range(1000)]
    write(kafka, name, lines[:500], 0)
    write(kafka, name, lines[500:], 1)
    first = drive(name, delivery, batch=100)
    first.until(lambda: len(first.caught.rows) >= 300)
    before = list(first.caught.lines)
    if delivery == "at_least_once":
        first.spout.ack_many(first.caught.ids)
    state = first.snapshot()
    first.until_rows(1000)  # read after the snapshot: emitted again
    second = drive(name, delivery, state=state)
    second.until_rows(1000 - len(before))
    assert sorted(before + second.caught.lines) == sorted(lines)
    second.idle()


def test_only_acked_records_are_passed(kafka, topic, drive):
    name = topic()
    write(kafka, name, [f"{n}" for n in range(10)])
    first = drive(name).until_rows(10)
    first.spout.ack_many([each for each in first.caught.ids if each != first.caught.ids[3]])
    again = drive(name, state=first.snapshot()).until_rows(7)
    assert again.caught.lines == [f"{n}" for n in range(3, 10)]


def test_tuples_are_tracked_at_least_once_only(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["a"])
    assert drive(name, "at_least_once").until_rows(1).caught.ids
    assert not drive(name, "exactly_once").until_rows(1).caught.ids
    assert not drive(name, "at_most_once").until_rows(1).caught.ids


def test_a_failed_tuple_comes_again_until_it_is_acked(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["a", "b", "c"])
    driven = drive(name).until_rows(3)
    a, b, c = driven.caught.ids
    driven.spout.ack_many([a, c])
    driven.spout.fail(b, Failure("bolt", "no luck"))
    driven.until_rows(4)
    assert (driven.caught.lines[3], driven.caught.ids[3]) == ("b", b)
    driven.spout.ack(b)
    driven.snapshot()
    assert driven.state.map("offsets")[f"{name}/0"] == 3
    assert driven.spout._reader.readings[0].flight.kept == 0


def test_a_tuple_is_given_up_after_its_last_attempt(kafka, topic, drive):
    """A record is given up to the user's function, or to the dead letters if there is none or it raises."""
    name = topic()
    write(kafka, name, ["bad", "good"])
    given_up, dead, reported = [], [], []

    def raises(record, failure):
        raise ValueError("a bug of the user's")

    for on_give_up in (lambda record, failure: given_up.append((record, failure)), None, raises):
        driven = drive(name, max_attempts=2, on_give_up=on_give_up).until_rows(2)
        driven.spout._context = dataclasses.replace(
            driven.spout._context,
            add_dead_letters=lambda rows, failure: dead.append((rows, failure)),
            report=reported.append,
        )
        bad, good = driven.caught.ids
        driven.spout.fail(bad, Failure("bolt", "once"))
        driven.until_rows(3)
        driven.spout.fail(bad, Failure("bolt", "twice"))
        driven.idle(50)
        driven.spout.ack(good)
        assert driven.spout.given_up == 1
        driven.snapshot()
        assert driven.state.map("offsets")[f"{name}/0"] == 2
    [(record, failure)] = given_up
    assert record == {"line": "bad", "topic": name, "partition": 0, "offset": 0}
    assert failure == Failure("bolt", "twice", attempts=2)
    assert dead == [([("bad", name, 0, 0)], Failure("bolt", "twice", attempts=2))] * 2
    assert any("on_give_up failed (ValueError: a bug of the user's)" in str(error) for error in reported)


def test_the_group_sees_how_far_the_spout_is_and_a_fresh_start_goes_on_there(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["a", "b", "c"])
    group = f"group-of-{name}"
    driven = drive(name, group=group).until_rows(3)
    driven.spout.ack_many(driven.caught.ids[:2])
    driven.spout.before_snapshot()
    driven.spout.after_commit()
    driven.until(lambda: _committed(kafka, group, name) == 2)
    assert drive(name, group=group).until_rows(1).caught.lines == ["c"]
    assert drive(name, "exactly_once", group=group).until_rows(3).caught.lines == ["a", "b", "c"]


def test_at_most_once_a_group_remembers_the_position(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["a", "b"])
    group = f"group-of-{name}"
    drive(name, "at_most_once", group=group).until_rows(2).close()
    write(kafka, name, ["c"])
    assert drive(name, "at_most_once", group=group).until_rows(1).caught.lines == ["c"]


def test_a_killed_broker_is_waited_for(kafka, topic, drive, caplog):
    name = topic(partitions=2)
    write(kafka, name, [f"{n}" for n in range(1000)], 0)
    driven = drive(name, "exactly_once").until_rows(1000)
    kafka.kill()
    driven.until(lambda: driven.spout.errors.counts)
    state = driven.snapshot()
    kafka.start()
    write(kafka, name, [f"{n}" for n in range(1000, 2000)], 1)
    driven.until_rows(2000)
    assert driven.caught.lines == [f"{n}" for n in range(2000)]
    assert drive(name, "exactly_once", state=state).until_rows(1000).caught.lines[0] == "1000"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) < 10
    assert f"Kafka at {kafka.bootstrap} works again" in warnings[-1]


def test_records_deleted_before_they_were_read_are_counted(kafka, topic, drive, caplog):
    name = topic()
    state = drive(name).snapshot()
    write(kafka, name, [f"{n}" for n in range(100)])
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in admin.delete_records([TopicPartition(name, 0, 40)]).values():
        future.result(PATIENCE)
    driven = drive(name, state=state).until_rows(60)
    assert driven.caught.lines[0] == "40"
    assert driven.spout.errors.counts["lost"] == 40
    assert f"{name} partition 0: Kafka deleted 40 records from offset 0 on" in caplog.text


def test_a_topic_that_was_made_anew_is_refused(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["only one"])
    state = drive(name).snapshot()
    state.map("offsets")[f"{name}/0"] = 1000
    driven = drive(name, state=state)
    with pytest.raises(ComponentError) as caught:
        driven.until_rows(1)
    assert f"{name} partition 0 ends at 1, but 1000 records of it were read" in str(caught.value)


class Gathered:
    """A consumer that returns, in one call and with errors first, all messages once it has the given number of
    each kind."""

    def __init__(self, consumer, errors, records):
        self.consumer, self.errors, self.records = consumer, errors, records
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.consumer, name)

    def consume(self, most, timeout):
        self.calls += 1
        errors, records = [], []
        while len(errors) < self.errors or len(records) < self.records:
            for message in self.consumer.consume(most, 0.1):
                (records if message.error() is None else errors).append(message)
        return errors + records


def test_what_is_wrong_with_some_partitions_costs_no_record_of_another(kafka, topic, drive):
    name = topic(partitions=3)
    state = drive(name).snapshot()
    for partition in range(2):  # both topics are shorter than before
        write(kafka, name, ["only one"], partition)
        state.map("offsets")[f"{name}/{partition}"] = 1000
    write(kafka, name, ["a", "b"], 2)
    driven = drive(name, state=state)
    driven.spout._reader.consumer = Gathered(driven.spout._reader.consumer, errors=2, records=2)
    with pytest.raises(ComponentError, match="ends at 1, but 1000 records of it were read"):
        driven.spout.next_batch()
    assert driven.caught.lines == ["a", "b"]
    driven.spout.ack_many(driven.caught.ids)
    driven.snapshot()
    assert driven.state.map("offsets")[f"{name}/2"] == 2


def test_a_spout_that_may_not_read_takes_no_records(kafka, topic, drive):
    name = topic()
    write(kafka, name, ["a"])
    driven = drive(name)
    consumer = driven.spout._reader.consumer = Gathered(driven.spout._reader.consumer, errors=0, records=1)
    driven.spout.errors.note(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(ComponentError, match="Give the client credentials"):
        driven.spout.next_batch()
    assert consumer.calls == 0


def test_a_missing_topic_is_named(kafka, drive):
    with pytest.raises(ComponentError) as caught:
        drive("no-such-topic")
    assert str(caught.value) == (
        f"component 'kafka' (task 10), Kafka at {kafka.bootstrap}: it reads from a topic that "
        "does not exist: 'no-such-topic'. Create it, or correct its name."
    )


def test_no_broker_at_all(monkeypatch):
    monkeypatch.setattr("penstock.connectors.kafka_client.ask.__defaults__", (0.5,))
    with pytest.raises(EnvironmentFault, match="the brokers did not answer within 0 s"):
        KafkaSpout("127.0.0.1:1", "t").open({}, context(), Catch())


def _committed(kafka, group, topic, partition=0):
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    [found] = consumer.committed([TopicPartition(topic, partition)], PATIENCE)
    consumer.close()
    return found.offset
