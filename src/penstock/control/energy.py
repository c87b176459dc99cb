"""Modelled energy (C §3.3, SPEC 6.6): watts from what nodes use, joules from watts and time.

Nothing here is measured. Spark tells no watts, so all figures are those of a ``PowerModel``; whoever shows them
says so (``Energy.label``). C leaves the base out for it is constant; here a released node's base is saved, so both
parts count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.control.limits import Loads
from penstock.control.placement import PlacementSnapshot, Regulate


@dataclass(frozen=True)
class PowerModel:
    """One node's watts: P = idle + cpu·u_cpu·f² + memory·u_memory·v² + network·u_network, with u the share of the
    limit in use, f and v the shares of full CPU frequency and memory voltage.

    Linear in use, as is usual for whole machines. f²: power goes with f·V² and V with f, but the same work keeps
    the CPU busy 1/f as long. The defaults make C's sixteen workers (i7 4790, 8 GB) at the 60 % use of its figure 8
    draw the 1,063 W of its figure 13; how they are split over the parts C does not say, and is a guess.
    """

    idle: float = 35.0
    """Watts of a machine that does nothing: C's base."""
    cpu: float = 40.0
    """Watts more with all cores busy."""
    memory: float = 8.0
    """Watts more with all memory in use."""
    network: float = 4.0
    """Watts more with the link full."""

    def dynamic(
        self, cpu: float, memory: float, network: float, frequency: float = 1.0, voltage: float = 1.0
    ) -> float:
        """P_dynamic in watts (C eq. 30)."""
        return self.cpu * cpu * frequency**2 + self.memory * memory * voltage**2 + self.network * network


@dataclass(frozen=True)
class Power:
    """Watts of a cluster."""

    base: float
    dynamic: float

    @property
    def total(self) -> float:
        return self.base + self.dynamic


@dataclass(frozen=True)
class Energy:
    """Joules (C eq. 29)."""

    base: float
    dynamic: float

    @property
    def total(self) -> float:
        return self.base + self.dynamic

    def __sub__(self, other: Energy) -> Energy:
        """What is saved against ``other``, part by part (C eq. 31)."""
        return Energy(self.base - other.base, self.dynamic - other.dynamic)

    @property
    def label(self) -> str:
        base, dynamic, total = (joules / 1e3 for joules in (self.base, self.dynamic, self.total))
        return f"{total:,.1f} kJ (modelled: base {base:,.1f}, dynamic {dynamic:,.1f})"


def power(
    snapshot: PlacementSnapshot,
    models: Mapping[str, PowerModel] | None = None,
    released: Collection[str] = (),
    regulated: Iterable[Regulate] = (),
) -> Power:
    """Of all nodes that are not released. ``models`` by node; the default where it names none. A resource without
    limit draws nothing, for nobody knows how much of it is in use."""
    loads, settings = Loads(snapshot), {each.node: each for each in regulated}
    base = dynamic = 0.0
    for index, node in enumerate(snapshot.nodes):
        if node.name in released:
            continue
        model = (models or {}).get(node.name, _DEFAULT)
        cpu, memory, network = (loads.used[each][index] / loads.limits[each][index] for each in range(3))
        setting = settings.get(node.name, _FULL)
        base += model.idle
        dynamic += model.dynamic(cpu, memory, network, setting.frequency, setting.voltage)
    return Power(base, dynamic)


def energy(windows: Iterable[tuple[float, Power]]) -> Energy:
    """C eq. 29 and 30 from ⟨seconds, power⟩ of windows that follow each other. Loads are means over a window, so
    the sum is the integral."""
    base = dynamic = 0.0
    for seconds, each in windows:
        if seconds < 0:
            raise ValueError(f"a window lasts 0 s or longer; got {seconds}")
        base += each.base * seconds
        dynamic += each.dynamic * seconds
    return Energy(base, dynamic)


def saved_dynamic(local: int, paths: int, node_cost: float, tuples: float, watts: float) -> float:
    """C eq. 33: (d / n)·W_node·M·P, in joules.

    ``node_cost`` in seconds for each tuple: ``InterNode.before`` over tuples a second. ``watts`` is P_dynamic of a
    node while it works. An estimate before anything moves; ``energy`` is what the model says of what then
    happened.
    """
    return local / paths * node_cost * tuples * watts if paths else 0.0


_DEFAULT = PowerModel()
_FULL = Regulate("", "")
