"""Whatever dies at whatever step of a commit: after a restart the outcome is that of a run without a crash."""

import random
import zlib

import pyarrow.dataset as ds
import pytest

from penstock.connectors.parquet import ParquetSink
from penstock.faults import STEPS
from penstock.state import manifest as manifests
from penstock.state.store import StateStore
from penstock.testing import LocalRunner
from tests.consistency.components import (
    SHAPES,
    WORKER_STEPS,
    WORLDS,
    Crash,
    Outside,
    World,
    build,
    counts,
    crash_points,
    die,
    pairs,
    rows_of,
    run_to_the_end,
)

COUNT = 100


class Restarts:
    """One topology started again and again from one folder, checked at every start and at the end."""

    def __init__(self, shape, world, folder, count=COUNT, uneven=True):
        self._shape, self._world, self._count, self._folder = shape, world, count, folder
        self._uneven = uneven

    @property
    def committed(self):
        return max(manifests.epochs(StateStore(self._folder).child("t")), default=0)

    def start(self, crash_at="", seed=0):
        topology, self.oracle = build(self._shape, self._count, Outside(self._world), crash_at)
        runner = LocalRunner(topology, seed=seed, folder=self._folder, die=die, uneven=self._uneven)
        found = counts(runner)
        assert sorted(WORLDS[self._world].rows) == pairs(found), "state and sinks tell of one moment"
        assert not WORLDS[self._world].prepared
        assert not found - self.oracle, "counted too often"
        return runner

    def crashes(self, crash_at, seed=0):
        """True where it really did."""
        try:
            self.start(crash_at, seed).run(0.2)
        except Crash:
            return True
        return False

    def finish(self, seed=0):
        runner = self.start(seed=seed)
        run_to_the_end(runner)
        assert counts(runner) == self.oracle
        assert sorted(WORLDS[self._world].rows) == pairs(self.oracle)
        assert not runner.errors
        return runner


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("crash_at", crash_points(epochs=(1, 3)))
def test_a_crash_at_every_step(shape, crash_at, world, folder):
    topology = Restarts(shape, world, folder)
    seed = zlib.crc32(f"{shape} {crash_at}".encode())
    assert topology.crashes(crash_at, seed)
    step, epoch = crash_at.split(":")
    if STEPS.index(step) >= STEPS.index("committed"):
        assert topology.committed == int(epoch)
    else:
        assert topology.committed in (int(epoch) - 1, int(epoch) - 2), "two epochs may be under way"
    topology.finish(seed + 1)


@pytest.mark.parametrize("step", WORKER_STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_crash_of_each_worker(shape, step, world, folder):
    """How far the others are then differs from worker to worker."""
    for worker in LocalRunner(build(shape, 1, Outside(world))[0]).plan.worker_ids():
        if (step == "marked" and worker.stage) or (step == "snapshotted" and not worker.stage):
            continue
        WORLDS[world] = World()
        topology = Restarts(shape, world, f"{folder}/{worker}", count=40, uneven=False)
        assert topology.crashes(f"{step}:2:{worker}", seed=worker.index)
        topology.finish(seed=2)


@pytest.mark.parametrize("seed", range(9))
def test_one_crash_after_the_other(seed, world, folder):
    draw = random.Random(seed)
    topology = Restarts(draw.choice(list(SHAPES)), world, folder, count=200)
    for _ in range(draw.randrange(3, 7)):
        crash_at = f"{draw.choice(STEPS)}:{topology.committed + draw.randrange(1, 4)}"
        assert topology.crashes(crash_at, seed=draw.randrange(100))
    topology.finish(seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_turns_does_not_matter(shape, seed, world, folder):
    runner = Restarts(shape, world, folder).finish(seed)
    assert runner.commits.committed > 4


def test_a_spout_hears_of_a_message_when_its_epoch_is_committed(world, folder):
    topology = Restarts("diamond", world, folder, count=60)
    runner = topology.start("committed:3")
    with pytest.raises(Crash):
        runner.run(1.0)
    for spout in runner.component("numbers"):
        assert spout.acked == list(range(len(spout.acked)))
        assert spout.acked, "epochs 1 and 2 were committed"
    told = [len(spout.acked) for spout in runner.component("numbers")]
    restored = [spout.position.value for spout in topology.start().component("numbers")]
    assert all(acked <= position for acked, position in zip(told, restored, strict=True))


@pytest.mark.parametrize("crash_at", crash_points(epochs=(2,)))
def test_parquet_files_on_disk(crash_at, tmp_path):
    def start(crash_at=""):
        topology, oracle = build("diamond", COUNT, ParquetSink(tmp_path / "rows"), crash_at)
        return LocalRunner(topology, folder=str(tmp_path / "state"), die=die), oracle

    with pytest.raises(Crash):
        start(crash_at)[0].run(1.0)
    runner, oracle = start()
    run_to_the_end(runner)
    assert rows_of(ds.dataset(tmp_path / "rows", format="parquet").to_table()) == pairs(oracle)
    assert counts(runner) == oracle
