"""Reduce: whichever task receives a tuple, the merged results equal those of one sequential pass."""

import random
from collections import Counter as Tally
from dataclasses import replace

import pyarrow as pa
import pytest

from penstock import Delivery, Merge, Reduce, Settings, Spout, TopologyBuilder, TopologyError, Transport
from penstock.aggregates import Count, CountOf, Distinct, Max, Mean, Min, Sum, TopK, Variance
from penstock.errors import ComponentError, PenstockError
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner, run_bolt
from penstock.topology.components import Context, Source
from tests.consistency.components import WORLDS, Outside, World, run_until

SMALL = Settings(transport=Transport(frame_bytes=500))
"""Small frames, hence many batches: the result of a key is merged from many partials."""


def sales(count, seed=1):
    """⟨shop, product, price, user, time⟩; some products are far more frequent than others."""
    rng = random.Random(seed)
    return [
        (rng.choice("xyz"), f"p{int(rng.paretovariate(1)) % 50}", rng.uniform(0, 100), rng.randrange(40), n / 10)
        for n in range(count)
    ]


FIELDS = ("shop", "product", "price", "user", "time")
MERGES = {
    "sold": Count(),
    "x": CountOf("shop", "x"),
    "revenue": Sum("price"),
    "price": Mean("price"),
    "spread": Variance("price"),
    "least": Min("price"),
    "most": Max("price"),
    "buyers": Distinct("user"),
    "shops": TopK("shop", 2),
}


def oracle(rows, key, merges=MERGES):
    """A single task that processes one tuple after the other."""
    partials = {}
    for row in rows:
        tup = dict(zip(FIELDS, row, strict=True))
        mine = partials.setdefault(tuple(tup[field] for field in key), {n: m.zero() for n, m in merges.items()})
        for name, merge in merges.items():
            mine[name] = merge.add(mine[name], merge.field and tup[merge.field])
    return {key: [merges[n].result(partial) for n, partial in mine.items()] for key, mine in partials.items()}


def build(reduce, spout, key, settings=SMALL, tasks=4, merged=2):
    builder = TopologyBuilder()
    builder.set_spout("rows", spout, 2)
    builder.set_bolt("partials", reduce.partials(), tasks).shuffle_grouping("rows")
    total = builder.set_bolt("total", reduce.merged(), merged)
    total = total.fields_grouping("partials", *key) if key else total.global_grouping("partials")
    builder.set_bolt("capture", CaptureBolt()).global_grouping("total")
    return builder.build("t", settings)


def latest(runner, keys):
    """The last update of each key."""
    return {tuple(tup[:keys]): list(tup[keys:]) for tup in runner.captured("capture")}


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for key, values in expected.items():
        spread = list(MERGES).index("spread")
        assert results[key][spread] == pytest.approx(values[spread], rel=1e-9)
        results[key][spread] = values[spread]
        assert results[key] == values, "to the last bit"


# -- totals


@pytest.mark.parametrize("key", [(), ("product",), ("shop", "product")], ids=["no key", "one field", "two fields"])
@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_whichever_task_gets_a_tuple_results_are_the_sequential_ones(key, delivery):
    rows = sales(1_000)
    settings = Settings(transport=Transport(frame_bytes=500), delivery=Delivery(delivery))
    runner = LocalRunner(
        build(Reduce(*key, **MERGES), FeederSpout(*FIELDS, rows=rows), key, settings), uneven=True
    )
    runner.run_until_idle()
    assert runner.errors == []
    assert [stats.executed for stats in runner.stats("partials")] == [250] * 4, "shuffled: any task has any key"
    assert sum(stats.executed for stats in runner.stats("total")) > 2 * len(oracle(rows, key)), "in several parts"
    assert_same(latest(runner, len(key)), oracle(rows, key))
    if delivery == "at_least_once":
        acked = [msg_id for spout in runner.component("rows") for msg_id in spout.acked]
        assert sorted(acked) == sorted(rows)


