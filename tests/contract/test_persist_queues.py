"""The contract of every queue of results, with real servers, and what each of the three kinds survives."""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pyarrow as pa
import pymemcache
import pytest
import redis

from penstock.clock import SimulatedClock
from penstock.errors import ComponentError, EnvironmentFault, TopologyError
from penstock.persist.dead_letters import DeadLetterRows
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.entries import pack
from penstock.persist.memcached import MemcachedQueue
from penstock.persist.memcached_client import HOLE_SECONDS
from penstock.persist.memory import MemoryQueue
from penstock.persist.policy import Flushing
from penstock.persist.processor import Processor, drained
from penstock.persist.queues import ENTRY_BYTES, QueueUnavailable, WriterSuperseded
from penstock.persist.redis import RedisQueue
from penstock.persist.sqlite import SQLiteStore
from penstock.testing.servers import debian
from penstock.testing.servers.memcached import MEMCACHED, MemcachedServer
from penstock.testing.servers.redis import RedisServer

PATIENCE = 30.0  # seconds; the machine may be busy
SOME_SECONDS = 8.0  # seconds within which a hanging server is detected
_numbers = itertools.count(1)
_fork = multiprocessing.get_context("fork")


class Place:
    """A place for queues. ``name`` is unique to the test."""

    def __init__(self, queue, folder="", server=None):
        self.queue, self.folder, self.server = queue, str(folder), server
        self.name = f"topology/store {next(_numbers)}"
        self._clients = []

    def open(self, name=None):
        client = self.queue.open(self.name if name is None else name, self.folder)
        self._clients.append(client)
        return client

    def reader(self, clock):
        """A client that waits for holes by this clock, if the kind of queue has holes."""
        client = self.open()
        for each in (client, *(server.client for server in getattr(client, "_servers", ()))):
            each._clock = clock
        return client

    def close(self):
        for client in self._clients:
            client.close()


@pytest.fixture
def embedded(tmp_path):
    place = Place(EmbeddedQueue(max_bytes=1 << 20), tmp_path)
    yield place
    place.close()


@pytest.fixture
def on_redis(redis_server):
    redis_server.start()
    place = Place(RedisQueue(redis_server.url), "", redis_server)
    yield place
    redis_server.start()
    place.close()


@pytest.fixture
def in_memcached(memcached_server):
    memcached_server.start()
    place = Place(MemcachedQueue(memcached_server.address), "", memcached_server)
    yield place
    memcached_server.start()
    place.close()


@pytest.fixture
def over_memcacheds(memcached_servers):
    place = Place(MemcachedQueue([server.address for server in memcached_servers]))
    yield place
    place.close()


@pytest.fixture
def copied_in_memcacheds(memcached_servers):
    place = Place(MemcachedQueue([server.address for server in memcached_servers], copies=2))
    yield place
    place.close()


@pytest.fixture
def in_memory(tmp_path):
    place = Place(MemoryQueue(), tmp_path)
    yield place
    place.close()
    for client in place._clients:
        shutil.rmtree(client._folder.parent, ignore_errors=True)


@pytest.fixture(
    params=["embedded", "in_memory", "on_redis", "in_memcached", "over_memcacheds", "copied_in_memcacheds"]
)
def place(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["on_redis", "in_memcached"])
def served(request):
    """The settings of a queue on a server."""
    return request.getfixturevalue(request.param)


def entries(found):
    return [entry for _, entry in found]


def positions(found):
    return [position for position, _ in found]


def drain(client):
    """Everything that can be read."""
    return list(itertools.chain.from_iterable(iter(lambda: client.read(7), [])))


