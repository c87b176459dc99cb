"""What a sink may say to its executor: not now, not yet, and when it commits."""

from typing import ClassVar

import pytest

from penstock import BasicBolt, Delivery, Settings, Spout, TopologyBuilder, TransactionalSink
from penstock.errors import ComponentError, SinkBusy, StateUnavailable
from penstock.plan.model import WorkerId
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore
from penstock.state.store import StateStore
from penstock.testing import LocalRunner
from penstock.worker import rejection
from penstock.worker.handover import take_handover
from tests.helpers import executors_of


class Numbers(Spout):
    def __init__(self, count):
        self.count = count

    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def open(self, conf, context, collector):
        self.collector, self.next, self.acked, self.failed = collector, 0, [], []

    def next_tuple(self):
        if self.next < self.count:
            self.collector.emit([self.next], msg_id=self.next)
            self.next += 1

    def ack(self, msg_id):
        self.acked.append(msg_id)

    def fail(self, msg_id, failure):
        self.failed.append(msg_id)


class Sink(TransactionalSink):
    """Takes what the test lets it take."""

    commit_interval = 0.0

    def prepare(self, conf, context):
        self.open_for, self.busy_for, self.refuses = True, 0, False
        self.asked = self.commits = 0
        self.written, self.committed = [], []

    def recover(self, tokens):
        pass

    def ready(self):
        self.asked += 1
        return self.open_for

    def write(self, batch, source):
        self.written += batch.column(0).to_pylist()

    def prepare_commit(self, epoch):
        if self.busy_for:
            self.busy_for -= 1
            raise SinkBusy("the sink", "takes it later")
        if self.refuses:
            raise ComponentError("the sink", "takes it never")
        self.committed += self.written
        self.written = []
        self.commits += 1

    def commit(self, token):
        raise AssertionError("there was no token")


class Store(Sink):
    """A sink of the user's own, with a server that may be down and a rule that rows may break."""

    down: Exception | None = None
    bad: frozenset[int] = frozenset()
    at = "prepare_commit"
    error: type[Exception] = ComponentError

    def prepare(self, conf, context):
        super().prepare(conf, context)
        self.begun = []

    def _check(self, call, rows):
        if self.down is not None:
            raise self.down
        if call == self.at and self.bad & set(rows):
            error = self.error
            raise error("the sink", "takes it never") if error is ComponentError else error("bad row")

    def write(self, batch, source):
        rows = batch.column(0).to_pylist()
        self._check("write", rows)
        self.begun += rows

    def prepare_commit(self, epoch):
        rows = self.begun
        try:
            self._check("prepare_commit", rows)
        except (OSError, SinkBusy, StateUnavailable):
            raise
        except Exception:
            self.begun = []
            raise
        self.begun = []
        return rows or None

    def commit(self, token):
        self._check("commit", token)
        self.committed += token


class SlowStore(Store):
    commit_interval = 0.5


class EveryHalfSecond(Sink):
    commit_interval = 0.5


@pytest.fixture
def run():
    def start(sink, count=100, message_timeout=1000.0):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(count))
        builder.set_bolt("sink", sink).shuffle_grouping("numbers")
        settings = Settings(delivery=Delivery("at_least_once", message_timeout=message_timeout))
        runner = LocalRunner(builder.build("sinks", settings))
        return runner, runner.component("numbers")[0], runner.component("sink")[0]

    return start


def test_a_sink_without_an_interval_commits_whenever_nothing_waits(run):
    runner, spout, sink = run(Sink())
    runner.run(0.5)
    assert sink.committed == list(range(100))
    assert sink.written == []
    assert spout.acked == list(range(100))
    commits = sink.commits
    runner.run(5.0)
    assert sink.commits == commits, "there was nothing to commit"


def test_tuples_are_acked_only_once_they_are_committed(run):
    runner, spout, sink = run(EveryHalfSecond())
    runner.run(0.3)
    assert sink.written
    assert spout.acked == []
    runner.run(0.5)
    assert spout.acked == sink.committed == list(range(100))


