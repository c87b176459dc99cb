"""Cost of the load monitor (*Pu 2021*, table 4): bytes that workers report, CPU on both sides, time per frame.
These are measured without Spark, with real reports of a topology as large as the paper's and invented numbers. The
delay of tuples is measured on Spark."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.erdm_topologies import LAPTOP, word_count
from benchmarks.harness import Results, median, run_parts, running, say
from penstock import Monitor, Settings, SimulatedClock, TopologyBuilder
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.registry import WorkerConnection
from penstock.metrics.bus import MetricsBus
from penstock.metrics.machine import MachineProbe
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol import codec
from penstock.protocol.events import Hello, WorkerReport
from penstock.testing import CaptureBolt, FeederSpout
from penstock.topology.builder import Topology
from penstock.worker.reports import REPORTS_PER_SAMPLE
from penstock.worker.sender import StreamCounts

WINDOWS = (10.0, 20.0, 30.0, 40.0, 50.0)  # seconds; those of Pu 2021
NODES = 16
LINK = 12.5e6  # bytes per second: the 100 Mb/s of Pu 2021
DELAY_RATE = 300.0  # lines per second for the delay, so that the machine is mostly idle
WITHOUT = 15.0  # seconds that are measured without the monitor, and at least with it
LONGER = 1.2  # times the length of a load sample is measured, so that one ends meanwhile


class Forward(CaptureBolt):
    def declare_output_fields(self, declarer):  # type: ignore[no-untyped-def]
        declarer.declare("word")


def topology(spouts: int, bolts: int) -> Topology:
    """The word count of *Pu 2021*: every spout sends to every split, every split to every count."""
    builder = TopologyBuilder()
    builder.set_spout("lines", FeederSpout("word"), spouts)
    builder.set_bolt("split", Forward(), bolts).shuffle_grouping("lines")
    builder.set_bolt("count", CaptureBolt(), bolts).fields_grouping("split", "word")
    return builder.build("monitored")


@dataclass
class Cluster:
    """The reports of all workers at one time, with counters as large as after some hours."""

    plan: Plan
    plain: dict[WorkerId, WorkerReport]
    full: dict[WorkerId, WorkerReport]
    """The same reports with what only the load monitor needs."""

    @property
    def connections(self) -> dict[WorkerId, WorkerConnection]:
        return {
            worker: WorkerConnection(Hello(worker.stage, worker.index, 0, number, f"host/{number % NODES}"), None)  # type: ignore[arg-type]
            for number, worker in enumerate(self.plan.worker_ids())
        }


def cluster(spouts: int, bolts: int) -> Cluster:
    plan = make_plan(topology(spouts, bolts))
    machine = MachineProbe().read() | {"jvm": [4242, 12_345.67, 987_654_321]}
    plain, full = {}, {}
    for worker in plan.worker_ids():
        tasks = plan.routes.tasks_of(worker)
        stats = TaskStats(*(1_234_567,) * 5, busy=1234.567, capacity=16_384)
        stats.latency.record(0.003, 5)
        stats.latency.record(0.005, 5)
        data = dict.fromkeys(tasks, stats)
        streams = [
            (task, target, 12_345_678, 1_234_567_890)
            for task in tasks
            for follower in plan.downstream_of[plan.task[task].component]
            for target in plan.tasks_of[follower]
        ]
        plain[worker] = WorkerReport(1_234_567, 1_234_567, 123, 1234.567, 123_456_789, data)
        full[worker] = msgspec.structs.replace(plain[worker], streams=streams, machine=machine)
    return Cluster(plan, plain, full)


def measure_reports(results: Results, options: argparse.Namespace) -> None:
    """Bytes per second on a node's link, and CPU of the workers and of the driver."""
    repeats = options.repeats or (1 if options.quick else 3)
    found = cluster(*((10, 20) if options.quick else (50, 100)))
    workers = len(found.full)
    plain, full = (
        sum(len(codec.encode(each)) for each in reports.values()) for reports in (found.plain, found.full)
    )
    make = median([_seconds(lambda: [codec.encode(each) for each in found.full.values()]) for _ in range(repeats)])
    texts = {worker: codec.encode(each) for worker, each in found.full.items()}
    bus = MetricsBus(found.plan)

    def take() -> None:
        for worker, text in texts.items():
            message = codec.decode_event(text)
            assert isinstance(message, WorkerReport)
            bus.record(0, worker, message)

    taken = median([_seconds(take) for _ in range(repeats)])
    sampling = median([_sampling_cost(found) for _ in range(repeats)])
    say(
        f"  {workers} workers: {full / workers:,.0f} bytes with streams, {plain / workers:,.0f} without; "
        f"sampling {sampling:.3f} s"
    )
    interval = Settings().lifecycle.metrics_interval
    for window in WINDOWS:
        told = REPORTS_PER_SAMPLE / window
        more = (full - plain) * told / NODES
        results.row(
            what=f"load samples of {window:g} s",
            workers=workers,
            monitor_bytes_s_node=more,
            other_reports_bytes_s_node=plain / interval / NODES,
            share_of_100_mbit=more / LINK,
            workers_cpu=make * told / workers,
            driver_cpu=taken * told + sampling / window,
        )
        results.bar(
            f"monitor.share.{window:g}", 100 * more / LINK, f"% of a 100 Mb/s link, samples of {window:g} s"
        )
    at = REPORTS_PER_SAMPLE / Settings().monitor.interval
    results.bar("monitor.bytes_share", (full - plain) * at / NODES / LINK, "of a 100 Mb/s link, samples of 30 s")
    results.bar(
        "monitor.driver_cpu", taken * at + sampling / Settings().monitor.interval, "cores, samples of 30 s"
    )


