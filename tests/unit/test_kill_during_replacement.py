"""What the outcome says if a topology is ended while it is being replaced. Without Spark, on a simulated clock."""

import pytest

from penstock.driver.lifecycle import OVER
from penstock.driver.requests import ReplaceRequest
from penstock.protocol import events as m
from tests.unit import fake_world
from tests.unit.fake_world import Fault, World


class BusyWorker(fake_world.FakeWorker):
    """The first form never finishes its tuples in flight."""

    def _on_RequestReport(self, message):  # noqa: N802
        pending = 5 if self.launch.attempt == 0 and self.world.busy else 0
        self.say(m.WorkerReport(7, 7, pending, 0.0, 0, {}, probe=message.number))


class BusyWorld(World):
    busy = True


def killed_at(step, folder, guarantee, pause=False, busy=True):
    world = BusyWorld(folder, guarantee)
    world.busy = busy
    fault = Fault(world, "replacement", step, "killed")
    supervisor = world.supervisor
    request = ReplaceRequest(supervisor.runs.current.deployment.topology, "test", pause)
    supervisor.request(request)
    world.turn_until(lambda: supervisor.lifecycle.phase in OVER)
    assert fault.struck
    assert "the change was cancelled" in str(request.answer.exception())
    world.check()
    return supervisor.left_behind


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    monkeypatch.setattr(fake_world, "FakeWorker", BusyWorker)


@pytest.mark.parametrize("pause", [False, True])
def test_tuples_that_the_old_form_did_not_finish_are_reported_as_lost(tmp_path, pause):
    left_behind = killed_at("handed_over", tmp_path, "at_most_once", pause)
    assert left_behind == "tuples in flight were not processed within 5 s; they are lost"


def test_tuples_that_the_next_run_processes_are_reported(tmp_path):
    left_behind = killed_at("handed_over", tmp_path, "at_least_once")
    assert left_behind == "tuples in flight were not processed within 0.2 s; the next run processes them"


def test_an_old_form_that_finished_leaves_nothing_behind(tmp_path):
    assert killed_at("handed_over", tmp_path, "at_most_once", busy=False) == ""