@pytest.mark.parametrize("form", [Sink, EveryHalfSecond])
def test_a_sink_that_is_not_ready_gets_nothing_and_is_asked_again_now_and_then(run, form):
    runner, spout, sink = run(form())
    sink.open_for = False
    runner.run(1.0)
    assert sink.written == sink.committed == spout.acked == []
    assert 50 <= sink.asked <= 110, "about every 10 ms"
    sink.open_for = True
    runner.run(1.0)
    assert sink.committed == spout.acked == list(range(100))


def test_a_sink_at_an_interval_commits_what_it_has_while_it_takes_nothing_more(run):
    runner, spout, sink = run(EveryHalfSecond(), count=10**6)
    runner.run(0.2)
    sink.open_for = False
    taken = len(sink.written)
    assert taken
    runner.run(1.0)
    assert len(sink.committed) == taken == len(spout.acked)


def test_a_busy_sink_keeps_its_tuples_and_is_asked_again(run):
    runner, spout, sink = run(Sink())
    sink.busy_for = 7
    runner.run(0.1)
    assert sink.busy_for > 0
    assert spout.acked == spout.failed == []
    assert len(runner.errors) == 1, "said once, however long it lasts"
    runner.run(2.0)
    assert sink.committed == list(range(100))
    assert sorted(spout.acked) == list(range(100))
    assert spout.failed == []
    assert len(runner.errors) == 1


def test_a_waiting_sink_does_not_turn_idly(run):
    runner, _, sink = run(Sink())
    sink.open_for = False
    runner.run(0.2)
    (executor,) = [executor for executor in executors_of(runner) if executor.component is sink]
    (slot,) = [slot for slot in runner._slots.values() if executor in slot.host.worker.inspect().executors]
    assert executor.busy
    assert not executor.may_run
    assert 0 < slot.host.wait() <= 0.01


def dead_letters(runner, component="sink"):
    store = StateStore(f"{runner._job.dead_letters or runner._job.shared}/{component}/{FOLDER}/0")
    return sorted(dead_letter.record.payload[0] for dead_letter in StateDeadLetterStore(store).read_all())


AWAY = [
    OSError(28, "No space left on device"),
    ConnectionRefusedError("no server"),
    SinkBusy("the sink", "takes it later"),
    StateUnavailable("the state store", "it did not write (an error of an object store's client)"),
    RuntimeError("a client library's own error"),
]


@pytest.mark.parametrize("form", [Store, SlowStore])
@pytest.mark.parametrize("down", AWAY, ids=lambda error: type(error).__name__)
def test_a_sink_that_is_away_is_waited_for_and_no_tuple_fails(run, form, down):
    runner, spout, sink = run(form(), message_timeout=0.5)
    sink.down = down
    runner.run(2.0)
    assert spout.acked == spout.failed == []
    assert len(runner.errors) == 1, "said once"
    (stats,) = runner.stats("sink")
    assert 1.5 < stats.away <= 2.0
    sink.down = None
    runner.run(1.5)
    assert sorted(sink.committed) == sorted(spout.acked) == list(range(100))
    assert spout.failed == []
    assert runner.stats("sink")[0].away == 0
    assert dead_letters(runner) == []


@pytest.mark.parametrize("call", ["write", "prepare_commit", "commit"])
@pytest.mark.parametrize("error", [ComponentError, ValueError])
@pytest.mark.parametrize("form", [Store, SlowStore])
def test_a_row_that_a_sink_rejects_is_a_dead_letter_alone(run, form, error, call):
    runner, spout, sink = run(form())
    sink.bad, sink.at, sink.error = frozenset({0, 41, 42, 99}), call, error
    runner.run(3.0)
    assert dead_letters(runner) == [0, 41, 42, 99]
    assert sorted(sink.committed) == [n for n in range(100) if n not in sink.bad]
    assert sorted(spout.acked) == list(range(100))
    assert spout.failed == []
    assert runner.stats("sink")[0].given_up == 4
    assert runner.stats("sink")[0].written == 96
    assert "rejected" in str(runner.errors[-1])


