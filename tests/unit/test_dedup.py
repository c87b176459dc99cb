"""DedupBolt: which tuples pass, how long keys are remembered, what survives a restart, which settings are
rejected."""

from dataclasses import replace

import numpy as np
import pytest

from penstock import BasicBolt, ComponentError, DedupBolt, Delivery, Settings, TopologyBuilder, TopologyError
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner, run_bolt
from tests.helpers import executors_of

FIELDS = [("order", int), ("amount", float)]


def once(tasks=1, delivery="at_most_once", group="order", spouts=1, **options):
    """orders -> once -> seen."""
    options = {"by": "order", "period": 10.0, "capacity": 1_000, "error_rate": 1e-6, "lossy": True, **options}
    builder = TopologyBuilder()
    builder.set_spout("orders", FeederSpout(*FIELDS), spouts)
    builder.set_bolt("once", DedupBolt(*FIELDS, **options), tasks).fields_grouping("orders", group)
    builder.set_bolt("seen", CaptureBolt()).global_grouping("once")
    return builder.build("t", Settings(delivery=Delivery(delivery, on_error="stop", epoch_interval=1_000.0)))


def passed(runner, rows):
    """The rows that pass."""
    before = len(runner.captured("seen"))
    runner.feed("orders", rows)
    runner.run_until_idle()
    return [tuple(tup) for tup in runner.captured("seen")[before:]]


def shown(runner):
    runner.report()
    return [dict(rows) for _, rows in sorted(runner.bus._published.items())]


def test_tuples_pass_once_unchanged_and_in_order():
    rows = [[3, 0.5], [1, 0.25], [3, 0.5], [2, 1.0], [1, 9.0]]
    out = run_bolt(DedupBolt(*FIELDS, by="order"), FIELDS, rows)
    assert [tuple(tup) for tup in out] == [(3, 0.5), (1, 0.25), (2, 1.0)]
    assert out[0].amount == 0.5
    out = run_bolt(DedupBolt(*FIELDS), FIELDS, rows)
    assert [tuple(tup) for tup in out] == [(3, 0.5), (1, 0.25), (2, 1.0), (1, 9.0)], "all fields, unless said"


def test_values_of_any_type_are_compared_and_passed():
    rows = [[("a", 1)], [None], [1], ["1"], [1.0], [("a", 1)], [True], [None], [{"k": [1]}], [{"k": [1]}]]
    out = run_bolt(DedupBolt("thing", error_rate=1e-6), ["thing"], rows)
    assert [tup[0] for tup in out] == [("a", 1), None, 1, "1", {"k": [1]}], "1, 1.0 and True are one key"


def test_duplicates_within_a_batch_and_across_batches_and_senders():
    runner = LocalRunner(once(tasks=3, spouts=2))
    rng = np.random.default_rng(1)
    for _ in range(3):
        rows = [[int(order), 1.0] for order in rng.integers(0, 500, 400)]
        passed(runner, rows)
    orders = [tup.order for tup in runner.captured("seen")]
    assert len(orders) == len(set(orders))
    assert sum(bolt.seen for bolt in runner.component("once")) == 1_200
    assert sum(bolt.dropped for bolt in runner.component("once")) == 1_200 - len(orders)
    assert len(orders) == pytest.approx(500 * (1 - np.exp(-1_200 / 500)), rel=0.1)


def test_a_key_is_remembered_for_one_to_two_periods_from_the_tuple_that_passed():
    runner = LocalRunner(once(period=10.0))
    runner.run(6.0)
    assert passed(runner, [[1, 0.0]])
    for _ in range(6):  # until shortly after 12 s: past the first rotation at 10 s
        runner.run(1.0)
        assert not passed(runner, [[1, 0.0]])
    runner.run(7.0)
    assert not passed(runner, [[1, 0.0]]), "at 19: a period is over, the second rotation is not"
    runner.run(1.5)
    assert passed(runner, [[1, 0.0]]), "at 20 it is forgotten, though copies came all the time"
    assert not passed(runner, [[1, 0.0]])


def test_more_keys_than_it_was_made_for_are_forgotten_sooner_in_the_same_memory():
    runner = LocalRunner(once(capacity=100))
    (bolt,) = runner.component("once")
    size = bolt.memory.shape.bytes
    assert passed(runner, [[1, 0.0]])
    assert len(passed(runner, [[order, 0.0] for order in range(2, 1_002)])) == 1_000
    assert bolt.memory.early == 10
    assert bolt.memory.bytes == 2 * size
    assert passed(runner, [[1, 0.0]]), "forgotten"
    assert not passed(runner, [[1_001, 0.0]]), "one of the last hundred"
    assert shown(runner)[0]["forgot early"] == 10


def test_what_it_dropped_is_shown_with_the_chance_of_an_error():
    runner = LocalRunner(once(capacity=1_000, error_rate=0.01))
    (rows,) = shown(runner)
    assert rows == {"seen": 0, "dropped": 0, "estimated error rate": "0"}
    passed(runner, [[order % 500, 0.0] for order in range(1_500)])
    (rows,) = shown(runner)
    assert (rows["seen"], rows["dropped"]) == (1_500, 1_000)
    assert 0 < float(rows["estimated error rate"]) < 0.01


# -- restarts


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_what_was_seen_and_when_survives_a_restart(delivery, tmp_path):
    topology = once(2, delivery)
    first = LocalRunner(topology, folder=str(tmp_path))
    assert len(passed(first, [[order, 0.0] for order in range(50)])) == 50
    first.run(7.0)
    first.commit()
    passed(first, [[order, 0.0] for order in range(50, 60)])  # after the commit, so the restart forgets them
    second = LocalRunner(topology, folder=str(tmp_path))
    assert sum(bolt.seen for bolt in second.component("once")) == 50
    assert sorted(order for order, _ in passed(second, [[n, 0.0] for n in range(70)])) == list(range(50, 70))
    second.run(3.5)  # ten seconds in both runs together: the first rotation
    assert not passed(second, [[1, 0.0]])
    second.run(10.0)
    assert passed(second, [[1, 0.0]]), "the time before the restart counted"


