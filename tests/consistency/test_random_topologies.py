"""Random topologies, disturbed at random: the outcome is that of a sequential run. ``make fault`` runs 10,000."""

import pytest

from tests.consistency.random_cases import draw_case, expected
from tests.consistency.random_topologies import judge, run_case


@pytest.mark.parametrize("seed", [*range(40), 310, 410])  # the last two scale state whose keys are tuples
def test_the_outcome_is_the_oracles(seed):
    run_case(seed)


def test_the_cases_have_everything_in_them():
    """Or they would prove less than they seem to."""
    cases = [draw_case(seed) for seed in range(300)]
    steps = [step for case in cases for step in case.steps]
    assert {step.does for step in steps} == {
        *("pass", "twice", "filter", "split", "both", "direct", "pair", "count", "parts", "merged")
    }
    assert {step.form for step in steps} == {"basic", "rich", "batch"}
    groupings = {grouping for step in steps for _, _, grouping in step.inputs}
    assert groupings == {
        *("shuffle", "fields", "fields-id", "fields-both", "partial"),
        *("global", "none", "local", "custom", "all", "direct"),
    }
    assert {event for case in cases for event, _ in case.events} == {
        *("run", "kill", "crash", "rescale", "move", "route")
    }
    assert {source.form for case in cases for source in case.sources} == {"tuple", "batch"}
    assert len({source.keys for case in cases for source in case.sources}) >= 10
    diamonds = [case for case in cases if any(len(step.inputs) > 1 for step in case.steps)]
    assert len(diamonds) > 100


@pytest.mark.parametrize("seed", range(20))
def test_the_judge_sees_a_row_that_is_lost_doubled_or_wrong(seed):
    case = draw_case(seed)
    case.delivery = "exactly_once"
    does = {step.name: step.does for step in case.steps}
    oracle = expected(case)
    rows = [(*leaf, *row) for leaf in case.leaves() for row, times in oracle[leaf].items() for _ in range(times)]
    judge(case, rows)
    exact = [row for row in rows if does.get(row[0]) != "merged"]  # a merging bolt may emit a total twice
    for tampered in [rows[1:], rows[:-1], *([[*rows, exact[0]]] if exact else [])]:
        with pytest.raises(AssertionError):
            judge(case, tampered)
