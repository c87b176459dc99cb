"""Cassandra and HBase, as real servers: what stores without transactions over several rows promise."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import uuid

import pyarrow as pa
import pytest

from penstock.clock import SystemClock
from penstock.persist import CassandraStore, EmbeddedQueue, HBaseStore
from penstock.persist.entries import pack
from penstock.persist.fenced import WriteState
from penstock.persist.processor import drained
from penstock.persist.spec import ProcessorSpec
from penstock.persist.stores import Overtaken, StoreUnavailable

FORKS = multiprocessing.get_context("forkserver")


class CassandraTarget:
    """A keyspace of its own, because the tests share the server."""

    def __init__(self, server):
        self.server = server
        self.keyspace, self.table = f"k{uuid.uuid4().hex}", "results"
        self.cluster = None
        self.reconnect()
        replication = "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        self.session.execute(f"CREATE KEYSPACE {self.keyspace} WITH replication = {replication}")

    def reconnect(self):
        from cassandra.cluster import Cluster

        if self.cluster is not None:
            self.close()
        host, _, port = self.server.address.partition(":")
        self.cluster = Cluster([host], int(port))
        self.session = self.cluster.connect()
        self.session.default_timeout = 60.0

    def store(self, **options):
        options = {"key": ["word"], "timeout": 5.0, **options}
        return CassandraStore(self.server.address, f"{self.keyspace}.{self.table}", **options)

    def rows(self, *columns):
        """Rows as tuples, sorted."""
        if not list(
            self.session.execute(
                "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s",
                (self.keyspace, self.table),
            )
        ):
            return []
        names = ", ".join(f'"{name}"' for name in columns)
        found = self.session.execute(f"SELECT {names} FROM {self.keyspace}.{self.table}")
        return sorted((tuple(row) for row in found), key=str)

    def counts(self):
        return self.rows("word", "count")

    def close(self):
        self.cluster.shutdown()


class HBaseTarget:
    def __init__(self, server):
        self.server, self.table = server, f"t{uuid.uuid4().hex}"

    def store(self, **options):
        options = {"key": ["word"], "timeout": 10.0, **options}
        return HBaseStore(self.server.address, self.table, **options)

    def rows(self, *columns):
        import happybase

        host, _, port = self.server.address.partition(":")
        connection = happybase.Connection(host, int(port))
        try:
            if self.table.encode() not in connection.tables():
                return []
            found = [cells for _, cells in connection.table(self.table).scan()]
        finally:
            connection.close()
        return sorted((tuple(cells.get(f"r:{name}".encode()) for name in columns) for cells in found), key=str)

    def counts(self):
        return [(word.decode(), None if n is None else int(n)) for word, n in self.rows("word", "count")]

    def reconnect(self):
        """Each call has a connection of its own."""

    def close(self):
        pass


@pytest.fixture(params=["cassandra", "hbase"])
def target(request):
    server = request.getfixturevalue(request.param)
    made = {"cassandra": CassandraTarget, "hbase": HBaseTarget}[request.param](server)
    yield made
    made.close()


@pytest.fixture
def queue():
    """A name: the stores keep the progress of all queues in one table."""
    return f"q ⟨{uuid.uuid4().hex}⟩"


@pytest.fixture
def opened():
    clients = []

    def open_it(store):
        store.check("here")
        clients.append(pickle.loads(pickle.dumps(store)).open())
        return clients[-1]

    yield open_it
    for client in clients:
        client.close()


def words(*rows):
    return pa.table({"word": [word for word, _ in rows], "count": [count for _, count in rows]})


def no_reject(rejected):
    raise AssertionError(f"rejected: {rejected}")


def write(client, queue, rows, before, after):
    found = []
    client.write(queue, rows, before, after, found.extend)
    return [each.row for each in found]


# -- rows and progress


def test_of_each_key_the_row_put_last_is_there(target, opened, queue):
    client = opened(target.store())
    assert client.progress(queue) == ""
    client.write(queue, words(("a", 1), ("b", 1), ("a", 2), ("a", 3), ("c", 1)), "", "one", no_reject)
    assert target.counts() == [("a", 3), ("b", 1), ("c", 1)]
    client.write(queue, words(("b", 5), ("d", 1), ("b", 4), ("a", 9), ("a", 0)), "one", "two", no_reject)
    again = opened(target.store())
    assert again.progress(queue) == "two"
    again.write(queue, words(("c", None)), "two", "three", no_reject)
    assert target.counts() == [("a", 0), ("b", 4), ("c", None), ("d", 1)]
    again.write(queue, words(("c", 7)), "three", "four", no_reject)
    again.write(queue, pa.table({}), "four", "five", no_reject)
    assert target.counts() == [("a", 0), ("b", 4), ("c", 7), ("d", 1)]
    assert client.progress(queue) == "five"


def test_who_was_overtaken_changes_nothing(target, opened, queue):
    one, two = opened(target.store()), opened(target.store())
    one.write(queue, words(("a", 1)), "", "one", no_reject)
    for before in ("", "zero"):
        with pytest.raises(Overtaken, match="another processor also writes for"):
            two.write(queue, words(("a", 5)), before, "two", no_reject)
    two.write(queue, words(("b", 2)), "one", "two", no_reject)
    with pytest.raises(Overtaken):
        one.write(queue, pa.table({}), "one", "two", no_reject)
    assert target.counts() == [("a", 1), ("b", 2)]


def test_a_processor_that_stalls_while_it_writes_sets_nothing_back(target, opened, queue):
    """It resumes when its successor has written the same rows, and newer ones of the same keys."""
    one, two = opened(target.store()), opened(target.store())
    one.write(queue, words(("a", 0), ("b", 0)), "", "one", no_reject)
    original = one.write_rows

    def stalling(rows, version):
        two.write(queue, words(("a", 1), ("b", 1)), "one", "two", no_reject)
        two.write(queue, words(("a", 2), ("c", 2)), "two", "three", no_reject)
        return original(rows, version)

    one.write_rows = stalling
    with pytest.raises(Overtaken):
        one.write(queue, words(("a", 1), ("b", 1)), "one", "two", no_reject)
    assert target.counts() == [("a", 2), ("b", 1), ("c", 2)]
    assert two.progress(queue) == "three"


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("step", ["claimed", "half written", "written", "swapped"])
def test_after_a_crash_between_any_two_steps_the_next_processor_completes_it(target, opened, queue, step):
    one, two = opened(target.store()), opened(target.store())
    one.write(queue, words(("a", 0), ("b", 0)), "", "one", no_reject)
    write_rows, swap = one.write_rows, one.swap_state

    def dying_write(rows, version):
        if step == "claimed":
            raise Killed
        write_rows(rows.slice(0, 1) if step == "half written" else rows, version)
        raise Killed

    def dying_swap(queue, before, after):
        swapped = swap(queue, before, after)
        if not WriteState.decode(after).claimed:
            raise Killed
        return swapped

    if step == "swapped":
        one.swap_state = dying_swap
    else:
        one.write_rows = dying_write
    rows = words(("a", 1), ("b", 1), ("a", 2))
    with pytest.raises(Killed):
        one.write(queue, rows, "one", "two", no_reject)
    if step == "swapped":
        assert two.progress(queue) == "two"
    else:
        assert two.progress(queue) == "one"
        two.write(queue, rows, "one", "two", no_reject)
    assert target.counts() == [("a", 2), ("b", 1)]


def take_turns(store, queue, rounds):
    """Writes repeatedly, as one of several processors: after an error it reads the queue's progress."""
    client = store.open()
    while True:
        with contextlib.suppress(Overtaken, StoreUnavailable):
            before = client.progress(queue)
            while (done := int(before or 0)) < rounds:
                client.write(
                    queue, words(*((f"{queue}{n}", done) for n in range(20))), before, str(done + 1), no_reject
                )
                before = str(done + 1)
            client.close()
            return


