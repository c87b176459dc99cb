"""The state and the prepared output that the new form of a topology begins with. Without Spark, on a simulated
clock."""

import pytest

from penstock.driver.requests import ReplaceRequest
from penstock.protocol import events as m
from penstock.protocol.task_states import SavedTask
from tests.unit import fake_world
from tests.unit.fake_world import World, topology


class SinkWorker(fake_world.FakeWorker):
    """The tasks of ``count`` are sinks with exactly-once delivery. ``world.away``: their system is down, so no
    epoch ends and nothing is published."""

    def _on_OpenTasks(self, message):  # noqa: N802
        self.world.opened[self.launch.attempt, self.id] = message
        super()._on_OpenTasks(message)

    def end_epoch(self, epoch):
        if not self.open or self.world.away:
            return
        key, token = f"count/{self.id.index}", f'["prepared in {epoch}"]'
        self.say(m.SnapshotWritten(epoch, {key: SavedTask({}, token)} if self.id.stage else {}))

    def _on_EpochCommitted(self, message):  # noqa: N802
        if self.world.publishes:
            super()._on_EpochCommitted(message)


class SinkWorld(World):
    def __init__(self, folder, away=False, publishes=True, guarantee="exactly_once"):
        self.away, self.publishes, self.opened = away, publishes, {}
        super().__init__(folder, guarantee)

    def commit_some(self):
        self.turn_until(lambda: self.supervisor.runs.current.epochs.committed >= 1)

    def replace(self, tasks=2):
        request = ReplaceRequest(topology(self.folder, self.guarantee, tasks), "test")
        self.supervisor.request(request)
        self.turn_until(request.answer.done)
        return request.answer

    def tokens(self):
        """With which tokens the sinks of the current run were opened."""
        number = self.supervisor.runs.current.number
        sinks = {id: message for (attempt, id), message in self.opened.items() if attempt == number and id.stage}
        return [entry.tokens for _, message in sorted(sinks.items()) for entry in message.tasks.values()]


@pytest.fixture
def sinks(monkeypatch):
    monkeypatch.setattr(fake_world, "FakeWorker", SinkWorker)


def driver_that_dies(folder, publishes):
    world = SinkWorld(folder, publishes=publishes)
    world.commit_some()
    if publishes:
        commits = world.supervisor.runs.current.epochs.commit_shell().loop.commits
        world.turn_until(lambda: commits.published == commits.committed)


PREPARED = ['["prepared in 1"]'] * 2


def test_output_that_an_earlier_driver_prepared_is_handed_on_until_it_is_published(tmp_path, sinks):
    driver_that_dies(tmp_path, publishes=False)
    world = SinkWorld(tmp_path, away=True)
    assert world.tokens() == PREPARED
    for _ in range(2):
        assert world.replace().exception() is None
        assert world.tokens() == PREPARED, "the sinks cannot publish it yet"
    world.away = False
    world.settle()
    assert world.replace().exception() is None
    assert world.tokens() == ["[]", "[]"], "published before the new form began"


def test_another_number_of_sinks_is_refused_while_their_output_is_not_published(tmp_path, sinks):
    driver_that_dies(tmp_path, publishes=False)
    world = SinkWorld(tmp_path, away=True)
    assert "may not be published yet" in str(world.replace(tasks=3).exception())
    world.settle()
    world.check()
    assert world.tokens() == PREPARED, "the old form runs again, with its output"


def test_another_number_of_sinks_is_allowed_if_an_earlier_driver_recorded_that_it_published(tmp_path, sinks):
    driver_that_dies(tmp_path, publishes=True)
    world = SinkWorld(tmp_path, away=True)
    assert world.replace(tasks=3).exception() is None
    assert world.tokens() == ["[]"] * 3
    assert world.supervisor.lifecycle.restarts.count == 0


def test_a_replacement_while_all_is_published_needs_no_restart(tmp_path, sinks):
    driver_that_dies(tmp_path, publishes=False)
    world = SinkWorld(tmp_path)
    replaced = world.replace(tasks=3)
    assert replaced.exception() is None
    assert replaced.result().gap < 0.5
    assert world.tokens() == ["[]"] * 3


# ---- stop-and-go and at-most-once delivery -----------------------------------------------------------------


class NotingWorker(fake_world.FakeWorker):
    """Notes the epoch with which tasks open. ``world.commits``: whether snapshots are written."""

    def _on_OpenTasks(self, message):  # noqa: N802
        self.world.opened[self.launch.attempt] = message.epoch
        super()._on_OpenTasks(message)

    def _on_TakeSnapshot(self, message):  # noqa: N802
        if self.world.commits:
            super()._on_TakeSnapshot(message)


class NotingWorld(World):
    def __init__(self, folder):
        self.opened, self.commits = {}, True
        super().__init__(folder, "at_most_once")

    def replace(self, pause):
        """Returns the epoch that the old form committed last, the epoch that the new form opened with, and what
        was left behind."""
        old = self.supervisor.runs.current
        request = ReplaceRequest(old.deployment.topology, "test", pause)
        self.supervisor.request(request)
        self.turn_until(request.answer.done)
        self.settle()
        self.check()
        return old.epochs.epoch, self.opened[self.supervisor.runs.current.number], request.answer.result()


@pytest.fixture
def noting(monkeypatch):
    monkeypatch.setattr(fake_world, "FakeWorker", NotingWorker)


def test_stop_and_go_hands_over_the_state_of_now(tmp_path, noting):
    world = NotingWorld(tmp_path)
    before = 0
    for pause in (False, True, True):
        committed, opened, replaced = world.replace(pause)
        assert opened == committed > before
        assert "last_committed" in replaced.steps
        before = opened


def test_stop_and_go_does_not_use_the_state_of_an_earlier_driver(tmp_path, noting):
    NotingWorld(tmp_path).replace(pause=False)
    world = NotingWorld(tmp_path)
    assert world.opened == {0: 0}, "at most once: it begins with nothing"
    world.commits = False
    _, opened, replaced = world.replace(pause=True)
    assert opened == 0
    assert "its state was not committed in time, so the new form begins without it" in replaced.left_behind


def test_state_that_was_handed_over_earlier_is_not_used_again(tmp_path, noting):
    world = NotingWorld(tmp_path)
    assert world.replace(pause=True)[1] > 0
    world.commits = False
    assert world.replace(pause=True)[1] == 0
