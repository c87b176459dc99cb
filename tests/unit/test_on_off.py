"""Figure 13 of *Lu 2020* with the mechanisms on and off, as far as it needs no Spark."""

import pytest

from benchmarks.on_off import (
    OVERLOADED,
    RATE,
    SYSTEMS,
    TIME_OUT,
    UNLIMITED,
    WORD,
    Course,
    on_to_off,
    slow_word_count,
    steady_rate,
)
from benchmarks.peers.bench import CASES
from benchmarks.words import sentences

WORDS = sum(len(each.split(" ")) for each in sentences()) / len(sentences())


def test_two_cases_are_overloaded_and_the_last_is_not_on_any_machine():
    needed = RATE * WORDS * WORD  # tasks that are busy all the time
    for case in CASES:
        if case in OVERLOADED:
            assert case[2] < needed / 2
    assert CASES[-1][2] > 1.2 * needed


def test_a_case_differs_only_in_flow_control(tmp_path):
    topologies = {system: slow_word_count((1, 2, 1), system, str(tmp_path)) for system in SYSTEMS}
    assert {each.settings.flow.mode for each in topologies.values()} == {"step", "none", "spout"}
    for each in topologies.values():
        assert each.settings.delivery == topologies["on"].settings.delivery
        assert each.settings.delivery.message_timeout == TIME_OUT
        assert each.settings.delivery.max_spout_pending == UNLIMITED
        assert {name: node.parallelism for name, node in each.nodes.items()} == {
            "sentences": 1,
            "split": 2,
            "count": 1,
        }


def test_the_ratio_where_nothing_is_completed_with_the_mechanisms_off():
    on = [Course(80.0, 0), Course(90.0, 0), Course(100.0, 0)]
    assert on_to_off(on, [Course(45.0, 9)] * 3) == pytest.approx(2.0)
    assert on_to_off(on, [Course(0.0, 9)] * 3) == 90.0


def test_a_rate_is_counted_from_report_to_report():
    """Between two looks at fixed times it would be 3 % too high or too low."""
    reports = [(0.0, 0)] + [(0.3 * n + 0.11, 120 * n) for n in range(1, 60)]
    assert steady_rate(reports, 5.0, 15.0) == pytest.approx(400)


def test_a_rate_that_ends_or_begins_in_the_middle_is_that_of_the_whole_time():
    ends = [(0.0, 0)] + [(0.3 * n, 120 * n) for n in range(1, 21)]
    assert steady_rate(ends, 5.0, 15.0) == pytest.approx((2400 - 1920) / 10)
    assert steady_rate(ends, 7.0, 15.0) == 0.0
    assert steady_rate([(0.0, 0), (14.9, 100)], 5.0, 15.0) == pytest.approx(10)
