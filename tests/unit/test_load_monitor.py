"""The load monitor on a simulated clock, with reports made by hand: load samples, snapshots, energy."""

import json
import math

import pytest

from penstock import Monitor, Settings, SimulatedClock, TopologyBuilder, make_plan
from penstock.control.placement import Use
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.registry import WorkerConnection
from penstock.errors import SettingError
from penstock.metrics.bus import MetricsBus, StreamCount
from penstock.metrics.stats import TaskStats
from penstock.plan.model import WorkerId
from penstock.protocol.events import Hello, WorkerReport
from penstock.testing import CaptureBolt, FeederSpout
from tests.helpers import Pass, settings_with
from tests.unit.watched import LINES, ORDERS, SHOW, SPLIT_0, SPLIT_1, Watched

NODES = {(0, 0): "host-a/1", (0, 1): "host-a/1", (1, 0): "host-a/1", (1, 1): "host-b/2", (2, 0): "host-b/2"}
TASKS = {(0, 0): LINES, (0, 1): ORDERS, (1, 0): SPLIT_0, (1, 1): SPLIT_1, (2, 0): SHOW}
CORES = {LINES: 0.5, ORDERS: 0.25, SPLIT_0: 1.0, SPLIT_1: 0.5, SHOW: 0.125}
STREAMS = {(LINES, SPLIT_0): (100, 2_000), (LINES, SPLIT_1): (50, 1_000), (SPLIT_0, SHOW): (100, 500)}
"""Tuples and bytes a second."""
JVM = {"host-a/1": (77, 0.75, 3_000_000), "host-b/2": (88, 0.25, 1_000_000)}


class Cluster:
    """Five workers on two nodes that work steadily and report every five seconds, all there is."""

    def __init__(self, **settings):
        self.watched = Watched(
            **{"monitor": "memory", "node_cores": 4.0, "node_memory": 1_000_000_000, **settings}
        )
        self.monitor, self.clock = self.watched.monitor, self.watched.clock
        self.begins(0)

    def begins(self, attempt):
        """Another start, in other processes."""
        self.attempt, self.since = attempt, self.clock.monotonic()
        for number, (worker, node) in enumerate(NODES.items()):
            self.watched.connect(worker, 1000 * attempt + number, node, attempt)

    def report(self, machine=None):
        age = self.clock.monotonic() - self.since
        for worker, task in TASKS.items():
            pid, cores, rss = JVM[NODES[worker]]
            told = {"id": NODES[worker][:6], "cores": 8, "memory": 16e9, "jvm": [pid, 50 + cores * age, rss]}
            streams = [
                [*pair, int(tuples * age), int(size * age)]
                for pair, (tuples, size) in STREAMS.items()
                if pair[0] == task
            ]
            self.watched.report(
                worker,
                {task: TaskStats(busy=0.1 * age)},
                self.attempt,
                cpu=CORES[task] * age,
                streams=streams if self.monitor.on else None,
                machine={**told, **(machine or {})},
            )

    def run(self, seconds, **more):
        """Returns the load samples."""
        samples = [self.poll(**more)]
        for _ in range(int(seconds / 5)):
            self.clock.advance(5.0)
            samples.append(self.poll(**more))
        return [sample for sample in samples if sample is not None]

    def poll(self, **more):
        self.report(**more)
        return self.watched.poll()


def by_name(rows, name):
    return {getattr(row, name): row for row in rows}


def test_a_load_sample_has_executors_streams_and_nodes():
    cluster = Cluster()
    (sample,) = cluster.run(30)
    assert (sample.topology, sample.ended, sample.seconds) == ("word-count", 1030.0, 30.0)
    executors = by_name(sample.executors, "executor")
    assert list(executors) == ["lines@0.0", "orders@0.1", "split@1.0", "split@1.1", "show@2.0"]
    lines, split = executors["lines@0.0"], executors["split@1.0"]
    assert (lines.component, lines.node, lines.cpu) == ("lines", "host-a/1", pytest.approx(0.5))
    assert (lines.bytes_in, lines.bytes_out, lines.network) == (0, 3_000, 1_000), "split@1.0 is on its node"
    assert (split.bytes_in, split.bytes_out, split.network) == (2_000, 500, 500)
    assert split.memory == 2_000_000
    streams = {(stream.source, stream.target): (stream.tuples, stream.bytes) for stream in sample.streams}
    assert streams == {
        ("lines@0.0", "split@1.0"): (100, 2_000),
        ("lines@0.0", "split@1.1"): (50, 1_000),
        ("split@1.0", "show@2.0"): (100, 500),
    }
    a, b = sample.nodes
    assert (a.node, a.used.cpu, a.used.memory, a.used.bandwidth) == ("host-a/1", 1.75, 6_000_000, 1_500)
    assert (a.other, b.other) == (Use(0.75, 3_000_000), Use(0.25, 1_000_000)), "the Spark executors' JVMs"
    assert a.capacity == b.capacity == Use(4.0, 1_000_000_000, 125_000_000)
    assert a.limit == Use(pytest.approx(3.2), 800_000_000, 100_000_000)


