"""``penstock bench fit``, as far as it needs neither Spark nor another system."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import fit, fit_forms, fit_growth, fit_repack, turns
from benchmarks.alice import Load, Outcome, kept_up, words_settings
from benchmarks.book import stamped
from benchmarks.fit_blocking import two_bolts
from benchmarks.fit_growth import Cost, draw, row_of
from benchmarks.fit_options import figures, repeats_of
from benchmarks.fit_passthrough import FIELDS, passthrough
from benchmarks.fit_repack import EVERY, Run, Some, counted_and_looked_up
from benchmarks.harness import Results, cpu_by_process, cpu_since
from benchmarks.peers import bids
from benchmarks.plain_words import PlainSplit, plain_word_count
from benchmarks.turns import median_ratio, spread, take_turns
from penstock import Settings
from penstock.testing import run_bolt

ROOT = Path(__file__).parents[2]


def options(**values):
    return argparse.Namespace(
        **{"quick": False, "repeats": None, "json": None, "text": None, "only": None, **values}
    )


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    monkeypatch.setattr(turns.psutil, "cpu_percent", lambda interval: 0.0)


# ---- turns and ratios ----------------------------------------------------------------------------------


def test_systems_take_turns_within_a_repeat():
    order = []

    def measure(system, number):
        order.append((number, system))
        return len(order)

    assert take_turns("words", ("a", "b"), 2, measure, str) == {"a": [1, 3], "b": [2, 4]}
    assert order == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_a_busy_machine_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(turns.psutil, "cpu_percent", lambda interval: 60.0)
    take_turns("words", ("a",), 1, lambda system, number: 1, str)
    assert "the machine is not idle: others use 60 % of all cores" in capsys.readouterr().err


def test_ratios_are_taken_within_a_repeat():
    ours, theirs = [10.0, 30.0, 80.0], [10.0, 10.0, 100.0]
    assert median_ratio(ours, theirs) == 1.0  # of 1, 3 and 0.8; the ratio of the medians would be 3
    assert median_ratio(["ab", "abcd"], ["a", "ab"], len) == 2
    assert spread([1.0, 2.345]) == "1 2.35"


def test_a_system_that_does_not_keep_up_is_counted():
    found = [Outcome(rate, np.ones(99), 0) for rate in (22_000, 21_500, 15_000)]
    assert kept_up(found, 22_000) == 2


def test_cpu_time_counts_processes_that_started_since():
    before = cpu_by_process()
    assert before
    assert cpu_since({}) >= sum(before.values())
    assert cpu_since(before) < sum(before.values()) + 1


def test_each_part_has_its_own_table(capsys):
    results = Results("fit")
    results.begin("idle")
    results.row(what="idle", core_share=0.03)
    results.begin("hops3")
    results.row(what="three hops", p50_ms=3.5)
    results.finish(options())
    shown = capsys.readouterr().out
    assert re.search(r"bench fit idle\n.*core_share.*bench fit hops3\n.*p50_ms", shown, re.S)
    assert "core_share" not in shown.partition("bench fit hops3")[2]


# ---- parts and options ---------------------------------------------------------------------------------


def test_the_parts_are_those_of_the_documentation(monkeypatch):
    named = []
    monkeypatch.setattr(fit, "run_parts", lambda name, parts, options: named.extend(parts) or 0)
    assert fit.main(options()) == 0
    page = (ROOT / "docs" / "how-to" / "measure.md").read_text()
    assert named
    assert [part for part in named if f"| `{part}` |" not in page] == []


def test_figures_of_a_short_run_are_not_for_the_documentation():
    assert repeats_of(options()) == 3
    assert repeats_of(options(quick=True)) == 1
    assert repeats_of(options(quick=True, repeats=5)) == 5
    assert figures(options()) == Path("docs/figures")
    assert figures(options(quick=True)) == Path("results")
    assert figures(options(quick=True, json="out/fit.json")) == Path("out")


# ---- topologies ----------------------------------------------------------------------------------------


def test_lines_are_stamped_with_the_time_at_which_they_are_due(tmp_path, monkeypatch):
    now = [1_700_000_000_000_000]
    monkeypatch.setattr(fit_forms, "micros", lambda: now[0])
    book = tmp_path / "book.txt"
    book.write_text("Oh dear\nthe end")
    emitted = []
    spout = fit_forms.MadeLines(1_000, str(book))
    collector = SimpleNamespace(emit=lambda values, msg_id: emitted.append((msg_id, *values)))
    spout.open({}, None, collector)
    spout.activate()
    for late in (0, 0, 1_000, 5_000):
        now[0] = 1_700_000_000_000_000 + late
        spout.next_tuple()
    lines = [("Oh dear", 0, 0), ("the end", 1_000, 1_000), ("Oh dear", 2_000, 5_000)]
    begun = 1_700_000_000_000_000
    assert emitted == [
        (number, stamped(line, begun + due), begun + came) for number, (line, due, came) in enumerate(lines, 1)
    ]


def test_the_word_count_runs_in_as_many_workers_as_the_form_says(tmp_path):
    settings = words_settings(Load("", "", "sent", 0, 0, 0), str(tmp_path), workers=1)
    topology = fit_forms.made_word_count(2_000, None, settings)
    assert topology.settings.workers.count == 1
    assert [node.parallelism for node in topology.nodes.values()] == [1, 2, 4, 1]


def test_plain_words_use_no_shortcut():
    assert not PlainSplit.plain_tuples
    assert [tup.word for tup in run_bolt(PlainSplit(), ["sentence"], [("a b a",)])] == ["a", "b", "a"]
    topology = plain_word_count(1, 2, 3, Settings())
    assert [node.parallelism for node in topology.nodes.values()] == [1, 2, 3]


def test_the_idle_topology_is_as_wide_as_the_word_count():
    assert [node.parallelism for node in fit.silent(Settings()).nodes.values()] == [1, 2, 4, 1]


def test_only_a_declared_sleeper_is_blocking():
    assert "sleeper" not in two_bolts("without").nodes
    assert two_bolts("declared").nodes["sleeper"].blocking
    assert not two_bolts("noticed").nodes["sleeper"].blocking
    assert {two_bolts(case).settings.workers.count for case in ("without", "declared", "noticed")} == {1}


def test_a_row_has_as_many_components_as_it_should():
    for components in fit_growth.LENGTHS:
        assert len(row_of(components).nodes) == components


# ---- bids ----------------------------------------------------------------------------------------------


def test_bids_are_the_same_for_all_systems():
    one, other = bids.make_bids(seed=1), bids.make_bids(seed=1)
    made = [one() for _ in range(2_000)]
    assert made == [other() for _ in range(2_000)]
    assert [type(value) for value in made[0]] == [kind for _, kind in FIELDS]
    hot = sum(bid[0] % 100 == 0 for bid in made)
    assert 900 < hot < 1_150  # half of them, and one in a hundred of the others
    prices = np.array([bid[2] for bid in made])
    assert prices.min() >= 100
    assert prices.max() <= 100_000_000
    assert 0.4 < np.mean(prices < 100_000) < 0.6  # as many below a thousand dollars as above


def test_a_peer_reports_what_came_after_the_warm_up(monkeypatch):
    clock = iter([0.0, 0.5, 1.0, 2.0, 3.0])
    cpu = iter([10.0, 12.0])
    monkeypatch.setattr(bids.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bids.time, "process_time", lambda: next(cpu))
    watch = bids.Watch(1.0, 2.0)
    for count in (5, 100, 200, 300):
        assert not watch.over
        watch.look(count)
    assert watch.over
    assert watch.result("plain loop") == {"system": "plain loop", "bids": 200, "bids_per_s": 100.0, "cpu_s": 2.0}


def test_the_pass_through_writes_what_the_spout_makes(tmp_path):
    topology = passthrough(tmp_path)
    assert list(topology.nodes) == ["bids", "pass", "sink"]
    assert topology.settings.delivery.guarantee == "exactly_once"


# ---- growth --------------------------------------------------------------------------------------------


def test_costs_are_relative_to_one_task_of_the_same_repeat():
    costs = {"1": [Cost(100, 1, 1), Cost(200, 1, 1)], "16": [Cost(130, 1, 2), Cost(260, 1, 2)]}
    assert fit_growth._against_one(costs) == {"1": 1, "16": 1.3}
    results = Results("fit")
    fit_growth._report_tasks(results, "flat out", costs)
    assert [row["× 1 task"] for row in results.rows] == [1, 1.3]


def test_growth_is_drawn(tmp_path):
    costs = {str(tasks): [Cost(100 + tasks, 1e6, 2, 0.5), Cost(110, 1e6, 2, 0.6)] for tasks in (2, 5)}
    draw({"flat out": costs, "paced": costs}, costs, tmp_path / "results" / "fit-growth.png")
    assert (tmp_path / "results" / "fit-growth.png").read_bytes().startswith(b"\x89PNG")


# ---- packing anew --------------------------------------------------------------------------------------


def test_bolts_become_slow_one_after_the_other(tmp_path):
    topology = counted_and_looked_up(tmp_path, slow=2)
    after = [topology.nodes[f"lookup{number}"].component._slow_after for number in (1, 2, 3)]
    assert after == [10, 20, float("inf")]
    assert topology.settings.workers.refit == "once"
    assert counted_and_looked_up(tmp_path, slow=0).settings.workers.refit == "off"
    executors = sum(node.parallelism for node in topology.nodes.values())
    assert executors == max(fit_repack.WORKERS)


def test_some_of_the_numbers_are_looked_up():
    found = run_bolt(Some(), [("number", int)], [(number,) for number in range(4 * EVERY)])
    assert [tup.number for tup in found] == [0, EVERY, 2 * EVERY, 3 * EVERY]


def test_gaps_and_wrong_results_of_both_ways_count(monkeypatch):
    runs = {
        False: Run(1_000, missing=0, wrong=0, gaps=[0.05, 0.07], silent=[0.04, 0.05]),
        True: Run(1_000, missing=1, wrong=2, gaps=[0.2], silent=[0.1]),
    }
    monkeypatch.setattr(fit_repack, "_run", lambda changes, policy: runs[policy])
    results = Results("fit")
    fit_repack.measure_repack(results, options())
    assert {bar["name"]: bar["value"] for bar in results.bars} == {
        "fit.wrong": 3,
        "fit.changes": 3,
        "fit.gap_s": 0.2,
    }
    assert [row["changes"] for row in results.rows] == [2, 1]
