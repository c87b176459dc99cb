"""How much of the time without output after a loss is the driver's own, on a simulated clock."""

import pytest

from tests.unit.fake_world import LATENCY, World

QUERY_ENDS = 0.1  # seconds after the loss of a worker until the engine has ended the query, as measured on Spark


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.waiter.wait_for(lambda: False, 5.0)
    return made


def lose_a_worker(world):
    """Kill one worker; the engine ends its query a moment later. Returns when."""
    query = world.engine.queries[-1]
    world.after(0.033, query.workers[0].die)  # between two looks of the supervisor
    world.after(0.033 + QUERY_ENDS, query.lose)
    return world.waiter.now() + 0.033


def run_until(world, condition):
    """Let the supervisor take turns. Returns when the condition holds."""
    world.turn_until(condition, seconds=5.0)
    return world.waiter.now()


def test_a_loss_is_noticed_and_the_query_started_again_at_once(world):
    lost = lose_a_worker(world)
    restarted = run_until(world, lambda: world.supervisor.lifecycle.restarts.count == 1)
    emitting = run_until(world, lambda: world.engine.queries[-1].workers[0].active)
    assert restarted - lost < QUERY_ENDS + 0.05 + 20 * LATENCY
    assert emitting - lost < QUERY_ENDS + 0.05 + 20 * LATENCY


def test_a_second_loss_in_a_row_waits(world):
    lose_a_worker(world)
    run_until(world, lambda: len(world.engine.queries) == 2)
    lost = lose_a_worker(world)
    launched = run_until(world, lambda: len(world.engine.queries) == 3)
    assert launched - lost >= 0.5, "a start that fails again and again must not keep the machine busy"


def test_the_state_is_taken_over_while_workers_connect(world):
    times = {}
    world.supervisor.runner.crash = lambda change, step: times.setdefault(step, world.waiter.now())
    lose_a_worker(world)
    run_until(world, lambda: "activated" in times)
    assert list(times).index("claimed") == list(times).index("launched") + 1
    assert times["claimed"] < times["connected"]