def test_load_samples_follow_one_another():
    cluster = Cluster(monitor_interval=10.0)
    assert [sample.ended for sample in cluster.run(40)] == [1010, 1020, 1030, 1040]
    assert cluster.monitor.sample.ended == 1040


def test_the_snapshot_is_what_policies_take():
    cluster = Cluster()
    (sample,) = cluster.run(30)
    snapshot = sample.snapshot(Settings())
    assert [node.name for node in snapshot.nodes] == ["host-a/1", "host-b/2"]
    assert snapshot.places["split@1.1"] == "host-b/2"
    assert len(snapshot.streams) == 3


def test_the_command_explains_the_newest_load_sample():
    cluster = Cluster()
    assert "the first begins when all workers have reported, and takes 30 s" in told(cluster)["lines"][0]
    cluster.run(10)
    assert told(cluster) == {"ended": None, "lines": ["no load sample yet: the first ends in 20 s"], "plan": None}
    cluster.run(20)
    answer = told(cluster)
    assert answer["ended"] == 1030
    assert answer["lines"][0].startswith("critical path: 2.265"), "with what moving the tuples costs Spark"
    assert answer["plan"]["critical_nodes"] == ["host-a/1", "host-b/2"]


def told(cluster):
    return json.loads(cluster.watched.explain())


def test_off_makes_no_load_samples_and_says_so():
    cluster = Cluster(monitor="off")
    assert cluster.run(90) == []
    assert "the load monitor is off" in told(cluster)["lines"][0]
    assert cluster.watched.status().energy["dynamic"] > 0


def test_a_worker_that_is_missing_holds_the_load_sample_up():
    cluster = Cluster(monitor_interval=10.0)
    gone = cluster.watched.workers.pop(WorkerId(2, 0))
    assert cluster.run(30) == []
    cluster.watched.workers[WorkerId(2, 0)] = gone
    assert [sample.seconds for sample in cluster.run(10)] == [10]


def test_a_restart_begins_a_load_sample_anew():
    cluster = Cluster(monitor_interval=10.0)
    assert len(cluster.run(15)) == 1
    cluster.begins(1)
    cluster.clock.advance(5.0)
    (sample,) = cluster.run(10)
    assert sample.seconds == 10
    assert by_name(sample.executors, "executor")["split@1.0"].cpu == pytest.approx(1.0), (
        "not what is left of before"
    )


def test_workers_of_another_start_are_not_sampled():
    """The bus has the new start's reports; a connection of the old one still stands."""
    cluster = Cluster(monitor_interval=10.0)
    cluster.run(0)
    cluster.attempt = 1
    assert cluster.run(20) == []


