"""The workers' code under the local runner: forms of components, time, life cycle, queues, order."""

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from penstock import (
    BasicBolt,
    BatchBolt,
    FieldCountError,
    Flow,
    RichBolt,
    Settings,
    ShowBolt,
    SimulatedClock,
    Spout,
    TopologyBuilder,
    TopologyError,
    Transport,
)
from penstock.plan.model import WorkerId
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner, NumberSpout, run_bolt, run_spout
from tests.helpers import (
    BatchFeeder,
    BatchPass,
    CaptureBatches,
    Pass,
    RichPass,
    line_topology,
    per_task,
    reports_of,
    run_rows,
)

CLOCK = SimulatedClock()
"""The clock of tests whose components let time pass; each test takes it on from where it stands."""


# ---- forms of components ---------------------------------------------------------------------------------

ORDERS = [
    (Pass, RichPass, BatchPass),
    (BatchPass, RichPass, Pass),
    (BatchPass, BatchPass, Pass),
    (RichPass, Pass, Pass),
]


@pytest.mark.parametrize("forms", ORDERS, ids=lambda forms: "-".join(form.__name__ for form in forms))
@pytest.mark.parametrize("fields", [("n", "word"), (("n", int), ("word", str))], ids=["untyped", "typed"])
@pytest.mark.parametrize("local", [False, True], ids=["hops", "fused"])
def test_all_forms_of_bolts_mix(forms, fields, local):
    rows = [(n, f"word {n}") for n in range(500)]
    bolts = [form(*fields) for form in forms]
    settings = Settings(transport=Transport(frame_bytes=1000))
    runner = LocalRunner(
        line_topology(FeederSpout(*fields, rows=rows), *bolts, CaptureBolt(), local=local, settings=settings)
    )
    runner.run_until_idle()
    assert runner.captured("b4") == rows
    assert [stats.executed for name in ("b1", "b2", "b3", "b4") for stats in runner.stats(name)] == [500] * 4
    assert runner.errors == []


@pytest.mark.parametrize("form", [Pass, RichPass, BatchPass])
def test_values_of_any_type_arrive_as_they_were_sent(form):
    rows = [(1,), (1.0,), (True,), ("a",), (None,), ({"k": [1, (2, 3)]},), (2**80,), (b"\x00",), ("\ud800",)]
    runner = run_rows(["x"], rows, form("x"))
    got = runner.captured("b2")
    assert got == rows
    assert [type(tup[0]) for tup in got] == [type(row[0]) for row in rows]


def test_a_batch_spout_feeds_tuple_bolts():
    batches = [
        pa.RecordBatch.from_pydict({"word": ["a", "b"], "n": [1, 2]}),
        {"n": [3], "word": ["c"]},
        (["d"], pa.chunked_array([[4], []])),
    ]
    runner = LocalRunner(line_topology(BatchFeeder("word", ("n", int), batches=batches), CaptureBolt()))
    runner.run_until_idle()
    assert runner.captured("b1") == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert runner.captured("b1")[2].word == "c"


def test_a_record_batch_is_read_by_its_names():
    batch = pa.RecordBatch.from_pydict({"last": ["Lovelace"], "first": ["Ada"]})
    runner = LocalRunner(line_topology(BatchFeeder("first", "last", batches=[batch]), CaptureBolt()))
    runner.run_until_idle()
    (tup,) = runner.captured("b1")
    assert (tup.first, tup.last) == ("Ada", "Lovelace")


def test_numpy_columns_arrive_as_plain_values():
    batch = {"n": np.arange(3), "x": np.array([0.5, 1.5, 2.5])}
    runner = LocalRunner(line_topology(BatchFeeder("n", "x", batches=[batch]), CaptureBolt()))
    runner.run_until_idle()
    assert runner.captured("b1") == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert {type(value) for tup in runner.captured("b1") for value in tup} == {int, float}


