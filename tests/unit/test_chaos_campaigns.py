"""The pure parts of the chaos tests: what a seed draws, what the oracle says of an output, what the report has."""

import json

import pytest

from tests.fault import chaos_report
from tests.fault.campaign import DELIVERIES, EVENTS, KINDS, SINKS, Campaign, Event, draw
from tests.fault.chaos_events import EVENTS as ACTIONS
from tests.fault.oracle import ORIGINS, judge, judge_savepoint, key_of, totals

SEEDS = range(20)  # of make fault
COUNT = 200


def output(count=COUNT):
    """What a sequential run writes."""
    seen = {}
    rows = []
    for n in range(count):
        for origin in ORIGINS:
            seen[key_of(n)] = seen.get(key_of(n), 0) + 1
            rows.append((origin, n, key_of(n), seen[key_of(n)]))
    return rows


# ---- drawing -------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_campaign_again():
    assert [draw(seed) for seed in SEEDS] == [draw(seed) for seed in SEEDS]
    assert len({draw(seed).events for seed in SEEDS}) == len(SEEDS)


def test_a_short_campaign_is_the_beginning_of_the_whole_one():
    assert draw(3, 4).events == draw(3).events[:4]


def test_all_seeds_together_have_two_hundred_events_of_all_kinds_sinks_and_guarantees():
    campaigns = [draw(seed) for seed in SEEDS]
    assert sum(len(campaign.events) for campaign in campaigns) >= 200
    events = [event for campaign in campaigns for event in campaign.events]
    assert {event.kind for event in events} == {kind.name for kind in KINDS} == ACTIONS.keys()
    cells = {(campaign.sink, campaign.delivery) for campaign in campaigns}
    assert cells == {(sink, delivery) for sink in SINKS for delivery in DELIVERIES}
    assert {bool(campaign.nodes) for campaign in campaigns} == {True, False}
    assert {campaign.source for campaign in campaigns} == {"files", "numbers", "kafka"}
    assert {event.form for event in events} == {form for kind in KINDS for form in kind.forms}


def test_events_happen_to_what_a_campaign_has_and_not_too_often():
    for campaign in map(draw, SEEDS):
        assert len(campaign.events) == EVENTS
        heavy = 0
        for kind in KINDS:
            times = sum(event.kind == kind.name for event in campaign.events)
            assert times <= kind.most
            assert not times or campaign.has(kind.needs), f"{campaign} has no {kind.needs}"
            heavy += times * kind.heavy
        assert heavy <= 2
        for event in campaign.events:
            (kind,) = (kind for kind in KINDS if kind.name == event.kind)
            assert any(least <= event.seconds <= most for least, most in kind.seconds)
            assert 0 <= event.pick < 1


def test_an_event_and_a_campaign_are_told_in_words():
    event = Event("stop worker", "", 1.0, True, 2.5, 0.1)
    assert str(event) == "stop worker for 2.5 s"
    assert str(Event("second driver", "stopped", 1.0, True, 0.0, 0.1)) == "second driver (stopped)"
    campaign = Campaign(7, "kafka", "kafka", "exactly_once", 2, (event,))
    assert str(campaign) == "seed 7: kafka to kafka, exactly_once, 2 executors"


# ---- the oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_what_a_sequential_run_writes_is_good(exact):
    verdict = judge(exact, COUNT, output(), totals(COUNT))
    assert verdict.good
    assert not verdict.doubled
    assert not verdict.notes
    assert verdict.rows == 2 * COUNT


@pytest.mark.parametrize("exact", [True, False])
def test_a_missing_record_is_lost(exact):
    verdict = judge(exact, COUNT, [row for row in output() if row[:2] != (1, 17)], totals(COUNT))
    assert verdict.lost == 1
    assert not verdict.good
    assert verdict.notes[0] == "1 records are not in the output, such as (1, 17)"


def test_a_record_twice_is_wrong_exactly_once_and_counted_at_least_once():
    rows = [*output(), output()[5]]
    assert judge(True, COUNT, rows, totals(COUNT)).wrong > 0
    verdict = judge(False, COUNT, rows, totals(COUNT))
    assert verdict.good
    assert verdict.doubled == 1


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "row", [(0, COUNT, key_of(COUNT), 1), (2, 0, "key-0", 1), (0, 3, "key-4", 1), (0, 3, "key-3", 0)]
)
def test_a_row_that_no_record_gives_is_wrong(exact, row):
    verdict = judge(exact, COUNT, [*output(), row], totals(COUNT))
    assert verdict.wrong >= 1
    assert not verdict.lost


def test_counts_are_exact_exactly_once_and_not_too_low_at_least_once():
    for change, exact, good in ((1, True, False), (-1, True, False), (1, False, True), (-1, False, False)):
        counts = totals(COUNT)
        counts["key-9"] += change
        assert judge(exact, COUNT, output(), counts).good is good, (change, exact)


def test_a_count_in_the_output_that_was_done_twice_is_wrong_exactly_once():
    """The record is there once, but the state had counted it before a crash."""
    rows = output()
    rows[-1] = (*rows[-1][:3], rows[-1][3] + 1)
    assert judge(True, COUNT, rows, totals(COUNT)).wrong == 1
    assert judge(False, COUNT, rows, totals(COUNT)).good


def test_a_savepoint_has_as_many_records_counted_as_emitted():
    assert judge_savepoint({"source/0": 3, "source/1": 4}, {"key-0": 5, "key-1": 2}) == ""
    assert judge_savepoint({"source/0": 3}, {"key-0": 2}) == "3 records emitted and 2 counted"


# ---- the report ----------------------------------------------------------------------------------------


def test_the_report_has_seeds_events_and_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    happened = [
        {"event": 1, "what": "kill worker", "kind": "kill worker", "at": 3.5, "told": "process 7"},
        {"event": 2, "what": "scale", "kind": "scale", "at": 4.5, "told": "", "skipped": "nobody there"},
    ]
    report = {
        "seed": 4,
        "sink": "parquet",
        "source": "files",
        "delivery": "exactly_once",
        "executors": 0,
        "good": False,
        "events": 1,
        "lost": 2,
        "wrong": 0,
        "doubled": 0,
        "rows": 98,
        "drivers": 1,
        "savepoints": 0,
        "seconds": 60.0,
        "faults": ["2 records are not in the output"],
        "happened": happened,
    }
    line = chaos_report.write([report])
    assert line.startswith("1 events in 1 campaigns, 0 of them good: 2 lost, 0 wrong")
    text = chaos_report.TEXT.read_text()
    assert "| 4 | files → parquet | exactly once | local | 1 | 1 | 98 | 2 | 0 | 0 | 60.0 | BAD |" in text
    assert "- 3.5 s: kill worker (process 7)" in text
    assert "skipped, nobody there" in text
    assert "| kill worker | 1 |" in text
    assert "- **2 records are not in the output**" in text
    found = {bar["name"]: bar["value"] for bar in json.loads(chaos_report.JSON.read_text())["bars"]}
    assert found["chaos.lost"] == 2
    assert found["chaos.events"] == 1
