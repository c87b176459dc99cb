"""The cluster and the four benchmarks of *Pu 2021* (tables 1 and 3, section 4.1), and the strategies it compares.

From the paper: machines, executors, ackers, pending tuples, the time of the switch, the length of the load sample,
the message size of Sol, and for the default strategy the rate, the utilization of the three resources (figure 8:
50 to 70 %) and the power. Because 50 × 200 tuples are pending all the time, rate and latency are related by
Little's law: 10,000 roots divided by the paper's latency of 855 ms for WordCount give 11,700 sentences per second;
with five words each that is the paper's rate. The same holds for Sol.

Our choice, made once per benchmark to match these figures with the default strategy and never for another
strategy: service times and sizes (the paper's rate at ``USE`` of cores and links), memory (``USE``), state, and
the delay between machines. At this utilization neither cores nor links make tuples wait for long, so most of the
paper's latency must be such a delay: transfer queues and batches between machines. The size of Sol's messages is
the paper's, and loads its links to 65 %. The paper's size of RollingSort's messages, 100,000, cannot be in bytes:
at its rate that would be 30 times what its links can carry.

The paper does not say which part of the work is caused by bytes between machines. Half of 64 cores for its rate
are half a millisecond per tuple, but counting a word takes microseconds, so it must be a large part. With
``HANDLING`` it is 60 % (Sol: 80 %). The service times are the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.control.erdm import ErdmPolicy
from penstock.control.placement import ExecutorMove, PlacementSnapshot
from penstock.sim.baselines import Proposal, leedsp, wndvr
from penstock.sim.executor import KEY, SimComponent
from penstock.sim.machine import MachineSpec
from penstock.sim.outcome import ClusterSetUp
from penstock.sim.relocation import PlacementStrategy
from penstock.sim.tmsh import tmsh
from penstock.topology.groupings import Fields

USE = 0.5
"""Share of cores, memory and links in use with the default strategy: the lower end of *Pu 2021*, figure 8."""
HANDLING = 1e-7
"""Core seconds per byte between machines, at each end; an estimate, see above."""
WORDS = 5
"""Words in a sentence."""
_MB = 1e6
_FILL = 0.95
"""Share of the limits of critical nodes in use after ERDM's moves. With limits of 95 % this is 90 % of the
resources (*Pu 2021*, figure 9: 80 to 100 %)."""


@dataclass(frozen=True)
class PublishedFigures:
    """Results of ERDM in *Pu 2021*, with their difference from the default strategy."""

    released: int
    executors: int
    moved: int
    local: int
    saved: float
    """Reduction of communication in percent."""
    rate: float
    faster: float
    """Increase of the rate in percent."""
    tmsh: float
    """Rate with TMSH-Storm."""
    latency: float | None
    """Milliseconds."""
    sooner: float | None
    """Reduction of the latency in percent."""

    @property
    def default_rate(self) -> float:
        return self.rate / (1 + self.faster / 100)


PUBLISHED: Mapping[str, PublishedFigures] = {
    "wordcount": PublishedFigures(2, 326, 17, 14, 11.2, 77_572, 13.7, 80_170, 801.33, 6.3),
    "sol": PublishedFigures(3, 286, 21, 18, 19.8, 76_471, 13.3, 81_639, 279.28, 8.7),
    "rollingsort": PublishedFigures(2, 318, 15, 12, 18.0, 59_763, 18.2, 62_647, 131.02, 10.4),
    "rollingcount": PublishedFigures(2, 266, 14, 11, 14.3, 57_530, 12.5, 59_800, None, None),
}


def _memory(executors: int) -> float:
    """``USE`` of the 8 GB of sixteen machines, divided equally."""
    return USE * 16 * MachineSpec().memory / executors


def _set_up(delay: float, *components: SimComponent, frame: int = 10) -> ClusterSetUp:
    return ClusterSetUp(
        components, seconds=300, frame=frame, machine=MachineSpec(delay=delay, handling=HANDLING), switch=105.0
    )


def _words(delay: float, split: float, count: float, sentence: float, word: float, state: float) -> ClusterSetUp:
    memory = _memory(250)
    return _set_up(
        delay,
        SimComponent("spout", 50, 1e-4, size=sentence, emits=1, memory=memory, state=_MB / 2),
        SimComponent(
            "split", 100, split, "spout", size=word, emits=WORDS, frames=WORDS, memory=memory, state=_MB / 2
        ),
        SimComponent("count", 100, count, "split", grouping=Fields(KEY), memory=memory, state=state),
        frame=5,
    )


BENCHMARKS: Mapping[str, ClusterSetUp] = {
    "wordcount": _words(0.2300, split=2.58e-4, count=1.43e-4, sentence=2_100, word=1_424, state=8 * _MB),
    "sol": _set_up(
        0.0784,
        SimComponent("spout", 50, 1e-4, size=2_000, emits=1, memory=_memory(250), state=_MB / 2),
        SimComponent("bolt1", 100, 0.461e-4, "spout", size=2_000, emits=1, memory=_memory(250), state=_MB / 2),
        SimComponent("bolt2", 100, 0.461e-4, "bolt1", memory=_memory(250), state=_MB / 2),
    ),
    "rollingsort": _set_up(
        0.0698,
        SimComponent("spout", 50, 1e-4, size=2_050, emits=1, memory=_memory(150), state=_MB / 2),
        SimComponent("sort", 100, 1.45e-4, "spout", memory=_memory(150), state=20 * _MB),
    ),
    "rollingcount": _words(0.3071, split=3.52e-4, count=1.94e-4, sentence=2_555, word=1_960, state=12 * _MB),
}


def default(snapshot: PlacementSnapshot) -> Proposal:
    """Storm's default: executors are already placed round robin, and stay."""
    return Proposal()


def erdm(snapshot: PlacementSnapshot) -> Proposal:
    """ERDM with the critical nodes widened until the executors of the others fit."""
    return proposed(ErdmPolicy(fill=_FILL), snapshot)


def erdm_path(snapshot: PlacementSnapshot) -> Proposal:
    """ERDM with the nodes of one critical path only, as *Pu 2021* defines them."""
    return proposed(ErdmPolicy(), snapshot)


def proposed(policy: ErdmPolicy, snapshot: PlacementSnapshot) -> Proposal:
    """What the policy decides, as a strategy of the simulator."""
    decided = policy.decide(snapshot)
    moves = tuple(each for each in decided if isinstance(each, ExecutorMove))
    return Proposal(moves, tuple(each for each in decided if not isinstance(each, ExecutorMove)))


def dvrnp(snapshot: PlacementSnapshot) -> Proposal:
    return wndvr(snapshot)


def dvrcp(snapshot: PlacementSnapshot) -> Proposal:
    return wndvr(snapshot, on_critical_path=True)


STRATEGIES: Mapping[str, PlacementStrategy] = {
    "default": default,
    "erdm": erdm,
    "tmsh": tmsh,
    "leedsp": leedsp,
    "dvrnp": dvrnp,
    "dvrcp": dvrcp,
}