def test_declared_types_hold_when_the_inferred_ones_differ_from_batch_to_batch():
    batches = [{"n": [1, 2], "any": ["a", "b"]}, {"n": [3], "any": [4]}]
    spout = BatchFeeder(("n", pa.int32()), "any", batches=batches, at_once=2)
    runner = LocalRunner(line_topology(spout, CaptureBatches()))
    runner.run_until_idle()
    got = [batch for batch, _ in runner.component("b1")[0].batches]
    assert [value for batch in got for value in batch.column("n").to_pylist()] == [1, 2, 3]
    assert {batch.schema.field("n").type for batch in got} == {pa.int32()}


def test_a_batch_knows_its_source():
    topology = line_topology(FeederSpout("x", rows=[(1,), (2,)]), CaptureBatches())
    runner = LocalRunner(topology)
    runner.run_until_idle()
    (batch, source) = runner.component("b1")[0].batches[0]
    assert (source.component, source.stream, source.task) == ("spout", "default", 1)
    assert batch.schema.names == ["x"]


class Splitter(BasicBolt):
    """Even numbers on the default stream, odd ones on ``odd``."""

    def declare_output_fields(self, declarer):
        declarer.declare("n")
        declarer.declare("n", "text", stream="odd")

    def execute(self, tup, collector):
        if tup.n % 2:
            collector.emit([tup.n, str(tup.n)], stream="odd")
        else:
            collector.emit([tup.n])


def test_several_streams_go_their_own_ways():
    builder = TopologyBuilder()
    builder.set_spout("n", FeederSpout("n", rows=[(n,) for n in range(6)]))
    builder.set_bolt("split", Splitter()).shuffle_grouping("n")
    builder.set_bolt("even", CaptureBolt()).shuffle_grouping("split")
    builder.set_bolt("odd", CaptureBolt()).shuffle_grouping("split", stream="odd")
    builder.set_bolt("both", CaptureBolt()).shuffle_grouping("split").shuffle_grouping("split", stream="odd")
    runner = LocalRunner(builder.build("t"))
    runner.run_until_idle()
    assert runner.captured("even") == [(0,), (2,), (4,)]
    assert runner.captured("odd") == [(1, "1"), (3, "3"), (5, "5")]
    assert Counter(tup.source_stream for tup in runner.captured("both")) == {"default": 3, "odd": 3}
    assert (runner.stats("split")[0].emitted, runner.stats("split")[0].sent) == (6, 12)


class Knows(CaptureBolt):
    def prepare(self, conf, context):
        self.conf, self.context = conf, context


def test_context_and_conf_reach_every_task():
    settings = Settings(conf={"limit": 3})
    runner = LocalRunner(line_topology(FeederSpout("x"), Knows(), parallelism=2, settings=settings))
    bolts = runner.component("b1")
    assert [(bolt.context.task, bolt.context.index) for bolt in bolts] == [(3, 0), (4, 1)]
    assert all(bolt.context.tasks == {"spout": (1, 2), "b1": (3, 4)} for bolt in bolts)
    assert all((bolt.context.parallelism, bolt.context.topology) == (2, "line") for bolt in bolts)
    assert bolts[0].conf == {"limit": 3}


# ---- ticks -----------------------------------------------------------------------------------------------


