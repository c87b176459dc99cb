"""A topology is replaced repeatedly while it, its replacement or the driver is killed: the state always has one
owner, at least once nothing is lost, exactly once the results equal a sequential run."""

import pytest

from tests.fault.replace_harness import MOVE_STEPS, STEPS, MoveRun, ReplaceRun

LEVELS = ("at_least_once", "exactly_once")


@pytest.mark.forms(
    short=[("exactly_once", "claimed")], full=[(delivery, step) for delivery in LEVELS for step in STEPS]
)
def test_the_driver_dies_between_two_steps_of_a_replacement(tmp_path, campaign, form):
    """In the second replacement, from four tasks to one. Started again it has the two of its file, and the state
    of four."""
    delivery, step = form
    run = ReplaceRun(tmp_path, 900 + STEPS.index(step), delivery, crash_at=f"{step}:2")

    def committed():
        if step != "checked":  # before that, those four may not have committed anything
            assert run.tasks_in_state() == 4, run.story()

    run.survive(f"replace crash at {step}", committed)
    campaign(run)


@pytest.mark.forms(
    short=[("exactly_once", 0)], full=[(delivery, seed) for delivery in LEVELS for seed in range(4)]
)
def test_somebody_is_killed_while_the_topology_is_replaced(tmp_path, campaign, full, form):
    delivery, seed = form
    kills = 5 if full else 2
    with ReplaceRun(tmp_path, 1000 + seed, delivery, count=4_000 * kills) as run:
        for _ in range(kills):
            run.kill_somebody()
        run.await_("a replacement to come through", lambda: run.status().get("replaced", 0) > 0)
        run.finish()
    campaign(run)


@pytest.mark.forms(short=[], full=[(delivery, seed) for delivery in LEVELS for seed in range(2)])
def test_somebody_is_killed_while_executors_move_and_nodes_are_left(tmp_path, campaign, form):
    """All workers to one node, the other left and taken back, again and again."""
    delivery, seed = form
    master = "local-cluster[2,24,1024]"
    with ReplaceRun(tmp_path, 1300 + seed, delivery, count=20_000, scale=(), master=master) as run:
        for _ in range(5):
            run.kill_somebody()
        run.await_("a move to come through", lambda: run.status().get("replaced", 0) > 0)
        run.finish()
    campaign(run)


@pytest.mark.forms(short=[], full=[(delivery, step) for delivery in LEVELS for step in STEPS])
def test_the_driver_dies_between_two_steps_of_a_move(tmp_path, campaign, form):
    """In the first move, that of all workers to one node."""
    delivery, step = form
    master = "local-cluster[2,24,1024]"
    seed = 1400 + STEPS.index(step)
    run = ReplaceRun(tmp_path, seed, delivery, scale=(), master=master, crash_at=f"{step}:1")
    run.survive(f"move crash at {step}")
    campaign(run)


@pytest.mark.forms(short=[], full=[(delivery,) for delivery in LEVELS])
def test_an_old_one_that_dies_in_the_gap_holds_nobody_up(tmp_path, campaign, form):
    """It has a minute to drain; the new one takes over as soon as it is known that this cannot be."""
    (delivery,) = form
    with ReplaceRun(tmp_path, 1100, delivery, drain_timeout=60.0) as run:
        run.kill({"step": "paused", "delay": 0.0, "of": "old", "pick": run.random.random()})
        assert run.faults[-1][1] < 30, run.story()
        run.finish()
    campaign(run)


@pytest.mark.forms(short=[], full=[(delivery, step) for delivery in LEVELS for step in MOVE_STEPS])
def test_the_driver_dies_between_two_steps_of_one_workers_move(tmp_path, campaign, form):
    """In the third move."""
    delivery, step = form
    run = MoveRun(tmp_path, 1500 + MOVE_STEPS.index(step), delivery, crash_at=f"{step}:3")
    run.survive(f"slot crash at {step}")
    campaign(run)


@pytest.mark.forms(
    short=[("at_least_once", 0)], full=[(delivery, seed) for delivery in LEVELS for seed in range(3)]
)
def test_somebody_is_killed_while_workers_move_one_by_one(tmp_path, campaign, full, form):
    delivery, seed = form
    kills = 6 if full else 1
    with MoveRun(tmp_path, 1600 + seed, delivery, count=4_000 * kills) as run:
        for _ in range(kills):
            run.kill_somebody()
        done = run.status()["replaced"]
        run.await_("moves to come through", lambda: run.status().get("replaced", 0) >= done + 2)
        run.finish()
    campaign(run)