def test_fused_components_share_the_process_by_their_time():
    builder = TopologyBuilder()
    builder.set_spout("spout", FeederSpout("x"), 1)
    builder.set_bolt("fused", Pass("x"), 1).local_or_shuffle_grouping("spout")
    builder.set_bolt("far", CaptureBolt(), 1).global_grouping("fused")
    settings = Settings(monitor=Monitor("memory", interval=10.0))
    plan = make_plan(builder.build("chain", settings))
    clock = SimulatedClock(0.0)
    bus, monitor = MetricsBus(plan, clock.monotonic), LoadMonitor(settings, clock)
    workers = {
        worker: WorkerConnection(Hello(worker.stage, worker.index, 0, worker.stage, "n/1"), None)
        for worker in plan.worker_ids()
    }
    machine = {"id": "m", "cores": 4, "memory": 4_000_000}
    spout, fused, far = (plan.tasks_of[name][0] for name in ("spout", "fused", "far"))
    for second in (0, 10):
        busy = {spout: 1.0 * second / 10, fused: 3.0 * second / 10, far: 0.0}
        streams = {spout: [[spout, fused, 70, 700 * second]], fused: [[fused, far, 7 * second, 50 * second]]}
        for worker in plan.worker_ids():
            tasks = plan.routes.tasks_of(worker)
            data = {task: TaskStats(busy=busy[task]) for task in tasks}
            rows = [row for task in tasks for row in streams.get(task, [])]
            bus.record(
                0, worker, WorkerReport(0, 0, 0, 8.0 * second / 10, 100, data, streams=rows, machine=machine)
            )
        sample = monitor.poll(clock.monotonic(), bus, workers)
        clock.advance(10.0)
    executors = by_name(sample.executors, "component")
    assert executors["spout"].cpu == pytest.approx(0.2)
    assert executors["fused"].cpu == pytest.approx(0.6)
    assert executors["far"].cpu == pytest.approx(0.8), "nothing was busy: evenly"
    assert executors["spout"].memory == executors["fused"].memory == 50
    assert (executors["spout"].bytes_out, executors["fused"].bytes_in) == (0, 0), "they never left the process"
    assert (executors["fused"].bytes_out, executors["fused"].network) == (50, 0)
    assert sample.workers["spout@0.0"] == sample.workers["fused@0.0"]
    snapshot = sample.snapshot(Settings())
    assert [(each.id, each.component) for each in snapshot.executors] == [
        ("spout+fused@0.0", "spout+fused"),
        ("far@1.0", "far"),
    ], "what shares a worker moves together"
    assert snapshot.executors[0].cpu == pytest.approx(0.8)
    assert [(each.source, each.target, each.bytes) for each in snapshot.streams] == [
        ("spout+fused@0.0", "far@1.0", 50)
    ]
    assert sample.units == {"spout+fused@0.0": WorkerId(0, 0), "far@1.0": WorkerId(1, 0)}
    assert (
        sample.snapshot(settings_with(placement_fill=0.5), filled=True).nodes[0].limit.cpu
        == snapshot.nodes[0].limit.cpu / 2
    )


def test_nodes_on_one_machine_share_what_it_has():
    cluster = Cluster(node_cores=0.0, node_memory=0)
    (sample,) = cluster.run(30, machine={"id": "one"})
    assert [node.capacity.cpu for node in sample.nodes] == [4, 4]
    assert sample.nodes[0].capacity.memory == 8e9
    apart = Cluster(node_cores=0.0)
    assert [node.capacity.cpu for node in apart.run(30)[0].nodes] == [8, 8]


# ---- what the bus counts


def test_streams_go_on_after_a_restart():
    cluster = Cluster()
    cluster.run(10)
    bus = cluster.watched.bus
    assert bus.streams()[LINES, SPLIT_0] == StreamCount(1_000, 20_000)
    cluster.begins(1)
    cluster.report()
    assert bus.streams()[LINES, SPLIT_0] == StreamCount(1_000, 20_000)
    cluster.run(5)
    assert bus.streams()[LINES, SPLIT_0] == StreamCount(1_500, 30_000)


def test_a_report_without_streams_keeps_those_before():
    cluster = Cluster()
    cluster.run(10)
    bus = cluster.watched.bus
    cluster.watched.report((0, 0), {LINES: TaskStats()}, cpu=9.0)
    assert bus.streams()[LINES, SPLIT_0] == StreamCount(1_000, 20_000)
    load = bus.load().workers[WorkerId(0, 0)]
    assert (load.cpu, load.machine["cores"]) == (9.0, 8)


def test_a_replacement_takes_over_what_was_counted():
    """Of two split tasks one is left: it has what both got."""
    cluster = Cluster()
    cluster.run(10)
    smaller = make_plan(cluster.watched.topology.scaled({"split": 1}))
    bus = MetricsBus(smaller, cluster.clock.monotonic)
    bus.continue_from(cluster.watched.bus)
    (split,) = smaller.tasks_of["split"]
    assert bus.streams()[smaller.tasks_of["lines"][0], split] == StreamCount(1_500, 30_000)


# ---- energy


def test_energy_is_modelled_and_adds_up():
    cluster = Cluster(monitor="off", watts="30,40,10,5")
    cluster.run(60)
    status = cluster.watched.status()
    a, b = status.nodes
    assert (a.node, a.workers, a.source) == ("host-a/1", 3, "modelled")
    dynamic = 40 * (1.75 + 0.75) / 4 + 10 * 9_000_000 / 1e9
    assert a.watts == pytest.approx(30 + dynamic)
    assert a.base == pytest.approx(30 * 60)
    assert a.dynamic == pytest.approx(dynamic * 55, rel=0.1), "of the first step only memory is known"
    assert a.cpu_seconds == pytest.approx((1.75 + 0.75) * 60)
    energy = status.energy
    assert (energy["source"], energy["measured"]) == ("modelled", None)
    assert energy["total"] == pytest.approx(a.total + b.total)
    assert energy["base"] == pytest.approx(2 * 30 * 60)