def persistently(ask, *arguments):
    """Repeats the call until the queue is available."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask(*arguments)
        except QueueUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def put_until_refused(client, size):
    """Puts entries that begin with their number. Returns how many were put, and the error."""
    for count in range(10_000):
        try:
            client.put([b"%d " % count + bytes(size)])
        except QueueUnavailable as error:
            return count, error
    raise AssertionError("it has room for all")


# -- reading and releasing


def test_what_is_put_is_read_in_order_and_whole(place):
    client = place.open()
    client.put([b"a", b"\x00\r\n\xff END\r\n"])
    client.put([b"c"])
    client.put([b"d", b"e", b"f"])
    found = client.read(10)
    assert entries(found) == [b"a", b"\x00\r\n\xff END\r\n", b"c", b"d", b"e", b"f"]
    assert all(before < after for before, after in itertools.pairwise(positions(found)))
    assert client.losses == 0
    assert client.warning == ""


def test_a_new_queue_is_empty(place):
    client = place.open()
    assert client.read(5) == []
    assert client.waiting() == 0
    client.rewind()
    assert client.read(5) == []


def test_reading_goes_on_where_it_was_and_respects_the_limit(place):
    client = place.open()
    client.put([b"%d" % number for number in range(100)])
    assert entries(client.read(4)) == [b"0", b"1", b"2", b"3"]
    assert entries(client.read(90)) == [b"%d" % number for number in range(4, 94)]
    assert entries(client.read(90)) == [b"%d" % number for number in range(94, 100)]
    assert client.read(90) == []
    place.open().put([b"100"])
    assert entries(client.read(90)) == [b"100"]


def test_what_is_not_released_is_read_again(place):
    client = place.open()
    client.put([b"%d" % number for number in range(10)])
    found = client.read(6)
    client.rewind()
    assert client.read(6) == found
    client.release(positions(found)[3])
    client.rewind()
    rest = [b"%d" % number for number in range(4, 10)]
    assert entries(drain(client)) == rest
    assert entries(drain(place.open())) == rest


def test_reading_goes_on_while_others_release(place):
    client, other = place.open(), place.open()
    client.put([b"%d" % number for number in range(10)])
    other.release(positions(other.read(3))[-1])
    assert entries(client.read(2)) == [b"3", b"4"]
    other.release(positions(other.read(4))[-1])  # also beyond the cursor of the other client
    assert entries(drain(client))[-3:] == [b"7", b"8", b"9"]


def test_releasing_never_goes_back(place):
    one, other = place.open(), place.open()
    one.put([b"%d" % number for number in range(8)])
    found = one.read(8)
    one.release(positions(found)[5])
    for client in (one, other, place.open()):
        client.release(positions(found)[2])
        client.release(positions(found)[5])
        client.rewind()
        assert entries(drain(client)) == [b"6", b"7"]
    one.release(positions(found)[6])
    one.release(positions(found)[5])
    assert entries(drain(place.open())) == [b"7"]
    one.release(positions(found)[7])
    one.release(positions(found)[7])
    assert drain(place.open()) == []
    one.put([b"8"])
    assert entries(drain(other)) == [b"8"]


def test_what_waits_is_known_to_all(place):
    writer, processor, onlooker = place.open(), place.open(), place.open()
    sizes = [10_000, 200_000, 3_000, 50_000]
    for size in sizes:
        writer.put([bytes(size)])

    def about(expected):
        return pytest.approx(expected, abs=1_100 * len(sizes))  # each entry counts up to a KiB more

    assert onlooker.waiting() == about(sum(sizes))
    found = processor.read(4)
    assert writer.waiting() == about(sum(sizes)), "reading takes nothing away"
    processor.release(positions(found)[0])
    assert onlooker.waiting() == about(sum(sizes[1:]))
    processor.release(positions(found)[0])
    assert onlooker.waiting() == about(sum(sizes[1:]))
    processor.release(positions(found)[2])
    assert onlooker.waiting() == writer.waiting() == about(sizes[3])
    processor.release(positions(found)[3])
    assert onlooker.waiting() == writer.waiting() == processor.waiting() == 0
    writer.put([bytes(5_000)])
    assert onlooker.waiting() == about(5_000)
    assert place.open().waiting() == about(5_000)


def test_what_waits_is_exact_over_many_segments_and_readers(embedded):
    """Segments have 64 KiB here."""
    writer, processor = embedded.open(), embedded.open()
    draw = random.Random(7)
    waiting = 0
    for _ in range(60):
        size = draw.randrange(1, 30_000)
        writer.put([bytes(size)])
        waiting += size + 8
        if draw.random() < 0.4:
            if draw.random() < 0.3:
                processor.close()
                processor = embedded.open()
            found = processor.read(draw.randrange(1, 5))
            if found:
                processor.release(positions(found)[-1])
                waiting -= sum(len(entry) + 8 for entry in entries(found))
        assert writer.waiting() == waiting
    files = sum(path.stat().st_size for path in folder_of(embedded).glob("*.seg"))
    assert files - waiting < 100_000, "what is released is gone from the disk but for one segment"


def test_a_big_entry(place):
    data = random.Random(1).randbytes(ENTRY_BYTES + 20_000)
    client = place.open()
    client.put([data, b"small", data])
    assert entries(client.read(5)) == [data, b"small", data]


def test_a_queue_is_there_for_the_next_process(place):
    client = place.open()
    client.put([b"a", b"b"])
    client.release(client.read(1)[0][0])
    client.close()
    again = place.open()
    assert entries(again.read(5)) == [b"b"]
    again.put([b"c"])
    assert entries(again.read(5)) == [b"c"]


def test_queues_of_different_names_have_nothing_in_common(place):
    odd = ["a/b", "a:b", "a%2Fb", "a b", "a", "", "A", "ü\n", "{a}", "}", ":id", "x" * 300, "x" * 299 + "y"]
    names = [*(place.name + name for name in odd), "..", "."]
    clients = [place.open(name) for name in names]
    for name, client in zip(names, clients, strict=True):
        client.register("writer")
        client.put([name.encode()])
    for name, client in zip(names, clients, strict=True):
        assert entries(client.read(5)) == [name.encode()]
    for client in clients:
        client.rewind()
        client.release(client.read(1)[0][0])
        assert client.waiting() == 0


# -- writers


def test_incarnations_grow(place, monkeypatch):
    client = place.open()
    before = int(time.time() * 1000)
    incarnations = [client.register("writer"), place.open().register("writer"), client.register("writer")]
    assert before <= incarnations[0] < incarnations[1] < incarnations[2]
    odd = [client.register(name) for name in ("other/writer", "other writer", "ü", "y" * 300)]
    assert all(before <= incarnation <= int(time.time() * 1000) for incarnation in odd), (
        "writers have nothing in common"
    )
    monkeypatch.setattr("time.time", lambda: 1.0)  # a clock that was set back
    assert client.register("writer") == incarnations[2] + 1
    assert place.open().register("writer") == incarnations[2] + 2


def _write(place, writer, count):
    """The process of a writer: puts entries in batches, named by writer and number."""
    client = place.open()
    number = 0
    while number < count:
        batch = range(number, min(number + 1 + (number + writer) % 3, count))
        client.put([b"%d %d " % (writer, each) + bytes(each * 37 % 5_000) for each in batch])
        number = batch.stop


def name_of(entry):
    writer, number, _ = entry.split(b" ", 2)
    return int(writer), int(number)


def test_several_writers_at_once_and_one_reader(place):
    writers, count = 4, 80
    processes = [_fork.Process(target=_write, args=(place, writer, count)) for writer in range(writers)]
    for process in processes:
        process.start()
    client, found = place.open(), []
    deadline = time.monotonic() + PATIENCE
    while len(found) < writers * count and time.monotonic() < deadline:
        some = client.read(9)
        found += [name_of(entry) for entry in entries(some)]
        if some:
            client.release(positions(some)[-1])
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    found += [name_of(entry) for entry in entries(drain(client))]
    for writer in range(writers):
        assert [number for who, number in found if who == writer] == list(range(count))
    assert client.losses == 0
    assert client.waiting() == 0


def _write_and_tell(place, writer, pipe):
    """Puts entries as fast as possible until it is killed, and reports which ones were acknowledged."""
    client = place.open()
    for number in itertools.count():
        client.put([b"%d %d " % (writer, number) + bytes(random.Random(number).randrange(30_000))])
        pipe.send(number)


def test_writers_killed_at_work_lose_and_block_nothing(place):
    acknowledged = {}
    for writer in range(3):
        pipe, theirs = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_write_and_tell, args=(place, writer, theirs))
        process.start()
        theirs.close()
        for _ in range(20):
            acknowledged[writer] = pipe.recv()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while pipe.poll():
            try:
                acknowledged[writer] = pipe.recv()
            except EOFError:
                break
    writer = place.open()
    writer.put([b"9 0 alive"])
    clock = SimulatedClock()
    client = place.reader(clock)
    found = []
    for _ in range(4):  # at most one hole per writer
        found += [name_of(entry) for entry in entries(drain(client))]
        clock.advance(HOLE_SECONDS)
    for writer, last in acknowledged.items():
        numbers = [number for who, number in found if who == writer]
        assert numbers in (list(range(last + 1)), list(range(last + 2)))  # the entry in flight may have been put
    assert found[-1] == (9, 0)
    assert client.losses == 0


# -- unavailable servers


def test_a_server_that_is_gone_and_comes_back(served):
    writer, processor = served.open(), served.open()
    writer.register("w")
    writer.put([b"a", b"b"])
    assert entries(processor.read(1)) == [b"a"]
    served.server.kill()
    asked = [
        lambda: writer.put([b"x"]),
        lambda: writer.register("w"),
        writer.waiting,
        lambda: processor.read(5),
        lambda: processor.release(1 << 60),
        lambda: served.open().put([b"x"]),
    ]
    for ask in asked:
        with pytest.raises(QueueUnavailable, match=f"queue '{served.name}' .*Error.*ueue (?:then )?continues"):
            ask()
    processor.close()
    served.server.start()
    persistently(writer.put, [b"c"])
    found = entries(persistently(processor.read, 5)) + entries(drain(processor))
    assert found == ([b"c"] if isinstance(served.queue, MemcachedQueue) else [b"b", b"c"])


def test_redis_keeps_what_it_acknowledged_across_kills(on_redis):
    pipe, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_write_and_tell, args=(on_redis, 0, theirs))
    process.start()
    theirs.close()
    last = [pipe.recv() for _ in range(50)][-1]
    on_redis.server.kill()
    process.join(PATIENCE)
    while pipe.poll():
        try:
            last = pipe.recv()
        except EOFError:
            break
    on_redis.server.start()
    client = on_redis.open()
    numbers = [name_of(entry)[1] for entry in entries(drain(client))]
    assert numbers in (list(range(last + 1)), list(range(last + 2)))
    incarnation = client.register("w")
    on_redis.server.kill()
    on_redis.server.start()
    assert persistently(client.register, "w") > incarnation


def test_a_server_that_hangs(served):
    writer, processor = served.open(), served.open()
    writer.put([b"a"])
    assert entries(processor.read(5)) == [b"a"]
    served.server.pause()
    try:
        for ask in (lambda: writer.put([b"b"]), lambda: processor.read(5)):
            begun = time.monotonic()
            with pytest.raises(QueueUnavailable):
                ask()
            assert time.monotonic() - begun < SOME_SECONDS
        writer.close()
    finally:
        served.server.resume()
    persistently(writer.put, [b"b"])
    persistently(writer.put, [b"c"])
    processor._clock = clock = SimulatedClock()  # a number may have been taken for the failed put
    found = entries(drain(processor))
    clock.advance(HOLE_SECONDS)
    found += entries(drain(processor))
    clock.advance(HOLE_SECONDS)
    found += entries(drain(processor))
    assert list(dict.fromkeys(found)) == [b"b", b"c"]  # an entry that was put twice may be read twice


# -- the embedded queue


def folder_of(place):
    (folder,) = Path(place.folder).glob("queue-*")
    return folder


def test_a_torn_record_is_cut_off(embedded):
    embedded.open().put([b"a", b"b"])
    (segment,) = folder_of(embedded).glob("*.seg")
    with open(segment, "ab") as file:
        file.write(b"\x40\x00\x00\x00half a frame and")
    client = embedded.open()
    assert entries(client.read(5)) == [b"a", b"b"]
    embedded.open().put([b"c"])
    assert entries(client.read(5)) == [b"c"]
    assert entries(drain(embedded.open())) == [b"a", b"b", b"c"]


def test_a_torn_position_is_that_before(embedded):
    client = embedded.open()
    client.put([b"a", b"b", b"c"])
    found = client.read(3)
    client.release(found[0][0])
    client.release(found[1][0])
    slots = client._slots()
    with open(folder_of(embedded) / "position", "r+b") as file:
        file.seek(slots.index(max(slots)) * 4096 + 3)
        file.write(b"\xff" * 9)
    assert entries(drain(embedded.open())) == [b"b", b"c"]
    client.release(found[1][0])
    assert entries(drain(embedded.open())) == [b"c"]


def test_a_full_disk(small_disk):
    place = Place(EmbeddedQueue(str(small_disk), max_bytes=1 << 20))
    writer, processor = place.open(), place.open()
    count, error = put_until_refused(writer, 50_000)
    assert 60 < count < 90
    assert "the queue cannot append ([Errno 28] No space left on device). Free disk space" in str(error)
    with contextlib.suppress(OSError), open(small_disk / "others", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    found = processor.read(1)
    processor.release(found[0][0])  # while the disk is completely full
    while more := processor.read(1):
        found += more
        processor.release(more[0][0])
        if len(found) % 10 == 0:
            writer.put([b"%d " % count])
            count += 1
    assert [int(entry.split()[0]) for entry in entries(found)] == list(range(count))
    assert writer.waiting() == 0
    place.close()


def test_the_embedded_queue_wants_a_local_folder(tmp_path):
    EmbeddedQueue().check("component 'store'", str(tmp_path))
    EmbeddedQueue().check("component 'store'", f"file://{tmp_path}")
    EmbeddedQueue(str(tmp_path)).check("component 'store'", "s3://bucket/state")
    with pytest.raises(EnvironmentFault) as caught:
        EmbeddedQueue().check("component 'store'", "s3://bucket/state")
    assert str(caught.value) == (
        "component 'store': the embedded queue needs a folder on a local path, not 's3://bucket/state'. Give it "
        "one: EmbeddedQueue(folder=...), or set delivery.state_dir. Or use RedisQueue, which needs none."
    )
    with pytest.raises(EnvironmentFault, match="and has none"):
        EmbeddedQueue().check("component 'store'", "")
    client = EmbeddedQueue().open("a", f"file://{tmp_path}/deep/er")
    client.put([b"a"])
    assert (tmp_path / "deep" / "er" / "queue-a" / "position").exists()
    client.close()


# -- Redis


def test_weak_settings_of_redis_are_told():
    with RedisServer(appendfsync="everysec") as server:
        client = RedisQueue(server.url).open("q", "")
        assert client.warning == ""
        client.put([b"a"])
        assert client.warning == (
            f"queue 'q' on Redis at {server.address}/0: a crash of Redis loses results, because it runs with "
            "appendfsync everysec. Set appendonly yes and appendfsync always."
        )
        client.close()
        control = redis.Redis.from_url(server.url)
        control.config_set("appendfsync", "always")
        control.config_set("maxmemory-policy", "allkeys-lru")
        control.config_set("maxmemory", 100 << 20)
        client = RedisQueue(server.url).open("q", "")
        client.waiting()
        assert "maxmemory-policy is allkeys-lru. Set it to noeviction" in client.warning
        client.close()
        control.acl_setuser("clerk", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
        client = RedisQueue(f"redis://clerk:secret@{server.address}").open("q", "")
        assert entries(client.read(5)) == [b"a"]
        assert "could not check whether appendonly is yes" in client.warning
        assert "secret" not in client.warning
        client.close()
        control.close()


def test_redis_without_memory_or_as_a_replica(on_redis):
    client = on_redis.open()
    client.put([bytes(100_000)])
    control = redis.Redis.from_url(on_redis.server.url)
    try:
        control.config_set("maxmemory", 1)
        with pytest.raises(QueueUnavailable, match="OutOfMemoryError"):
            client.put([b"b"])
        found = client.read(5)
        client.release(found[0][0])
        assert client.waiting() == 0
    finally:
        control.config_set("maxmemory", 0)
    client.put([b"c"])
    try:
        control.replicaof("127.0.0.1", "1")
        with pytest.raises(QueueUnavailable, match="ReadOnlyError"):
            client.put([b"d"])
    finally:
        control.replicaof("NO", "ONE")
    client.put([b"e"])
    assert entries(client.read(5)) == [b"c", b"e"]
    control.close()


def test_a_redis_that_was_emptied_hides_nothing_new(on_redis):
    writer, processor = on_redis.open(), on_redis.open()
    writer.put([b"a", b"b", b"c"])
    found = processor.read(2)
    control = redis.Redis.from_url(on_redis.server.url)
    control.flushall()
    control.close()
    writer.put([b"d", b"e"])
    processor.release(found[1][0])
    assert entries(drain(processor)) == [b"d", b"e"]
    assert writer.waiting() == 2


# -- memcached


def interrupt(client, step, action):
    """Runs a function right before the client's next call of that name for an entry."""
    calls, original = [], getattr(client._server, step)

    def interrupted(key, *arguments, **options):
        if not calls and key.rpartition(":")[2] != "id":
            calls.append(key)
            action()
        return original(key, *arguments, **options)

    setattr(client._server, step, interrupted)