def test_a_snapshot_writes_the_generation_that_changed_and_the_other_once(tmp_path):
    runner = LocalRunner(once(delivery="exactly_once"), folder=str(tmp_path))
    (bolt,) = runner.component("once")
    (executor,) = [executor for executor in executors_of(runner) if executor.component is bolt]

    def snapshot():
        return {name for name in executor.snapshot(False).changes if name.startswith("seen ")}

    passed(runner, [[1, 0.0]])
    assert snapshot() == {"seen by", "seen now"}
    assert snapshot() == set(), "nothing came"
    runner.run(10.5)
    assert snapshot() == {"seen now", "seen before"}
    passed(runner, [[2, 0.0]])
    assert snapshot() == {"seen now"}
    size = len(executor.snapshot(True).encode()["seen now"][2])
    assert size < bolt.memory.shape.bytes + 2_000


@pytest.mark.parametrize("numbers", [[1, 2, 4, 2, 1], [4, 1], [2, 3, 1, 5]])
def test_with_another_number_of_tasks_nothing_is_seen_as_new_or_as_old(numbers, tmp_path):
    came = 0
    for tasks in numbers:
        runner = LocalRunner(once(tasks, "exactly_once"), folder=str(tmp_path))
        rows = [[order, 0.0] for order in range(came + 100)]
        assert sorted(order for order, _ in passed(runner, rows)) == list(range(came, came + 100))
        came += 100
        runner.commit()
        assert sum(bolt.dropped for bolt in runner.component("once")) == sum(range(0, came, 100))
    runner.run(21.0)
    assert len(passed(runner, [[order, 0.0] for order in range(came)])) == came, "all of it is forgotten in time"


def test_other_fields_to_compare_begin_from_nothing(tmp_path):
    first = LocalRunner(once(delivery="exactly_once"), folder=str(tmp_path))
    assert passed(first, [[1, 5.0]])
    first.commit()
    for _ in range(2):  # the second run finds what the first left
        runner = LocalRunner(once(delivery="exactly_once", by=["order", "amount"]), folder=str(tmp_path))
        assert runner.component("once")[0].memory.keys == 0
        runner.commit()
    assert passed(runner, [[1, 5.0]])


def test_at_least_once_each_tuple_stems_from_its_own_row():
    builder = TopologyBuilder()
    builder.set_spout("orders", FeederSpout(*FIELDS))
    builder.set_bolt("once", DedupBolt(*FIELDS, by="order", lossy=True)).fields_grouping("orders", "order")
    builder.set_bolt("fussy", Fussy()).shuffle_grouping("once")
    runner = LocalRunner(builder.build("t", Settings(delivery=Delivery("at_least_once"))))
    runner.feed("orders", [[order, 0.0] for order in range(10)] + [[3, 1.0], [7, 1.0]])
    runner.run_until_idle()
    (spout,) = runner.component("orders")
    assert spout.failed == [(7, 0.0)]
    assert len(spout.acked) == 11, "duplicates are done with when they are dropped"


class Fussy(BasicBolt):
    def execute(self, tup, collector):
        if tup.order == 7:
            raise ValueError("not that one")


# -- rejected settings


@pytest.mark.parametrize(
    ("delivery", "why"),
    [
        (
            "exactly_once",
            "exactly once delivery does not allow by default: it takes up to 0.001 of the new",
        ),
        (
            "at_least_once",
            "at least once delivery does not allow by default: a tuple that failed behind it",
        ),
    ],
)
def test_tuples_that_count_are_lost_only_where_it_is_said(delivery, why):
    topology = once(delivery=delivery, lossy=False, error_rate=0.001)
    with pytest.raises(ComponentError) as caught:
        LocalRunner(topology)
    text = str(caught.value)
    for part in (
        "component 'once'",
        why,
        "its DedupBolt may lose tuples",
        "Allow it with DedupBolt(..., lossy=True)",
    ):
        assert part in text
    LocalRunner(replace(topology, settings=Settings()))  # at-most-once delivery allows losses


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        ((), {}, r"it has no field to compare tuples by\. Name the fields of its input"),
        (("a", "b"), {"by": "c"}, r"by= names fields that it does not have: 'c'\. Its fields are: a, b\."),
        ((("a", int),), {"by": ()}, r"it has no field to compare tuples by\. Its fields are: a\."),
        (("a",), {"period": 0}, r"period must be greater than 0 s.*not 0 and 1000000"),
        (("a",), {"period": "1 h"}, r"not '1 h' and 1000000"),
        (("a",), {"capacity": 0}, r"and 0\. Estimate how many different keys"),
        (("a",), {"capacity": 1e6}, r"and 1000000\.0"),
        (("a",), {"error_rate": 0}, r"error_rate must be above 0 .*not 0\. 0\.001 drops"),
        (("a",), {"error_rate": 0.6}, r"not 0\.6"),
    ],
)
def test_settings_that_make_no_sense(fields, options, text):
    with pytest.raises(TopologyError, match=text):
        DedupBolt(*fields, **options)


def test_an_input_with_other_fields():
    with pytest.raises(ComponentError, match=r"field 'order': the input has no such field, only id, amount"):
        run_bolt(DedupBolt(*FIELDS, by="order"), ["id", "amount"], [[1, 2.0]])
    with pytest.raises(ComponentError, match="amount"):
        run_bolt(DedupBolt(*FIELDS, by="order"), ["order", "sum"], [[1, 2.0]])
