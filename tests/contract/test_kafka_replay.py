"""ReplaySpout with all its queues on a real Kafka broker."""

from __future__ import annotations

import contextlib
import itertools
import time

import confluent_kafka
import numpy as np
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from penstock.cli.main import main
from penstock.connectors import kafka_replay
from penstock.connectors.kafka_eden import KafkaEden
from penstock.connectors.kafka_replay import Broker, KafkaStore, stores_of
from penstock.errors import ComponentError, EnvironmentFault
from penstock.replay import QueueEden, ReplayRecord, ReplaySpout
from penstock.replay.records import encode
from penstock.state.values import TaskState
from penstock.topology.components import Context, Failure

DEADLINE = 60.0
_numbers = itertools.count(1)


def write(kafka, topic, lines):
    Broker("test", kafka.bootstrap, {}).produce(topic, 0, [line.encode() for line in lines])


class Bench:
    """The tasks of a ReplaySpout that reads a topic, one process after another."""

    def __init__(self, kafka, name, tasks=1):
        self.kafka, self.name, self.tasks = kafka, name, tasks
        self.topology = f"shop{next(_numbers)}"
        self.state = TaskState()
        self.spout = None

    def context(self, index=0):
        ids = {"lines": tuple(range(1, self.tasks + 1))}
        return Context(
            self.topology,
            "lines",
            index + 1,
            index,
            ids,
            delivery="at_least_once",
            state=self.state,
            folder="s3://x",
        )

    def start(self, index=0, max_attempts=3):
        eden = KafkaEden(self.kafka.bootstrap, self.name)
        self.spout, self.rows = ReplaySpout(eden, max_attempts=max_attempts), []
        self.spout.open({}, self.context(index), self)
        self.spout.activate()

    def room(self):
        return 1_000_000

    def emit_batch(self, columns, stream="default", msg_ids=None):
        self.rows += zip(msg_ids, zip(*columns, strict=True), strict=True)

    def await_rows(self, count):
        end = time.monotonic() + DEADLINE
        while len(self.rows) < count:
            self.spout.next_batch()
            self.spout._replayer.wait(0.01)
            assert time.monotonic() < end, self.rows
        rows, self.rows = self.rows, []
        return rows

    def await_stored(self):
        end = time.monotonic() + DEADLINE
        while self.spout._replayer.outstanding:
            self.spout._replayer.wait(0.01)
            assert time.monotonic() < end

    def await_dead(self, values):
        """Waits until nothing is in flight, and these are the dead letters."""
        self.await_stored()
        [(_, _, queues)] = list(stores_of(self.kafka.bootstrap, self.topology))
        found = [dead_letter.record for dead_letter in queues.dead.read_all()]
        queues.close()
        assert [record.payload[0] for record in found] == values
        return found

    def snapshot(self):
        """The state that a committed snapshot leaves for the next process."""
        self.spout.before_snapshot()
        parts = {name: [data] for name, (_, _, data) in self.state.snapshot(full=True).encode().items()}
        self.state = TaskState()
        self.state.restore(parts)


@pytest.fixture
def bench(kafka, topic):
    bench = Bench(kafka, topic())
    yield bench
    if bench.spout is not None:
        bench.spout.close()


def values(rows):
    return [row[0] for _, row in rows]


