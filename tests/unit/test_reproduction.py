"""``penstock reproduce``: nothing of the papers is missing, verdicts, resuming after a kill, and the page."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.reproduction.command import DOCS, PAGE, RESULTS, find, print_list, select, without_row, write
from benchmarks.reproduction.model import Exhibit, Experiment, Value
from benchmarks.reproduction.pictures import picture_paths
from benchmarks.reproduction.registry import EXHIBITS, EXPERIMENTS
from benchmarks.reproduction.report import Findings, anchor, number, page
from benchmarks.reproduction.runner import duration, estimate, outstanding
from benchmarks.reproduction.store import MOST_POINTS, Repeat, Store, thinned
from benchmarks.reproduction.verdict import compare, summary, tolerance
from penstock.cli.reproduce import add_parser
from penstock.errors import EnvironmentFault, LoadError

ROOT = Path(__file__).resolve().parents[2]
FAST = "storm-groupings"
# Everything in the papers that has a number, counted in the papers by hand. *Storm overview* numbers nothing: its
# entries are its figures, tables and listings by section.
NUMBERED = {
    "Lu 2020": {"table": 4, "figure": 17, "algorithm": 3, "equation": 5},
    "Pu 2021": {"table": 4, "figure": 15, "algorithm": 2, "equation": 33},
    "Sun 2022": {"table": 2, "figure": 8, "algorithm": 1, "equation": 7},
}
OVERVIEW = {
    "section 2.1, figure 1",
    "section 2.1, figure 2",
    "section 2.2",
    "section 2.3.1",
    "section 2.3.2",
    "section 2.3.3",
    "section 2.4.1, table",
    "section 2.4.1, memory",
    "section 2.4.2",
    "section 2.5.1, figure",
    "section 2.5.1, emit of a spout",
    "section 2.5.1, emit of a bolt",
    "section 2.5.1, ack",
    "section 2.5.1, acker",
    "section 2.5.2",
}


# ---- the registry ------------------------------------------------------------------------------------------


def numbers_of(paper, kind):
    """The numbers of a paper's exhibits of one kind; ``equations 6 to 12`` are several."""
    found = []
    for exhibit in EXHIBITS:
        match = re.match(rf"{kind}s? (\d+)(?: (to|and) (\d+))?(?: [a-d])?$", exhibit.number)
        if exhibit.paper == paper and match:
            first = int(match[1])
            found += range(first, int(match[3] or first) + 1)
    return found


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_table_figure_algorithm_and_equation_has_a_row(paper):
    for kind, last in NUMBERED[paper].items():
        assert sorted(set(numbers_of(paper, kind))) == list(range(1, last + 1)), kind


def test_figure_13_has_its_four_cases():
    assert [each.number[-1] for each in EXHIBITS if each.number.startswith("figure 13 ")] == list("abcd")


def test_everything_in_the_overview_has_a_row():
    assert {each.number for each in EXHIBITS if each.paper == "Storm overview"} == OVERVIEW


def test_every_row_is_measured_or_shows_where_it_is_in_the_code_or_why_not():
    assert without_row(EXHIBITS) == []
    assert without_row((Exhibit("x", "Lu 2020", "figure 1", "nothing"),)) == ["x"]


def test_what_rows_refer_to_exists():
    for exhibit in EXHIBITS:
        for path in (*exhibit.code, *exhibit.tests):
            assert (ROOT / path).is_file(), f"{exhibit.id}: {path}"
        for value in exhibit.values:
            assert value.experiment in EXPERIMENTS, f"{exhibit.id}: {value.name}"
        for curve in exhibit.picture.curves if exhibit.picture else ():
            assert curve.experiment in exhibit.experiments, f"{exhibit.id}: {curve.name}"
    used = {id for exhibit in EXHIBITS for id in exhibit.experiments}
    assert used == set(EXPERIMENTS), "an experiment that no row shows"