def test_two_processors_at_once_get_through(target, queue):
    processes = [FORKS.Process(target=take_turns, args=(target.store(), queue, 15)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert target.counts() == sorted(((f"{queue}{n}", 14) for n in range(20)), key=str)


# -- values


def test_rejected_rows_are_left_out_and_all_others_are_in(target, opened, queue):
    client = opened(target.store())
    client.write(queue, words(("first", 0)), "", "one", no_reject)
    rows = words(("a", 1), (None, 2), ("b", 3), ("x" * 70_000, 4), ("", 5), ("c", 6))
    assert write(client, queue, rows, "one", "two") == [1, 3, 4]
    assert target.counts() == [("a", 1), ("b", 3), ("c", 6), ("first", 0)]
    assert client.progress(queue) == "two"


def test_a_value_that_does_not_fit_its_column_is_rejected_and_the_row_before_counts(cassandra, opened, queue):
    target = CassandraTarget(cassandra)
    client = opened(target.store())
    client.write(queue, words(("a", 0), ("b", 0)), "", "one", no_reject)
    rows = words(("a", 1.0), ("b", 1.0), ("a", 2.0), ("a", 2.5), ("b", 1.5))
    assert write(client, queue, rows, "one", "two") == [3, 4]
    assert target.counts() == [("a", 2), ("b", 1)]
    target.close()


def test_all_kinds_of_values(target, opened, queue):
    moment = datetime.datetime(2024, 2, 29, 12, 30, 15, 250_000)
    table = pa.table(
        {
            "word": ["ü⟨⟩\0x"],
            "n": pa.array([2**63 - 1], pa.int64()),
            "small": pa.array([7], pa.int8()),
            "big": pa.array([2**64 - 1], pa.uint64()),
            "x": [0.1],
            "yes": [True],
            "data": [b"\0\xff"],
            "day": [moment.date()],
            "at": pa.array([moment], pa.timestamp("ms")),
            "exact": pa.array([moment.replace(microsecond=123)], pa.timestamp("us")),
            "cents": [decimal.Decimal("1.20")],
            "list": [[1, 2]],
            "took": pa.array([datetime.timedelta(seconds=2)], pa.duration("us")),
            "kind": pa.array(["a"]).dictionary_encode(),
            "nothing": pa.array([None], pa.null()),
        }
    )
    opened(target.store()).write(queue, table, "", "one", no_reject)
    (found,) = target.rows(*table.column_names)
    if isinstance(target, HBaseTarget):
        text = [None if value is None else value.decode("latin-1") for value in found]
        assert text[1:] == [
            *("9223372036854775807", "7", "18446744073709551615", "0.1", "true", "\0\xff", "2024-02-29"),
            *("2024-02-29 12:30:15.250", "2024-02-29 12:30:15.000123", "1.20", "[1, 2]", "2000000", "a", None),
        ]
        assert found[0].decode() == "ü⟨⟩\0x"
        return
    found = dict(zip(table.column_names, found, strict=True))
    assert found["day"].date() == moment.date()
    del found["day"]
    assert found == {
        "word": "ü⟨⟩\0x",
        "n": 2**63 - 1,
        "small": 7,
        "big": 2**64 - 1,
        "x": 0.1,
        "yes": True,
        "data": b"\0\xff",
        "at": moment,
        "exact": "2024-02-29 12:30:15.000123",
        "cents": decimal.Decimal("1.20"),
        "list": "[1, 2]",
        "took": 2_000_000,
        "kind": "a",
        "nothing": None,
    }


def test_a_key_of_several_columns(target, opened, queue):
    client = opened(target.store(key=["word", "count"], columns={"word": "word", "count": "count", "x": "value"}))
    rows = pa.table({"word": ["a", "a", "a", "b"], "count": [1, 2, 1, 1], "x": [1, 2, 3, 4]})
    client.write(queue, rows, "", "one", no_reject)
    found = [(word, int(n), int(x)) for word, n, x in target.rows("word", "count", "value")]
    assert [(n, x) for _, n, x in found] == [(1, 3), (2, 2), (1, 4)]


def test_what_is_missing_is_told_and_comes_right_without_losses(target, opened, queue):
    client = opened(target.store(create=False))
    with pytest.raises(StoreUnavailable, match=f"table '{target.store().table}' at .*The rows wait in the queue"):
        client.write(queue, words(("a", 1)), "", "one", no_reject)
    assert client.progress(queue) == ""
    other = opened(target.store())
    other.write(queue, words(("a", 1)), "", "one", no_reject)
    assert target.counts() == [("a", 1)]
    with pytest.raises(StoreUnavailable, match="have no field word"):
        opened(target.store(columns=["word", "count"])).write(queue, pa.table({"x": [1]}), "one", "two", no_reject)


# -- outages


def test_a_server_that_is_killed_is_gone_back_to_with_what_it_acknowledged(target, opened, queue):
    client = opened(target.store())
    client.write(queue, words(("a", 1)), "", "one", no_reject)
    target.server.kill()
    try:
        with pytest.raises(StoreUnavailable):
            client.write(queue, words(("b", 2)), "one", "two", no_reject)
    finally:
        target.server.start()
    deadline = time.monotonic() + 120
    while True:
        try:
            client.write(queue, words(("b", 2)), "one", "two", no_reject)
            break
        except StoreUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.2)  # another process
    assert client.progress(queue) == "two"
    target.reconnect()
    assert target.counts() == [("a", 1), ("b", 2)]


def test_a_server_that_hangs_is_left_in_time(target, opened, queue):
    client = opened(target.store(timeout=2.0))
    client.write(queue, words(("a", 1)), "", "one", no_reject)
    target.server.pause()
    try:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match="within 2 s"):
            client.write(queue, words(("b", 2)), "one", "two", no_reject)
        assert time.monotonic() - begun < 15
    finally:
        target.server.resume()