def test_a_sink_that_takes_nothing_and_does_not_say_why_is_waited_for_however_long(run, monkeypatch):
    monkeypatch.setattr(rejection, "TRIES", 3)
    runner, spout, sink = run(Store(), count=5)
    sink.bad, sink.error = frozenset(range(5)), ValueError
    runner.run(8.0)
    assert dead_letters(runner) == spout.acked == spout.failed == []
    assert runner.stats("sink")[0].away > 7
    sink.bad = frozenset()
    runner.run(3.0)
    assert sorted(sink.committed) == sorted(spout.acked) == list(range(5))


@pytest.mark.parametrize("call", ["write", "prepare_commit", "commit"])
@pytest.mark.parametrize("form", [Store, SlowStore])
def test_an_outage_in_the_middle_of_a_search_makes_no_dead_letters(run, form, call, monkeypatch):
    """Row 30 is bad; once some rows are taken the server goes down with an error of its own kind, for longer than
    anything is tried."""
    monkeypatch.setattr(rejection, "TRIES", 3)
    runner, spout, sink = run(form())
    sink.bad, sink.at, sink.error = frozenset({30}), call, ValueError
    check, taken = sink._check, []

    def check_and_fail(name, rows):
        check(name, rows)
        if name == call and rows and not taken:
            taken.extend(rows)
            sink.down = RuntimeError("a client library's own error")

    sink._check = check_and_fail
    runner.run(10.0)
    assert 0 < len(taken) < 100, "or this shows nothing"
    assert dead_letters(runner) == []
    sink.down = None
    runner.run(6.0)
    assert dead_letters(runner) == [30]
    assert sorted(sink.committed) == [n for n in range(100) if n != 30]
    assert sorted(spout.acked) == list(range(100))
    assert spout.failed == []


@pytest.mark.parametrize("call", ["write", "prepare_commit", "commit"])
@pytest.mark.parametrize("form", [Store, SlowStore])
def test_a_bad_row_that_is_alone_is_a_dead_letter_as_soon_as_others_are_taken(run, form, call):
    runner, spout, sink = run(form(), count=1)
    sink.bad, sink.at, sink.error = frozenset({0}), call, ValueError
    runner.run(2.0)
    assert dead_letters(runner) == spout.acked == []
    spout.count = 50
    runner.run(2.5)
    assert dead_letters(runner) == [0]
    assert sorted(sink.committed) == list(range(1, 50))
    assert sorted(spout.acked) == list(range(50))
    (stats,) = runner.stats("sink")
    assert (stats.executed, stats.written, stats.given_up, stats.away) == (50, 49, 1, 0)


@pytest.mark.parametrize("bad", [{98, 99}, {*range(10, 20)}, {0, 1, 2, 3, 4}, {*range(0, 100, 2)}])
@pytest.mark.parametrize("call", ["write", "commit"])
def test_bad_rows_side_by_side_are_found(run, bad, call, monkeypatch):
    monkeypatch.setattr(rejection, "TRIES", 8)
    runner, _, sink = run(Store())
    sink.bad, sink.at, sink.error = frozenset(bad), call, ValueError
    runner.run(4.0)
    assert dead_letters(runner) == sorted(bad)
    assert sorted(sink.committed) == [n for n in range(100) if n not in bad]


def test_a_sink_that_is_away_when_the_topology_starts_is_waited_for(run):
    class Late(Store):
        tries = 0

        def recover(self, tokens):
            Late.tries += 1
            if Late.tries < 5:
                raise ConnectionRefusedError("no server")

    runner, spout, sink = run(Late())
    runner.run(3.0)
    assert Late.tries == 5
    assert sorted(sink.committed) == sorted(spout.acked) == list(range(100))


def test_a_rejected_row_waits_until_its_dead_letter_is_stored(run, monkeypatch):
    runner, spout, sink = run(Store())
    sink.bad, sink.at = frozenset({7}), "write"
    add = StateDeadLetterStore.add

    def full(self, records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateDeadLetterStore, "add", full)
    runner.run(2.0)
    assert spout.acked == spout.failed == []
    monkeypatch.setattr(StateDeadLetterStore, "add", add)
    runner.run(2.0)
    assert dead_letters(runner) == [7]
    assert sorted(spout.acked) == list(range(100))