def test_ids_and_anchors_are_unique():
    assert len({each.id for each in EXHIBITS}) == len(EXHIBITS)
    assert len({anchor(each) for each in EXHIBITS}) == len(EXHIBITS)


def test_quick_runs_of_everything_take_about_half_an_hour():
    assert sum(each.quick_seconds for each in EXPERIMENTS.values()) <= 31 * 60


def test_parts_of_benchmarks_that_experiments_name_exist():
    """Otherwise a repeat would measure nothing."""
    missing = set()
    for experiment in EXPERIMENTS.values():
        if experiment.program[:2] == ("penstock", "bench"):
            module = importlib.import_module(f"benchmarks.{experiment.program[2]}")
            if experiment.program[4] not in module.PARTS:
                missing.add(experiment.id)
    assert missing == set()


def test_a_name_that_is_misspelled_is_told():
    with pytest.raises(LoadError, match=r"Did you mean lu-fig15\?"):
        select(["lufig15"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "'0' is not a whole number above 0"),
        (["--repeats", "many"], "'many' is not a whole number above 0"),
        (["--text", "no-such-book.txt"], "there is no file 'no-such-book.txt'"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert message in capsys.readouterr().err


def test_the_text_may_be_given_by_a_path_relative_to_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("a line")
    monkeypatch.chdir(tmp_path)
    assert Path(parsed("--text", "book.txt").text) == tmp_path / "book.txt"


def test_names_in_the_list_are_whole_on_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_list(Store(tmp_path), list(EXPERIMENTS.values()), parsed("--list"))
    listed = capsys.readouterr().out
    assert [id for id in EXPERIMENTS if id not in listed] == []


def test_the_page_is_written_into_a_new_folder(tmp_path):
    write(Store(tmp_path), tmp_path / "new" / "docs")
    assert (tmp_path / "new" / "docs" / PAGE).is_file()


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["reproduce", *words])


def test_only_takes_experiments_exhibits_and_patterns():
    assert [each.id for each in select(["lu-fig15"])] == ["lu-fig15"]
    assert [each.id for each in select(["sun-table1", "sun-grid"])] == ["sun-grid"]
    assert len(select(["pu-sim-*"])) == 4
    assert select(None) == list(EXPERIMENTS.values())
    with pytest.raises(LoadError, match=r"--only lu-fig99.*'penstock reproduce --list' shows all"):
        select(["lu-fig99"])
    with pytest.raises(LoadError):
        select(["lu-fig1"])  # in the code, not measured


# ---- verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "better", "ours", "verdict"),
    [
        (100.0, "higher", 106.0, "better"),
        (100.0, "higher", 105.0, "equal"),
        (100.0, "higher", 94.0, "worse"),
        (100.0, "lower", 94.0, "better"),
        (100.0, "lower", 106.0, "worse"),
        (100.0, "same", 130.0, "worse"),
        (100.0, "same", 103.0, "equal"),
        (-10.0, "higher", -5.0, "better"),
        (0.0, "lower", 0.0, "equal"),
        (0.0, "lower", 1.0, "worse"),
        ((50.0, 70.0), "same", 60.0, "equal"),
        ((50.0, 70.0), "same", 80.0, "worse"),
        ((50.0, 70.0), "higher", 80.0, "better"),
        (None, "higher", 80.0, "no value in the paper"),
    ],
)
def test_verdicts(paper, better, ours, verdict):
    assert compare(Value("x", "v", "v", "", paper, better), [ours]).verdict == verdict


def test_a_value_that_may_be_0_has_a_tolerance_in_its_unit():
    value = Value("x", "v", "v", "%", 0.0, "lower", slack=1.0)
    assert [compare(value, [ours]).verdict for ours in (0.9, 1.1, -2.0)] == ["equal", "worse", "better"]