class Rows(Spout):
    """Emits two rows per millisecond; its position is its state."""

    def __init__(self, rows):
        self._rows = rows
        self._rests = False

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def open(self, conf, context, collector):
        self._collector = collector
        self._rows = self._rows[context.index :: context.parallelism]
        self.position = context.state.value("position", 0)

    def next_tuple(self):
        self._rests = not self._rests
        if self._rests:
            return
        for row in self._rows[self.position.value : self.position.value + 2]:
            self._collector.emit(row)
            self.position.value += 1

    @property
    def emitted(self):
        return self._rows[: self.position.value]

    @property
    def done(self):
        return self.position.value == len(self._rows)


def test_a_graceful_end_loses_nothing():
    """With at-most-once delivery and without a tick, the results contain everything that was emitted."""
    runner = LocalRunner(build(Reduce("product", **MERGES), Rows(sales(2_000)), ["product"]))
    runner.run(0.02)
    runner.deactivate()
    runner.run_until_idle()
    done = [row for spout in runner.component("rows") for row in spout.emitted]
    assert 0 < len(done) < 2_000
    assert_same(latest(runner, 1), oracle(done, ["product"]))


@pytest.mark.parametrize("window", [False, True], ids=["totals", "windows"])
@pytest.mark.parametrize("seed", range(2))
def test_exactly_once_across_a_restart(window, seed, tmp_path):
    rows = sales(1_200)
    merges = {"sold": Count(), "revenue": Sum("price"), "buyers": Distinct("user")}
    reduce = Reduce("product", **merges)
    if window:
        reduce = reduce.window("time", 15, 5, lateness=20)
    world = WORLDS[str(tmp_path)] = World()
    builder = TopologyBuilder()
    builder.set_spout("rows", Rows(rows))
    builder.set_bolt("partials", reduce.partials(), 4).shuffle_grouping("rows")
    builder.set_bolt("total", reduce.merged()).fields_grouping("partials", "product")
    builder.set_bolt("sink", Outside(str(tmp_path))).global_grouping("total")
    topology = builder.build(
        "t", Settings(transport=Transport(frame_bytes=500), delivery=Delivery("exactly_once", epoch_interval=1000))
    )

    uneven = not window  # a worker that cannot keep up would be later than any lateness
    killed = LocalRunner(topology, seed, folder=str(tmp_path), uneven=uneven)
    run_until(killed, lambda: len(killed.component("rows")[0].emitted) > 300)
    killed.commit()
    assert world.rows
    done = len(killed.component("rows")[0].emitted)
    run_until(killed, lambda: len(killed.component("rows")[0].emitted) > done + 100)
    again = LocalRunner(topology, seed + 1, folder=str(tmp_path), uneven=uneven)
    assert 300 < len(again.component("rows")[0].emitted) <= done, "rows come again"
    assert again.component("total")[0].partials["buyers"]
    run_until(again, lambda: again.component("rows")[0].done)
    again.run_until_idle()
    again.commit()
    assert again.errors == []

    if not window:
        assert {row[:1]: list(row[1:]) for row in world.rows} == oracle(rows, ["product"], merges)
        return
    results = {row[:2]: list(row[2:]) for row in world.rows}
    assert len(results) == len(world.rows), "each window once"
    last = max(end for _, end in results)
    assert last >= 40
    expected = {}
    for end in range(5, int(last) + 1, 5):
        within = [row for row in rows if end - 15 <= row[4] < end]
        expected |= {(*key, end): values for key, values in oracle(within, ["product"], merges).items()}
    assert results == expected


def test_the_partials_of_a_batch_are_one_row_a_key():
    rows = [("a", 1), ("b", 2), ("a", 3), (None, 4)] * 2
    partials = run_bolt(Reduce("word", count=Count(), sum=Sum("n")).partials(), [("word", str), ("n", int)], rows)
    assert Tally(map(tuple, partials)) == Tally([("a", 4, 8), ("b", 2, 4), (None, 2, 8)])


