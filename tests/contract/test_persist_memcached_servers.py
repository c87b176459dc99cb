"""The queue on several memcached servers, of which one is killed, hangs, and comes back."""

import itertools
import time

import pytest

from penstock.clock import SimulatedClock
from penstock.errors import TopologyError
from penstock.persist.memcached import MemcachedQueue
from penstock.persist.memcached_group import DEAD_SECONDS
from penstock.persist.queues import QueueUnavailable, WriterSuperseded
from penstock.persist.stamps import unstamped
from penstock.testing.servers.memcached import MemcachedServer

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def three():
    """A test that stops a server starts it again."""
    with MemcachedServer() as one, MemcachedServer() as two, MemcachedServer() as three:
        yield [one, two, three]


class Spread:
    """A queue over the servers; clients have simulated clocks."""

    def __init__(self, servers, copies):
        self.servers = servers
        self.queue = MemcachedQueue([server.address for server in servers], copies=copies)
        self.name = f"spread/{next(_numbers)}"
        self.clients = []

    def open(self):
        client, clock = self.queue.open(self.name, ""), SimulatedClock(100.0)
        client._clock = client._group._clock = clock
        for server in client._servers:
            server.client._clock = clock
        self.clients.append(client)
        return client


@pytest.fixture(params=[1, 2], ids=["one copy", "two copies"])
def spread(request, three):
    place = Spread(three, request.param)
    yield place
    for client in place.clients:
        client.close()
    for server in three:
        server.start()  # unless it runs
        server.resume()


def names(*numbers):
    return [b"%d" % number for number in numbers]


def put(client, *numbers):
    for number in numbers:
        client.put(names(number))


def drain(client):
    return [entry for _, entry in itertools.chain.from_iterable(iter(lambda: client.read(7), []))]


def when_dead(client):
    """Everything that can be read once a server that is away counts as dead."""
    found = drain(client)
    client._clock.advance(DEAD_SECONDS)
    return found + drain(client)


def on_server(spread, index):
    """How many entries a server holds."""
    return spread.queue.open(spread.name, "")._servers[index].client.read(1000)


def test_entries_are_spread_over_all_servers(spread):
    writer = spread.open()
    put(writer, *range(30))
    held = [len(on_server(spread, index)) for index in range(3)]
    assert sum(held) == 30 * spread.queue.copies
    assert max(held) == min(held)
    assert drain(spread.open()) == names(*range(30))


def test_a_killed_server_loses_only_what_was_on_it_alone_and_that_is_counted(spread):
    writer, processor = spread.open(), spread.open()
    put(writer, *range(30))
    held = [int(unstamped(data)[1]) for _, data in on_server(spread, 1)] if spread.queue.copies == 1 else []
    spread.servers[1].kill()
    put(writer, *range(30, 60))  # writes go on, to the others
    found = when_dead(processor)
    assert found == [name for name in names(*range(60)) if int(name) not in held]
    assert processor.losses == len(held)
    assert len(held) == (10 if spread.queue.copies == 1 else 0)
    text = f"{spread.servers[1].address} does not answer. The queue continues on the other servers."
    assert writer.warning == f"queue '{spread.name}' {spread.queue}: {text}".replace(
        ", 2 copies of each entry", ""
    )
    assert spread.open().losses == 0


def test_a_server_that_comes_back_empty_is_used_again(spread):
    writer, processor = spread.open(), spread.open()
    put(writer, *range(9))
    spread.servers[0].kill()
    put(writer, *range(9, 12))
    spread.servers[0].start()
    for client in (writer, processor):
        client._clock.advance(1.0)
    put(writer, *range(12, 30))
    assert len(on_server(spread, 0)) >= 6 * spread.queue.copies
    found = drain(processor)
    assert found[-21:] == names(*range(9, 30))
    assert processor.losses == 30 - len(found)
    assert len(found) == 30 if spread.queue.copies == 2 else 20 < len(found) < 30
    assert writer.warning == processor.warning == ""
    processor.release(len(found))
    assert processor.waiting() == writer.waiting() == 0


def test_with_two_copies_one_server_after_another_may_die(three):
    spread = Spread(three, 2)
    writer, last = spread.open(), 0
    for turn, server in enumerate(spread.servers):
        put(writer, *range(10 * turn, 10 * turn + 10))
        server.kill()
        processor = spread.open()  # the processor is killed too
        found = processor.read(100)
        assert [entry for _, entry in found] == names(*range(last, 10 * turn + 10))
        processor.release(found[-1][0])
        last = 10 * turn + 10
        server.start()
        writer._clock.advance(10.0)
        assert processor.losses == 0
    assert drain(spread.open()) == []


def test_a_new_processor_knows_what_was_written_from_what_is_lost(spread):
    writer, first = spread.open(), spread.open()
    put(writer, *range(12))
    found = first.read(6)
    first.release(found[-1][0])
    spread.servers[2].kill()
    put(writer, *range(12, 15))
    second = spread.open()
    rest = when_dead(second)
    assert rest[-3:] == names(12, 13, 14)
    assert second.losses == 9 - len(rest)
    assert second.losses == (2 if spread.queue.copies == 1 else 0)


