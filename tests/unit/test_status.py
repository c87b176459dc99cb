"""The status of a topology: what is taken, and the JSON that programs rely on."""

import json
from pathlib import Path

import pytest

from penstock.driver.policy_decision import PolicyDecision
from penstock.metrics.stats import TaskStats
from tests.unit.watched import LINES, SHOW, SPLIT_0, Watched, busy

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "status.md"


@pytest.fixture
def watched():
    watched = Watched()
    busy(watched)
    return watched


def parsed(watched):
    def no_constants(name):
        raise AssertionError(f"{name} is not JSON")

    text = json.dumps(watched.status().to_json())
    return json.loads(text, parse_constant=no_constants)


def component(status, name):
    return {row["component"]: row for row in status["components"]}[name]


def test_before_any_report():
    watched = Watched()
    watched.begun, watched.state = None, "starting"
    status = parsed(watched)
    assert (status["state"], status["uptime"], status["rate_in"], status["pending"]) == ("starting", 0, 0, 0)
    assert [row["component"] for row in status["components"]] == ["lines", "orders", "split", "show"]
    assert component(status, "split")["latency_p50"] is None
    assert all(worker["pid"] is None and not worker["connected"] for worker in status["workers"])


def test_the_topology_as_a_whole(watched):
    watched.committed, watched.restarts = 12, 1
    status = parsed(watched)
    assert status["format"] == 1
    assert (status["topology"], status["state"], status["delivery"]) == ("word-count", "active", "at_least_once")
    assert (status["time"], status["uptime"], status["epoch"], status["restarts"]) == (1003, 3, 12, 1)
    assert status["rate_in"] == pytest.approx(200 / 3), "what the spouts emit"
    assert status["rate_out"] == pytest.approx(200 / 3), "what the last bolt takes"
    assert status["pending"] == 10


def test_components(watched):
    status = parsed(watched)
    lines, split, show = (component(status, name) for name in ("lines", "split", "show"))
    assert (lines["kind"], lines["max_rate"], lines["limit"]) == ("spout", 1000, 1000)
    assert (lines["acked"], lines["failed"]) == (100, 2)
    assert component(status, "orders")["max_rate"] is None, "no limit"
    assert (split["kind"], split["tasks"], split["executed"], split["limit"]) == ("bolt", 2, 200, None)
    assert split["latency_p99"] == pytest.approx(0.003, rel=0.05)
    assert split["execute_time"] == pytest.approx(2e-4)
    assert (show["queued"], show["capacity"], show["errors"], show["last_error"]) == (15_000, 16_384, 2, "no ink")
    assert show["published"] == [["written", 400], ["share", None]], "NaN is not JSON"
    assert split["published"] == []


def test_tasks_and_workers(watched):
    status = parsed(watched)
    tasks = {row["task"]: row for row in status["tasks"]}
    assert list(tasks) == ["lines/0", "orders/0", "split/0", "split/1", "show/0"]
    assert (tasks["split/1"]["component"], tasks["split/1"]["worker"]) == ("split", "1.1")
    assert (tasks["show/0"]["queued"], tasks["show/0"]["limit"]) == (15_000, None)
    workers = {row["worker"]: row for row in status["workers"]}
    assert list(workers) == ["0.0", "0.1", "1.0", "1.1", "2.0"]
    assert workers["1.1"] == {
        "worker": "1.1",
        "node": "node-a",
        "pid": 4321,
        "connected": True,
        "cpu": 1.5,
        "rss": 2_000_000,
        "tasks": ["split/1"],
        "clock_skew": 0.0,
    }
    assert (workers["2.0"]["connected"], workers["2.0"]["node"]) == (False, ""), "it has not said hello"