def test_failed_tuples_come_back_and_end_as_dead_letters(bench, kafka, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write(kafka, bench.name, ["good", "bad", "last"])
    bench.start()
    rows = bench.await_rows(3)
    assert values(rows) == ["good", "bad", "last"]
    bench.spout.ack_many([rows[0][0], rows[2][0]])
    bench.spout.fail(rows[1][0], Failure("split", "boom 1"))
    for attempt in (2, 3):
        [(id, row)] = bench.await_rows(1)
        assert row == ("bad",)
        bench.spout.fail(id, Failure("split", f"boom {attempt}"))
    bench.await_stored()
    options = ["--kafka", kafka.bootstrap, "--topology", bench.topology]
    assert main(["dlq", "list", *options]) == 0
    said = capsys.readouterr().out
    assert "boom 3" in said
    assert "('bad',)" in said
    assert main(["dlq", "send-back", "--all", *options]) == 0  # while it runs
    assert capsys.readouterr().out == "1 dead letter sent back\n"
    [(id, row)] = bench.await_rows(1)
    assert row == ("bad",)
    bench.spout.ack(id)
    bench.snapshot()
    bench.spout.close()
    assert main(["dlq", "list", *options]) == 0
    assert "no dead letters" in capsys.readouterr().out
    write(kafka, bench.name, ["fresh"])
    bench.start()
    assert values(bench.await_rows(1)) == ["fresh"]


def test_a_record_as_large_as_kafka_allows_comes_back_and_ends_as_a_dead_letter(bench, kafka):
    """In a replay queue it takes more room: six bytes for each control character."""
    large = "\1" * 990_000
    write(kafka, bench.name, ["small", large])
    bench.start()
    rows = bench.await_rows(2)
    for _ in range(2):
        bench.spout.fail_many([id for id, _ in rows], Failure("split", "boom"))
        rows = bench.await_rows(2)
        assert sorted(values(rows)) == sorted(["small", large])
    bench.spout.fail_many([id for id, _ in rows], Failure("split", "boom"))
    bench.await_dead(["small", large])


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_record_that_no_topic_takes_does_not_hold_up_the_others(bench, kafka, monkeypatch, attempts):
    monkeypatch.setattr(kafka_replay, "_RECORD_BYTES", 20_000)
    write(kafka, bench.name, ["small", "\1" * 10_000, "last"])
    bench.start(max_attempts=attempts)
    rows = bench.await_rows(3)
    bench.spout.fail_many([id for id, _ in rows], Failure("split", "boom"))
    large = b"a record of more than 20000 bytes, which a replay topic does not take"
    if attempts == 1:
        found = bench.await_dead(["small", large, "last"])
        assert (found[1].error, found[1].attempts) == ("boom", 1)
        return
    back = bench.await_rows(2)
    assert values(back) == ["small", "last"]
    bench.spout.ack_many([id for id, _ in back])
    bench.await_dead([large])


def test_a_process_that_dies_loses_nothing(bench, kafka):
    write(kafka, bench.name, [str(n) for n in range(6)])
    bench.start()
    rows = bench.await_rows(6)
    bench.spout.ack_many([rows[0][0], rows[2][0]])
    bench.spout.fail(rows[1][0], Failure("split", "boom"))
    back = bench.await_rows(1)
    bench.snapshot()
    dead = bench.spout  # not closed: the process died with tuples 1 and 3 to 5 in flight
    bench.start()
    again = bench.await_rows(4)
    assert values(again) == ["1", "3", "4", "5"]  # failed tuples come first
    bench.spout.fail(again[0][0], Failure("split", "boom"))
    bench.spout.ack_many([id for id, _ in again[1:]])
    [(id, row)] = bench.await_rows(1)
    assert row == ("1",)
    bench.spout.fail(id, Failure("split", "boom"))
    bench.await_dead(["1"])  # with the attempt of the process that died
    assert values(back) == ["1"]
    dead.close()


def test_a_broker_that_is_away_for_a_while(bench, kafka):
    write(kafka, bench.name, ["a", "b"])
    bench.start()
    rows = bench.await_rows(2)
    kafka.kill()
    bench.spout.fail(rows[0][0], Failure("split", "boom"))
    kafka.start()
    [(id, row)] = bench.await_rows(1)
    assert row == ("a",)
    bench.spout.ack_many([id, rows[1][0]])
    bench.await_stored()


def test_topics_are_made_once_with_a_partition_for_each_task(bench, kafka):
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    store = KafkaStore(kafka.bootstrap, "clicks")
    bench.tasks = 2
    queues = store.open(bench.context(0))
    queues.from_.append([ReplayRecord(("x",))])
    queues.pointer.store(True)
    queues.close()
    names = [f"{bench.topology}.clicks.{kind}" for kind in ("from", "to", "dead")]
    found = admin.list_topics(timeout=10).topics
    assert [len(found[name].partitions) for name in names] == [2, 2, 2]
    bench.tasks = 3  # a later run with more tasks
    other = store.open(bench.context(2))
    assert other.from_.empty  # each task has its own partition
    assert not other.pointer.load()
    other.close()
    assert [len(admin.list_topics(timeout=10).topics[name].partitions) for name in names] == [3, 3, 3]
    again = store.open(bench.context(0))
    assert again.pointer.load()
    assert [record.payload for _, record in again.from_.read(5)] == [("x",)]
    again.close()


def test_another_source_may_keep_its_queues_on_kafka(bench, kafka, tmp_path):
    spout = ReplaySpout(QueueEden(tmp_path, ("line",)), store=KafkaStore(kafka.bootstrap))
    spout.open({}, bench.context(), bench)  # the task's folder is a URL, which is allowed here
    assert KafkaStore("x").topics("shop", "lines")["from"] == "shop.lines.from"


def test_a_record_that_cannot_be_read_is_set_aside_alone(bench, kafka, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write(kafka, bench.name, ["fresh"])
    bench.start()
    [(fresh, _)] = bench.await_rows(1)
    bench.spout.ack(fresh)
    broker = Broker("test", kafka.bootstrap, {})
    topics = KafkaStore(kafka.bootstrap, bench.name).topics(bench.topology, "lines")
    bad = [b"J{", None, b"Pcos\nsystem\n."]
    good = [encode(ReplayRecord(("a",))), encode(ReplayRecord(("b",)))]
    broker.produce(topics["from"], 0, [good[0], *bad, good[1]])
    broker.produce(topics["dead"], 0, [None])  # a record of another program; listing must not fail because of it
    rows = bench.await_rows(2)
    assert values(rows) == ["a", "b"]
    bench.spout.ack_many([id for id, _ in rows])
    bench.spout.close()
    [(_, _, queues)] = list(stores_of(kafka.bootstrap, bench.topology))
    dead_letters = [dead_letter.record for dead_letter in queues.dead.read_all()]
    queues.close()
    assert sorted(record.payload[0] for record in dead_letters) == sorted([b"J{", b"", b"Pcos\nsystem\n.", b""])
    assert all(record.damaged for record in dead_letters)


def test_no_broker_and_no_queues_are_said(kafka, capsys, monkeypatch):
    monkeypatch.setattr("penstock.connectors.kafka_replay.ANSWER_SECONDS", 0.2)
    broker = Broker("test", "127.0.0.1:1", {})
    for _ in range(2):
        with pytest.raises(
            EnvironmentFault, match=r"Kafka at 127.0.0.1:1: 1 of 1 records were not accepted within .*. Ch"
        ):
            broker.produce("topic", 0, [b"x"])
    assert main(["dlq", "list", "--kafka", kafka.bootstrap, "--topology", "none"]) == 2
    assert "topology 'none' has no replay queues here. Check" in capsys.readouterr().err


# ---- tuples are read again from the topic --------------------------------------------------------------------


def opened_eden(kafka, name, **options):
    eden = KafkaEden(kafka.bootstrap, name, **options)
    eden.open({}, Context("t", "lines", 1, 0, {"lines": (1,)}, delivery="at_least_once", state=TaskState()))
    return eden


def read_all(eden, count, limit=1000):
    found, end = [], time.monotonic() + DEADLINE
    while len(found) < count:
        found += eden.read(limit) or [eden.wait(0.05)][:0]
        assert time.monotonic() < end
    return found


def read_again(eden, chosen):
    """All of them: one call may return the first ones only."""
    found, positions = [], np.array(sorted(at for at, _ in chosen), np.int64)
    while len(found) < len(positions):
        some = eden.read_again(positions[len(found) :])
        assert some
        found += some
    return found


def test_records_of_several_partitions_are_read_again(kafka, topic):
    name = topic(3)
    broker = Broker("test", kafka.bootstrap, {})
    for partition in range(3):
        broker.produce(name, partition, [f"{partition} {number}".encode() for number in range(2000)])
    eden = opened_eden(kafka, name, fields={"line": "value", "n": "partition", "at": "offset"})
    found = sorted(read_all(eden, 6000))
    for chosen in (found[::7], found[100:2300], found[::999], found[-1:]):
        assert read_again(eden, chosen) == [values for _, values in chosen]
    broker.produce(name, 1, [b"later"])
    assert [values[0] for _, values in read_all(eden, 1)] == ["later"]
    eden.close()


def test_only_committed_records_are_read_again(kafka, topic):
    """Transactions leave gaps between offsets, which are no lost records."""
    name = topic()
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions(DEADLINE)
    for number in range(6):
        producer.begin_transaction()
        producer.produce(name, str(number))
        (producer.abort_transaction if number % 2 else producer.commit_transaction)(DEADLINE)
    eden = opened_eden(kafka, name)
    found = read_all(eden, 3)
    assert [values for _, values in found] == [("0",), ("2",), ("4",)]
    assert read_again(eden, found) == [values for _, values in found]
    assert read_again(eden, found[2:]) == [("4",)]
    eden.close()


def test_reading_again_needs_the_rights_of_the_group_of_the_source_only(kafka, topic, monkeypatch):
    groups, real = [], confluent_kafka.Consumer

    def consumer(config):
        groups.append(config["group.id"])
        return real(config)

    monkeypatch.setattr(confluent_kafka, "Consumer", consumer)
    name = topic()
    write(kafka, name, ["a", "b"])
    eden = opened_eden(kafka, name, group="shop")
    found = read_all(eden, 2)
    assert read_again(eden, found) == [("a",), ("b",)]
    eden.close()
    assert groups == ["shop", "shop"]


def test_no_read_returns_more_than_it_was_asked_for_after_one_that_raised(kafka, topic, monkeypatch):
    name = topic()
    write(kafka, name, [str(number) for number in range(40)])
    eden = opened_eden(kafka, name)
    reader, sizes, end = eden._spout._reader, [], time.monotonic() + DEADLINE
    monkeypatch.setattr(reader, "discover", lambda: eden._emitted and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_all(eden, 10, limit=10)
    monkeypatch.undo()
    while sum(sizes) < 40:
        sizes.append(len(eden.read(10)))
        assert time.monotonic() < end
    assert max(sizes) <= 10
    eden.close()


def test_records_that_kafka_has_deleted_are_dead_letters_and_the_rest_goes_on(bench, kafka):
    write(kafka, bench.name, [str(number) for number in range(10)])
    bench.start()
    rows = bench.await_rows(10)
    Broker("test", kafka.bootstrap, {}).delete_before(bench.name, 0, 4)
    bench.spout.fail_many([id for id, _ in rows[2:6]], Failure("split", "boom"))
    bench.spout.ack_many([id for id, _ in [*rows[:2], *rows[6:]]])
    back = bench.await_rows(2)
    assert values(back) == ["4", "5"]
    bench.spout.ack_many([id for id, _ in back])
    found = bench.await_dead([f"{bench.name} partition 0 offset {number}".encode() for number in (2, 3)])
    assert found[0].error == (
        f"boom; {bench.name} partition 0 offset 2 can no longer be read: Kafka has deleted it (retention)"
    )
    write(kafka, bench.name, ["goes on"])
    [(id, row)] = bench.await_rows(1)
    assert row == ("goes on",)
    bench.spout.ack(id)
    bench.snapshot()


def test_records_of_a_topic_that_was_made_anew_are_gone(kafka, topic):
    name = topic()
    write(kafka, name, [str(number) for number in range(10)])
    eden = opened_eden(kafka, name)
    found = read_all(eden, 10)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.delete_topics([name])[name].result(DEADLINE)
    end = time.monotonic() + DEADLINE
    while name in admin.list_topics(timeout=10).topics:
        assert time.monotonic() < end
    kafka.create_topic(name, 1)
    write(kafka, name, ["other"])
    again = []
    while not again:
        with contextlib.suppress(EnvironmentFault, ComponentError):  # until the new topic is known everywhere
            again = read_again(eden, found[5:])
        assert time.monotonic() < end
    assert all(record.damaged for record in again)
    assert f"{name} partition 0 offset 5 can no longer be read: the topic is shorter than before" in again[0].error
    eden.close()


def test_many_failures_of_a_replacement_are_stored_fast(bench, kafka):
    """Generous, because the machine may be busy."""
    write(kafka, bench.name, [str(number) for number in range(50_000)])
    bench.start()
    rows = bench.await_rows(50_000)
    bench.spout.deactivate()
    begun = time.monotonic()
    bench.spout.fail_many([id for id, _ in rows], Failure("", "replaced", handed_on=True))
    while not bench.spout.settled():
        assert time.monotonic() < begun + 20.0
    bench.spout.close()
    bench.start()
    assert sorted(map(int, values(bench.await_rows(50_000)))) == list(range(50_000))