def _die_before_adding(place):
    client = place.open()
    client.put([b"whole"])
    interrupt(client, "add", lambda: os.kill(os.getpid(), signal.SIGKILL))
    client.put([bytes(50_000)])


def test_a_writer_that_dies_with_a_number_blocks_for_seconds_only(in_memcached):
    for _ in range(2):
        process = _fork.Process(target=_die_before_adding, args=(in_memcached,))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
    writer, clock = in_memcached.open(), SimulatedClock()
    processor = in_memcached.reader(clock)
    writer.put([b"after"])
    assert entries(drain(processor)) == [b"whole"]
    clock.advance(HOLE_SECONDS - 0.01)
    assert drain(processor) == [], "a writer may be slow"
    clock.advance(0.01)
    found = drain(processor)
    assert entries(found) == [b"whole", b"after"], "both holes were seen at once"
    processor.release(positions(found)[-1])
    assert writer.waiting() == 0
    assert processor.losses == 0, "nothing that was acknowledged"


def test_numbers_that_nobody_used_do_not_count_as_waiting_for_ever(in_memcached):
    process = _fork.Process(target=_die_before_adding, args=(in_memcached,))
    process.start()
    process.join(PATIENCE)
    clock = SimulatedClock()
    processor, writer = in_memcached.reader(clock), in_memcached.open()
    (found,) = processor.read(5)
    processor.release(found[0])
    assert writer.waiting() == pytest.approx(50_000, abs=2_000)
    assert processor.read(5) == []
    clock.advance(HOLE_SECONDS)
    assert processor.read(5) == []
    assert writer.waiting() == 0
    writer.put([b"next"])
    assert entries(processor.read(5)) == [b"next"]