def test_what_is_none_or_not_a_number_is_no_value():
    rows = [("a", None), ("a", float("nan")), ("a", 2.0), ("b", None)]
    both = Reduce("k", tuples=Count(), values=Count("x"), mean=Mean("x"), least=Min("x"))
    (a, b) = run_bolt(both.partials(), ["k", "x"], rows)
    assert (tuple(a), tuple(b)) == (("a", 3, 1, ((0, 2.0), 1), 2.0), ("b", 1, 0, (0, 0), None))


def test_the_bolts_say_that_they_emit_partials():
    reduce = Reduce("word", count=Count())
    windows = reduce.window("time", 10)
    for one in (reduce, windows):
        assert (one.partials().emits_partials, one.partials().merges_partials) == (True, False)
        assert (one.merged().emits_partials, one.merged().merges_partials) == (False, True)
    assert (CaptureBolt().emits_partials, CaptureBolt().merges_partials) == (False, False)


# -- windows


def windowed(rows, *arguments, **options):
    counts = Reduce("word", count=Count()).window("time", *arguments, **options)
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("word", "time"))
    builder.set_bolt("partials", counts.partials()).shuffle_grouping("rows")
    builder.set_bolt("total", counts.merged()).fields_grouping("partials", "word")
    builder.set_bolt("capture", CaptureBolt()).global_grouping("total")
    builder.set_bolt("late", CaptureBolt()).global_grouping("total", stream="late")
    runner = LocalRunner(builder.build("t"))
    for row in rows:  # each row in a separate batch
        runner.feed("rows", [row])
        runner.run_until_idle()
    return runner, [tuple(tup) for tup in runner.captured("capture")]


def test_a_window_slides():
    _, results = windowed([("a", 0), ("a", 29), ("a", 31), ("b", 65), ("a", 1000)], 90, 30, lateness=0)
    assert results == [
        ("a", 30, 2),
        ("a", 60, 3),
        ("a", 90, 3),
        ("b", 90, 1),
        ("a", 120, 1),  # contains only 31
        ("b", 120, 1),
        ("b", 150, 1),
    ]


def test_without_a_slide_windows_follow_each_other():
    _, results = windowed([("a", 0.5), ("a", 9.9), ("a", 10.0), ("a", 31.0)], 10.0, lateness=0)
    assert results == [("a", 10.0, 2), ("a", 20.0, 1)]


def test_times_may_be_before_0_and_windows_ages_apart():
    _, results = windowed([("a", -15), ("a", -5), ("a", 10**12), ("a", 10**15)], 10, lateness=0)
    assert results == [("a", -10, 1), ("a", 0, 1), ("a", 10**12 + 10, 1)]


def test_what_comes_late_counts_where_it_still_can_and_is_told():
    runner, results = windowed([("a", 5), ("a", 25), ("a", 15), ("a", 3), ("a", 60)], 20, 10, lateness=0)
    assert results == [("a", 10, 1), ("a", 20, 1), ("a", 30, 2), ("a", 40, 1)], "15 counts in ⟨10, 30⟩"
    assert [tuple(tup) for tup in runner.captured("late")] == [("a", 1, 1), ("a", 0, 1)]
    assert windowed([("a", 5), ("a", 25), ("a", 15), ("a", 3), ("a", 60)], 20, 10, lateness=22)[1][:2] == [
        ("a", 10, 2),
        ("a", 20, 3),
    ]


def test_a_window_that_is_not_over_is_kept():
    runner, results = windowed([("a", 1), ("a", 12)], 10)
    assert results == [], "the lateness is a slide"
    (total,) = runner.component("total")
    assert dict(total.partials["count"]) == {(0, "a"): 1, (1, "a"): 1}


@pytest.mark.parametrize(("time", "got"), [(None, "None"), (float("inf"), "inf"), ("noon", "noon")])
def test_a_time_that_is_no_number(time, got):
    with pytest.raises(PenstockError) as caught:
        run_bolt(Reduce("word", count=Count()).window("time", 10).partials(), ["word", "time"], [("a", time)])
    text = str(caught.value)
    assert text.startswith("component 'bolt', field 'time': the time of a window is not a number: ")
    assert got in text
    assert text.endswith("Emit seconds, or any unit that length and slide are in too.")


