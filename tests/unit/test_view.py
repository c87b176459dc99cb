"""The tables of the live view, whatever the data."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console, ConsoleDimensions

from penstock.cli import drain, run
from penstock.cli.main import _ToStandardError, main
from penstock.cli.status import task_lines
from penstock.cli.view import brief, compact, component_table, latency, result_table, screen, summary
from penstock.driver.outcome import FRUITLESS, judge
from penstock.metrics.bus import ComponentView
from penstock.metrics.stats import TaskStats

CELL = re.compile(r"\S+(?: m?s\b)?")
"""A word, or a number with its unit."""


def text_of(table):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_component_with_everything_and_one_with_nothing():
    busy = ComponentView("split", 2, 1234.5, 9876.5, 17, 2.5e-6, 0.0066, 0.0147, 3, "ValueError", 10, 20)
    fresh = ComponentView("count", 1, 0.0, 0.0, 0, None, None, None, 0, "", 0, 0)
    shown = text_of(component_table("word-count", [busy, fresh]))
    for part in ("word-count", "split", "1,234", "9,876", "17", "2.5 us", "6.6 ms", "14.7 ms", "3"):
        assert part in shown
    assert "-" in shown


def test_acks_and_state_are_shown_where_there_are_any():
    spout = ComponentView("lines", 1, 0, 50.0, 0, None, 0.004, 0.01, 0, "", 10, 20, 1_500, 7)
    count = ComponentView("count", 1, 50.0, 0, 0, None, 0.004, 0.01, 0, "", 10, 20, 0, 0, 12_345, 2_500_000)
    shown = text_of(component_table("word-count", [spout, count]))
    for part in ("acked", "1,500", "failed", "7", "state", "12,345 keys, 2 MB"):
        assert part in shown


def test_values_that_look_like_markup_are_shown_as_they_are():
    shown = text_of(result_table("[bold]", [["[/api/users]", 1000], ["[red]", "x"]]))
    for part in ("[bold]", "[/api/users]", "1,000", "[red]"):
        assert part in shown


# ---- the live view -----------------------------------------------------------------------------------------


def drawn(width, height, error="", decision="", scale=1.0, rows=3, more=0):
    """The lines of the screen on a terminal of this size."""
    views = [
        ComponentView(
            "a-component-with-a-rather-long-name", 4, 9.9e6 * scale, 1.2e9 * scale, int(70_000 * scale), 2e-6,
            0.004, 12.34 * scale, int(888_888 * scale), "", 1, 1, 10, int(5_000_000 * scale),
        ),
        ComponentView("count", 1, 0.0, 0.0, 0, None, None, None, 0, "", 0, 0),
        *(ComponentView(f"more-{n}", 1, 0.0, 0.0, 0, None, None, None, 0, "", 0, 0) for n in range(more)),
    ]  # fmt: skip
    published = {"show": [[f"word {n}", n * 1000] for n in range(rows)]}
    out = io.StringIO()
    console = Console(width=width, height=height, file=out, force_terminal=True, color_system=None)
    size = ConsoleDimensions(width, height)
    console.print(screen("word-count  active", decision, error, views, published, size))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("more", [0, 13, 16, 17, 40])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 20), (40, 12)])
def test_it_fits_a_terminal(width, height, more):
    lines = drawn(width, height, "x" * 500, "y" * 500, rows=100, more=more)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert len(lines) == height - 1 or more == 13, "all room is used, for results or for components"


def test_components_without_room_are_counted():
    lines = drawn(80, 24, more=23)
    assert lines[-1] == "… and 9 more components; penstock status shows all"
    assert sum(line.startswith("more-") for line in lines) == 14


@pytest.mark.parametrize("width", range(20, 121, 5))
def test_no_number_is_ever_cut(width):
    """Half a number is a wrong number: a column that has no room is left out."""
    for scale in (0.001, 1.0, 90.0):
        whole, here = (drawn(w, 24, scale=scale) for w in (120, width))
        names = ("a-component", "count")
        cells = [[line for line in lines if line.startswith(names)] for lines in (whole, here)]
        for wide, narrow in zip(*cells, strict=True):
            known = [cell.strip() for cell in re.split(r"\s{2,}|(?<=\w) (?=[\d-])", wide[40:])]
            found = [cell.strip() for cell in re.split(r"\s{2,}|(?<=\w) (?=[\d-])", narrow[max(16, width - 64) :])]
            assert set(found) - {""} <= set(known), (narrow, wide)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_nothing_jumps(width, height):
    """Neither an error nor larger numbers move a column or a line."""
    quiet, loud = drawn(width, height, scale=0.0001), drawn(width, height, "ValueError: 3", "scaling: …")
    assert len(quiet) == len(loud)
    heads = [next(line for line in lines if line.startswith("component")) for lines in (quiet, loud)]
    assert heads[0] == heads[1]
    first = [lines[lines.index(head) + 1] for lines, head in zip((quiet, loud), heads, strict=True)]
    for head, row in zip(heads, first, strict=True):
        assert [each.end() for each in CELL.finditer(row)][1:] == [each.end() for each in CELL.finditer(head)][1:]
    assert "1.2 ms" in first[0]
    assert "12.34 s" in first[1], "a unit is never cut off"
    assert [line.split()[0] for line in quiet[5:]] == [line.split()[0] for line in loud[5:]]


def test_errors_and_the_way_out_are_at_the_top():
    lines = drawn(80, 24, "component 'count': ValueError: 3")
    assert "Ctrl-C" in lines[1]
    assert "ValueError: 3" in lines[3]


def test_the_cause_of_an_error_is_seen_on_a_narrow_terminal():
    error = "1,234 errors, the last: component 'parse' (orders.py:118 in execute): execute raised "
    lines = drawn(80, 24, error + "ValueError: no price")
    assert "".join(lines[3:5]) == error + "ValueError: no price"
    assert lines[5].startswith("component  ")
    assert drawn(80, 24)[3:5] == ["no errors", ""]


def test_warnings_go_where_standard_error_is_now(monkeypatch):
    """Rich puts a stand-in there while it shows a spinner: else the warning would begin in the spinner's line."""
    handler = _ToStandardError()
    stand_in = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stand_in)
    handler.emit(logging.makeLogRecord({"msg": "tuples are lost"}))
    assert stand_in.getvalue() == "tuples are lost\n"