@pytest.mark.parametrize("released", [False, True], ids=["tombstone", "tombstone gone"])
def test_a_writer_that_stalls_with_a_number_takes_a_new_one(in_memcached, released):
    writer, other, clock = in_memcached.open(), in_memcached.open(), SimulatedClock()
    processor = in_memcached.reader(clock)
    seen = []

    def meanwhile():
        other.put([b"other"])
        assert processor.read(5) == []
        clock.advance(HOLE_SECONDS)
        found = processor.read(5)
        seen.extend(entries(found))
        if released:
            processor.release(positions(found)[-1])

    interrupt(writer, "add", meanwhile)
    writer.put([b"one", b"two"])
    assert seen == [b"other"]
    assert entries(drain(processor)) == [b"one", b"two"]
    assert processor.losses == writer.losses == 0


def test_the_processor_and_a_writer_meet_at_a_hole(in_memcached):
    """The entry arrives right before the tombstone would be added."""
    writer, clock = in_memcached.open(), SimulatedClock()
    processor = in_memcached.reader(clock)

    def meanwhile():
        assert processor.read(5) == []
        clock.advance(HOLE_SECONDS)

    interrupt(writer, "add", meanwhile)
    interrupt(processor, "add", lambda: writer.put([b"late"]))
    writer.put([b"one"])
    assert entries(drain(processor)) == [b"one"]
    writer.put([b"two"])
    assert entries(drain(processor)) == [b"two"]