def test_a_tolerance_is_printed_if_it_is_not_the_usual_one():
    values = [
        Value("x", "v", "v", "s", 10.0),
        Value("x", "v", "v", "s", 10.0, equal=0.1),
        Value("x", "v", "v", "keys", 10.0, equal=0.0),
        Value("x", "v", "v", "%", 2.0, slack=0.5),
        Value("x", "v", "v", "%", 2.0, slack=1.0),
        Value("x", "v", "v", "s", 10.0, slack=1.0),
        Value("x", "v", "v", "", (0.0, 10.0), slack=2.0),
        Value("x", "v", "v", "keys", 0.0, equal=0.0),
        Value("x", "v", "v", "%", 20.0, slack=0.5),
        Value("x", "v", "v", "%", None, equal=0.1),
    ]
    assert [tolerance(each) for each in values] == [
        *("", "± 10 %", "± 0 %", "± 0.5 points", "± 1 point", "± 1 s", "± 2"),
        *("", "", ""),
    ]


def test_median_spread_and_ratio():
    found = compare(Value("x", "v", "v", "s", 10.0, "lower", bar=6.0), [7.0, 5.0, 6.0])
    assert (found.ours, found.low, found.high, found.repeats) == (6.0, 5.0, 7.0, 3)
    assert found.ratio == pytest.approx(0.6)
    assert found.met is True


def test_no_ratio_where_it_says_nothing():
    assert compare(Value("x", "v", "v", "", -5.0), [5.0]).ratio is None
    assert compare(Value("x", "v", "v", "", (1.0, 2.0)), [5.0]).ratio is None
    assert compare(Value("x", "v", "v", "", 0.0), [5.0]).ratio is None


def test_not_run_and_not_applicable():
    assert compare(Value("x", "v", "v", "", 1.0, bar=1.0), []).verdict == "not run"
    assert compare(Value("x", "v", "v", "", 1.0, bar=1.0), []).met is None
    found = compare(Value("x", "v", "v", "", 1.0, differs="another unit"), [1.0])
    assert found.verdict == "not applicable"


def test_a_bar_is_met_in_the_direction_that_counts():
    assert compare(Value("x", "v", "v", "", None, "lower", bar=1.0), [1.1]).met is False
    assert compare(Value("x", "v", "v", "", None, "higher", bar=1.0), [1.1]).met is True


def test_the_summary_of_an_exhibit():
    value = Value("x", "v", "v", "", 1.0)
    found = [compare(value, [2.0]), compare(value, [1.0]), compare(value, [])]
    assert summary(found) == "1 better, 1 equal, 1 not run"
    assert summary([compare(value, [])]) == "not run"


# ---- stored results ----------------------------------------------------------------------------------------

TINY = Experiment("tiny", "Tiny", ("python", "-m", "tiny", "--seed", "{seed}"), 5, 50, "none", takes_text=True)
MACHINE = {
    "cpu": "C",
    "cores": 2,
    "memory_gb": 1.0,
    "python": "3",
    "java": 17,
    "pyspark": "4",
    "pyarrow": "26",
    "penstock": "0",
}


def repeat(experiment, number, quick=False, text=False, seconds=7.0, **values):
    command = experiment.command(quick, text)
    return Repeat(number, quick, command, experiment.version, "2026-01-01", seconds, MACHINE, values)


def test_a_finished_repeat_is_not_outstanding(tmp_path):
    store = Store(tmp_path)
    store.add(TINY, repeat(TINY, 2))
    assert [each.number for each in outstanding(store, [TINY], False, 3, False)] == [1, 3]
    assert [each.number for each in outstanding(store, [TINY], True, 1, False)] == [1], "quick is another result"
    assert [each.number for each in outstanding(store, [TINY], False, 2, True)] == [1, 2], "so is another text"


def test_an_experiment_that_always_has_the_same_results_is_run_once(tmp_path):
    fixed = Experiment("fixed", "Fixed", ("x",), 1, 1, "none", varies=False)
    assert [each.number for each in outstanding(Store(tmp_path), [fixed], False, None, False)] == [1]
    assert [each.number for each in outstanding(Store(tmp_path), [TINY], False, None, False)] == [1, 2, 3, 4, 5]
    assert [each.number for each in outstanding(Store(tmp_path), [TINY], True, None, False)] == [1]


