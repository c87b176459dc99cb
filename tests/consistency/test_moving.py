"""Workers that go on in another process while the rest runs: the outcome is that of a run in which none moves."""

import random
import zlib
from collections import Counter

import pytest

from penstock import TopologyBuilder
from penstock.faults import STEPS
from penstock.testing import LocalRunner
from tests.consistency.components import (
    INTERVAL,
    SHAPES,
    WORLDS,
    Crash,
    Numbers,
    Outside,
    World,
    counts,
    die,
    key_of,
    pairs,
    run_to_the_end,
    run_until_idle,
)
from tests.helpers import settings_with

LEVELS = ("at_most_once", "at_least_once", "exactly_once")
MODES = ("step", "spout", "credit", "none")


def start(shape, world, seed=0, count=120, folder=None, **settings):
    builder = TopologyBuilder()
    copies = SHAPES[shape](builder, count, Outside(world))
    oracle: Counter[str] = Counter()
    for n in range(count):
        oracle[key_of(n)] += sum(copies.values())
    topology = builder.build("t", settings_with(**{"frame_bytes": 200, "epoch_interval": INTERVAL, **settings}))
    folder = folder or f"memory://{world}/{seed}"
    return LocalRunner(topology, seed=seed, folder=folder, die=die, uneven=True), oracle


def movable(runner):
    return [worker for worker in runner.plan.worker_ids() if worker.stage]


def check(runner, oracle, world, exact):
    run_until_idle(runner)
    if exact:
        run_to_the_end(runner)
    assert counts(runner) == oracle
    totals = {component: sum(s.executed for s in runner.stats(component)) for component in runner.plan.tasks_of}
    runner.close()  # other than exactly once the sinks commit now
    assert sorted(WORLDS[world].rows) == pairs(oracle)
    assert runner.errors == [], "no frame lost, doubled or overtaken"
    assert totals["count"] == totals["sink"] == oracle.total(), "who goes on counts on"


@pytest.mark.parametrize("delivery", LEVELS)
@pytest.mark.parametrize(
    ("shape", "mode"),
    [(shape, mode) for shape in SHAPES for mode in MODES if shape == "diamond" or mode in ("step", "credit")],
)
def test_results_are_those_of_a_run_without_moves(shape, mode, delivery, world):
    for seed, (capacity, overflow) in enumerate([(1, 0), (8, 300), (16_384, 1 << 20)]):
        WORLDS[world] = World()
        draw = random.Random(seed)
        runner, oracle = start(
            shape,
            world,
            seed,
            flow=mode,
            delivery=delivery,
            inbox_capacity=capacity,
            overflow_bytes=overflow,
        )
        for _ in range(4):
            runner.run(draw.uniform(0, 0.01))
            assert runner.move(draw.choice(movable(runner)))
        check(runner, oracle, world, delivery == "exactly_once")


@pytest.mark.parametrize("delivery", LEVELS)
@pytest.mark.parametrize("seed", range(6))
def test_who_cannot_leave_in_time_stays(delivery, seed, world):
    """Given up before it has left, or after it has snapshotted its state and before that is committed."""
    draw = random.Random(seed)
    runner, oracle = start("diamond", world, seed, delivery=delivery)
    moved = []
    for _ in range(8):
        runner.run(draw.uniform(0, 0.005))
        moved.append(runner.move(draw.choice(movable(runner)), patience=draw.uniform(0, 0.02)))
        runner.run(0.05)
    assert not all(moved)
    check(runner, oracle, world, delivery == "exactly_once")


@pytest.mark.parametrize("crash_at", [f"{step}:2" for step in STEPS])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_crash_at_every_step_of_the_commit_with_which_it_leaves(shape, crash_at, world, folder):
    seed = zlib.crc32(f"{shape} {crash_at}".encode())
    draw = random.Random(seed)
    settings = {"delivery": "exactly_once", "folder": folder}
    runner, oracle = start(shape, world, seed, crash_at=crash_at, epoch_interval=1e9, **settings)
    runner.commit()
    with pytest.raises(Crash):
        runner.move(draw.choice(movable(runner)))
    runner, oracle = start(shape, world, seed + 1, **settings)
    assert sorted(WORLDS[world].rows) == pairs(counts(runner)), "state and sinks tell of one moment"
    run_to_the_end(runner)
    assert counts(runner) == oracle
    assert sorted(WORLDS[world].rows) == pairs(oracle)


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_crash_after_a_move_finds_what_the_mover_wrote(epoch, world, folder):
    settings = {"delivery": "exactly_once", "folder": folder}
    runner, oracle = start("diamond", world, crash_at=f"notified:{epoch}", **settings)

    def moves():
        for worker in movable(runner) * 3:
            runner.move(worker)
            runner.run(0.002)

    with pytest.raises(Crash):
        moves()
    runner, _ = start("diamond", world, 1, **settings)
    run_to_the_end(runner)
    assert counts(runner) == oracle


def test_what_goes_to_it_meanwhile_is_held_and_not_lost(world):
    """With a spout that has all its tuples on their way before the worker opens in its new place."""
    runner, oracle = start("diamond", world, count=60, delivery="at_least_once")
    assert isinstance(runner.component("numbers")[0], Numbers)
    run_until_idle(runner)
    before = runner.stats("count")[0].received
    assert before
    for worker in movable(runner):
        assert runner.move(worker)
    assert runner.stats("count")[0].received == before
    check(runner, oracle, world, exact=False)