def test_a_warning_cannot_steer_the_terminal(capsys):
    _ToStandardError().emit(logging.makeLogRecord({"msg": "lost \x1b[2J\x9b1m\n\tat a row"}))
    assert capsys.readouterr().err == "lost \\x1b[2J\\x9b1m\n\tat a row\n"


def test_the_last_line_of_drain_cannot_steer_the_terminal(capsys):
    """A store's answer is in it."""
    report = SimpleNamespace(written=1, rejected=0, trouble="no table \x1b]0;title\x07", attempts=2, waiting=3)
    processor = SimpleNamespace(empty=False, report=lambda: report, close=lambda: None)
    spec = SimpleNamespace(component="save", store="a store", processor=lambda clock: processor)
    assert drain._drain(spec, until=0.0) is False
    assert capsys.readouterr().out == (
        "save: 1 rows written to a store; attempt 2: no table \\x1b]0;title\\x07; some entries are not written\n"
    )


def test_what_penstock_run_says_at_the_end_cannot_steer_the_terminal(capsys):
    total = TaskStats(executed=1, errors=1, last_error="ValueError: \x1b[2J")
    running = SimpleNamespace(outcome=lambda: judge([], {"parse": total}, ""))
    session = run._RunCommand.__new__(run._RunCommand)
    session._running, session._console = SimpleNamespace(internals=running), Console(file=io.StringIO())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.cli.view.summary", lambda *ignored: "")
        assert session._sum_up(1.0, 0.0) == FRUITLESS
    assert "ValueError: \\x1b[2J" in capsys.readouterr().err


def test_a_warning_is_shown_once_however_often_main_is_called(capsys):
    for _ in range(3):
        assert main(["list"]) == 0
    capsys.readouterr()
    logging.getLogger("penstock").warning("a node's clock is off")
    assert capsys.readouterr().err.count("a node's clock is off") == 1


def test_text_of_users_can_neither_mark_up_nor_steer_the_terminal():
    lines = drawn(80, 24, "[bold]x[/bold] \x1b[2J\x1b]0;title\x07")
    assert "[bold]x[/bold]" in lines[3]
    assert not any("\x1b" in line for line in lines)
    shown = text_of(result_table("a\x1b[31m", [["\x1b[2J", 1]]))
    assert "\x1b" not in shown


@pytest.mark.parametrize("value", [0, 999_999, 1_000_000, 999_999_999, 5e12, 123_456_789_012])
def test_numbers_have_at_most_seven_characters(value):
    assert len(compact(value)) <= 7
    assert len(brief(value)) <= 6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0123, "12.3 ms"),
        (0.9999, "999.9 ms"),
        (1.2345, "1.23 s"),
        (99.99, "99.99 s"),
        (100, "100 s"),
        (86_400, "86,400 s"),
    ],
)
def test_a_latency_has_at_most_nine_characters(seconds, text):
    assert latency(seconds) == text
    assert len(text) <= 9


def test_status_has_lag_written_rows_and_a_task_that_hangs():
    quiet = {"in_call": 0.0, "lag": {}, "written": 0, "given_up": 0, "away": 0.0, "late": 0}
    tasks = [
        {**quiet, "task": "lines/0", "lag": {"in/1": 1500, "in/0": 7}},
        {**quiet, "task": "count/2", "in_call": 12.4},
        {**quiet, "task": "store/0", "written": 12_000, "given_up": 3, "away": 8.0},
        {**quiet, "task": "windows/1", "late": 1_234},
        {**quiet, "task": "show/0", "in_call": 0.4},
    ]
    assert task_lines(tasks) == [
        "lines/0 has 1,507 records to read: in/0 7, in/1 1,500",
        "count/2 has been in one call of its component's code for 12 s",
        "store/0 has written 12,000 rows",
        "store/0 has been waiting for its external system for 8 s",
        "store/0 has given up 3 tuples or rows",
        "windows/1 received 1,234 tuples too late for their windows",
    ]


@pytest.mark.parametrize(("restarts", "text"), [(0, "0 restarts"), (1, "1 restart"), (2, "2 restarts")])
def test_the_summary_says_how_long_it_ran_and_how_long_its_end_took(restarts, text):
    bus = SimpleNamespace(totals=dict, published=dict)
    running = SimpleNamespace(topology=SimpleNamespace(name="words"), restarts=restarts, committed=7, bus=bus)
    assert summary(running, 12.34, 20.06) == f"words ran 12.3 s and took 20.1 s to end, {text}, epoch 7 committed"
