"""The four benchmarks of Pu 2021: their shape is that of table 3, and their results are right."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import erdm_topologies as erdm
from benchmarks.erdm_topologies import FOUR_NODES, FULL, TOPOLOGIES, Lines, Messages
from penstock import ComponentError, Settings, SimulatedClock, TopologyBuilder, make_plan
from penstock.cli.loading import load_topology
from penstock.testing import CaptureBolt, LocalRunner
from penstock.topology.builder import Subscription, TopologyNode
from penstock.topology.groupings import Global

FILE = Path(erdm.__file__)


def with_capture(topology, component, **conf):
    """The topology with a bolt that keeps what a component emits, and no need for a folder."""
    stream = topology.nodes[component].streams["default"]
    inputs = (Subscription(component, stream.name, Global()),)
    nodes = {**topology.nodes, "capture": TopologyNode("capture", CaptureBolt(), 1, 1, {}, inputs)}
    settings = dataclasses.replace(
        topology.settings, delivery=dataclasses.replace(topology.settings.delivery, on_error="stop"), conf=conf
    )
    return dataclasses.replace(topology, nodes=nodes, settings=settings)


def finish(runner):
    runner.deactivate()
    runner.run_until_idle()
    assert runner.errors == []


def emitted(source, seconds=0.5, **conf):
    """What a source emits at 4,000 messages a second."""
    builder = TopologyBuilder()
    builder.set_spout("source", source).set_max_rate(4_000)
    builder.set_bolt("capture", CaptureBolt()).global_grouping("source")
    runner = LocalRunner(builder.build("t", Settings(conf=conf)))
    runner.run(seconds)
    finish(runner)
    return runner.captured("capture")


def lines_of(runner):
    """The lines that the spouts have emitted, made again from their numbers."""
    found = []
    for spout in runner.component("source"):
        numbers = np.arange(spout._next)
        ids = spout.originals(numbers) * spout._spouts + spout._index
        found += zip(ids.tolist(), spout.drawn(erdm.rehash(ids.astype(np.uint64), spout._seed)), strict=True)
    return found


# ---- shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bolts"),
    [
        ("word_count", ["split", "count"]),
        ("sol", ["level2", "level3"]),
        ("rolling_sort", ["sort"]),
        ("rolling_count", ["split", "rolling_count"]),
    ],
)
def test_the_full_shape_is_that_of_table_3(name, bolts):
    topology = TOPOLOGIES[name](FULL)
    plan = make_plan(topology)
    assert len(plan.tasks_of["source"]) == 50
    assert [len(plan.tasks_of[bolt]) for bolt in bolts] == [100] * len(bolts)
    assert len(plan.worker_ids()) == 50 + 100 * len(bolts), "bolts that Pu 2021 does not have share workers"
    assert topology.settings.delivery.max_spout_pending == 200
    assert topology.settings.delivery.guarantee == "at_least_once"
    assert (FULL.nodes, FULL.ackers) == (16, 16)
    assert len(make_plan(TOPOLOGIES[name](FOUR_NODES)).worker_ids()) == 4 + 8 * len(bolts)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_runs_by_its_name_in_the_file(name):
    runner = LocalRunner(load_topology(f"{FILE}:{name}"))
    runner.run(0.5)
    finish(runner)
    (stats,) = runner.stats("source")
    assert stats.emitted == pytest.approx(0.5 * (200 if name == "rolling_sort" else 2_000), rel=0.2)
    assert stats.acked == stats.emitted


# ---- sources -----------------------------------------------------------------------------------------------


def test_messages_are_the_same_in_every_run_and_others_with_another_seed():
    first, again, other = ([tuple(tup)[:2] for tup in emitted(Lines(), seed=seed)] for seed in (1, 1, 2))
    assert first == again != other
    words = Counter(word for _, line in first for word in line.split(" "))
    assert max(words.values()) > 0.05 * words.total(), "as in a text"
    assert {len(line.split(" ")) for _, line in first} == {10}


def test_a_message_is_as_large_as_the_scale_says():
    for scale, size in ((1, 2_000), (0.1, 200)):
        messages = [tup.message for tup in emitted(Messages(2_000), scale=scale)]
        assert {len(message) for message in messages} == {size}
        assert len(set(messages)) > 0.8 * len(messages)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_share_of_the_messages_are_copies_of_some_before(share):
    rows = [tuple(tup)[:2] for tup in emitted(Lines(), 1.0, duplicates=share)]
    assert len(rows) > 3_000
    copies = len(rows) - len({id for id, _ in rows})
    assert copies == pytest.approx(share * len(rows), rel=0.1, abs=1)
    assert len(set(rows)) == len({id for id, _ in rows}), "a copy is a copy"
    assert all(id <= place for place, (id, _) in enumerate(rows)), "the original came before"


@pytest.mark.parametrize("conf", [{"duplicates": 1}, {"duplicates": -0.1}, {"scale": 0}])
def test_a_share_or_a_scale_that_cannot_be(conf):
    with pytest.raises(
        ComponentError, match=r"'source'.*conf.duplicates must be at least 0 .* not .*Leave them out"
    ):
        emitted(Lines(), **conf)


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [False, True])
def test_words_are_counted_with_the_copies_or_without(dedup):
    runner = LocalRunner(with_capture(erdm.word_count(FOUR_NODES, dedup=dedup), "count", duplicates=0.5))
    runner.run(0.5)
    finish(runner)
    lines = lines_of(runner)
    assert len(lines) == pytest.approx(1_000, rel=0.3)
    if dedup:
        lines = list(dict(lines).items())
        assert sum(bolt.dropped for bolt in runner.component("once")) >= 0.3 * len(lines_of(runner))
    oracle = Counter(word for _, line in lines for word in line.split(" "))
    counted = {word: count for bolt in runner.component("count") for word, count in bolt.counts.items()}
    if dedup:  # one in a thousand lines may be dropped by mistake
        assert 0.99 * oracle.total() <= sum(counted.values()) <= oracle.total()
    else:
        assert counted == oracle
    assert {tup.word: tup.count for tup in runner.captured("capture")}.keys() == counted.keys()


def test_messages_pass_all_levels_as_they_were():
    runner = LocalRunner(with_capture(erdm.sol(FOUR_NODES, levels=4), "level4"))
    runner.run(0.2)
    finish(runner)
    out = sorted((tup.id, tup.message) for tup in runner.captured("capture"))
    assert out == sorted(lines_of(runner))
    assert list(runner.plan.tasks_of) == ["source", "level2", "level3", "level4", "capture"]


def test_a_chunk_is_the_newest_messages_and_comes_out_sorted_every_so_often():
    runner = LocalRunner(with_capture(erdm.rolling_sort(rate=400.0), "sort", scale=0.02))
    runner.run(0.95)  # every 0.2 s: four times
    sorts = runner.component("sort")
    for bolt in sorts:
        assert bolt.bytes == sum(map(len, bolt.chunk)) == 40_000
        assert len(bolt.chunk) == 20
    finish(runner)
    for task in {tup.source_task for tup in runner.captured("capture")}:
        rows = [(tup.rank, tup.message) for tup in runner.captured("capture") if tup.source_task == task]
        begins = [place for place, (rank, _) in enumerate(rows) if rank == 0]
        assert len(begins) == 4
        for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
            ranks, messages = zip(*rows[begin:end], strict=True)
            assert ranks == tuple(range(end - begin))
            assert list(messages) == sorted(messages)


def test_a_chunk_survives(tmp_path):
    topology = erdm.rolling_sort(rate=400.0)
    first = LocalRunner(topology, folder=str(tmp_path))
    first.run(0.5)
    first.deactivate()
    first.commit()
    second = LocalRunner(topology, folder=str(tmp_path))
    assert [bolt.chunk for bolt in second.component("sort")] == [bolt.chunk for bolt in first.component("sort")]
    assert all(bolt.chunk for bolt in second.component("sort"))
    third = LocalRunner(topology.scaled({"sort": 1}), folder=str(tmp_path))
    (bolt,) = third.component("sort")
    assert len(bolt.chunk) == 20, "of both, as much as one keeps"


def test_a_message_that_failed_is_made_again():
    runner = LocalRunner(erdm.sol())
    runner.run(0.05)
    finish(runner)
    (spout,) = runner.component("source")
    before = spout._next
    spout.fail(3, None)
    assert list(spout._again) == [3]
    spout.before_snapshot()
    assert spout._position.value == 3, "a restart begins with it"
    runner.activate()
    runner.run(0.01)
    assert not spout._again
    assert spout._next > before


def test_words_are_counted_over_the_window(monkeypatch):
    topology = with_capture(erdm.rolling_count(FOUR_NODES, rate=400.0), "rolling_count", scale=0.01)
    runner = LocalRunner(topology, clock=SimulatedClock(0.05))  # no batch comes where a window ends
    monkeypatch.setattr(erdm.time, "time", runner.clock.now)  # a window is 1.5 s, a slide 0.3 s
    runner.run(3.5)
    finish(runner)
    windows = {}
    for tup in runner.captured("capture"):
        windows.setdefault(tup.window_end, Counter())[tup.word] += tup.count
    ends = sorted(windows)
    assert np.diff(ends).tolist() == [30.0] * (len(ends) - 1)
    full = [end for end in ends if end - 150 >= 30]
    assert full
    for end in full:
        assert windows[end].total() == pytest.approx(1.5 * 400 * 10, rel=0.15)