def test_a_restarted_memcached_is_noticed(in_memcached):
    writer, processor, idle = in_memcached.open(), in_memcached.open(), in_memcached.open()
    writer.put([b"%d" % number for number in range(10)])
    found = processor.read(4)
    processor.release(positions(found)[1])
    assert idle.waiting() == 8 * 1024
    in_memcached.server.kill()
    in_memcached.server.start()
    assert persistently(idle.waiting) == 0
    assert idle.losses == 8, "as far as it knows"
    persistently(writer.put, [b"a", b"b"])
    persistently(processor.release, positions(found)[3])  # a position of the previous queue
    after = persistently(processor.read, 5)
    assert entries(after) == [b"a", b"b"]
    assert processor.losses == 6, "four it had read"
    assert positions(after)[0] > positions(found)[3]
    processor.release(positions(found)[3])
    assert entries(drain(in_memcached.open())) == [b"a", b"b"]
    processor.release(positions(after)[0])
    assert entries(drain(in_memcached.open())) == [b"b"]


@pytest.mark.parametrize("step", ["add", "get"])
def test_a_memcached_emptied_in_the_middle_of_a_put(in_memcached, step):
    writer, processor = in_memcached.open(), in_memcached.open()
    writer.put([b"before"])
    control = pymemcache.Client(in_memcached.server.address)
    interrupt(writer, step, lambda: control.flush_all(noreply=False))
    writer.put([b"one", b"two"])
    assert entries(drain(processor)) == [b"one", b"two"]
    control.close()