# -- the processor, killed at any moment


def process(spec, folder):
    """The process of a processor; ends when the queue is empty for a moment and the writer is done."""
    clock = SystemClock()
    processor = spec.processor(clock)
    while not (os.path.exists(f"{folder}/done") and drained(processor, clock.monotonic() + 1, clock, time.sleep)):
        processor.turn()
        time.sleep(processor.wait())
    processor.close()


def test_a_processor_killed_again_and_again_leaves_each_key_with_its_last_row(target, tmp_path):
    keys, count = 50, 6_000
    spec = ProcessorSpec(
        uuid.uuid4().hex,
        "persist",
        EmbeddedQueue(),
        target.store(),
        str(tmp_path),
        str(tmp_path / "dead"),
        0.05,
        300,
        60.0,
    )
    ended = threading.Event()

    def put():
        writer = spec.queue.open(spec.name, spec.folder)
        incarnation = writer.register("persist/0")
        for number in range(count // 20):
            rows = words(*((f"key-{n % keys}", n) for n in range(20 * number, 20 * number + 20)))
            writer.put([pack("persist/0", incarnation, number + 1, rows)])
            time.sleep(0.03)
        writer.close()
        (tmp_path / "done").touch()
        ended.set()

    putting = threading.Thread(target=put)
    putting.start()
    kills, moments = 0, iter([0.9, 1.3, 1.7, 1.1, 1.5, 1.9] * 10)
    running = FORKS.Process(target=process, args=(spec, str(tmp_path)))
    running.start()
    while not ended.wait(next(moments)):
        os.kill(running.pid, signal.SIGKILL)
        running.join()
        kills += 1
        running = FORKS.Process(target=process, args=(spec, str(tmp_path)))
        running.start()
    putting.join()
    running.join()
    assert running.exitcode == 0
    assert kills >= 4
    assert target.counts() == sorted(((f"key-{n % keys}", n) for n in range(count - keys, count)), key=str)
    print(json.dumps({"store": str(target.store()), "kills": kills}))
