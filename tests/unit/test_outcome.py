"""Exit codes and sentences of a topology that has ended."""

import pytest

from penstock.driver.outcome import FRUITLESS, INCOMPLETE, judge
from penstock.metrics.stats import TaskStats

GOOD = TaskStats(executed=10, emitted=10, acked=9, failed=1, errors=1)


def test_a_topology_that_did_its_work_ends_with_nothing_to_say():
    outcome = judge(["lines"], {"lines": GOOD, "count": TaskStats(executed=10, errors=1)}, "")
    assert (outcome.code, outcome.sentences) == (0, ())


def test_one_that_was_never_given_anything_does_too():
    assert judge(["lines"], {"lines": TaskStats(), "count": TaskStats()}, "").code == 0


def test_a_sink_that_was_away_for_a_while_and_has_written_did_its_work():
    """That it was away is reported once, as an error; it may have had one row only."""
    sink = TaskStats(executed=1, errors=1, last_error="no server", written=1)
    assert judge(["lines"], {"lines": GOOD, "sink": sink}, "").code == 0


def test_one_with_more_dead_letters_than_successes_is_not_fruitless():
    spout = TaskStats(emitted=10, failed=21, acked=3, given_up=7)
    assert judge(["lines"], {"lines": spout, "count": TaskStats(executed=24, errors=21)}, "").code == 0


@pytest.mark.parametrize(
    ("spout", "bolt", "sentence"),
    [
        (
            TaskStats(errors=3, last_error="no such file."),
            TaskStats(),
            "Spout 'lines' emitted nothing and raised 3 errors; the last error: no such file.",
        ),
        (
            TaskStats(emitted=5, failed=25),
            TaskStats(executed=25),
            "Every tuple of spout 'lines' failed: 25 failures, none succeeded.",
        ),
        (
            TaskStats(emitted=5, failed=25, given_up=5),
            TaskStats(executed=25),
            "Every tuple of spout 'lines' failed: 25 failures, none succeeded.",
        ),
        (
            TaskStats(emitted=5),
            TaskStats(executed=5, errors=5, last_error="KeyError: 'x'"),
            "Bolt 'count' failed on every one of 5 tuples; the last error: KeyError: 'x'.",
        ),
    ],
)
def test_a_component_that_only_failed(spout, bolt, sentence):
    outcome = judge(["lines"], {"lines": spout, "count": bolt}, "")
    assert (outcome.code, outcome.sentences) == (FRUITLESS, (sentence,))


def test_what_was_left_behind():
    outcome = judge(["lines"], {"lines": GOOD}, "epoch 7 is not committed")
    assert (outcome.code, outcome.sentences) == (
        INCOMPLETE,
        ("Not everything was finished: epoch 7 is not committed.",),
    )