def test_first_repeats_of_all_experiments_come_first(tmp_path):
    other = Experiment("other", "Other", ("x",), 1, 1, "none")
    work = outstanding(Store(tmp_path), [TINY, other], False, 2, False)
    assert [(each.experiment.id, each.number) for each in work] == [
        ("tiny", 1),
        ("other", 1),
        ("tiny", 2),
        ("other", 2),
    ]


def test_a_changed_command_or_version_makes_results_stale(tmp_path):
    store = Store(tmp_path)
    store.add(TINY, repeat(TINY, 1, v=1.0))
    for changed in (
        Experiment("tiny", "Tiny", (*TINY.program, "--more"), 5, 50, "none", takes_text=True),
        Experiment("tiny", "Tiny", TINY.program, 5, 50, "none", takes_text=True, version=2),
    ):
        assert store.current(changed, False, False) == []
        assert store.best(changed) == []
    store.add(changed, repeat(changed, 1, v=2.0))
    assert [each.values for each in store.repeats(changed)] == [{"v": 2.0}], "the stale one is gone"


def test_results_in_full_are_shown_rather_than_quick_ones(tmp_path):
    store = Store(tmp_path)
    for quick, text in ((True, True), (True, False), (False, False), (False, True)):
        store.add(TINY, repeat(TINY, 1, quick, text))
        shown = store.best(TINY)[0]
        assert (shown.quick, "--text" in shown.command) == (quick, text or quick)
    assert len(store.repeats(TINY)) == 4


def test_fresh_forgets_only_what_would_be_run_again(tmp_path):
    store = Store(tmp_path)
    store.add(TINY, repeat(TINY, 1, quick=True))
    store.add(TINY, repeat(TINY, 1))
    store.forget(TINY, quick=True, text=False)
    assert [each.quick for each in store.repeats(TINY)] == [False]


def test_the_estimate_is_what_earlier_repeats_took(tmp_path):
    store = Store(tmp_path)
    assert estimate(store, TINY, quick=False) == 50
    store.add(TINY, repeat(TINY, 1, seconds=70.0))
    store.add(TINY, repeat(TINY, 2, seconds=90.0))
    assert estimate(store, TINY, quick=False) == 80
    assert estimate(store, TINY, quick=True) == 5


def test_two_processes_do_not_share_a_folder(tmp_path):
    with (
        Store(tmp_path).locked(),
        pytest.raises(EnvironmentFault, match="another process runs experiments"),
        Store(tmp_path).locked(),
    ):
        pass


def test_arguments_of_a_repeat():
    assert TINY.arguments(True, 3, "a book.txt") == [
        "python", "-m", "tiny", "--seed", "3", "--text", "a book.txt", "--quick",
    ]  # fmt: skip
    assert "a book" not in TINY.command(True, True), "the path of the book is not stored"


def test_curves_are_thinned():
    x, y = thinned([list(range(1000)), list(range(1000))])
    assert len(x) == len(y) <= MOST_POINTS


def test_durations_for_people():
    assert [duration(each) for each in (5, 99, 120, 7_500)] == ["5 s", "99 s", "2 min", "2 h 05 min"]


# ---- the page ----------------------------------------------------------------------------------------------

SHOWN = Exhibit(
    "t-fig1",
    "Lu 2020",
    "figure 1",
    "A title",
    (
        Value("tiny", "v", "speed", "m/s", 10.0, bar=11.0),
        Value("tiny", "w", "weight", "kg", 10.0, differs="on the moon"),
        Value("tiny", "l", "length", "m", 10.0, "lower", equal=0.1),
    ),
)


def shown(repeats):
    return page(Findings([SHOWN], {"tiny": TINY}, {"tiny": repeats}), {"t-fig1": "figures/x.png"})


