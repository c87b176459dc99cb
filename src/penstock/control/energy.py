"""The energy model (Pu 2021, section 3.3): computes watts from the resource use of nodes, and joules from watts
and time.

Nothing is measured here. Spark does not report power, so all figures come from a ``PowerModel``, and every output
must say so (``Energy.label``). Pu 2021 omits the base power because it is constant. Here it is included, because
releasing a node saves its base power.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.control.limits import Loads
from penstock.control.placement import PlacementSnapshot, Regulate


@dataclass(frozen=True)
class PowerModel:
    """The power of one node in watts: P = idle + cpu·u_cpu·f² + memory·u_memory·v² + network·u_network. u is the
    used share of the limit; f and v are the shares of full CPU frequency and memory voltage.

    The model is linear in use, as is usual for whole machines. The factor is f² because power is proportional to
    f·V² and V to f, while the same work keeps the CPU busy 1/f times as long. With the defaults, the sixteen
    workers of Pu 2021 (i7 4790, 8 GB) at 60 % use (figure 8) draw the 1,063 W of figure 13. Pu 2021 does not state
    how the power is divided over the components, so the division is an estimate.
    """

    idle: float = 35.0
    """Watts of an idle machine: Pu 2021's base power."""
    cpu: float = 40.0
    """Additional watts with all cores busy."""
    memory: float = 8.0
    """Additional watts with all memory in use."""
    network: float = 4.0
    """Additional watts with the network link saturated."""

    def dynamic(
        self, cpu: float, memory: float, network: float, frequency: float = 1.0, voltage: float = 1.0
    ) -> float:
        """P_dynamic in watts (Pu 2021, equation 30)."""
        return self.cpu * cpu * frequency**2 + self.memory * memory * voltage**2 + self.network * network


@dataclass(frozen=True)
class Power:
    """The power of a cluster in watts."""

    base: float
    dynamic: float

    @property
    def total(self) -> float:
        return self.base + self.dynamic


@dataclass(frozen=True)
class Energy:
    """Energy in joules (Pu 2021, equation 29)."""

    base: float
    dynamic: float

    @property
    def total(self) -> float:
        return self.base + self.dynamic

    def __sub__(self, other: Energy) -> Energy:
        """The saving compared with ``other``, for each part (Pu 2021, equation 31)."""
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
    """The power of all nodes that are not released. ``models`` maps nodes to models; other nodes use the default
    model. A resource without a limit contributes nothing, because its used share is unknown."""
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


def energy(samples: Iterable[tuple[float, Power]]) -> Energy:
    """The energy of consecutive load samples, given as pairs of seconds and power (Pu 2021, equations 29 and 30).
    Loads are means over a load sample, so the sum equals the integral."""
    base = dynamic = 0.0
    for seconds, each in samples:
        if seconds < 0:
            raise ValueError(f"a load sample cannot last {seconds} s")
        base += each.base * seconds
        dynamic += each.dynamic * seconds
    return Energy(base, dynamic)


def saved_dynamic(local: int, paths: int, node_cost: float, tuples: float, watts: float) -> float:
    """The estimated saving (d / n)·W_node·M·P in joules (Pu 2021, equation 33).

    ``node_cost`` is in seconds per tuple: ``InterNode.before`` divided by tuples per second. ``watts`` is
    P_dynamic of a working node. This is an estimate made before anything moves; ``energy`` computes the model's
    value afterwards.
    """
    return local / paths * node_cost * tuples * watts if paths else 0.0


_DEFAULT = PowerModel()
_FULL = Regulate("", "")
