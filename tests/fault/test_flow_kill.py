"""Workers are killed during data migration, exactly once: the merged totals equal a sequential run."""

import os
import random
import signal

import pytest

from penstock import Delivery, Flow, Lifecycle, Migration, Settings, submit
from penstock.spark.session import close_session, open_session
from tests.helpers import wide
from tests.integration.flow_components import Offers, branches_with_partials, oracle

pytestmark = pytest.mark.spark

RATE = 800
PATIENCE = 60.0  # seconds, for each step, on a busy machine


@pytest.fixture(scope="module")
def spark():
    yield open_session()
    close_session()


class Run:
    """A topology whose first branch is too slow for its data, and the workers it runs in."""

    delivery = "exactly_once"

    def __init__(self, folder, seed, count):
        self.seed, self.count, self.faults = seed, count, []
        self.random = random.Random(seed)
        settings = Settings(
            conf={"folder": str(folder)},
            delivery=Delivery(self.delivery, state_dir=str(folder / "state"), epoch_interval=0.3),
            flow=Flow(inbox_capacity=200),
            lifecycle=Lifecycle(metrics_interval=0.1, max_restarts=1000),
            migration=Migration(interval=0.2),
        )
        self.handle = submit(wide(branches_with_partials(Offers(("left",), RATE, count), settings)))

    def until(self, condition, what):
        assert self.handle.internals.server.wait(condition, PATIENCE), f"seed {self.seed}: {what}\n{self.story()}"

    def merged(self):
        return sorted(self.handle.internals.bus.published().get("merge", []))

    def migrates(self):
        """Data of a branch goes another way at this moment, and an epoch has been committed since the start."""
        decisions = list(self.handle.internals.migrations.decisions)
        return (
            decisions
            and "→" in decisions[-1].text
            and self.handle.internals.committed > self.handle.internals.epoch
        )

    def kill(self, component):
        """kill -9 the worker of one of the component's tasks."""
        self.until(self.migrates, "data is migrated")
        plan, restarts = self.handle.internals.plan, self.handle.internals.restarts
        worker = plan.routes.worker_of[self.random.choice(plan.tasks_of[component])]
        assert self.merged() != oracle(self.count), "there is something left to lose"
        os.kill(self.handle.internals.workers[worker].hello.pid, signal.SIGKILL)
        self.until(
            lambda: self.handle.internals.restarts > restarts and self.handle.state == "active", "a new start"
        )
        self.faults.append((f"worker of {component}", 0.0))

    def finish(self):
        self.until(lambda: self.merged() == oracle(self.count), "all is merged")
        self.handle.deactivate()
        assert self.handle.drain(30), self.story()
        self.handle.commit()
        assert self.merged() == oracle(self.count), self.story()
        assert self.handle.internals.bus.segments(), "what went another way is on record"

    def story(self):
        bus = self.handle.internals.bus
        decisions = list(self.handle.internals.migrations.decisions)
        return f"faults {self.faults}\n{self.merged()}\n{bus.queues()}\n{decisions}"


@pytest.mark.seeds(1, 4)
def test_workers_killed_while_data_is_migrated(spark, tmp_path, campaign, full, seed):
    kills = ["source", "work", "merge", "work", "source"] if full else ["work", "source"]
    run = Run(tmp_path, 800 + seed, 8_000 if full else 5_000)
    try:
        for component in kills:
            run.kill(component)
        run.finish()
    finally:
        run.handle.kill(drain=False)
    campaign(run)
