"""The HTTP endpoint and Prometheus' format, read back by Prometheus' own parser."""

import http.client
import json
import math
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import PortInUse
from penstock.metrics.stats import TaskStats
from penstock.web.exposition import exposition
from penstock.web.server import StatusServer
from tests.unit.watched import LINES, SHOW, SPLIT_0, Watched, busy

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture
def watched():
    watched = Watched()
    busy(watched)
    return watched


def families(watched):
    return {family.name: family for family in text_string_to_metric_families(exposition(watched.status()))}


def value(watched, name, **labels):
    """Of the one sample with these labels, and the topology's."""
    labels = {"topology": watched.topology.name, **labels}
    found = [
        sample.value
        for family in families(watched).values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def of(component, task=0):
    return {"component": component, "task": str(task)}


def test_counters_gauges_and_labels(watched):
    assert value(watched, "penstock_emitted_total", **of("lines")) == 200
    assert value(watched, "penstock_acked_total", **of("lines")) == 100
    assert value(watched, "penstock_executed_total", **of("split", 1)) == 100
    assert value(watched, "penstock_busy_seconds_total", **of("split")) == pytest.approx(0.02)
    assert value(watched, "penstock_queue_tuples", **of("show")) == 15_000
    assert value(watched, "penstock_rate_limit_tuples_per_second", **of("lines")) == 1000
    assert value(watched, "penstock_rate_limit_tuples_per_second", **of("show")) == math.inf
    assert value(watched, "penstock_pending_tuples") == 10
    assert value(watched, "penstock_worker_up", worker="1.0", node="node-a") == 1
    assert value(watched, "penstock_worker_up", worker="2.0", node="") == 0
    watched.state, watched.restarts = "restarting", 3
    assert value(watched, "penstock_restarts_total") == 3
    assert value(watched, "penstock_state", state="restarting") == 1
    assert value(watched, "penstock_state", state="active") == 0


def test_lag_commits_rows_of_sinks_and_calls_that_do_not_return(watched):
    watched.report((0, 0), {LINES: TaskStats(lag={"in/0": 7, "in/1": 1500})})
    watched.report((1, 0), {SPLIT_0: TaskStats(in_call=12.0)})
    watched.report((2, 0), {SHOW: TaskStats(written=12_000, given_up=3)})
    watched.commit_age = 4.5
    for partition, waiting in (("in/0", 7), ("in/1", 1500)):
        assert value(watched, "penstock_source_lag_records", partition=partition, **of("lines")) == waiting
    assert value(watched, "penstock_commit_age_seconds") == 4.5
    assert value(watched, "penstock_sink_rows_total", **of("show")) == 12_000
    assert value(watched, "penstock_given_up_total", **of("show")) == 3
    assert value(watched, "penstock_in_call_seconds", **of("split")) == 12


def test_energy_says_that_it_is_modelled(watched):
    watched.poll()
    watched.clock.advance(10.0)
    watched.report((0, 0), {}, machine={"id": "m", "rapl": 5.0})
    watched.poll()
    watched.clock.advance(10.0)
    watched.report((0, 0), {}, machine={"id": "m", "rapl": 95.0})
    watched.poll()
    modelled = {"node": "node-a", "part": "base", "source": "modelled"}
    assert value(watched, "penstock_energy_joules_total", **modelled) == 700
    assert value(watched, "penstock_power_watts", **modelled) == 35
    assert value(watched, "penstock_measured_energy_joules_total", node="node-a", source="rapl") == 90
    assert value(watched, "penstock_node_cpu_seconds_total", node="node-a") == 1.5, "one process, four workers"


def test_names_and_types_follow_the_rules(watched):
    """HELP and TYPE once and before the samples, counters and no others end in _total, no sample twice."""
    said, seen = {}, set()
    text = exposition(watched.status())
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("#"):
            _, what, name, rest = line.split(" ", 3)
            assert (what, name) not in said
            assert rest.strip()
            assert name.startswith("penstock_")
            said[what, name] = rest
            continue
        name, labels = re.fullmatch(r"([a-z_]+)(\{.*\}) \S+", line).groups()
        assert (name, labels) not in seen
        seen.add((name, labels))
        family = name if ("TYPE", name) in said else re.sub("_(bucket|sum|count)$", "", name)
        kind = said["TYPE", family]
        assert ("HELP", family) in said
        assert (kind == "counter") == name.endswith("_total"), name
        assert (kind == "histogram") == (family != name), name
    assert len(seen) > 100


def test_the_histogram_is_ours(watched):
    stats = TaskStats()
    recorded = ((50e-6, 1), (0.0005, 10), (0.0007, 10), (0.2, 5), (500.0, 2))
    for seconds, times in recorded:
        stats.latency.record(seconds, times)
    fresh = Watched()
    fresh.report((1, 0), {SPLIT_0: stats})
    samples = [s for s in families(fresh)["penstock_latency_seconds"].samples if s.labels.get("task") == "0"]
    samples = [s for s in samples if s.labels["component"] == "split"]
    buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
    assert [bound for bound, _ in buckets] == [1e-6 * 2**k for k in range(7, 28)] + [math.inf]
    counts = [count for _, count in buckets]
    assert counts == sorted(counts), "cumulative"
    for bound, count in buckets:
        assert count == sum(times for seconds, times in recorded if seconds < bound)
    (total,) = (s.value for s in samples if s.name.endswith("_count"))
    (seconds,) = (s.value for s in samples if s.name.endswith("_sum"))
    assert total == counts[-1] == 28
    assert seconds == pytest.approx(1001.012, rel=0.05)


def test_labels_are_escaped():
    name = 'a "quoted"\\path\nand more'
    watched = Watched(name)
    assert value(watched, "penstock_epoch") == 0, "the topology's label came back as it is"


def test_every_metric_is_documented(watched):
    text = DOCS.read_text()
    names = re.findall(r"^# TYPE (\S+)", exposition(watched.status()), re.MULTILINE)
    assert [name for name in names if f"`{name}`" not in text] == []


# ---- over HTTP


@pytest.fixture
def server(watched):
    with StatusServer(lambda: watched.status()) as server:
        yield server


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_pages(server, watched):
    code, kind, text = get(f"{server.url}/status")
    assert (code, kind) == (200, "application/json")
    assert json.loads(text) == watched.status().to_json()
    code, kind, text = get(f"{server.url}/metrics?name=x")
    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert text == exposition(watched.status())
    assert get(f"{server.url}/")[0] == 404
    assert "/metrics" in get(f"{server.url}/")[2]


@pytest.mark.parametrize(
    ("state", "code"), [("active", 200), ("inactive", 200), ("ending", 200), ("restarting", 503), ("failed", 503)]
)
def test_health(server, watched, state, code):
    watched.state = state
    assert get(f"{server.url}/healthz") == (code, "text/plain; charset=utf-8", f"{state}\n")


def test_until_the_topology_runs_nothing_is_healthy():
    with StatusServer(lambda: None) as server:
        assert get(f"{server.url}/healthz")[0] == 503
        assert get(f"{server.url}/status")[0] == 503


def test_one_connection_takes_several_requests_and_nothing_is_changed(server):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    for method, code in (("GET", 200), ("HEAD", 200), ("GET", 200)):
        connection.request(method, "/healthz")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (code, b"" if method == "HEAD" else b"active\n")
    connection.request("POST", "/healthz")
    assert connection.getresponse().status == 501
    connection.close()


def test_a_name_that_was_made_to_point_here_is_refused(server):
    asked = urllib.request.Request(f"{server.url}/status", headers={"Host": "evil.example"})
    assert get(asked)[0] == 403
    port = server.url.rpartition(":")[2]
    assert get(urllib.request.Request(f"{server.url}/status", headers={"Host": f"localhost:{port}"}))[0] == 200


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            PortInUse, match=rf"HTTP endpoint: it cannot listen on 127.0.0.1:{port} .Address .*--http"
        ):
            StatusServer(lambda: None, port)


def test_after_the_end_nobody_listens(watched):
    with StatusServer(watched.status) as server:
        pass
    with pytest.raises(urllib.error.URLError):
        get(f"{server.url}/healthz")