class Counted(Numbers):
    """Knows after a restart where it was."""

    def open(self, conf, context, collector):
        super().open(conf, context, collector)
        self.position = context.state.value("next", 0)
        self.next = self.position.value

    def before_snapshot(self):
        self.position.value = self.next


@pytest.fixture
def exactly_once(tmp_path):
    def start(sink, count=100):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Counted(count))
        builder.set_bolt("sink", sink).shuffle_grouping("numbers")
        topology = builder.build("sinks", Settings(delivery=Delivery("exactly_once", epoch_interval=0.5)))
        runner = LocalRunner(topology, folder=str(tmp_path))
        return runner, runner.component("sink")[0]

    return start


@pytest.mark.parametrize("down", AWAY[:4], ids=lambda error: type(error).__name__)
def test_exactly_once_a_sink_that_is_away_is_waited_for(exactly_once, down):
    """Whether it fails in ``write`` (at first) or ``prepare_commit`` or ``commit`` (later)."""
    runner, sink = exactly_once(Store())
    sink.down = down
    runner.run(2.0)
    assert runner.commits.committed == 0
    assert len(runner.errors) == 1
    sink.down = None
    runner.run(3.0)
    assert sink.committed == list(range(100))
    runner.component("numbers")[0].count = 200
    runner.run(0.1)
    sink.down = down
    runner.run(3.0)
    sink.down = None
    runner.run(3.0)
    assert sink.committed == list(range(200))
    assert dead_letters(runner) == []


@pytest.mark.parametrize("error", [ComponentError, ValueError])
def test_exactly_once_a_row_that_a_sink_rejects_is_a_dead_letter_alone(exactly_once, error):
    runner, sink = exactly_once(Store())
    sink.bad, sink.at, sink.error = frozenset({0, 41, 42, 99}), "write", error
    runner.run(3.0)
    assert dead_letters(runner) == [0, 41, 42, 99]
    assert sink.committed == [n for n in range(100) if n not in sink.bad]
    assert runner.stats("sink")[0].written == 96


def test_exactly_once_what_was_prepared_stays_in_the_manifests_while_the_sink_is_away_at_the_start(exactly_once):
    class Late(Store):
        away, recovered = False, []

        def recover(self, tokens):
            if Late.away:
                raise ConnectionRefusedError("no server")
            Late.recovered += [row for token in tokens for row in token]

    first, sink = exactly_once(Late())
    first.run(0.1)
    sink.commit = lambda token: (_ for _ in ()).throw(ConnectionRefusedError("no server"))
    first.run(2.0)
    assert first.commits.committed >= 1, "prepared, committed, and not published"
    Late.away = True
    for _ in range(2):  # it does not come back in the second start either
        again, _ = exactly_once(Late())
        again.run(3.0)
        assert again.commits.committed > first.commits.committed
    Late.away = False
    again.run(3.0)
    assert Late.recovered == list(range(100))


class UntilTick(BasicBolt):
    """Keeps what comes, and emits it at its tick: then it has it no more."""

    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def prepare(self, conf, context):
        self.kept = context.state.value("kept", [])

    def execute(self, tup, collector):
        if not tup.is_tick:
            self.kept.value = [*self.kept.value, tup.n]
            return
        kept, self.kept.value = self.kept.value, []
        for n in kept:
            collector.emit([n])