# -- errors


def test_a_field_that_is_not_there():
    with pytest.raises(PenstockError) as caught:
        run_bolt(Reduce("word", sum=Sum("prise")).partials(), ["word", "price"], [("a", 1)])
    assert str(caught.value).endswith(
        "PartialBolt reads field 'prise', which its input 'rows' does not have. Did you mean 'price'?"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reduce("word"), "Reduce('word'): it has no merge. Name one: count=Count()."),
        (
            lambda: Reduce("word", count=Count),
            "Reduce('word', count=…): count is the class Count, not a Merge. Pass Count(), with brackets.",
        ),
        (
            lambda: Reduce("word", count="n"),
            "Reduce('word', count=…): count is 'n', not a Merge. "
            "Use one of Penstock's merges, such as Count(), or derive your own from Merge.",
        ),
        (
            lambda: Reduce("word", count=Count()).window("time", 10, 3),
            "window of field 'time': its length, 10, is not a multiple of its slide, 3. "
            "A length of 9 fits that slide.",
        ),
        (
            lambda: Reduce("word", count=Count()).window("time", "10"),
            "window of field 'time': length must be a number greater than 0, not '10'. Use the field's unit.",
        ),
        (
            lambda: Reduce("word", count=Count()).window("time", 10, lateness=-1),
            "window of field 'time': lateness must be a number of at least 0, not -1. Use the field's unit.",
        ),
    ],
)
def test_mistakes_are_told_while_the_topology_is_built(make, message):
    with pytest.raises(TopologyError) as caught:
        make()
    assert str(caught.value) == message


def test_a_merge_that_raises_fails_its_batch_and_no_more():
    class Picky(Count):
        def total(self, values):
            if 13 in values:
                raise ValueError("unlucky")
            return len(values)

    counts = Reduce("k", count=Picky("x"))
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("k", "x"))
    builder.set_bolt("partials", counts.partials()).shuffle_grouping("rows")
    builder.set_bolt("total", counts.merged()).fields_grouping("partials", "k")
    builder.set_bolt("capture", CaptureBolt()).global_grouping("total")
    runner = LocalRunner(builder.build("t", Settings(delivery=Delivery("at_least_once"))))
    for n in range(20):
        runner.feed("rows", [("a", n)])
        runner.run_until_idle()
    assert runner.component("rows")[0].failed == [("a", 13)]
    assert len(runner.component("rows")[0].acked) == 19
    assert runner.captured("capture")[-1].count == 19
    assert "ValueError: unlucky" in str(runner.errors[0])


def test_a_merge_of_ones_own():
    class Range(Merge):
        def zero(self):
            return ()

        def add(self, partial, value):
            return self.merge(partial, (value, value))

        def merge(self, partial, other):
            return (min(partial + other), max(partial + other)) if partial or other else ()

        def result(self, partial):
            return partial[1] - partial[0]

    ranges = Reduce(range=Range("n"))
    runner = LocalRunner(build(ranges, FeederSpout("n", rows=[(n,) for n in range(3, 500)]), ()))
    runner.run_until_idle()
    assert latest(runner, 0) == {(): [496]}


def test_lateness_is_exact():
    """Regression: it was rounded up to whole slides."""
    rows = [("a", 5), ("a", 13), ("a", 9), ("a", 14), ("a", 8)]
    runner, results = windowed(rows, 10, lateness=4)
    assert results == [("a", 10, 2)], "over at 14, with 9 in it, not at 20"
    assert [tuple(tup) for tup in runner.captured("late")] == [("a", 0, 1)]
    assert windowed([("a", 0.05), ("a", 0.14), ("a", 0.16)], 0.1, lateness=0.05)[1] == [("a", 0.1, 1)]


