"""The order of entries on several servers, whichever of them die, hang and come back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.persist.stamps import Passed, Stamp, StampedEntry, StampedOrder, digest_of, unstamped

SERVERS = 3
PUT, READ, KILL, RESTART_READER, RESTART_WRITER = "put", "read", "kill", "restart reader", "restart writer"
puts = st.tuples(st.just(PUT), st.integers(0, 2), st.integers(0, SERVERS - 1))
reads = st.tuples(st.just(READ), st.integers(0, SERVERS), st.just(0))
kills = st.tuples(st.just(KILL), st.integers(0, SERVERS - 1), st.just(0))
restarts = st.one_of(
    st.tuples(st.just(RESTART_READER), st.just(0), st.just(0)),
    st.tuples(st.just(RESTART_WRITER), st.integers(0, 2), st.just(0)),
)
many = settings(max_examples=300)


class World:
    """Servers that hold lists of entries; writers put one after another; one reader."""

    def __init__(self, copies):
        self.copies = copies
        self.servers = [[] for _ in range(SERVERS)]
        self.read_until = [0] * SERVERS
        self.time = 0
        self.sessions = [(writer + 1, 0, 1) for writer in range(3)]  # session, acknowledged, incarnation
        self.next_session = 4
        self.put, self.passed = [], []
        self.order, self.released = StampedOrder(SERVERS), Passed()
        self.order.begin(self.released)

    def do(self, event):
        kind, one, two = event
        if kind == PUT:
            session, done, incarnation = self.sessions[one]
            self.time += 1
            self.order.passed.begin(session)
            self.released.begin(session)
            stamp = Stamp(session, done + 1, 0, digest_of(f"w{one}"), incarnation, self.time)
            self.sessions[one] = (session, done + 1, incarnation)
            name = b"%d" % len(self.put)
            self.put.append(name)
            for copy in range(self.copies):
                self.servers[(two + copy) % SERVERS].append(stamp.on(name))
        elif kind == READ:
            for turn in range(SERVERS):  # servers are read in any order
                self.read_round((one + turn) % SERVERS)
            self.order.end_round()
            self.take()
        elif kind == KILL:
            self.servers[one], self.read_until[one] = [], 0
        elif kind == RESTART_READER:  # all that was passed on is in the store
            self.released = self.order.passed.copy()
            lost, self.order = self.order.lost, StampedOrder(SERVERS)
            self.order.lost = lost
            self.order.begin(Passed.decode(self.released.encode()))
            self.read_until = [0] * SERVERS
        else:
            _, _, incarnation = self.sessions[one]
            self.sessions[one] = (self.next_session, 0, incarnation + 1)
            self.next_session += 1

    def read_round(self, server):
        entries = self.servers[server]
        for position in range(self.read_until[server], len(entries)):
            self.order.add(StampedEntry(server, position, *unstamped(entries[position])))
        self.read_until[server] = len(entries)

    def take(self):
        while (taken := self.order.take()) is not None:
            if taken[1]:
                self.passed.append(taken[0].entry)

    def finish(self):
        for writer in range(3):  # a later entry of each writer tells what is missing
            self.do((PUT, writer, writer))
        for _ in range(3):
            self.do((READ, 0, 0))
        self.order.give_up()
        self.take()


@many
@given(st.lists(st.one_of(puts, reads, restarts), max_size=60), st.sampled_from([1, 2]))
def test_everything_comes_once_and_in_the_order_in_which_it_was_put(steps, copies):
    """As long as no server dies, and without ``give_up``."""
    world = World(copies)
    for step in steps:
        world.do(step)
    for _ in range(3):
        world.do((READ, 0, 0))
    assert world.passed == world.put
    assert world.order.lost == 0
    assert not world.order.waiting


@many
@given(st.lists(st.one_of(puts, puts, puts, reads, kills), max_size=60), st.sampled_from([1, 2]))
def test_what_survives_comes_once_and_in_order_and_the_rest_is_counted(steps, copies):
    world = World(copies)
    for step in steps:
        world.do(step)
    world.finish()
    assert world.passed == sorted(set(world.passed), key=int)
    missing = set(world.put) - set(world.passed)
    assert world.order.lost == len(missing)
    assert not world.order.waiting
    if copies == 2 and sum(step[0] == KILL for step in steps) <= 1:
        assert not missing


@many
@given(st.lists(st.one_of(puts, puts, reads, kills, restarts), max_size=60), st.sampled_from([1, 2]))
def test_after_restarts_no_more_is_counted_than_is_lost(steps, copies):
    """A writer that ended puts no later entry that would tell."""
    world = World(copies)
    for step in steps:
        world.do(step)
    world.finish()
    assert world.passed == sorted(set(world.passed), key=int)
    assert world.order.lost <= len(set(world.put) - set(world.passed))
    assert not world.order.waiting