def test_the_page_of_results():
    text = shown([repeat(TINY, n, v=v, w=0.01, l=11.0) for n, v in ((1, 20.0), (2, 22.0), (3, 30.0))])
    assert "| speed, m/s | 10 | 22 (20 to 30) | 2.2 | **better** |" in text
    assert "| weight, kg | 10 | 0.01 (0.01 to 0.01) | 0.001 | **not applicable**: on the moon |" in text
    assert "| length, m | 10 | 11 (11 to 11) | 1.1 | **equal** (± 10 %) |" in text
    assert "in full, 3 of 5 repeats, 2026-01-01" in text
    assert "| ≥ 11 m/s | 22 (20 to 30) | yes |" in text
    assert "| [figure 1](#lu-2020-figure-1) | A title | **1 better, 1 equal, 1 not applicable** |" in text
    assert "![Lu 2020, figure 1](figures/x.png)" in text
    assert "`python -m tiny --seed SEED`" in text


def test_what_is_quick_or_not_run_says_so():
    quick = repeat(TINY, 1, quick=True, v=20.0, w=1.0, l=10.0)
    assert "**1 better, 1 equal, 1 not applicable** (quick)" in shown([quick])
    assert "quick, 1 repeat, 2026-01-01" in shown([quick])
    text = shown([])
    assert "| **not run** |" in text
    assert "**not run**; `penstock reproduce --only tiny`" in text


def test_a_short_run_that_did_not_measure_an_exhibit_does_not_make_it_quick():
    """A short run may measure only some values of its experiment."""
    text = shown([repeat(TINY, 1, quick=True, other=1.0)])
    assert "| A title | **not run** |" in text
    assert "| ≥ 11 m/s |  | not run |" in text


def test_numbers_of_the_page():
    assert [number(each) for each in (0.1234, 12.345, 123.4, 12_345.6)] == ["0.123", "12.3", "123", "12,346"]


def test_the_checked_in_page_is_that_of_the_stored_results():
    """``penstock reproduce --write-only`` writes it again."""
    findings = find(Store(RESULTS))
    pictures = picture_paths(findings)
    assert (DOCS / PAGE).read_text() == page(findings, pictures)
    assert [path for path in pictures.values() if not (DOCS / path).is_file()] == []


# ---- real runs ---------------------------------------------------------------------------------------------


def reproduce(folder, *words):
    code = "from penstock_command import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "reproduce", "--quick", "--only", FAST, "--repeats", "2", *words]
    command += ["--results", str(folder / "results"), "--docs", str(folder / "docs")]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def stored(folder):
    path = folder / "results" / f"{FAST}.json"
    return json.loads(path.read_text())["repeats"] if path.exists() else []


def test_a_run_that_is_killed_in_the_middle_is_resumed(tmp_path):
    (before,) = ended_in_the_middle(tmp_path, signal.SIGKILL)
    again = reproduce(tmp_path, "--json", str(tmp_path / "out.json"))
    _, errors = again.communicate(timeout=90)
    assert again.returncode == 0, errors
    assert stored(tmp_path)[0] == before, "a finished repeat was run again"
    assert [each["number"] for each in stored(tmp_path)] == [1, 2]
    assert f"[1 of 1] {FAST}" in errors
    assert "quick, 2 repeats" in (tmp_path / "docs" / PAGE).read_text()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["verdict"] for row in rows if row["exhibit"] == "storm-memory" and row["paper"]} == {"equal"}


def test_ctrl_c_leaves_the_page_of_what_is_done(tmp_path):
    ended_in_the_middle(tmp_path, signal.SIGINT)
    assert "quick, 1 repeat," in (tmp_path / "docs" / PAGE).read_text()


def ended_in_the_middle(folder, number):
    """Send a signal as soon as the first repeat is stored. Returns the stored repeats."""
    (folder / "docs").mkdir()
    process = reproduce(folder)
    deadline = time.monotonic() + 60
    while not stored(folder):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert len(stored(folder)) == 1
    return stored(folder)