def test_a_server_that_hangs_for_a_moment_loses_nothing_and_nothing_overtakes_it(spread):
    writer, processor = spread.open(), spread.open()
    put(writer, *range(9))
    spread.servers[1].pause()
    put(writer, *range(9, 12))
    before = drain(processor)
    if spread.queue.copies == 1:
        assert before == [], "what is on that server comes first"
    else:
        assert before == names(*range(12))
    spread.servers[1].resume()
    processor._clock.advance(1.0)
    assert before + drain(processor) == names(*range(12))
    assert processor.losses == 0


def test_a_server_that_is_back_is_read_before_anything_else_is_passed_on(three):
    """The processor learns from a release, not from a read, that it is back."""
    spread = Spread(three, 1)
    first, second, processor = spread.open(), spread.open(), spread.open()
    put(first, 0, 1, 2)
    found = processor.read(3)
    held = first._turn  # the server that gets the next entry
    put(first, 3)
    spread.servers[held].pause()
    second._turn = (held + 1) % 3
    put(second, 4)
    assert drain(processor) == []
    spread.servers[held].resume()
    processor._clock.advance(1.0)
    processor.release(found[-1][0])
    assert drain(processor) == names(3, 4)
    for client in spread.clients:
        client.close()


def test_what_a_server_brings_back_too_late_is_dropped_and_was_counted(spread):
    writer, processor = spread.open(), spread.open()
    put(writer, *range(9))
    spread.servers[1].pause()
    put(writer, *range(9, 12))
    found = when_dead(processor)
    lost = processor.losses
    assert lost == 12 - len(found)
    assert lost == (3 if spread.queue.copies == 1 else 0)
    spread.servers[1].resume()
    processor._clock.advance(10.0)
    assert drain(processor) == [], "newer entries may be in the store"
    assert processor.losses == lost
    processor.release(len(found))
    assert processor.waiting() == 0


def test_a_put_that_timed_out_and_arrives_later_is_read_once(spread):
    writer, processor = spread.open(), spread.open()
    put(writer, *range(3))
    spread.servers[0].pause()
    begun = time.monotonic()
    put(writer, *range(3, 9))  # the paused server may carry out what it was sent
    assert time.monotonic() - begun < 8
    spread.servers[0].resume()
    writer._clock.advance(10.0)
    put(writer, *range(9, 12))
    assert when_dead(processor) == names(*range(12))
    assert processor.losses == 0


def test_order_holds_between_clients_that_follow_each_other(spread):
    clients = [spread.open() for _ in range(4)]
    for number in range(40):
        put(clients[number * 7 % 4], number)
    assert drain(spread.open()) == names(*range(40))


def test_without_any_server_the_queue_is_unavailable(spread):
    writer, processor = spread.open(), spread.open()
    put(writer, 1, 2, 3)
    for server in spread.servers:
        server.kill()
    for ask in (lambda: put(writer, 4), lambda: processor.read(5), writer.waiting, lambda: writer.register("w")):
        with pytest.raises(QueueUnavailable, match=r"none of the servers answers .*continues by itself"):
            ask()
    for server in spread.servers:
        server.start()
    for client in (writer, processor):
        client._clock.advance(10.0)
    put(writer, 5)
    assert when_dead(processor) == names(5)


def test_who_was_replaced_puts_nothing_though_a_server_lost_its_memory(spread):
    old, new = spread.open(), spread.open()
    first = old.register("store/0")
    old.put([b"1"], "store/0", first)
    second = new.register("store/0")
    assert second > first
    spread.servers[0].kill()
    spread.servers[0].start()
    for client in (old, new):
        client._clock.advance(10.0)
    new.put([b"2"], "store/0", second)  # tells the server that came back
    spread.servers[1].kill()
    with pytest.raises(WriterSuperseded):
        old.put([b"late"], "store/0", first)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MemcachedQueue(["a:1", "a:1"]), "not one or several different addresses"),
        (lambda: MemcachedQueue([]), "not one or several different addresses"),
        (
            lambda: MemcachedQueue("a:1", copies=2),
            r"copies is 2, not a number from 1 to 1, .* server\. Write .*'b:11211'",
        ),
        (
            lambda: MemcachedQueue(["a:1", "b:1"], copies=0),
            "copies is 0, not a number from 1 to 2, .* its servers",
        ),
        (lambda: MemcachedQueue(["a:1", "b:1"], copies="2"), "copies is '2', not a number from 1 to 2"),
        (lambda: MemcachedQueue(["a:1", "b:http"]), "not a host and port"),
    ],
)
def test_wrong_servers_are_refused(make, says):
    with pytest.raises(TopologyError, match=says):
        make().check("here", "")
