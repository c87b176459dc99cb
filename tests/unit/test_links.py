"""The bandwidth of the links of a branch: configured, measured between nodes, or unknown."""

import pyarrow as pa
import pytest

from penstock import Migration, SettingError, Settings
from penstock.clock import SimulatedClock
from penstock.control.links import BranchLinks, LinkSpeeds
from penstock.driver.migration_controller import MigrationController
from penstock.frames.header import Header, Kind
from penstock.metrics.stats import TaskStats
from penstock.plan.model import WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol.commands import ProbeLinks
from penstock.settings.rates import parse_rates
from penstock.worker.link_meter import PROBE_BYTES, PROBES
from tests.unit.test_migration_controller import build, stats


def branch(task, *hops):
    return BranchLinks((task,), frozenset(hops))


NEAR, FAR = branch("work/0", ("a", "a"), ("a", "b")), branch("work/1", ("a", "c"), ("c", "b"))


def test_if_nothing_is_known_all_branches_are_equal():
    assert LinkSpeeds({}).bandwidths([NEAR, FAR], {}) == [1.0, 1.0]


def test_the_narrowest_link_counts_and_a_branch_of_which_nothing_is_known_is_as_wide_as_the_widest():
    measured = {("a", "c"): [8e6, 9e6, 1e6], ("c", "b"): [5e6]}
    assert LinkSpeeds({}).bandwidths([NEAR, FAR, branch("work/2")], measured) == [5e6, 5e6, 5e6]
    measured["a", "b"] = [2e7]
    assert LinkSpeeds({}).bandwidths([NEAR, FAR, branch("work/2")], measured) == [2e7, 5e6, 2e7]


def test_within_a_node_nothing_is_measured():
    assert LinkSpeeds({}).bandwidths([NEAR, FAR], {("a", "a"): [3.0], ("a", "b"): [7.0]}) == [7.0, 7.0]


def test_what_is_configured_takes_precedence():
    measured = {("a", "b"): [9e6], ("a", "c"): [9e6], ("c", "b"): [9e6]}
    assert LinkSpeeds({"b>a": 2e6, "c": 3e6}).bandwidths([NEAR, FAR], measured) == [2e6, 3e6]
    assert LinkSpeeds({"work/0": 1e6}).bandwidths([NEAR, FAR], measured) == [1e6, 9e6]
    assert LinkSpeeds({"a>a": 4.0}).bandwidths([NEAR, FAR], {}) == [4.0, 4.0]


def test_the_setting_is_checked():
    assert parse_rates(" a=1e6, b>c=2 ,") == {"a": 1e6, "b>c": 2.0}
    for wrong in ("a", "a=fast", "=3", "a=0", "a=-1", "a=inf", "a=nan"):
        with pytest.raises(SettingError, match="is not of the form NAME=RATE with a rate above 0"):
            Migration(bandwidth=wrong)
    with pytest.raises(SettingError, match="'a' has two rates"):
        Migration(bandwidth="a=1, a=2")


@pytest.mark.parametrize(("narrow", "wide"), [(1, 2), (2, 1)])
def test_a_configured_narrow_link_is_avoided(narrow, wide):
    """Two tasks have the same load; the one with the wide link is the light branch."""
    plan = make_plan(build())
    tasks = plan.tasks_of["partials"]
    bandwidth = f"partials/{narrow}=1e3, partials/{wide}=1e6"
    migrations = MigrationController(plan, Settings(migration=Migration(bandwidth=bandwidth)))
    migrations.decide(0.0, {})
    load = dict(zip(tasks, (stats(500, 300, 95), stats(9, 9, 30), stats(9, 9, 30)), strict=True))
    (order,) = migrations.decide(0.5, load)
    assert order.routes == {tasks[0]: tasks[wide]}


def test_a_measured_narrow_link_is_avoided_and_links_are_only_probed_between_nodes():
    plan = make_plan(build())
    one, two, three = plan.tasks_of["partials"]
    worker_of = plan.routes.worker_of
    places = dict.fromkeys(plan.worker_ids(), "host/0")
    assert MigrationController(plan, Settings(), lambda: places).begin() == []
    places |= {worker_of[two]: "host/1", worker_of[three]: "host/2"}
    migrations = MigrationController(plan, Settings(), lambda: places)
    assert migrations.begin() == [ProbeLinks()]
    source = WorkerId(0, 0)
    links = {(source, worker_of[two]): 1e6, (source, worker_of[three]): 5e7}
    load = {one: stats(500, 300, 95), two: stats(9, 9, 30), three: stats(9, 9, 30)}
    migrations.decide(0.0, {}, links)
    (order,) = migrations.decide(0.5, load, links)
    assert order.routes == {one: three}


def test_busy_time_does_not_count_as_bandwidth():
    plan = make_plan(build())
    one, two, three = plan.tasks_of["partials"]
    migrations = MigrationController(plan, Settings())
    migrations.decide(0.0, {})
    slow, fast = stats(300, 300, 30, busy=99.0), stats(300, 300, 31, busy=0.01)
    (order,) = migrations.decide(0.5, {one: stats(500, 300, 95), two: slow, three: fast})
    assert order.routes == {one: two}
    assert TaskStats().busy == 0


def test_a_worker_measures_the_link_by_the_distance_of_its_frames():
    from penstock.protocol.job import make_job
    from penstock.spark.pickling import dumps
    from penstock.worker.intake import Intake
    from penstock.worker.phase import WorkerPhase

    topology, clock = build(), SimulatedClock()
    plan = make_plan(topology)
    intake = Intake(WorkerId(1, 0), make_job(topology, plan, "", dumps), clock, WorkerPhase.OPEN)
    frame = Header(Kind.PROBE, 1, 0, 0, 0).pack()
    for number in range(PROBES):
        assert intake.links.speeds() == []
        intake.offer(pa.py_buffer(frame))
        clock.advance(0.5 if number == 1 else 0.01)  # one pause on the way does not count
    assert intake.links.speeds() == [(0, pytest.approx(PROBE_BYTES / 0.01))]
