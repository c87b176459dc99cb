"""A status in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.driver.status import TaskStatus, TopologyStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATES = ("starting", "active", "inactive", "restarting", "ending", "ended", "failed")
_SHORTEST, _LONGEST = 7, 27  # bounds of latency, 1 µs doubled so often: 0.1 ms, less is noise; two minutes

_Labels = Mapping[str, str]
_Of = Callable[[TaskStatus], float]

# name, what it counts, how it is read
_COUNTERS: tuple[tuple[str, str, _Of], ...] = (
    ("penstock_received", "Tuples taken from the task's inbox.", lambda t: t.total.received),
    ("penstock_received_bytes", "Their size on the wire.", lambda t: t.total.received_bytes),
    ("penstock_executed", "Tuples executed.", lambda t: t.total.executed),
    ("penstock_emitted", "Tuples emitted, counted once however many subscribe.", lambda t: t.total.emitted),
    ("penstock_sent", "Tuples sent, counted once for each receiver.", lambda t: t.total.sent),
    ("penstock_sent_bytes", "Their size on the wire.", lambda t: t.total.sent_bytes),
    ("penstock_acked", "Messages of a spout that were acked.", lambda t: t.total.acked),
    ("penstock_failed", "Messages of a spout that failed or timed out.", lambda t: t.total.failed),
    ("penstock_expired", "Tuples not executed because their messages had timed out.", lambda t: t.total.expired),
    (
        "penstock_given_up",
        "Messages that a spout gave up, tuples that a bolt gave up, and rows that a sink rejected; each is a dead "
        "letter or was handed over.",
        lambda t: t.total.given_up,
    ),
    ("penstock_sink_rows", "Rows of a sink that the other system has.", lambda t: t.total.written),
    ("penstock_late", "Tuples that came too late for one of their windows or more.", lambda t: t.total.late),
    ("penstock_errors", "Errors of the component.", lambda t: t.total.errors),
    ("penstock_busy_seconds", "Time in the component's own code.", lambda t: t.total.busy),
)
_GAUGES: tuple[tuple[str, str, _Of], ...] = (
    ("penstock_queue_tuples", "Tuples that wait in the inbox, its overflow included.", lambda t: t.queue.length),
    ("penstock_queue_capacity_tuples", "Tuples the inbox holds without overflow.", lambda t: t.queue.capacity),
    ("penstock_queue_overflow_tuples", "Tuples that wait in its overflow.", lambda t: t.queue.overflowing),
    (
        "penstock_rate_limit_tuples_per_second",
        "What the task may send where it is slowed most; +Inf: nowhere.",
        lambda t: t.queue.limit,
    ),
    (
        "penstock_in_call_seconds",
        "For how long the component's code has not returned; 0: it has.",
        lambda t: t.total.in_call,
    ),
    ("penstock_sink_away_seconds", "For how long a sink has taken nothing; 0: it does.", lambda t: t.total.away),
    ("penstock_state_entries", "Entries of the task's state.", lambda t: t.total.state_keys),
    ("penstock_state_bytes", "What they take in the state directory.", lambda t: t.total.state_bytes),
)


def exposition(status: TopologyStatus) -> str:
    """Every metric of a topology. Counters go on counting when its query is started again."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: TopologyStatus) -> Iterator[str]:
    whole = {"topology": status.topology}
    yield from _family(
        "penstock_state",
        "gauge",
        "1 for the state the topology is in.",
        [({**whole, "state": state}, float(state == status.state)) for state in _STATES],
    )
    yield from _family(
        "penstock_uptime_seconds", "gauge", "Since the spouts first emitted.", [(whole, status.uptime)]
    )
    yield from _family("penstock_epoch", "gauge", "The newest committed epoch.", [(whole, status.epoch)])
    yield from _family(
        "penstock_commit_age_seconds",
        "gauge",
        "Since the newest epoch was committed; none before the first commit of a start.",
        [] if status.commit_age is None else [(whole, status.commit_age)],
    )
    yield from _family("penstock_pending_tuples", "gauge", "Tuples on their way.", [(whole, status.pending)])
    yield from _family(
        "penstock_restarts_total", "counter", "Starts of the query after the first.", [(whole, status.restarts)]
    )
    tasks = [(_labels(status, task), task) for task in status.tasks]
    for name, help, value in _COUNTERS:
        yield from _family(f"{name}_total", "counter", help, [(labels, value(task)) for labels, task in tasks])
    for name, help, value in _GAUGES:
        yield from _family(name, "gauge", help, [(labels, value(task)) for labels, task in tasks])
    yield from _family(
        "penstock_source_lag_records",
        "gauge",
        "Records of a partition of the source that the task has not read yet.",
        [
            ({**labels, "partition": partition}, lag)
            for labels, task in tasks
            for partition, lag in sorted(task.total.lag.items())
        ],
    )
    yield from _latency(tasks)
    workers = [({**whole, "worker": worker.worker, "node": worker.node}, worker) for worker in status.workers]
    yield from _family(
        "penstock_worker_up",
        "gauge",
        "1: the worker is connected.",
        [(at, float(one.connected)) for at, one in workers],
    )
    yield from _family(
        "penstock_worker_cpu_seconds_total",
        "counter",
        "CPU time of the worker's process; a new one begins at 0.",
        [(at, one.cpu) for at, one in workers],
    )
    yield from _family(
        "penstock_worker_memory_bytes", "gauge", "Its resident memory.", [(at, one.rss) for at, one in workers]
    )
    yield from _energy(status)


