"""The settings of nodes: where workers run, and what a node has."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from penstock.settings.fields import setting
from penstock.settings.groups import Group


@dataclass(frozen=True)
class Placement(Group):
    """The nodes on which workers run, and the resources of the nodes."""

    policy: str = setting(
        "spark",
        "",
        "spark spreads workers as Spark does; erdm (Pu 2021) moves them to few nodes, by load, so that others "
        "become free",
        choices=("spark", "erdm"),
    )
    _: KW_ONLY
    fill: float = setting(
        0.9, "", "erdm fills a node up to this share of its limits, which leaves room for variation"
    )
    critical: str = setting(
        "widened",
        "",
        "path: the critical nodes are those of the most costly path, as Pu 2021 defines it; widened: and further "
        "ones, most costly first, until the executors of all other nodes fit on them",
        choices=("path", "widened"),
    )
    spare_slots: int = setting(
        0,
        "slots",
        "slots kept free on each node for each stage of bolts, so that a single worker can move there. Each costs "
        "a process. 0: with erdm as many as moves to half of the nodes need, otherwise none",
        zero=True,
    )
    spark_cores: float = setting(
        0.05,
        "cores",
        "what Spark's processes use on a node on which nothing happens. It stays on the node whatever erdm moves; "
        "what they use beyond it moves with the executors",
        zero=True,
    )
    node_cores: float = setting(
        0.0, "cores", "cores of a node. 0: those of its machine, divided by the nodes on it", zero=True
    )
    node_memory: int = setting(
        0, "bytes", "memory of a node. 0: that of its machine, divided by the nodes on it", zero=True
    )
    node_bandwidth: float = setting(
        125_000_000.0,
        "bytes/s",
        "what a node's link carries, in and out together. A node cannot report it; the default is 1 Gb/s",
    )
    cpu_limit: float = setting(0.8, "", "a node is full when this share of its cores is in use")
    memory_limit: float = setting(0.8, "", "a node is full when this share of its memory is in use")
    bandwidth_limit: float = setting(0.8, "", "a node is full when this share of its bandwidth is in use")
    watts: str = setting(
        "35,40,8,4",
        "W",
        "what a node draws when idle, and in addition with CPU, memory and network in full use. The default fits "
        "figure 13 of Pu 2021",
    )

    @property
    def by_executor(self) -> bool:
        """Whether single executors are to move, so that each needs a worker of its own."""
        return self.policy == "erdm"

    @property
    def spares(self) -> int | None:
        """Spare slots on each node for each stage of bolts. None: as many as its workers per node."""
        return None if self.by_executor and not self.spare_slots else self.spare_slots

    def _check(self) -> None:
        for share in ("cpu_limit", "memory_limit", "bandwidth_limit"):
            if getattr(self, share) > 1:
                raise self._refuse(share, "it must be a share, above 0 and up to 1", "Try 0.8.")
        if self.fill > 1:
            raise self._refuse("fill", "it must be a share, above 0 and up to 1", "Try 0.9.")
        try:
            watts = [float(number) for number in self.watts.split(",")]
        except ValueError:
            watts = []
        if len(watts) != 4 or not all(0 <= each < math.inf for each in watts):
            raise self._refuse(
                "watts",
                "it must have four numbers of 0 or more: idle, CPU, memory, network",
                "For example 35,40,8,4.",
            )
