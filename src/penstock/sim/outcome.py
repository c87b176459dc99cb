"""Input and result of a run of the simulated cluster."""

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
    """The simulated cluster and its topology. Values without a reference to *Pu 2021* are our choice."""

    components: tuple[SimComponent, ...]
    """Spouts first; each component after the one whose tuples it receives."""
    seconds: int
    machine: MachineSpec = MachineSpec()  # noqa: RUF009
    machines: int = 16
    copies: int = 1
    """Number of topologies with these components, each on ``workers`` consecutive machines."""
    workers: int = 16
    ackers: int = 16
    """Ackers of each copy."""
    ack_service: float = 2e-6
    """Core seconds per acked tuple."""
    ack_size: float = 20.0
    """Bytes per acked tuple."""
    max_pending: int = 200
    """Pending tuples of each spout executor (*Pu 2021*, table 3)."""
    frame: int = 10
    """Tuples that a spout emits at a time, to save events. They wait as single tuples do."""
    switch: float = math.inf
    """The time at which the strategy is asked (*Pu 2021*: 105 s)."""
    sample_seconds: float = 30.0
    """Length of the load sample before that, in seconds (*Pu 2021*, table 4)."""
    limit: float = 0.95
    """Share of a machine's resources that a strategy may use."""
    start: float = 2.0
    """Core seconds for the start of an executor."""
    dies: tuple[tuple[float, int], ...] = ()
    """⟨time, machine⟩ of each failure."""
    recover: float = 10.0
    """Seconds until the executors of a failed machine are placed on the others."""
    time_out: float = 30.0
    """Seconds after which a spout emits a lost tuple again; Storm's default."""
    tick: float = 1.0

    def __post_init__(self) -> None:
        if self.max_pending < self.frame:
            raise ValueError(f"a frame of {self.frame} tuples exceeds max_pending {self.max_pending}")


@dataclass(frozen=True)
class ClusterTick:
    """What happened in one tick."""

    time: float
    """The end of the tick."""
    processed: int
    """Tuples processed by bolts: the transmission and processing rate of *Pu 2021*."""
    latency: float | None
    """Mean seconds from emission to ack, of the roots acked in this tick."""
    cpu: tuple[float, ...]
    """Share in use, by machine."""
    memory: tuple[float, ...]
    bandwidth: tuple[float, ...]
    power: Power
    """Computed by the power model."""


@dataclass(frozen=True)
class Switch:
    """How the strategy's proposal was carried out."""

    snapshot: PlacementSnapshot
    proposal: Proposal
    carried: tuple[ExecutorMove, ...]
    """Moves that kept the limits, in order."""
    refused: int
    took: float
    """Seconds until the last executor had moved; inf if the run ended before."""


@dataclass(frozen=True)
class ClusterOutcome:
    set_up: ClusterSetUp
    ticks: tuple[ClusterTick, ...]
    switch: Switch | None
    emitted: int
    """Spout tuples, including those emitted again."""
    completed: int
    failed: int
    """Spout tuples that were given up and emitted again."""
    pending: int
    processed: dict[str, int]
    """Processed tuples by component."""
    places: dict[str, str]
    """Machine of each executor at the end."""
    released: tuple[str, ...]

    def mean_rate(self, begin: float, end: float) -> float:
        """Processed tuples per second."""
        ticks = self.between(begin, end)
        return sum(tick.processed for tick in ticks) / (len(ticks) * self.set_up.tick)

    def mean_latency(self, begin: float, end: float) -> float:
        """Mean of the ticks' mean latencies, in seconds."""
        found = [tick.latency for tick in self.between(begin, end) if tick.latency is not None]
        return sum(found) / len(found)

    def mean_power(self, begin: float, end: float) -> float:
        ticks = self.between(begin, end)
        return sum(tick.power.total for tick in ticks) / len(ticks)

    def between(self, begin: float, end: float) -> list[ClusterTick]:
        """The ticks within this interval."""
        half = self.set_up.tick / 2
        return [tick for tick in self.ticks if begin + half < tick.time < end + half]

    def until(self, tuples: float, begin: float = 0.0) -> tuple[float, float] | None:
        """Seconds and joules from ``begin`` until this many tuples are processed; None if the run ended before."""
        seconds = joules = done = 0.0
        for tick in self.between(begin, math.inf):
            part = min((tuples - done) / tick.processed, 1.0) if tick.processed else 1.0
            seconds += part * self.set_up.tick
            joules += part * self.set_up.tick * tick.power.total
            done += tick.processed
            if done >= tuples:
                return seconds, joules
        return None