class TickTuples(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("kind", "when")

    def execute(self, tup, collector):
        collector.emit(["tick" if tup.is_tick else tup[0], CLOCK.now()])


class RichTicks(RichBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("kind", "when")

    def prepare(self, conf, context, collector):
        self._collector = collector

    def execute(self, tup):
        self._collector.emit(["tick" if tup.is_tick else tup[0], CLOCK.now()])


class TickBatches(BatchBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("kind", "when")

    def execute_batch(self, batch, source, collector):
        collector.emit_batch([batch.column(0), [CLOCK.now()] * batch.num_rows])

    def tick(self, collector):
        collector.emit_batch({"kind": ["tick"], "when": [CLOCK.now()]})


def ticking(bolt, interval, rows=()):
    builder = TopologyBuilder()
    builder.set_spout("spout", FeederSpout("x", rows=rows))
    builder.set_bolt("ticks", bolt).shuffle_grouping("spout").set_tick_interval(interval)
    builder.set_bolt("sink", CaptureBolt()).shuffle_grouping("ticks")
    return LocalRunner(builder.build("t"), clock=CLOCK)


@pytest.mark.parametrize("form", [TickTuples, RichTicks, TickBatches])
def test_ticks_come_at_their_interval(form):
    runner = ticking(form(), 0.25, rows=[("a",)])
    start = CLOCK.now()
    runner.run(1.1)
    got = runner.captured("sink")
    assert [tup.kind for tup in got] == ["a", "tick", "tick", "tick", "tick"]
    assert [tup.when - start for tup in got[1:]] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.002)
    assert runner.stats("ticks")[0].executed == 1


def test_no_ticks_without_an_interval():
    runner = LocalRunner(line_topology(FeederSpout("x", rows=[("a",)]), TickTuples(), CaptureBolt()), clock=CLOCK)
    runner.run(3.0)
    assert [tup.kind for tup in runner.captured("b2")] == ["a"]


class SlowTicks(CaptureBolt):
    def execute(self, tup, collector):
        self.tuples.append("tick" if tup.is_tick else tup.x)
        if not tup.is_tick:
            CLOCK.advance(1.0)


def test_ticks_missed_while_busy_are_not_made_up_for():
    builder = TopologyBuilder()
    builder.set_spout("spout", FeederSpout("x", rows=[("slow",)]))
    builder.set_bolt("bolt", SlowTicks()).shuffle_grouping("spout").set_tick_interval(0.1)
    runner = LocalRunner(builder.build("t"), clock=CLOCK)
    runner.run(0.05)  # one second for the tuple
    runner.run(0.001)
    assert runner.component("bolt")[0].tuples == ["slow", "tick"]


# ---- life cycle ------------------------------------------------------------------------------------------


class LifeSpout(FeederSpout):
    def __init__(self, *fields, rows=()):
        super().__init__(*fields, rows=rows)
        self.calls = []

    def open(self, conf, context, collector):
        super().open(conf, context, collector)
        self.calls.append("open")

    def activate(self):
        self.calls.append("activate")

    def deactivate(self):
        self.calls.append("deactivate")

    def close(self):
        self.calls.append("close")
        raise RuntimeError("close fails")


class LifeBolt(CaptureBolt):
    closed = 0

    def cleanup(self):
        self.closed += 1
        raise RuntimeError("cleanup fails")


def test_activate_and_deactivate():
    runner = LocalRunner(line_topology(LifeSpout("x"), CaptureBolt()))
    runner.feed("spout", [(1,)])
    runner.run_until_idle()
    runner.deactivate()
    runner.deactivate()
    runner.feed("spout", [(2,)])
    runner.run(0.1)
    assert runner.captured("b1") == [(1,)]
    runner.activate()
    runner.run_until_idle()
    assert runner.captured("b1") == [(1,), (2,)]
    assert runner.component("spout")[0].calls == ["open", "activate", "deactivate", "activate"]


def test_what_was_emitted_before_deactivate_still_arrives():
    runner = LocalRunner(
        line_topology(FeederSpout("x"), CaptureBolt(), settings=Settings(transport=Transport(5.0)))
    )
    runner.feed("spout", [(n,) for n in range(10)])
    runner.run(0.005)
    emitted = len(runner.component("spout")[0].acked)
    runner.deactivate()
    runner.run_until_idle()
    assert emitted > 0
    assert runner.captured("b1") == [(n,) for n in range(emitted)]


@pytest.mark.parametrize("local", [False, True])
def test_close_reaches_all_also_when_one_raises(local):
    runner = LocalRunner(line_topology(LifeSpout("x"), LifeBolt(), parallelism=2, local=local))
    runner.close()
    assert [spout.calls[-1] for spout in runner.component("spout")] == ["close"] * 2
    assert [bolt.closed for bolt in runner.component("b1")] == [1, 1]
    texts = [str(error) for error in runner.errors]
    assert sum("component 'spout'" in text and "RuntimeError: close fails" in text for text in texts) == 2
    assert sum("component 'b1'" in text and "RuntimeError: cleanup fails" in text for text in texts) == 2


# ---- acks ------------------------------------------------------------------------------------------------


class AckingBolt(RichBolt):
    def prepare(self, conf, context, collector):
        self._collector = collector

    def execute(self, tup):
        (self._collector.fail if tup.n % 3 == 0 else self._collector.ack)(tup)


def test_rich_acks_and_fails_are_counted():
    runner = LocalRunner(line_topology(NumberSpout(10), AckingBolt()))
    runner.run_until_idle()
    assert (runner.stats("b1")[0].acked, runner.stats("b1")[0].failed) == (6, 4)


def test_each_message_id_is_acked_once():
    rows = [(n,) for n in range(300)]
    runner = LocalRunner(line_topology(FeederSpout("n", rows=rows), CaptureBolt(), parallelism=2))
    runner.run_until_idle()
    runner.run(0.1)
    acked = [id for spout in runner.component("spout") for id in spout.acked]
    assert sorted(acked) == rows
    assert sum(stats.acked for stats in runner.stats("spout")) == 300
    assert not any(spout.failed for spout in runner.component("spout"))


class Untracked(FeederSpout):
    def next_tuple(self):
        if self._rows:
            self._collector.emit(self._rows.popleft())


def test_a_tuple_without_a_message_id_is_not_tracked():
    runner = LocalRunner(line_topology(Untracked("n", rows=[(1,), (2,)]), CaptureBolt()))
    runner.run_until_idle()
    assert len(runner.captured("b1")) == 2
    assert runner.component("spout")[0].acked == []
    assert runner.stats("spout")[0].acked == 0


class EmitsWhenAcked(FeederSpout):
    def ack(self, msg_id):
        if msg_id != ("again",):
            self._collector.emit(("again",), msg_id=("again",))


class EmitsWhenActivated(FeederSpout):
    def activate(self):
        self._collector.emit(("hello",))


class EmitsInPrepare(RichPass):
    def prepare(self, conf, context, collector):
        super().prepare(conf, context, collector)
        collector.emit(["hello"])


def test_a_spout_may_emit_in_ack():
    runner = LocalRunner(line_topology(EmitsWhenAcked("x", rows=[("first",)]), CaptureBolt()))
    runner.run(0.1)
    assert runner.captured("b1") == [("first",), ("again",)]


def test_a_spout_may_emit_in_activate():
    runner = LocalRunner(line_topology(EmitsWhenActivated("x"), CaptureBolt()))
    runner.run(0.1)
    assert runner.captured("b1") == [("hello",)]


def test_a_rich_bolt_may_emit_in_prepare():
    runner = LocalRunner(line_topology(FeederSpout("x"), EmitsInPrepare("x"), CaptureBolt()))
    runner.run(0.1)
    assert runner.captured("b2") == [("hello",)]


# ---- queues ----------------------------------------------------------------------------------------------


class SlowBatches(BatchBolt):
    """A millisecond a tuple."""

    def __init__(self):
        self.largest, self.seen = 0, []

    def execute_batch(self, batch, source, collector):
        self.largest = max(self.largest, batch.num_rows)
        self.seen += batch.column("n").to_pylist()
        CLOCK.advance(0.001 * batch.num_rows)


class SlowTuples(CaptureBolt):
    def execute(self, tup, collector):
        super().execute(tup, collector)
        CLOCK.advance(0.001)


@pytest.mark.parametrize("capacity", [1, 100, 1000])
def test_the_inbox_bounds_what_waits(capacity):
    settings = Settings(flow=Flow("none", inbox_capacity=capacity), transport=Transport(frame_bytes=2000))
    runner = LocalRunner(line_topology(NumberSpout(5000), SlowBatches(), settings=settings), clock=CLOCK)
    (bolt,), longest = runner.component("b1"), 0
    while len(bolt.seen) < 5000:
        runner.run(0.001)
        longest = max(longest, runner.stats("b1")[0].queued)
    assert longest <= capacity + bolt.largest
    if capacity > bolt.largest:  # else each frame is gone before the next is let in
        assert longest >= capacity / 2
    assert bolt.seen == list(range(5000))


def test_a_slow_bolt_holds_back_the_spout_it_is_fused_with():
    """One worker, so there is no channel to fill: the spout must not run while its receiver's inbox is full.
    Between two looks at the clock it may make 4,096 calls."""
    runner = LocalRunner(
        line_topology(
            NumberSpout(40_000), SlowTuples(), local=True, settings=Settings(flow=Flow(inbox_capacity=100))
        ),
        clock=CLOCK,
    )
    longest = 0
    for _ in range(200):
        runner.run(0.001)
        longest = max(longest, runner.stats("b1")[0].queued)
    assert longest <= 100 + 2 * 4096


def test_fused_components_exchange_no_frames():
    topology = line_topology(NumberSpout(100), Pass("task", "n"), CaptureBolt(), parallelism=3, local=True)
    runner = LocalRunner(topology)
    runner.run_until_idle()
    assert list(reports_of(runner)) == [WorkerId(0, 0), WorkerId(0, 1), WorkerId(0, 2)]
    assert [worker.frames_sent for worker in reports_of(runner).values()] == [0, 0, 0]
    for task, got in enumerate(per_task(runner, "b2"), 1):
        assert got == [(task, n) for n in range(100)]


def test_without_fusing_the_same_topology_sends_frames():
    topology = line_topology(
        NumberSpout(100), CaptureBolt(), local=True, settings=Settings(transport=Transport(fusing=False))
    )
    runner = LocalRunner(topology)
    runner.run_until_idle()
    assert reports_of(runner)[WorkerId(0, 0)].frames_sent > 0
    assert len(runner.captured("b1")) == 100


# ---- time ------------------------------------------------------------------------------------------------


class Arrivals(CaptureBolt):
    def execute(self, tup, collector):
        self.tuples.append(CLOCK.now())


@pytest.mark.parametrize("linger", [0.0, 0.002, 0.05])
def test_a_single_tuple_leaves_at_once(linger):
    runner = LocalRunner(
        line_topology(FeederSpout("x"), Arrivals(), settings=Settings(transport=Transport(linger))), clock=CLOCK
    )
    runner.run(0.1)
    start = CLOCK.now()
    runner.feed("spout", [("x",)])
    runner.run(0.2)
    (arrived,) = runner.component("b1")[0].tuples
    assert arrived - start <= 0.003  # a pause of the spout and some turns


def test_tuples_wait_for_company():
    runner = LocalRunner(
        line_topology(FeederSpout("x"), CaptureBolt(), settings=Settings(transport=Transport(0.05)))
    )
    for n in range(5):
        runner.feed("spout", [(n,)])
        runner.run(0.005)
    runner.run_until_idle()
    assert reports_of(runner)[WorkerId(0, 0)].frames_sent == 2, "the first at once, the others together"
    assert runner.captured("b1") == [(n,) for n in range(5)]


def test_latency_is_measured_from_the_spout():
    runner = LocalRunner(line_topology(NumberSpout(100), SlowBatches()), clock=CLOCK)
    runner.run_until_idle()
    stats = runner.stats("b1")[0]
    assert 0.01 <= stats.latency.percentile(0.01) <= 0.02, "a small first frame leaves at once"
    assert 0.08 <= stats.latency.percentile(0.99) <= 0.15
    assert stats.busy == pytest.approx(0.1)


# ---- order -----------------------------------------------------------------------------------------------


def merged(seed):
    builder = TopologyBuilder()
    builder.set_spout("numbers", NumberSpout(40), 3)
    builder.set_bolt("pass", Pass("task", "n"), 3).shuffle_grouping("numbers")
    builder.set_bolt("sink", CaptureBolt()).global_grouping("pass").global_grouping("numbers")
    runner = LocalRunner(builder.build("t", Settings(transport=Transport(frame_bytes=200))), seed=seed)
    runner.run_until_idle()
    return [(tup.source_task, *tup) for tup in runner.captured("sink")]


def test_one_seed_is_one_order():
    assert merged(5) == merged(5)


def test_other_seeds_are_other_orders_of_the_same_tuples():
    runs = [merged(seed) for seed in range(4)]
    assert len({tuple(run) for run in runs}) > 1
    assert all(Counter(run) == Counter(runs[0]) for run in runs)


@pytest.mark.parametrize("seed", range(4))
def test_tuples_between_two_tasks_keep_their_order(seed):
    last = {}
    for source, task, n in merged(seed):
        assert n > last.get((source, task), -1)
        last[source, task] = n


def test_a_relayed_stream_arrives_whole():
    builder = TopologyBuilder()
    builder.set_spout("numbers", NumberSpout(200), 2)
    builder.set_bolt("a", Pass("task", "n"), 3).shuffle_grouping("numbers")
    builder.set_bolt("b", Pass("task", "n"), 2).shuffle_grouping("a")
    builder.set_bolt("join", CaptureBolt(), 2).fields_grouping("b", "n").fields_grouping("numbers", "n")
    runner = LocalRunner(builder.build("t", Settings(transport=Transport(frame_bytes=300))))
    runner.run_until_idle()
    got = Counter((tup.source_component, *tup) for tup in runner.captured("join"))
    assert got == {(source, task, n): 1 for source in ("b", "numbers") for task in (1, 2) for n in range(200)}


# ---- one component alone ---------------------------------------------------------------------------------


class Lengths(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("length")
        declarer.declare("word", stream="long")

    def prepare(self, conf, context):
        self._limit = conf.get("limit", 3)

    def execute(self, tup, collector):
        if tup.is_tick:
            collector.emit([-1])
            return
        collector.emit([len(tup.word)])
        if len(tup.word) > self._limit:
            collector.emit([tup.word], stream="long")


def test_run_bolt():
    rows = [("a",), ("long",), ("longest",)]
    assert run_bolt(Lengths(), ["word"], rows) == [(1,), (4,), (7,)]
    assert run_bolt(Lengths(), ["word"], rows, stream="long") == [("long",), ("longest",)]
    assert run_bolt(Lengths(), ["word"], rows, stream="long", conf={"limit": 5}) == [("longest",)]
    assert run_bolt(Lengths(), ["word"], rows, tick_interval=0.4, seconds=1.0) == [(1,), (4,), (7,), (-1,), (-1,)]
    assert run_bolt(CaptureBolt(), ["word"], rows) == []


class Counting(Spout):
    def __init__(self):
        self._n = 0

    def declare_output_fields(self, declarer):
        declarer.declare("n")
        declarer.declare("square", stream="squares")

    def open(self, conf, context, collector):
        self._collector, self._most = collector, conf.get("most", 3)

    def next_tuple(self):
        if self._n < self._most:
            self._collector.emit([self._n])
            self._collector.emit([self._n**2], stream="squares")
            self._n += 1


def test_run_spout():
    assert run_spout(Counting()) == [(0,), (1,), (2,)]
    assert run_spout(Counting(), stream="squares", conf={"most": 4}) == [(0,), (1,), (4,), (9,)]


def test_a_spout_that_never_pauses_does_not_hang_a_test():
    runner = LocalRunner(line_topology(NumberSpout(10**9), CaptureBolt()))
    with pytest.raises(TimeoutError, match=r"'line' is still busy after 0.01 simulated s"):
        runner.run_until_idle(limit=0.01)


def test_an_unknown_component_names_those_there_are():
    with pytest.raises(KeyError, match="component 'b7' does not exist; there are spout, b1"):
        LocalRunner(line_topology(FeederSpout("x"), CaptureBolt())).component("b7")


# ---- ShowBolt --------------------------------------------------------------------------------------------


def shown(rows, bolt=None):
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("key", "score", rows=rows))
    builder.set_bolt("show", bolt or ShowBolt()).shuffle_grouping("rows")
    runner = LocalRunner(builder.build("t"))
    runner.run(0.6)
    runner.report()
    published = runner.bus.published()["show"]
    assert runner.errors == []
    return published


def test_show_keeps_the_newest_of_each_key_largest_first():
    assert shown([("a", 1), ("b", 5), ("a", 7), ("c", 6)]) == [["a", 7], ["c", 6], ["b", 5]]


def test_show_shows_at_its_end_what_came_after_the_last_tick():
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("key", "count", rows=[("a", n) for n in range(1, 100)]))
    builder.set_bolt("show", ShowBolt()).shuffle_grouping("rows")
    runner = LocalRunner(builder.build("t"))
    runner.run(0.1)  # before the first tick
    runner.report()
    assert runner.bus.published() == {}
    runner.close()
    assert runner.bus.published() == {"show": [["a", 99]]}


def test_show_keeps_as_many_rows_as_asked():
    rows = [(f"k{n}", n) for n in range(30)]
    random.Random(2).shuffle(rows)
    assert shown(rows, ShowBolt(rows=3)) == [["k29", 29], ["k28", 28], ["k27", 27]]
    assert len(shown(rows)) == 10


def test_show_without_an_order_shows_the_newest_first():
    assert shown([("a", "x"), ("b", 1), ("c", 3), ("d", 2)]) == [["d", 2], ["c", 3], ["b", 1], ["a", "x"]]


def test_show_without_an_order_takes_an_update_as_new():
    assert shown([("a", None), ("b", 1), ("a", "new")]) == [["a", "new"], ["b", 1]]


class DictionaryBolt(BatchBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("x")

    def execute_batch(self, batch, source, collector):
        collector.emit_batch([batch.column(0).dictionary_encode()])


def test_a_dictionary_column_arrives_as_its_values():
    out = run_bolt(DictionaryBolt(), [("x", str)], [["a"], ["b"], ["a"]])
    assert [tup.x for tup in out] == ["a", "b", "a"]


class Columns(BasicBolt):
    plain_tuples = True

    def declare_output_fields(self, declarer):
        declarer.declare("word", "length")

    def execute(self, tup, collector):
        assert type(tup) is tuple
        words = tup[0].split()
        collector.emit_columns(words, [len(word) for word in words])


def test_emit_columns_is_emit_for_each_and_plain_tuples_have_no_names():
    out = run_bolt(Columns(), ["line"], [["a bc"], ["def"], [""]])
    assert [tuple(tup) for tup in out] == [("a", 1), ("bc", 2), ("def", 3)]


class Ragged(Columns):
    def execute(self, tup, collector):
        collector.emit_columns([1, 2], [3])


def test_columns_of_different_lengths_are_refused_whole():
    with pytest.raises(FieldCountError, match=r"component 'bolt'.*has 2 fields.*2 values"):
        run_bolt(Ragged(), ["line"], [["x"]])


def test_plain_tuples_and_ticks_exclude_each_other():
    with pytest.raises(TopologyError, match=r"component 'bolt'.*could not tell ticks from tuples"):
        run_bolt(Columns(), ["line"], [["x"]], tick_interval=1)