def test_the_network_counts_from_the_first_load_sample_on():
    cluster = Cluster(monitor_interval=10.0, watts="0,0,0,100", node_bandwidth=3_000.0)
    cluster.run(15)
    assert cluster.watched.status().nodes[0].dynamic_watts == pytest.approx(100 * 1_500 / 3_000)


def test_a_released_node_s_base_stops_counting():
    cluster = Cluster(monitor="off")
    cluster.run(30)
    for worker in ((1, 1), (2, 0)):
        cluster.watched.workers[WorkerId(*worker)].connected = False
    cluster.run(30)
    a, b = cluster.watched.status().nodes
    assert a.base == pytest.approx(35 * 60)
    assert b.base == pytest.approx(35 * 30)
    assert (b.workers, b.watts) == (0, 0)
    cluster.watched.workers[WorkerId(1, 1)].connected = True
    cluster.run(10)
    assert cluster.watched.status().nodes[1].base == pytest.approx(35 * 35), "from when it was seen on"


def test_measured_energy_is_each_machine_s_once():
    cluster = Cluster(monitor="off")
    for second in range(0, 35, 5):
        cluster.poll(machine={"id": "one", "rapl": 100.0 * second})
        cluster.clock.advance(5.0)
    status = cluster.watched.status()
    assert [node.measured for node in status.nodes] == [1_500, 1_500], "shared by the nodes on it"
    assert (status.energy["source"], status.energy["measured"]) == ("rapl", 3_000)
    assert status.energy["base"] == pytest.approx(2 * 35 * 30), "the model's stays beside it"
    assert status.nodes[0].source == "rapl"


def test_where_a_node_does_not_measure_the_whole_is_modelled():
    cluster = Cluster(monitor="off")
    cluster.poll(machine={"rapl": 1.0})
    cluster.watched.report((1, 1), {}, machine={"id": "host-b"})
    cluster.watched.report((2, 0), {}, machine={"id": "host-b"})
    cluster.watched.monitor = LoadMonitor(cluster.watched.topology.settings, cluster.clock)
    cluster.watched.poll()
    energy = cluster.watched.status().energy
    assert (energy["source"], energy["measured"]) == ("modelled", None)
    assert [node.source for node in cluster.watched.status().nodes] == ["rapl", "modelled"]


def test_a_worker_that_serves_again_is_not_counted_twice():
    """Spark lends its Python workers to one task after the other; their CPU time goes on."""
    cluster = Cluster(monitor="off")
    cluster.run(30)
    before = cluster.watched.status().energy["cpu_seconds"]
    cluster.attempt = 1
    for worker, connection in list(cluster.watched.workers.items()):
        cluster.watched.connect((worker.stage, worker.index), connection.hello.pid, connection.hello.node, 1)
    cluster.run(5)
    grown = cluster.watched.status().energy["cpu_seconds"] - before
    assert grown == pytest.approx(5 * (sum(CORES.values()) + 1.0))


# ---- settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"cpu_limit": 1.5},
            "setting placement.cpu_limit: 1.5 is not allowed: it must be a share, above 0 and up to 1",
        ),
        (
            {"watts": "1,2,3"},
            "setting placement.watts: '1,2,3' is not allowed: it must have four numbers of 0 or more",
        ),
        ({"watts": "1,2,3,many"}, "it must have four numbers"),
        (
            {"monitor": "memory", "monitor_interval": 0.5},
            "it must be at least four reports of lifecycle.metrics_interval, 0.25 s",
        ),
    ],
)
def test_settings_that_do_not_fit(settings, text):
    with pytest.raises(SettingError) as caught:
        settings_with(**settings)
    assert text in str(caught.value)


def test_a_node_that_tells_nothing_has_a_limit_all_the_same():
    cluster = Cluster(node_cores=0.0, node_memory=0)
    (sample,) = cluster.run(30, machine={"cores": 0, "memory": 0})
    assert all(0 < node.limit.cpu < math.inf for node in sample.snapshot(Settings()).nodes)
