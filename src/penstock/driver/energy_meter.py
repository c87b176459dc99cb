"""Meters the energy that each node uses for a topology: modelled by a ``PowerModel``, and measured where the
machines have RAPL counters. Does no IO; the load monitor supplies the readings."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from penstock.control.energy import PowerModel
from penstock.control.placement import Use
from penstock.driver.load_sample import LoadReading
from penstock.metrics.bus import WorkerLoad


@dataclass(frozen=True)
class NodeEnergy:
    """The energy of one node since the topology was submitted. ``base`` and ``dynamic`` are modelled joules: of
    the idle node, and of what the topology uses on it."""

    node: str
    workers: int = 0
    """The topology's workers on the node now. 0 after the topology has left the node; its energy no longer
    grows."""
    base_watts: float = 0.0
    """Watts now."""
    dynamic_watts: float = 0.0
    """Watts now."""
    base: float = 0.0
    dynamic: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the worker processes, and of the Spark executor since its first reading."""
    cores: float = 0.0
    """Cores that the node has."""
    executor_cores: float = 0.0
    """Cores in use now by the worker processes."""
    spark_cores: float = 0.0
    """Cores in use now by Spark's processes on the node."""
    measured: float | None = None
    """Joules measured by RAPL for everything that ran on the machine. If several nodes are on one machine, each
    has an even share. None if the machine does not report it."""

    @property
    def watts(self) -> float:
        return self.base_watts + self.dynamic_watts

    @property
    def total(self) -> float:
        return self.base + self.dynamic

    @property
    def source(self) -> str:
        return "modelled" if self.measured is None else "rapl"


class EnergyMeter:
    """Sums up the energy of all nodes. One thread calls ``update`` every few seconds; any thread may read
    ``nodes``."""

    def __init__(self, model: PowerModel) -> None:
        self._model = model
        self._nodes: dict[str, NodeEnergy] = {}
        self._counters = _CounterReader()
        self._last: float | None = None

    @property
    def nodes(self) -> tuple[NodeEnergy, ...]:
        """All nodes that have ever had a worker of the topology, sorted by name."""
        return tuple(self._nodes[name] for name in sorted(self._nodes.copy()))

    def update(self, reading: LoadReading, capacities: Mapping[str, Use], bandwidths: Mapping[str, float]) -> None:
        """Add the energy that nodes with workers have used since the last call. ``bandwidths``: bytes per second
        of each node in the last load sample; a node that is missing used none."""
        seconds = 0.0 if self._last is None else max(0.0, reading.time - self._last)
        self._last = reading.time
        measured = self._measured(reading)
        present = reading.workers_of
        for name in present:
            node = self._nodes.get(name, NodeEnergy(name))
            workers = reading.workers_of[name]
            executors, spark, growth = self._cpu(reading, name)
            memory = (
                sum(reading.load.workers[worker].rss for worker in workers)
                + _jvm(reading.load.workers[workers[0]])[2]
            )
            capacity = capacities[name]
            shares = (
                (executors + spark) / capacity.cpu,
                memory / capacity.memory,
                bandwidths.get(name, 0.0) / capacity.bandwidth,
            )
            dynamic = self._model.dynamic(*(min(1.0, share) for share in shares))
            known = seconds if node.workers else 0.0  # how long a new node has been in use is unknown
            joules = measured.get(name)
            if joules is not None:
                joules += node.measured or 0.0
            self._nodes[name] = NodeEnergy(
                name,
                len(workers),
                self._model.idle,
                dynamic,
                node.base + self._model.idle * known,
                node.dynamic + dynamic * known,
                node.cpu_seconds + growth,
                capacity.cpu,
                executors,
                spark,
                joules if joules is not None else node.measured,
            )
        for name in self._nodes.keys() - set(present):
            self._nodes[name] = replace(
                self._nodes[name],
                workers=0,
                base_watts=0.0,
                dynamic_watts=0.0,
                executor_cores=0.0,
                spark_cores=0.0,
            )

    def _cpu(self, reading: LoadReading, name: str) -> tuple[float, float, float]:
        """Return the cores that executors and Spark's processes use on a node, and the CPU seconds used since the
        last call."""
        executors = spark = growth = 0.0
        for worker in reading.workers_of[name]:
            load, key = reading.load.workers[worker], (name, reading.places[worker].pid)
            growth += self._counters.read(key, load.time, load.cpu, begins=0.0)
            executors += self._counters.rates.get(key, 0.0)
        load = reading.load.workers[reading.workers_of[name][0]]
        pid, seconds, _ = _jvm(load)
        if pid:
            growth += self._counters.read((name, pid), load.detailed_at, seconds)
            spark = self._counters.rates.get((name, pid), 0.0)
        return executors, spark, growth

    def _measured(self, reading: LoadReading) -> dict[str, float]:
        """Return the joules measured since the last call, by node. All workers of a machine report the same
        counter, so only one of them is read."""
        by_machine: dict[object, tuple[float, set[str]]] = {}
        for worker, place in reading.places.items():
            load = reading.load.workers[worker]
            machine = load.machine.get("id") or place.node
            if "rapl" not in load.machine:
                continue
            if machine not in by_machine:
                key = ("rapl", place.node, place.pid)
                by_machine[machine] = self._counters.read(key, load.detailed_at, load.machine["rapl"]), set()
            by_machine[machine][1].add(place.node)
        return {node: joules / len(nodes) for joules, nodes in by_machine.values() for node in nodes}


class _CounterReader:
    """Computes the growth and the rate of counters that are read repeatedly."""

    def __init__(self) -> None:
        self.rates: dict[Hashable, float] = {}
        """Growth per second between the last two readings of each counter; missing until there are two."""
        self._last: dict[Hashable, tuple[float, float]] = {}

    def read(self, key: Hashable, time: float, value: float, begins: float | None = None) -> float:
        """Return the growth since the last reading. The first reading of a counter grows from ``begins``, or by 0
        without it. A counter that has decreased was reset to 0."""
        then, before = self._last.get(key, (time, value if begins is None else begins))
        growth = value - before if value >= before else value
        if time > then:
            self.rates[key] = growth / (time - then)
        self._last[key] = time, value
        return growth


def _jvm(load: WorkerLoad) -> tuple[int, float, int]:
    """Return process id, CPU seconds and resident bytes of the Spark executor; zeros if unknown."""
    pid, seconds, resident = load.machine.get("jvm") or (0, 0.0, 0)
    return pid, seconds, resident