def test_exactly_once_a_tick_does_not_fall_between_what_two_sinks_of_a_worker_prepare(tmp_path):
    """One sink has prepared the epoch, the other is away. What a tick emits now would be in the first one's next
    transaction, and in this epoch's state as emitted: a crash after the epoch would lose it."""

    class Shared(Store):
        published: ClassVar[list[int]] = []

        def recover(self, tokens):
            for token in tokens:
                self.commit(token)

        def commit(self, token):
            Shared.published.extend(token)

    def start():
        builder = TopologyBuilder()
        builder.set_spout("numbers", Counted(100))
        builder.set_bolt("keeps", UntilTick()).local_or_shuffle_grouping("numbers").set_tick_interval(2.0)
        builder.set_bolt("ready", Shared()).local_or_shuffle_grouping("keeps")
        builder.set_bolt("away", Store()).local_or_shuffle_grouping("numbers")
        topology = builder.build("sinks", Settings(delivery=Delivery("exactly_once", epoch_interval=1.0)))
        return LocalRunner(topology, folder=str(tmp_path))

    first = start()
    assert len(first.plan.worker_ids()) == 1, "all in one worker, or this shows nothing"
    first.run(0.5)
    first.component("away")[0].down = ConnectionRefusedError("no server")
    first.run(2.0)
    assert first.commits.committed == 0
    first.component("away")[0].down = None
    while not first.commits.committed:
        first.run(0.001)
    again = start()  # the first one died
    again.run(5.0)
    assert sorted(Shared.published) == list(range(100))


@pytest.mark.parametrize("form", [Store, SlowStore])
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_rows_of_a_sink_that_moves_are_counted(tmp_path, form, delivery):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Counted(100))
    builder.set_bolt("sink", form()).shuffle_grouping("numbers")
    runner = LocalRunner(builder.build("sinks", Settings(delivery=Delivery(delivery))), folder=str(tmp_path))
    runner.run(0.02)
    old = runner.component("sink")[0]
    assert runner.move(WorkerId(1, 0))
    runner.run(1.0)
    assert old.committed == list(range(100))
    assert runner.stats("sink")[0].written == 100


def test_exactly_once_what_a_sink_publishes_after_its_worker_has_left_is_counted(exactly_once):
    runner, sink = exactly_once(Store())
    sink.commit = lambda token: (_ for _ in ()).throw(ConnectionRefusedError("no server"))
    runner.run(2.0)
    assert runner.commits.committed
    assert runner.stats("sink")[0].written == 0
    worker = runner.workers[WorkerId(1, 0)]
    state = take_handover(
        1, worker.inspect().stats, worker._tasks, worker._flow, worker.intake.detectors, worker._sender
    )
    (task,) = state.tasks.values()
    assert task.stats.written == 100


class Scripted(Store):
    """Raises what the test has put down for the next calls of ``at``, before it looks at the rows."""

    def prepare(self, conf, context):
        super().prepare(conf, context)
        self.script = []

    def _check(self, call, rows):
        if call == self.at and rows and self.script:
            raise self.script.pop(0)
        super()._check(call, rows)


class SlowScripted(Scripted):
    commit_interval = 0.5


