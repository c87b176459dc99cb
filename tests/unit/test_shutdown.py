"""What a shutdown says about work that was not finished."""

from types import SimpleNamespace

import pytest

from penstock import Settings
from penstock.driver.shutdown import ShuttingDown
from penstock.driver.steps import Cause, Problem
from penstock.errors import TopologyFailed
from penstock.metrics.stats import TaskStats


def shutdown(in_call, keeps_state=False):
    run = SimpleNamespace(
        settings=Settings(),
        keeps_state=keeps_state,
        where="topology 't'",
        bus=SimpleNamespace(tasks=lambda: {1: TaskStats(), 2: TaskStats(in_call=in_call)}),
        plan=SimpleNamespace(task={2: SimpleNamespace(key="lines/0")}),
    )
    return ShuttingDown(SimpleNamespace(current=run), True, True, lambda shutdown: None, ())


@pytest.mark.parametrize(
    ("cause", "keeps_state", "text"),
    [
        (Cause.TIMED_OUT, False, "tuples in flight were not processed within 10 s; they are lost"),
        (Cause.TIMED_OUT, True, "tuples in flight were not processed within 10 s; the next run processes them"),
        (
            Cause.CANCELLED,
            False,
            "tuples in flight were not processed because it was ended at once; they are lost",
        ),
        (Cause.LOST, False, ""),
    ],
)
def test_tuples_in_flight(cause, keeps_state, text):
    made = shutdown(in_call=0.1, keeps_state=keeps_state)
    made._on_not_drained(Problem(cause, TopologyFailed("topology 't'", "not drained")))
    assert made.left_behind == text


def test_a_call_that_does_not_return_is_named():
    made = shutdown(in_call=13.2)
    made._on_not_drained(Problem(Cause.TIMED_OUT, TopologyFailed("topology 't'", "not drained")))
    assert made.left_behind == (
        "lines/0 has been in one call of its component's code for 13 s, so tuples in flight were not processed "
        "within 10 s; they are lost"
    )
