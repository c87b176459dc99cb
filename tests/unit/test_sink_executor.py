"""What a sink may say to its executor: not now, not yet, and when it commits."""

import pytest

from penstock import Settings, Spout, TopologyBuilder, TransactionalSink
from penstock.errors import ComponentError, SinkBusy
from penstock.testing import LocalRunner


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


class EveryHalfSecond(Sink):
    commit_interval = 0.5


@pytest.fixture
def run():
    def start(sink, count=100):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(count))
        builder.set_bolt("sink", sink).shuffle_grouping("numbers")
        runner = LocalRunner(builder.build("sinks", Settings(delivery="at_least_once", message_timeout=1000.0)))
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
    sink.busy_for = 20
    runner.run(0.1)
    assert sink.busy_for > 0
    assert spout.acked == spout.failed == []
    assert len(runner.errors) == 1, "said once, however long it lasts"
    runner.run(1.0)
    assert sink.committed == list(range(100))
    assert sorted(spout.acked) == list(range(100))
    assert spout.failed == []


def test_what_a_sink_refuses_fails(run):
    runner, spout, sink = run(Sink())
    sink.refuses = True
    runner.run(0.5)
    assert spout.acked == []
    assert spout.failed == list(range(100))


def test_a_waiting_sink_does_not_turn_idly(run):
    runner, _, sink = run(Sink())
    sink.open_for = False
    runner.run(0.2)
    (executor,) = [e for slot in runner._slots.values() for e in slot.executors if e.component is sink]
    slot = next(slot for slot in runner._slots.values() if executor in slot.executors)
    assert executor.busy
    assert not executor.may_run
    assert 0 < slot.idle_for() <= 0.01