@pytest.mark.parametrize("call", ["prepare_commit", "commit"])
@pytest.mark.parametrize("away", AWAY[:2], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("form", [Scripted, SlowScripted])
def test_rows_that_come_while_a_piece_is_half_committed_are_not_taken_for_it(run, form, away, call):
    """A row alone fails for an unknown reason; the next time it is written, and the sink goes away before it is
    committed. The rows that come now are another piece."""
    runner, spout, sink = run(form(), count=1)
    sink.at, sink.script = call, [RuntimeError("HTTP 500"), away]
    while sink.script:
        runner.run(0.001)
    assert sink.committed == []
    spout.count = 3
    runner.run(5.0)
    assert sorted(sink.committed) == sorted(spout.acked) == [0, 1, 2]
    assert dead_letters(runner) == spout.failed == []


@pytest.mark.parametrize("form", [Store, SlowStore])
@pytest.mark.parametrize("call", ["write", "commit"])
@pytest.mark.parametrize("error", [ComponentError, ValueError])
def test_a_parcel_whose_rows_are_all_rejected_is_acked(run, form, error, call, monkeypatch):
    monkeypatch.setattr(rejection, "TRIES", 8)
    runner, spout, sink = run(form(), count=1)
    runner.run(1.0)
    sink.bad, sink.at, sink.error = frozenset({1, 2}), call, error
    spout.count = 3
    runner.run(5.0)
    assert dead_letters(runner) == [1, 2]
    assert sorted(spout.acked) == [0, 1, 2]
    assert spout.failed == []


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_exactly_once_bad_rows_at_the_end_of_an_epoch_do_not_stop_the_topology(exactly_once, rows, monkeypatch):
    """The rows behind them belong to the next epoch, and do not come before this one has ended."""
    monkeypatch.setattr(rejection, "TRIES", 8)
    runner, sink = exactly_once(Store(), count=10)
    runner.run(1.0)
    sink.bad, sink.at, sink.error = frozenset(range(10, 10 + rows)), "write", ValueError
    spout = runner.component("numbers")[0]
    spout.count = 10 + rows
    runner.run(1.0)
    assert runner.stats("sink")[0].away > 0
    spout.count = 50
    runner.run(20.0)
    assert dead_letters(runner) == sorted(sink.bad)
    assert sink.committed == [n for n in range(50) if n not in sink.bad]


def test_exactly_once_a_sink_that_has_never_taken_anything_is_waited_for(exactly_once, monkeypatch):
    monkeypatch.setattr(rejection, "TRIES", 3)
    runner, sink = exactly_once(Store(), count=1)
    sink.bad, sink.at, sink.error = frozenset({0}), "write", ValueError
    runner.run(8.0)
    assert dead_letters(runner) == []
    assert runner.stats("sink")[0].away > 7
    sink.bad = frozenset()
    runner.run(3.0)
    assert sink.committed == [0]


def test_a_sink_that_has_committed_nothing_has_taken_nothing_whatever_it_wrote(run, monkeypatch):
    monkeypatch.setattr(rejection, "TRIES", 3)
    runner, _, sink = run(SlowStore(), count=1)
    sink.bad, sink.error = frozenset({0}), ValueError
    runner.run(8.0)
    assert dead_letters(runner) == []


@pytest.mark.parametrize("write", ["away", "in doubt"])
def test_a_commit_in_doubt_tries_the_parcel_that_waits_to_be_written(run, write):
    """Row 0 is written and will never be committed. The sink does not take row 1 in ``write`` until after the
    commit has begun."""
    runner, spout, sink = run(SlowStore(), count=1)
    sink.bad, sink.error = frozenset({0}), ValueError
    runner.run(0.1)
    assert sink.begun == [0]
    write_rows, until = sink.write, runner.clock.now() + 0.6

    def late(batch, source):
        if 1 in batch.column(0).to_pylist() and runner.clock.now() < until:
            raise OSError("a blip") if write == "away" else RuntimeError("a client library's own error")
        write_rows(batch, source)

    sink.write = late
    spout.count = 2
    runner.run(10.0)
    spout.count = 20
    runner.run(5.0)
    assert dead_letters(runner) == [0]
    assert sorted(sink.committed) == list(range(1, 20))
    assert sorted(spout.acked) == list(range(20))
    (stats,) = runner.stats("sink")
    assert (stats.executed, stats.written, stats.given_up, stats.away) == (20, 19, 1, 0)


def test_what_a_refused_piece_left_in_the_open_transaction_blames_no_other_row(run):
    """Three parcels are one transaction; it is refused because of row 0. When it is offered in parts, ``write``
    fails for an unknown reason after row 0's parcel was written again: that is still in the transaction."""
    runner, spout, sink = run(SlowStore(), count=1)
    sink.bad = frozenset({0})
    for count in (2, 3, 4):
        runner.run(0.05)
        spout.count = count
    runner.run(0.1)
    assert sink.begun == [0, 1, 2, 3]
    write_rows, writes = sink.write, []

    def failing(batch, source):
        writes.extend(batch.column(0).to_pylist())
        if writes == [0, 1] or (writes[:2] == [0, 1] and runner.clock.now() < until):
            raise RuntimeError("a client library's own error")
        write_rows(batch, source)

    sink.write, until = failing, runner.clock.now() + 1.0
    runner.run(8.0)
    assert writes[:2] == [0, 1], "or this shows nothing"
    assert dead_letters(runner) == [0]
    assert sorted(sink.committed) == [1, 2, 3]
    assert sorted(spout.acked) == [0, 1, 2, 3]
