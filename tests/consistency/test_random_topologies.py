"""Random topologies, disturbed at random: the outcome is that of a sequential run. ``make fault`` runs 10,000."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter

import pytest

from tests.consistency import random_topologies
from tests.consistency.random_cases import draw_case, expected
from tests.consistency.random_topologies import judge, run_case


@pytest.mark.parametrize("seed", [*range(45), 78])  # the last one: equal times of different zones
def test_the_outcome_is_the_oracles(seed):
    run_case(seed)


def test_the_cases_have_everything_in_them():
    """Or they would prove less than they seem to."""
    cases = [draw_case(seed) for seed in range(300)]
    steps = [step for case in cases for step in case.steps]
    assert {step.does for step in steps} == {
        *("pass", "twice", "filter", "split", "both", "direct", "pair", "count", "parts", "merged"),
        *("tally", "panes", "windows"),
    }
    assert {step.form for step in steps} == {"basic", "rich", "batch"}
    groupings = {grouping for step in steps for _, _, grouping in step.inputs}
    assert groupings == {
        *("shuffle", "fields", "fields-id", "fields-both", "partial"),
        *("fields-time", "fields-key-time", "global", "none", "local", "custom", "all", "direct"),
    }
    assert {event for case in cases for event, _ in case.events} == {
        *("run", "kill", "crash", "rescale", "move", "route", "next era")
    }
    assert {source.form for case in cases for source in case.sources} == {"tuple", "batch"}
    assert len({source.keys for case in cases for source in case.sources}) >= 10
    diamonds = [case for case in cases if any(len(step.inputs) > 1 for step in case.steps)]
    assert len(diamonds) > 100
    windows = [case.windows for case in cases if case.windows is not None]
    assert {each.panes for each in windows} >= {1, 2, 3}  # windows that follow each other, and sliding ones
    late = [case for case in cases for step in case.steps if step.does == "windows" and has_late_rows(case, step)]
    assert len(late) > 20


def has_late_rows(case, step):
    return bool(expected(case)[step.name, "late"])


@pytest.mark.parametrize("seed", range(20))
def test_the_judge_sees_a_row_that_is_lost_doubled_or_wrong(seed):
    case = draw_case(seed)
    case.delivery = "exactly_once"
    does = {step.name: step.does for step in case.steps}
    oracle = expected(case)
    rows = [
        (*leaf, *row, *([] if does.get(leaf[0]) in ("count", "merged", "windows") else [case.time_of(row[0])]))
        for leaf in case.leaves()
        for row, times in oracle[leaf].items()
        for _ in range(times)
    ]
    judge(case, rows)
    exact = [row for row in rows if does.get(row[0]) != "merged"]  # a merging bolt may emit a total twice
    for tampered in [rows[1:], rows[:-1], *([[*rows, exact[0]]] if exact else [])]:
        with pytest.raises(AssertionError):
            judge(case, tampered)


def test_the_campaign_names_the_wrong_seeds_and_fails(monkeypatch, tmp_path, capsys):
    """In processes of its own, which inherit the fault."""
    right = random_topologies.expected

    def wrong_for_seed_3(case):
        if case.seed != 3:
            return right(case)
        return {leaf: rows + Counter({("a", "row"): 1}) for leaf, rows in right(case).items()}

    monkeypatch.setattr(random_topologies, "expected", wrong_for_seed_3)
    report = tmp_path / "results" / "report.json"
    assert random_topologies.main(["--seed", "2", "--cases", "3", "--json", str(report)]) == 1
    found = json.loads(report.read_text())
    assert list(found["wrong"]) == ["3"]
    assert [bar["value"] for bar in found["bars"]] == [3, 1]
    assert "python -m tests.consistency.random_topologies --seed 3" in capsys.readouterr().out


def test_a_campaign_that_is_interrupted_has_a_report_and_leaves_no_process(monkeypatch, tmp_path):
    def interrupted(seed):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)  # it is ended by the campaign

    monkeypatch.setattr(random_topologies, "run_case", interrupted)
    report = tmp_path / "report.json"
    assert random_topologies.main(["--cases", "40", "--jobs", "2", "--json", str(report)]) == 130
    assert json.loads(report.read_text())["stopped"] == "interrupted"
    assert not multiprocessing.active_children()