def test_a_queue_without_its_tail_or_head_is_made_anew(in_memcached):
    writer, processor = in_memcached.open(), in_memcached.open()
    for part in ("tail", "head"):
        writer.put([b"lost"])
        assert processor.waiting()
        assert processor._server.delete(processor._key(part))
        assert processor.read(5) == []
        writer.put([b"new"])
        found = processor.read(5)
        assert entries(found) == [b"new"]
        processor.release(found[0][0])
    assert processor.losses == 2


def test_what_a_processor_left_undeleted_goes_with_the_next(in_memcached):
    writer, processor = in_memcached.open(), in_memcached.open()
    writer.put([b"a", b"b", b"c"])
    found = processor.read(3)
    keys = [processor._key(number) for number in (1, 2, 3)]

    def crash(*arguments, **options):
        raise KeyboardInterrupt

    processor._server.delete_many = crash
    with pytest.raises(KeyboardInterrupt):
        processor.release(positions(found)[1])
    fresh = in_memcached.open()
    (last,) = fresh.read(5)
    assert len(fresh._server.get_many(keys)) == 3
    fresh.release(last[0])
    assert fresh._server.get_many(keys) == {}
    assert entries(drain(in_memcached.open())) == []


def test_values_of_strangers_are_passed_and_counted(in_memcached):
    writer, processor = in_memcached.open(), in_memcached.open()
    writer.put([b"a", b"b", b"c", b"d"])
    for number, value in ((2, b"what is this"), (3, b"")):
        assert writer._server.set(writer._key(number), value)
    found = drain(processor)
    assert entries(found) == [b"a", b"d"]
    assert processor.losses == 2
    processor.release(positions(found)[-1])
    assert writer.waiting() == 0


