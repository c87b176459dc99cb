"""Replay with state behind it: after a crash at any step no line is missing from the counts."""

import pytest

from penstock import BasicBolt, Delivery, Lifecycle, Settings, TopologyBuilder, Transport
from penstock.connectors.file_eden import FileEden
from penstock.replay import ReplayRecord, ReplaySpout, spout
from penstock.replay.embedded import open_beside
from penstock.testing import LocalRunner
from tests.consistency.components import INTERVAL, WORKER_STEPS, Crash, crash_points, die

LINES = [f"line {number}" for number in range(60)]
FAILING = frozenset(LINES[::7])


class Paced(ReplaySpout):
    """Waits for its threads a little: simulated time does not."""

    def next_batch(self):
        super().next_batch()
        if self._replayer is not None:
            self._replayer.wait(0.005)

    def die(self):
        """What the end of a process does to threads and locks, and nothing that a graceful end does."""
        if self._replayer is not None:
            self._replayer._stop.set()
            for inbox in self._replayer._inboxes.values():
                inbox.put(None)
            for thread in self._replayer._threads:
                thread.join()
            self._replayer._sources.queues.close()


class Count(BasicBolt):
    """How often each line came; some fail the first time."""

    def prepare(self, conf, context):
        self.times = context.state.map("times", 0)
        self._failed = set()

    def execute(self, tup, collector):
        if tup.line in FAILING - self._failed:
            self._failed.add(tup.line)
            raise ValueError("not at first")
        self.times[tup.line] += 1


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(spout, "_BATCH", 4)  # several epochs of them


@pytest.fixture
def start(tmp_path):
    source = tmp_path / "lines.txt"
    source.write_text("".join(f"{line}\n" for line in LINES))
    started = []

    def start(crash_at="", seed=0, folder=tmp_path / "state"):
        for runner in started:
            for each in runner.component("lines"):
                each.die()
        started.clear()
        builder = TopologyBuilder()
        builder.set_spout("lines", Paced(FileEden(str(source)), max_attempts=20))
        builder.set_bolt("count", Count(), 2).fields_grouping("lines", "line")
        settings = Settings(
            delivery=Delivery("at_least_once", epoch_interval=INTERVAL, max_spout_pending=8),
            lifecycle=Lifecycle(crash_at=crash_at),
            transport=Transport(0.0),
        )
        topology = builder.build("t", settings)
        runner = LocalRunner(topology, seed=seed, folder=str(folder), die=die, uneven=True)
        started.append(runner)
        return runner

    yield start
    for runner in started:
        runner.close()


def counted(runner):
    return {line: times for bolt in runner.component("count") for line, times in bolt.times.items()}


def finish(runner):
    """Until nothing is left to read; returns the lines that were never counted."""
    for _ in range(400):
        runner.run(INTERVAL)
        if set(counted(runner)) >= set(LINES):
            break
    return sorted(set(LINES) - set(counted(runner)))


@pytest.mark.parametrize("crash_at", crash_points(epochs=(1, 3, 6)))
def test_a_crash_at_every_step_loses_nothing(start, crash_at):
    with pytest.raises(Crash):
        start(crash_at, len(crash_at)).run(1.0)
    assert not finish(start())


@pytest.mark.parametrize("step", WORKER_STEPS)
def test_a_crash_of_each_worker_loses_nothing(start, step, tmp_path):
    for worker in start().plan.worker_ids():
        if (step == "marked" and worker.stage) or (step == "snapshotted" and not worker.stage):
            continue
        folder = tmp_path / str(worker)
        with pytest.raises(Crash):
            start(f"{step}:4:{worker}", worker.index, folder).run(1.0)
        assert not finish(start(folder=folder))


def test_one_crash_after_the_other_loses_nothing(start):
    for seed, step in enumerate(("reported", "snapshotted", "collected", "notified", "written")):
        runner = start()
        committed = runner.commits.committed
        runner = start(f"{step}:{committed + 2 + seed % 2}", seed)
        with pytest.raises(Crash):
            runner.run(1.0)
    assert not finish(start())


@pytest.mark.parametrize("ending", ["deactivate", "close"])
def test_an_end_without_an_epoch_passes_nothing(start, ending):
    """The acks since the last epoch are in no state."""
    runner = start()
    runner.run(3 * INTERVAL)
    runner.commits.tick = lambda now: None
    runner.run(3 * INTERVAL)
    getattr(runner, ending)()
    if ending == "deactivate":
        runner.run_until_idle()
        assert runner.component("lines")[0]._replayer is None
    assert not finish(start())


def test_a_fresh_start_reads_from_the_beginning_and_keeps_what_had_failed(start, tmp_path):
    runner = start()
    assert not finish(runner)
    start(folder=tmp_path / "other")  # lets go of the first
    [folder] = {path.parent for path in (tmp_path / "state").rglob("about.json")}
    beside = open_beside(folder)
    beside.from_.append([ReplayRecord(("owed",), 1)])
    beside.close()
    runner._state.clear()
    fresh = start()
    assert not counted(fresh)
    assert not finish(fresh)
    assert counted(fresh)["owed"]