def _sampling_cost(found: Cluster) -> float:
    """CPU seconds to build a load sample and store it in SQLite."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(monitor=Monitor(str(Path(folder) / "load.sqlite")))
        clock = SimulatedClock(0.0)
        monitor, bus = LoadMonitor(settings, clock), MetricsBus(found.plan, clock.monotonic)
        workers = found.connections
        for second in (0.0, settings.monitor.interval):
            clock.advance(second)
            for worker, report in found.full.items():
                streams = [
                    (source, target, tuples + int(second), size)
                    for source, target, tuples, size in report.streams or ()
                ]
                bus.record(0, worker, msgspec.structs.replace(report, streams=streams))
            begun = time.process_time()
            made = monitor.poll(clock.monotonic(), bus, workers)
        monitor.close()
        spent = time.process_time() - begun
    if made is None or len(made.executors) != len(found.full):
        raise SystemExit("no load sample contained all executors")
    return spent


def measure_frame(results: Results, options: argparse.Namespace) -> None:
    """Time that counting adds to each frame, whatever the length of the load sample: a worker counts each frame it
    sends."""
    frames = 20_000 if options.quick else 200_000
    streams = StreamCounts()

    def count() -> None:
        for number in range(frames):
            streams.add(1, number % 100, 100, 4096)

    repeats = options.repeats or 5
    nanoseconds = median([_seconds(count) for _ in range(repeats)]) / frames * 1e9
    results.row(what="one frame counted", ns=nanoseconds)
    results.bar("monitor.frame_ns", nanoseconds, "ns a frame")


def measure_delay(results: Results, options: argparse.Namespace) -> None:
    """Additional latency on Spark: the word count at a steady rate without the monitor and with load samples of 10
    to 50 s that are stored in SQLite, by turns. p50 from emission to ack, as the mean of values taken every
    second."""
    turns = options.repeats or (1 if options.quick else 3)
    windows = WINDOWS[:1] if options.quick else WINDOWS
    found: dict[float, list[float]] = {window: [] for window in (0.0, *windows)}
    for turn in range(turns):
        for window in found:
            found[window].append(_p50(window, measured_seconds(window)))
            say(f"  {turn + 1} of {turns}, load samples of {window:g} s: {1e3 * found[window][-1]:.2f} ms")
    off = median(found[0.0])
    for window, seen in found.items():
        added = 1e3 * (median(seen) - off)
        what = f"load samples of {window:g} s" if window else "off"
        results.row(what=what, p50_ms=1e3 * median(seen), added_ms=added, worst_ms=1e3 * max(seen))
        if window:
            results.bar(f"monitor.delay_ms.{window:g}", added, "ms more at p50 than without the monitor")


def measured_seconds(window: float) -> float:
    """How long the delay is measured with load samples of this length; 0: without the monitor."""
    return max(WITHOUT, LONGER * window)


def delayed_topology(window: float, folder: Path) -> Topology:
    """The word count with the load monitor, which stores its samples in this folder; 0: without the monitor."""
    stored = {"monitor": str(folder / "load.sqlite"), "monitor.interval": window}
    topology = word_count(LAPTOP, DELAY_RATE)
    return replace(topology, settings=topology.settings.with_values(stored if window else {"monitor": "off"}))


def _p50(window: float, seconds: float) -> float:
    seen = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-monitor-") as folder,
        running(delayed_topology(window, Path(folder))) as handle,
    ):
        time.sleep(8.0)  # until the code is warm
        for _ in range(round(seconds)):
            time.sleep(1.0)
            view = next(each for each in handle.internals.bus.view() if each.component == "source")
            seen += [] if view.latency_p50 is None else [view.latency_p50]
    return sum(seen) / len(seen)


def _seconds(action: Callable[[], object]) -> float:
    """CPU seconds, so that other programs on the machine do not count."""
    begun = time.process_time()
    action()
    return time.process_time() - begun


PARTS = {"reports": measure_reports, "frame": measure_frame, "delay": measure_delay}


def main(options: argparse.Namespace) -> int:
    """``penstock bench monitor``"""
    return run_parts("monitor", PARTS, options)