def test_a_full_memcached_refuses_and_goes_on_when_there_is_room():
    with MemcachedServer(megabytes=8) as server:
        place = Place(MemcachedQueue(server.address, max_bytes=4 << 20))
        writer, clock = place.open(), SimulatedClock()
        processor = place.reader(clock)
        count, error = put_until_refused(writer, 100_000)
        assert count > 20
        assert "out of memory" in str(error)
        assert writer.warning == ""
        found = drain(processor)
        processor.release(positions(found)[-1])
        assert writer.waiting() == 0
        writer.put([b"%d " % count + bytes(100_000)])
        found += drain(processor)
        clock.advance(HOLE_SECONDS)
        found += drain(processor)
        assert [int(entry.split()[0]) for entry in entries(found)] == list(range(count + 1))
        assert processor.losses == 0
        place.close()


def test_a_memcached_that_drops_values_is_told_and_the_losses_are_counted():
    with MemcachedServer(megabytes=8, evict=True) as server:
        place = Place(MemcachedQueue(server.address))
        writer, clock = place.open(), SimulatedClock()
        processor = place.reader(clock)
        count = 200
        for number in range(count):
            writer.put([b"%d " % number + bytes(100_000)])
        assert writer.warning == (
            f"queue '{place.name}' in memcached at {server.address}: it drops results when its memory is full. "
            "Start it with -M."
        )
        found = 0
        for _ in range(count):
            found += len(drain(processor))
            clock.advance(HOLE_SECONDS)
        assert found < count
        assert processor.losses == count - found
        place.close()


def test_little_memory_is_told(in_memcached):
    client = MemcachedQueue(in_memcached.server.address, max_bytes=65 << 20).open("q", "")
    client.waiting()
    assert "its memory of 128 MiB is less than twice max_bytes. Start it with a greater -m." in client.warning
    client.close()


def test_an_entry_memcached_never_takes_is_an_error(in_memcached):
    with pytest.raises(ComponentError) as caught:
        in_memcached.open().put([bytes(1 << 20)])
    assert not isinstance(caught.value, QueueUnavailable)
    assert str(caught.value) == (
        f"queue '{in_memcached.name}' in memcached at {in_memcached.server.address}: an entry has 1048576 "
        "bytes, but memcached accepts at most 1048576. Start it with a larger -I, or use RedisQueue or "
        "EmbeddedQueue."
    )


def test_what_waits_survives_the_end_of_its_range(in_memcached):
    """The counter of bytes wraps around."""
    writer = in_memcached.open()
    writer.put([b"a"])
    writer.release(writer.read(1)[0][0])
    almost = (1 << 64) - (2 << 40)
    tail = int(writer._server.get(writer._key("tail")))
    writer._server.incr(writer._key("tail"), almost - tail + (tail & 0xFFFFFFFFFF))
    writer._server.set(writer._key("head"), b"1 %d 1 0" % (almost >> 40))
    writer.put([bytes(10_000)])
    writer.put([bytes(10_000)])
    assert writer.waiting() == pytest.approx(20_000, abs=2_200)
    found = in_memcached.open().read(5)
    assert [len(entry) for entry in entries(found)] == [10_000, 10_000]
    writer.release(found[0][0])
    assert writer.waiting() == pytest.approx(10_000, abs=1_100)


# -- settings that are rejected


@pytest.mark.parametrize(
    "queue", [EmbeddedQueue("/x", 5), RedisQueue("redis://u:secret@h:1/2", 5), MemcachedQueue("h:1", 5)], ids=str
)
def test_queues_travel_and_tell_no_passwords(queue):
    queue.check("here", "/folder")
    again = pickle.loads(pickle.dumps(queue))
    assert str(again) == str(queue)
    assert again.max_bytes == 5
    assert "secret" not in str(queue)


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (RedisQueue("localhost:6379"), "here: the URL .* is not a Redis URL.*Write RedisQueue"),
        (MemcachedQueue("localhost:http"), "here: server is not a host and port of memcached.*Write Memcached"),
        (
            MemcachedQueue(max_bytes=1 << 40),
            "here: max_bytes of MemcachedQueue is .*more than .*Use RedisQueue",
        ),
    ],
    ids=str,
)
def test_wrong_places_are_refused(queue, message):
    with pytest.raises(TopologyError, match=message):
        queue.check("here", "")


