"""Energy of a running topology, node by node (SPEC 6.6): watts from a ``PowerModel`` and joules so far; measured
ones beside them where the machines count them (RAPL). Pure; the load monitor tells it what was used."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from penstock.control.energy import PowerModel
from penstock.control.placement import Use
from penstock.coordinator.load_window import Look
from penstock.metrics.bus import SlotLoad


@dataclass(frozen=True)
class NodeEnergy:
    """One node since the topology was first started. Joules; base and dynamic are modelled."""

    node: str
    slots: int = 0
    """Of ours on it now. 0: it is released, and nothing more counts."""
    base_watts: float = 0.0
    dynamic_watts: float = 0.0
    """Both now."""
    base: float = 0.0
    dynamic: float = 0.0
    cpu_seconds: float = 0.0
    """Of the slots' processes, and of the Spark executor beside them since it was first seen."""
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
    """``tick`` is called every few seconds, by one thread; ``nodes`` is read by any."""

    def __init__(self, model: PowerModel) -> None:
        self._model = model
        self._nodes: dict[str, NodeEnergy] = {}
        self._counters = _Counters()
        self._last: float | None = None

    @property
    def nodes(self) -> tuple[NodeEnergy, ...]:
        """All that ever had a slot of ours, by name."""
        return tuple(self._nodes[name] for name in sorted(self._nodes.copy()))

    def tick(self, look: Look, capacities: Mapping[str, Use], bandwidths: Mapping[str, float]) -> None:
        """Count what nodes with slots of ours have used since the last call. ``bandwidths``: bytes a second, of
        the last window; what is not named used none."""
        seconds = 0.0 if self._last is None else max(0.0, look.time - self._last)
        self._last = look.time
        measured = self._measured(look)
        present = look.slots_of
        for name in present:
            node = self._nodes.get(name, NodeEnergy(name))
            slots = look.slots_of[name]
            cores, grown = self._cpu(look, name)
            memory = sum(look.load.slots[slot].rss for slot in slots) + _jvm(look.load.slots[slots[0]])[2]
            has = capacities[name]
            shares = (cores / has.cpu, memory / has.memory, bandwidths.get(name, 0.0) / has.bandwidth)
            dynamic = self._model.dynamic(*(min(1.0, share) for share in shares))
            known = seconds if node.slots else 0.0  # how long it has been ours nobody knows
            joules = measured.get(name)
            if joules is not None:
                joules += node.measured or 0.0
            self._nodes[name] = NodeEnergy(
                name,
                len(slots),
                self._model.idle,
                dynamic,
                node.base + self._model.idle * known,
                node.dynamic + dynamic * known,
                node.cpu_seconds + grown,
                joules if joules is not None else node.measured,
            )
        for name in self._nodes.keys() - set(present):
            self._nodes[name] = replace(self._nodes[name], slots=0, base_watts=0.0, dynamic_watts=0.0)

    def _cpu(self, look: Look, name: str) -> tuple[float, float]:
        """Cores in use, and seconds since the last call."""
        cores = grown = 0.0
        for slot in look.slots_of[name]:
            load, key = look.load.slots[slot], (name, look.places[slot].pid)
            grown += self._counters.read(key, load.time, load.cpu, begins=0.0)
            cores += self._counters.rates.get(key, 0.0)
        load = look.load.slots[look.slots_of[name][0]]
        pid, seconds, _ = _jvm(load)
        if pid:
            grown += self._counters.read((name, pid), load.told, seconds)
            cores += self._counters.rates.get((name, pid), 0.0)
        return cores, grown

    def _measured(self, look: Look) -> dict[str, float]:
        """Joules since the last call, by node. Of each machine one slot is listened to."""
        heard: dict[object, tuple[float, set[str]]] = {}
        for slot, place in look.places.items():
            load = look.load.slots[slot]
            machine = load.machine.get("id") or place.node
            if "rapl" not in load.machine:
                continue
            if machine not in heard:
                key = ("rapl", place.node, place.pid)
                heard[machine] = self._counters.read(key, load.told, load.machine["rapl"]), set()
            heard[machine][1].add(place.node)
        return {node: joules / len(nodes) for joules, nodes in heard.values() for node in nodes}


class _Counters:
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


def _jvm(load: SlotLoad) -> tuple[int, float, int]:
    """Process, CPU seconds, resident bytes of the Spark executor; zeros where it is not known."""
    pid, seconds, resident = load.machine.get("jvm") or (0, 0.0, 0)
    return pid, seconds, resident