def test_late_tuples_are_counted_without_a_subscriber():
    counts = Reduce("word", count=Count()).window("time", 10, lateness=0)
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("word", "time"))
    builder.set_bolt("partials", counts.partials()).shuffle_grouping("rows")
    builder.set_bolt("total", counts.merged()).fields_grouping("partials", "word")
    runner = LocalRunner(builder.build("t"))
    for piece in ([("a", 25)], [("a", 3), ("a", 4), ("b", 5)], [("a", 26)]):
        runner.feed("rows", piece)
        runner.run_until_idle()
    (stats,) = runner.stats("total")
    assert stats.late == 3, "tuples, not partials"


@pytest.mark.parametrize(
    ("reduce", "wrong"),
    [
        (Reduce("wrod", count=Count()), "'wrod', which its input 'rows' does not have. Did you mean 'word'?"),
        (Reduce("word", total=Sum("tiem")), "'tiem', which its input 'rows' does not have. Did you mean 'time'?"),
        (
            Reduce("word", count=Count()).window("tmie", 10),
            "'tmie', which its input 'rows' does not have. Did you mean 'time'?",
        ),
    ],
)
def test_misspelt_fields_are_found_while_the_topology_is_built(reduce, wrong):
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("word", "time"))
    builder.set_bolt("partials", reduce.partials()).shuffle_grouping("rows")
    with pytest.raises(TopologyError) as error:
        builder.build("t")
    assert str(error.value).endswith(f"PartialBolt reads field {wrong}")


def test_partials_of_another_reduce_are_found_while_the_topology_is_built():
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout("word", "time"))
    builder.set_bolt("partials", Reduce("word", count=Count()).partials()).shuffle_grouping("rows")
    other = Reduce("word", count=Count()).window("time", 10)
    builder.set_bolt("total", other.merged()).fields_grouping("partials", "word")
    with pytest.raises(
        TopologyError, match=r"WindowBolt reads field 'pane', which its input 'partials' does not have\."
    ):
        builder.build("t")


class Emitted:
    """A collector that keeps what is emitted, by stream."""

    def __init__(self):
        self.rows = {}

    def emit_batch(self, columns, stream="default", anchors=None):
        self.rows.setdefault(stream, []).extend(zip(*(list(column) for column in columns), strict=True))


def test_partials_that_are_dropped_or_fail_leave_no_gap_behind_which_windows_would_wait():
    """Their spouts emit them again, at other positions. Their times do not complete windows."""
    window = Reduce("k", count=Count()).window("time", length=2.0, slide=1.0, lateness=0.0)
    partials, merged, emitted = window.partials(), window.merged(), Emitted()
    merged.prepare({}, Context("t", "total", 9, 0, {"total": (9,)}, inputs=(("partials", "segments"),)))
    names = ["sender", "offset", "length", "tuples", "stream", "newest"]

    def notes(rows):
        arrays = [pa.array(column) for column in zip(*rows, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names)

    source = Source("spout", "default", 3, range_offset=0, range_length=2)
    dropped = pa.RecordBatch.from_pydict({"k": ["a", "b"], "time": [50.0, 51.0]})
    partials.skip_batch(dropped, source, emitted)
    failing = pa.RecordBatch.from_pydict({"k": ["a"], "time": ["soon"]})
    with pytest.raises(ComponentError):
        partials.execute_batch(failing, replace(source, range_offset=2, range_length=1), emitted)
    later = pa.RecordBatch.from_pydict({"k": ["a"], "time": [3.5]})
    partials.execute_batch(later, replace(source, range_offset=3, range_length=1), emitted)
    rows = emitted.rows["segments"]
    assert rows == [(3, 0, 2, 2, "default", None), (3, 2, 1, 1, "default", None), (3, 3, 1, 1, "default", 3.5)]
    told, expired = Source("partials", "segments", 5), Emitted()
    merged.skip_batch(notes([(3, 4, 1, 1, "default", 99.0)]), told, expired)  # overtook what is before it
    assert merged._complete.value is None
    merged.execute_batch(notes(rows), told, expired)
    assert merged._complete.value == 3
    assert merged._ledger.gaps == 0