@pytest.mark.parametrize(("queue", "library"), [(RedisQueue(), "redis"), (MemcachedQueue(), "pymemcache")])
def test_a_missing_library_is_named(queue, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(EnvironmentFault, match=rf"{library} is not installed.*pip install \"penstock\["):
        queue.check("here", "")


def test_no_server_and_no_way_to_fetch_one_is_told(monkeypatch):
    monkeypatch.setattr(debian.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        MEMCACHED.command()
    assert str(caught.value) == (
        "memcached for tests: memcached is not installed, and neither is apt-get, which is needed to fetch it. "
        "Install it (on Debian: apt-get install memcached)."
    )


def test_a_server_that_cannot_start_says_why(redis_server):
    redis_server.start()
    server = RedisServer()
    server._port = redis_server._port
    with pytest.raises(EnvironmentFault, match=r"the server did not start: .*(bind|listen)"):
        server.start()
    server.close()


def test_who_was_replaced_puts_nothing_more(place):
    old, new = place.open(), place.open()
    first = old.register("store/0")
    old.put([b"1"], "store/0", first)
    second = new.register("store/0")
    with pytest.raises(WriterSuperseded, match="another process has registered as 'store/0' since"):
        old.put([b"late"], "store/0", first)
    new.put([b"2"], "store/0", second)
    old.put([b"3"], "store/1", old.register("store/1"))
    assert [data for _, data in place.open().read(10)] == [b"1", b"2", b"3"]


def test_a_queue_has_an_id_of_its_own_for_as_long_as_it_remembers(place):
    one = place.open()
    id = one.id()
    assert id
    assert place.open().id() == id == one.id()
    assert place.open(f"{place.name} too").id() != id


def test_a_queue_that_lost_its_memory_has_another_id(in_memcached):
    client = in_memcached.open()
    before = client.id()
    in_memcached.server.kill()
    in_memcached.server.start()
    assert in_memcached.open().id() != before


def test_embedded_a_record_that_changed_on_disk_is_told_from_a_torn_one(embedded):
    client = embedded.open()
    for number in range(6):
        client.put([b"entry %d" % number])
    client.close()
    (segment,) = Path(embedded.folder).rglob("*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(b"entry 2")] ^= 1
    segment.write_bytes(data)
    with pytest.raises(EnvironmentFault, match="is not what was written"):
        embedded.open().put([b"entry 6"])
    assert segment.read_bytes() == data, "nothing is cut off"


def test_embedded_a_process_that_stands_still_with_the_lock_is_not_waited_for_without_end(embedded, monkeypatch):
    monkeypatch.setattr("penstock.storage.segments._LOCK_SECONDS", 0.2)
    client = embedded.open()
    client.put([b"1"])
    (lock,) = Path(embedded.folder).rglob("lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(QueueUnavailable, match="another process holds the lock"):
            client.put([b"2"])
    client.put([b"2"])
    assert [data for _, data in client.read(10)] == [b"1", b"2"]


class Killed(BaseException):
    """Stands for the end of the process."""


def test_rows_are_written_once_though_the_server_has_lost_its_memory_meanwhile(served, tmp_path):
    clock, store = SimulatedClock(1000.0), SQLiteStore(str(tmp_path / "rows.db"), "rows")

    def processor(crash=lambda step: None):
        dead, flushing = DeadLetterRows(tmp_path / "dead", "persist"), Flushing(0.01, 100)
        return Processor(served.name, served.open(), store.open(), dead, flushing, clock, crash)

    def put(word, number):
        persistently(writer.put, [pack("persist/0", incarnation, number, pa.table({"word": [word]}))])

    def kill(step):
        if step == "written" and killing:
            raise Killed

    writer, killing = served.open(), []
    incarnation = writer.register("persist/0")
    put("before", 1)
    first = processor(kill)
    assert drained(first, clock.monotonic() + 100, clock, clock.advance)
    if isinstance(served.queue, RedisQueue):
        control = redis.Redis.from_url(served.server.url)
        control.flushall()
        control.close()
    else:
        served.server.kill()
        served.server.start()
    put("before", 1)  # the writer did not learn that it had arrived
    put("after", 2)
    killing.append(True)
    with pytest.raises(Killed):
        drained(first, clock.monotonic() + 100, clock, clock.advance)
    assert drained(processor(), clock.monotonic() + 100, clock, clock.advance)
    with sqlite3.connect(tmp_path / "rows.db") as rows:
        assert rows.execute("SELECT word FROM rows ORDER BY rowid").fetchall() == [("before",), ("after",)]
