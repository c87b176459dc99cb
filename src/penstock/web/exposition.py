"""Renders a topology's status in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.driver.status import TaskStatus, TopologyStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATES = ("starting", "active", "inactive", "restarting", "ending", "ended", "failed")
_SHORTEST, _LONGEST = 7, 27
"""Latency buckets range from 2^7 µs (0.1 ms; shorter times are noise) to 2^27 µs (two minutes)."""

_Labels = Mapping[str, str]
_Of = Callable[[TaskStatus], float]

# name, help text, function that reads the value
_COUNTERS: tuple[tuple[str, str, _Of], ...] = (
    ("penstock_received", "Tuples taken from the task's inbox.", lambda t: t.total.received),
    ("penstock_received_bytes", "Size of these tuples on the wire.", lambda t: t.total.received_bytes),
    ("penstock_executed", "Tuples executed.", lambda t: t.total.executed),
    ("penstock_emitted", "Tuples emitted, each counted once for all receivers.", lambda t: t.total.emitted),
    ("penstock_sent", "Tuples sent, each counted once per receiver.", lambda t: t.total.sent),
    ("penstock_sent_bytes", "Size of the sent tuples on the wire.", lambda t: t.total.sent_bytes),
    ("penstock_acked", "Messages of a spout that were acked.", lambda t: t.total.acked),
    ("penstock_failed", "Messages of a spout that failed or timed out.", lambda t: t.total.failed),
    ("penstock_expired", "Tuples skipped because their messages had timed out.", lambda t: t.total.expired),
    (
        "penstock_given_up",
        "Messages given up by a spout, tuples given up by a bolt, and rows rejected by a sink; each became a dead "
        "letter or was passed to on_give_up of the spout.",
        lambda t: t.total.given_up,
    ),
    ("penstock_sink_rows", "Rows that a sink has written to its external system.", lambda t: t.total.written),
    ("penstock_late", "Tuples that arrived too late for at least one of their windows.", lambda t: t.total.late),
    ("penstock_errors", "Errors of the component.", lambda t: t.total.errors),
    ("penstock_busy_seconds", "Time spent in the component's code.", lambda t: t.total.busy),
)
_GAUGES: tuple[tuple[str, str, _Of], ...] = (
    ("penstock_queue_tuples", "Tuples waiting in the inbox, including its overflow.", lambda t: t.queue.length),
    ("penstock_queue_capacity_tuples", "Tuples the inbox holds without overflow.", lambda t: t.queue.capacity),
    ("penstock_queue_overflow_tuples", "Tuples waiting in the inbox's overflow.", lambda t: t.queue.overflowing),
    (
        "penstock_rate_limit_tuples_per_second",
        "The lowest rate limit of the task towards one of its receivers; +Inf if there is none.",
        lambda t: t.queue.limit,
    ),
    (
        "penstock_in_call_seconds",
        "Duration of the current call of the component's code; 0 if there is none.",
        lambda t: t.total.in_call,
    ),
    (
        "penstock_sink_unavailable_seconds",
        "Time for which the sink's external system has accepted nothing; 0 if it accepts rows.",
        lambda t: t.total.away,
    ),
    ("penstock_state_entries", "Entries of the task's state.", lambda t: t.total.state_keys),
    ("penstock_state_bytes", "Size of the task's state in the state directory.", lambda t: t.total.state_bytes),
)


def exposition(status: TopologyStatus) -> str:
    """Every metric of a topology. Counters keep their values when the topology's query is restarted."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: TopologyStatus) -> Iterator[str]:
    whole = {"topology": status.topology}
    yield from _family(
        "penstock_state",
        "gauge",
        "1 for the topology's current state, 0 for the others.",
        [({**whole, "state": state}, float(state == status.state)) for state in _STATES],
    )
    yield from _family(
        "penstock_uptime_seconds", "gauge", "Time since the spouts first emitted.", [(whole, status.uptime)]
    )
    yield from _family("penstock_epoch", "gauge", "The newest committed epoch.", [(whole, status.epoch)])
    yield from _family(
        "penstock_commit_age_seconds",
        "gauge",
        "Time since the newest epoch was committed; absent before the first commit of a query run.",
        [] if status.commit_age is None else [(whole, status.commit_age)],
    )
    yield from _family("penstock_pending_tuples", "gauge", "Tuples in flight.", [(whole, status.pending)])
    yield from _family(
        "penstock_restarts_total", "counter", "Restarts of the topology's query.", [(whole, status.restarts)]
    )
    tasks = [(_labels(status, task), task) for task in status.tasks]
    for name, help, value in _COUNTERS:
        yield from _family(f"{name}_total", "counter", help, [(labels, value(task)) for labels, task in tasks])
    for name, help, value in _GAUGES:
        yield from _family(name, "gauge", help, [(labels, value(task)) for labels, task in tasks])
    yield from _family(
        "penstock_source_lag_records",
        "gauge",
        "Records of a source partition that the task has not read yet.",
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
        "1 if the worker is connected.",
        [(at, float(one.connected)) for at, one in workers],
    )
    yield from _family(
        "penstock_worker_cpu_seconds_total",
        "counter",
        "CPU time of the worker's process; a new process starts at 0.",
        [(at, one.cpu) for at, one in workers],
    )
    yield from _family(
        "penstock_worker_memory_bytes",
        "gauge",
        "Resident memory of the worker's process.",
        [(at, one.rss) for at, one in workers],
    )
    yield from _ackers(status)
    yield from _energy(status)


def _ackers(status: TopologyStatus) -> Iterator[str]:
    whole = {"topology": status.topology}
    ackers = [({**whole, "acker": str(one.acker), "node": one.node}, one) for one in status.ackers]
    yield from _family(
        "penstock_acker_open_roots",
        "gauge",
        "Messages of spouts whose ledgers the acker keeps and that are neither complete nor failed.",
        [(at, one.open_roots) for at, one in ackers],
    )
    yield from _family(
        "penstock_acker_entries_total",
        "counter",
        "Changes of ledgers, about one for each message and hop; a new process starts at 0.",
        [(at, one.entries) for at, one in ackers],
    )
    yield from _family(
        "penstock_acker_cpu_seconds_total",
        "counter",
        "CPU time of the acker's process; a new process starts at 0.",
        [(at, one.cpu) for at, one in ackers if one.cpu is not None],
    )


def _energy(status: TopologyStatus) -> Iterator[str]:
    """Measured joules have their own metric, so that a sum over the modelled ones does not count them twice."""
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
    yield from _family("penstock_power_watts", "gauge", "Current power of a node, by a power model.", watts)
    yield from _family("penstock_energy_joules_total", "counter", "Energy of a node, by a power model.", parts)
    yield from _family(
        "penstock_measured_energy_joules_total",
        "counter",
        "Measured energy of a node's machine, including other programs, if its processor provides it.",
        [({**at, "source": "rapl"}, node.measured) for at, node in nodes if node.measured is not None],
    )
    yield from _family(
        "penstock_node_cpu_seconds_total",
        "counter",
        "CPU time of a node's workers and of their Spark executor.",
        [(at, node.cpu_seconds) for at, node in nodes],
    )


def _latency(tasks: Iterable[tuple[_Labels, TaskStatus]]) -> Iterator[str]:
    """The buckets are those of the histogram that end at a power of two, so the counts are exact. The sum is
    within 5 % of the exact sum."""
    name = "penstock_latency_seconds"
    yield from _head(
        name,
        "histogram",
        "Time from the spout's emit until the task had processed the tuple, measured for the oldest tuple of "
        "each frame. For a spout: until the message was acked.",
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
