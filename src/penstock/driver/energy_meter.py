"""Energy of a running topology, node by node: watts from a ``PowerModel`` and joules so far; measured
ones beside them where the machines count them (RAPL). Pure; the load monitor tells it what was used."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from penstock.control.energy import PowerModel
from penstock.control.placement import Use
from penstock.driver.load_sample import LoadReading
from penstock.metrics.bus import WorkerLoad


@dataclass(frozen=True)
class NodeEnergy:
    """One node since the topology was first started. Joules; base and dynamic are modelled."""

    node: str
    workers: int = 0
    """Of ours on it now. 0: it is released, and nothing more counts."""
    base_watts: float = 0.0
    dynamic_watts: float = 0.0
    """Both now."""
    base: float = 0.0
    dynamic: float = 0.0
    cpu_seconds: float = 0.0
    """Of the workers' processes, and of the Spark executor beside them since it was first seen."""
    measured: float | None = None
    """By RAPL: all that ran on its machine, an even share where several of our nodes are on it; None: not told."""

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
    """``update`` is called every few seconds, by one thread; ``nodes`` is read by any."""

    def __init__(self, model: PowerModel) -> None:
        self._model = model
        self._nodes: dict[str, NodeEnergy] = {}
        self._counters = _CounterReader()
        self._last: float | None = None

    @property
    def nodes(self) -> tuple[NodeEnergy, ...]:
        """All that ever had a worker of ours, by name."""
        return tuple(self._nodes[name] for name in sorted(self._nodes.copy()))

    def update(self, reading: LoadReading, capacities: Mapping[str, Use], bandwidths: Mapping[str, float]) -> None:
        """Count what nodes with workers of ours have used since the last call. ``bandwidths``: bytes a second, of
        the last window; what is not named used none."""
        seconds = 0.0 if self._last is None else max(0.0, reading.time - self._last)
        self._last = reading.time
        measured = self._measured(reading)
        present = reading.workers_of
        for name in present:
            node = self._nodes.get(name, NodeEnergy(name))
            workers = reading.workers_of[name]
            cores, grown = self._cpu(reading, name)
            memory = (
                sum(reading.load.workers[worker].rss for worker in workers)
                + _jvm(reading.load.workers[workers[0]])[2]
            )
            has = capacities[name]
            shares = (cores / has.cpu, memory / has.memory, bandwidths.get(name, 0.0) / has.bandwidth)
            dynamic = self._model.dynamic(*(min(1.0, share) for share in shares))
            known = seconds if node.workers else 0.0  # how long it has been ours nobody knows
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
                node.cpu_seconds + grown,
                joules if joules is not None else node.measured,
            )
        for name in self._nodes.keys() - set(present):
            self._nodes[name] = replace(self._nodes[name], workers=0, base_watts=0.0, dynamic_watts=0.0)

    def _cpu(self, reading: LoadReading, name: str) -> tuple[float, float]:
        """Cores in use, and seconds since the last call."""
        cores = grown = 0.0
        for worker in reading.workers_of[name]:
            load, key = reading.load.workers[worker], (name, reading.places[worker].pid)
            grown += self._counters.read(key, load.time, load.cpu, begins=0.0)
            cores += self._counters.rates.get(key, 0.0)
        load = reading.load.workers[reading.workers_of[name][0]]
        pid, seconds, _ = _jvm(load)
        if pid:
            grown += self._counters.read((name, pid), load.detailed_at, seconds)
            cores += self._counters.rates.get((name, pid), 0.0)
        return cores, grown

    def _measured(self, reading: LoadReading) -> dict[str, float]:
        """Joules since the last call, by node. Of each machine one worker is listened to."""
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
    """Counters that are read now and then: by how much each grew, and how fast."""

    def __init__(self) -> None:
        self.rates: dict[Hashable, float] = {}
        """As of the last time it was seen to have moved on; unknown at first."""
        self._last: dict[Hashable, tuple[float, float]] = {}

    def read(self, key: Hashable, time: float, value: float, begins: float | None = None) -> float:
        """Its growth since it was last read. At first sight since ``begins``, or none. One that went back has
        begun anew at 0."""
        then, before = self._last.get(key, (time, value if begins is None else begins))
        grown = value - before if value >= before else value
        if time > then:
            self.rates[key] = grown / (time - then)
        self._last[key] = time, value
        return grown


def _jvm(load: WorkerLoad) -> tuple[int, float, int]:
    """Process, CPU seconds, resident bytes of the Spark executor; zeros where it is not known."""
    pid, seconds, resident = load.machine.get("jvm") or (0, 0.0, 0)
    return pid, seconds, resident
