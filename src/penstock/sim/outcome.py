"""What goes into a run of the simulated cluster and what comes out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.control.energy import Power
from penstock.control.placement import ExecutorMove, PlacementSnapshot
from penstock.sim.baselines import Proposal
from penstock.sim.executor import SimComponent
from penstock.sim.machine import MachineSpec


@dataclass(frozen=True)
class ClusterSetUp:
    """Figures without a word about C are ours."""

    components: tuple[SimComponent, ...]
    """Spouts first; each after what it takes from."""
    seconds: int
    machine: MachineSpec = MachineSpec()  # noqa: RUF009
    machines: int = 16
    copies: int = 1
    """Topologies of these components, each on ``workers`` machines in a row."""
    workers: int = 16
    ackers: int = 16
    """Of each copy."""
    ack_service: float = 2e-6
    """Core seconds for each tuple acked."""
    ack_size: float = 20.0
    """Bytes for each tuple acked."""
    max_pending: int = 200
    """Tuples of a spout's executor (C table 3)."""
    frame: int = 10
    """Tuples a spout emits at a time, to have fewer events; they wait as single tuples do."""
    switch: float = math.inf
    """When the strategy is asked (C: 105 s)."""
    sample_seconds: float = 30.0
    """Seconds before that the monitor looked at (C table 4)."""
    limit: float = 0.95
    """Of what a machine has, a strategy may use so much."""
    start: float = 2.0
    """Core seconds an executor's start takes."""
    dies: tuple[tuple[float, int], ...] = ()
    """When which machine dies."""
    recover: float = 10.0
    """Seconds until its executors are placed on the others."""
    time_out: float = 30.0
    """Seconds after which a spout emits again what was lost; Storm's."""
    tick: float = 1.0

    def __post_init__(self) -> None:
        if self.max_pending < self.frame:
            raise ValueError(f"a frame of {self.frame} tuples is never emitted with {self.max_pending} pending")


@dataclass(frozen=True)
class ClusterTick:
    """What happened in one."""

    time: float
    """Its end."""
    processed: int
    """Tuples, by bolts: C's rate of transmission and processing."""
    latency: float | None
    """Mean from emission to ack of what was acked in it."""
    cpu: tuple[float, ...]
    """Share of each machine in use."""
    memory: tuple[float, ...]
    bandwidth: tuple[float, ...]
    power: Power
    """Modelled."""


@dataclass(frozen=True)
class Switch:
    """What became of the strategy's proposal."""

    snapshot: PlacementSnapshot
    proposal: Proposal
    carried: tuple[ExecutorMove, ...]
    """Moves that held the limits, those before them carried out."""
    refused: int
    took: float
    """Seconds until the last executor was where it should be; inf if the run ended before."""


@dataclass(frozen=True)
class ClusterOutcome:
    set_up: ClusterSetUp
    ticks: tuple[ClusterTick, ...]
    switch: Switch | None
    emitted: int
    """Roots' tuples, those emitted again included."""
    completed: int
    failed: int
    """Given up, and emitted again."""
    pending: int
    processed: dict[str, int]
    """Tuples by component."""
    places: dict[str, str]
    """Executor → machine, at the end."""
    released: tuple[str, ...]

    def mean_rate(self, begin: float, end: float) -> float:
        """Tuples a second."""
        ticks = self.between(begin, end)
        return sum(tick.processed for tick in ticks) / (len(ticks) * self.set_up.tick)

    def mean_latency(self, begin: float, end: float) -> float:
        """Of the ticks' means, in seconds."""
        found = [tick.latency for tick in self.between(begin, end) if tick.latency is not None]
        return sum(found) / len(found)

    def mean_power(self, begin: float, end: float) -> float:
        ticks = self.between(begin, end)
        return sum(tick.power.total for tick in ticks) / len(ticks)

    def between(self, begin: float, end: float) -> list[ClusterTick]:
        """Ticks that lie in it."""
        half = self.set_up.tick / 2
        return [tick for tick in self.ticks if begin + half < tick.time < end + half]

    def until(self, tuples: float, begin: float = 0.0) -> tuple[float, float] | None:
        """Seconds and joules until so many are processed, from ``begin`` on; None: not in this run."""
        seconds = joules = done = 0.0
        for tick in self.between(begin, math.inf):
            part = min((tuples - done) / tick.processed, 1.0) if tick.processed else 1.0
            seconds += part * self.set_up.tick
            joules += part * self.set_up.tick * tick.power.total
            done += tick.processed
            if done >= tuples:
                return seconds, joules
        return None