def test_lag_commits_rows_of_sinks_and_calls_that_do_not_return(watched):
    assert parsed(watched)["commit_age"] is None, "nothing was committed yet"
    watched.report((0, 0), {LINES: TaskStats(lag={"in/0": 7, "in/1": 1500})})
    watched.report((1, 0), {SPLIT_0: TaskStats(in_call=12.0)})
    watched.report((2, 0), {SHOW: TaskStats(written=12_000, given_up=3, late=2)})
    watched.commit_age = 4.5
    status = parsed(watched)
    assert status["commit_age"] == 4.5
    tasks = {row["task"]: row for row in status["tasks"]}
    assert tasks["lines/0"]["lag"] == {"in/0": 7, "in/1": 1500}
    assert tasks["split/0"]["in_call"] == 12
    show = tasks["show/0"]
    assert (show["written"], show["given_up"], show["late"]) == (12_000, 3, 2)


def test_energy(watched):
    assert parsed(watched)["nodes"] == [], "nobody has looked yet"
    watched.poll()
    watched.clock.advance(10.0)
    watched.poll()
    status = parsed(watched)
    (node,) = status["nodes"]
    assert (node["node"], node["workers"], node["source"]) == ("node-a", 3, "modelled")
    assert (node["base"], node["measured"]) == (350, None)
    assert status["energy"]["base"] == 350
    assert status["energy"]["total"] == node["base"] + node["dynamic"]


def test_decisions_have_reasons_and_times_in_order(watched):
    watched.migrations.decisions.append(PolicyDecision(1001.5, "split", "split/0 → split/1: its inbox is full"))
    watched.bus.note("restart", "", "worker 1.0 has been silent for 20 s")
    watched.report((2, 0), {SHOW: TaskStats(queued=12, capacity=16_384)})
    assert parsed(watched)["decisions"] == [
        {
            "time": 1001,
            "kind": "flow",
            "component": "show",
            "text": "show/0 slows its senders: 15,000 of 16,384 tuples are queued, and 900 per second arrived",
        },
        {
            "time": 1001.5,
            "kind": "migration",
            "component": "split",
            "text": "split/0 → split/1: its inbox is full",
        },
        {"time": 1003, "kind": "restart", "component": "", "text": "worker 1.0 has been silent for 20 s"},
        {
            "time": 1003,
            "kind": "flow",
            "component": "show",
            "text": "show/0 no longer slows its senders: 12 of 16,384 tuples are queued",
        },
    ]


def test_errors_stay_when_the_live_view_has_taken_them(watched):
    assert watched.bus.take_errors() == ["component 'show': no ink"]
    assert parsed(watched)["errors"] == [{"time": 1002, "text": "component 'show': no ink"}]


def test_only_the_newest_are_kept(watched):
    for number in range(200):
        watched.bus.note("flow", "", str(number))
    assert [each["text"] for each in parsed(watched)["decisions"]] == [str(number) for number in range(136, 200)]


def test_counters_go_on_after_a_restart_and_gauges_do_not(watched):
    watched.report((1, 0), {SPLIT_0: TaskStats(executed=5, queued=1, capacity=100)}, attempt=1)
    (task,) = (task for task in watched.status().tasks if task.task.id == SPLIT_0)
    assert (task.total.executed, task.total.queued, task.total.capacity) == (105, 1, 100)
    assert (task.queue.length, task.queue.capacity) == (1, 100)


def test_every_field_is_documented(watched):
    """A field is in the table of its part, as `name`."""
    watched.bus.note("flow", "", "x")
    watched.poll()
    status = parsed(watched)
    text = DOCS.read_text()
    documented = text[text.index("## JSON") :]
    lists = ("components", "tasks", "workers", "nodes", "decisions", "errors")
    parts = {f"| `{name}[]`": status[name][0] for name in lists}
    for begin, example in {"| the whole": status, "| `energy`": status["energy"], **parts}.items():
        (row,) = (line for line in documented.splitlines() if line.startswith(begin))
        missing = [name for name in example if f"`{name}`" not in row]
        assert not missing, begin