def _energy(status: TopologyStatus) -> Iterator[str]:
    """Measured joules have labels of their own: a sum over all would have everything twice."""
    nodes = [({"topology": status.topology, "node": node.node}, node) for node in status.nodes]
    parts: list[tuple[_Labels, float]] = []
    watts: list[tuple[_Labels, float]] = []
    for at, node in nodes:
        for part, joules, now in (
            ("base", node.base, node.base_watts),
            ("dynamic", node.dynamic, node.dynamic_watts),
        ):
            labels = {**at, "part": part, "source": "modelled"}
            parts.append((labels, joules))
            watts.append((labels, now))
    yield from _family("penstock_power_watts", "gauge", "Of a node now, by a power model.", watts)
    yield from _family("penstock_energy_joules_total", "counter", "Of a node so far, by a power model.", parts)
    yield from _family(
        "penstock_measured_energy_joules_total",
        "counter",
        "Of a node's machine so far, whatever runs on it, where its processor tells.",
        [({**at, "source": "rapl"}, node.measured) for at, node in nodes if node.measured is not None],
    )
    yield from _family(
        "penstock_node_cpu_seconds_total",
        "counter",
        "CPU time of a node's workers and of the Spark executor they belong to.",
        [(at, node.cpu_seconds) for at, node in nodes],
    )


def _latency(tasks: Iterable[tuple[_Labels, TaskStatus]]) -> Iterator[str]:
    """Buckets are those of ours that end at a doubling, so the counts are exact; the sum is within 5 %."""
    name = "penstock_latency_seconds"
    yield from _head(
        name,
        "histogram",
        "From the spout's emit until the task was done with the tuple, of the oldest in each frame; of a spout, "
        "until it was acked.",
    )
    for labels, task in tasks:
        latency = task.total.latency
        for doublings in range(_SHORTEST, _LONGEST + 1):
            bound, count = latency.below(doublings)
            yield _sample(f"{name}_bucket", {**labels, "le": _number(bound)}, count)
        yield _sample(f"{name}_bucket", {**labels, "le": "+Inf"}, latency.count)
        yield _sample(f"{name}_sum", labels, latency.seconds)
        yield _sample(f"{name}_count", labels, latency.count)


def _labels(status: TopologyStatus, task: TaskStatus) -> _Labels:
    return {"topology": status.topology, "component": task.task.component, "task": str(task.task.index)}


def _family(name: str, kind: str, help: str, samples: Iterable[tuple[_Labels, float]]) -> Iterator[str]:
    yield from _head(name, kind, help)
    for labels, value in samples:
        yield _sample(name, labels, value)


def _head(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: _Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.15g}"
