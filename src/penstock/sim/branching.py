"""D's experiment: a source, three branches that differ, a sink that merges (D figure 3, tables 1 and 2).

D gives the shape of the network, 1 MB packets, stop at a full queue and resume at half, and the four sizes. What
it leaves open was calibrated once, for all sizes and strategies: of 93 sets of round values, the one whose times
and gains with seeds 0 to 4 lay nearest to D's table 2 (in the last round without its 5 GB). Each value stands here
with its reason; the policy's own are D's.
"""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from penstock.sim.network import LinkSpec, NodeSpec, Packet, SimNetwork
from penstock.sim.strategies import Strategy
from penstock.sim.workload import WorkloadShape, packets

SOURCE, SINK = "source", "sink"
TICK = 5.0
"""Seconds between two looks at the share completed (D figures 7 and 8)."""


@dataclass(frozen=True)
class BranchingSetUp:
    nodes: tuple[NodeSpec, ...]
    """The branches' and the sink; the source has neither queue nor speed."""
    links: tuple[LinkSpec, ...]
    shape: WorkloadShape

    @property
    def branches(self) -> list[str]:
        """By the names packets carry: that of the branch's first node."""
        return [link.target for link in self.links if link.source == SOURCE]


QUEUE = 30
"""Packets of a branch node's queue: 5 to 10 s of its work. Much shorter, and a queue fills between two looks of
the policy; much longer, and it swallows whole bursts, so that no strategy is ever put to the test."""

FIGURE_3 = BranchingSetUp(
    nodes=(
        # Speeds: together 14 MB/s for 10.7 offered, so the data fits if it is spread, and no branch alone can
        # take its burst of 8.7. The slowest has the widest links: D concludes from its table 1 that bandwidth
        # matters least.
        NodeSpec("a", speed=3.0, queue=QUEUE),
        NodeSpec("b", speed=6.0, queue=QUEUE),
        NodeSpec("c", speed=5.0, queue=QUEUE),
        NodeSpec(SINK, speed=60.0, queue=3 * QUEUE),  # merging is cheap; room for each branch
    ),
    links=(
        # Six that differ. All are faster than their branch's node; a burst on top of a light branch's own data
        # fills the narrower ones. Delays of a site's network: they count in signals, not in throughput.
        LinkSpec(SOURCE, "a", bandwidth=16.0, delay=0.002),
        LinkSpec(SOURCE, "b", bandwidth=12.0, delay=0.005),
        LinkSpec(SOURCE, "c", bandwidth=8.0, delay=0.010),
        LinkSpec("a", SINK, bandwidth=20.0, delay=0.003),
        LinkSpec("b", SINK, bandwidth=15.0, delay=0.004),
        LinkSpec("c", SINK, bandwidth=10.0, delay=0.008),
    ),
    # 8.1 MB/s in a calm, 14.1 in a burst, 10.7 on average: D's migration moves 9.5 to 10.4. A calm and a burst
    # take about half a minute, so 500 MB see one burst or two and mostly find the queues empty: D's smallest size
    # gains least.
    shape=WorkloadShape(calm=(14.0, 26.0), burst=(10.0, 20.0), base=2.7, peak=6.0),
)

Totals = dict[int, tuple[int, int]]
"""Of each flow: packets, and the sum of their values. With both, means merge exactly (D eq. 7)."""


def merge(totals: Totals, packet: Packet) -> None:
    count, value = totals.get(packet.flow, (0, 0))
    totals[packet.flow] = count + 1, value + packet.value


def oracle(count: int, seed: int, set_up: BranchingSetUp = FIGURE_3) -> Totals:
    """What every strategy's sink must end with: the same packets, merged one after the other."""
    totals: Totals = {}
    for packet in packets(count, set_up.branches, set_up.shape, seed):
        merge(totals, packet)
    return totals


@dataclass(frozen=True)
class BranchingOutcome:
    seconds: float
    """Until the sink had merged the last packet."""
    totals: Totals
    shares: tuple[float, ...]
    """Completed at the end of every ``TICK``; the last is 1."""
    peaks: dict[str, int]
    """The longest each node's queue has been."""
    held_up: float
    """Seconds in which the source could not send."""


def run(strategy: Strategy, count: int, seed: int, set_up: BranchingSetUp = FIGURE_3) -> BranchingOutcome:
    """So many packets through the network. A strategy serves one run."""
    env = simpy.Environment()
    network = SimNetwork(env, [NodeSpec(SOURCE, speed=1.0, queue=1), *set_up.nodes], set_up.links)
    source, sink = network.nodes[SOURCE], network.nodes[SINK]
    strategy.set_up(env, network, source, network.paths(SOURCE, SINK))
    totals: Totals = {}
    times: list[float] = []
    finished = env.event()

    def done(packet: Packet) -> None:
        merge(totals, packet)
        times.append(env.now)
        if len(times) == count:
            finished.succeed()

    sink.on_done = done
    source.produce(packets(count, set_up.branches, set_up.shape, seed))
    env.run(finished)
    peaks = {name: node.peak for name, node in network.nodes.items()}
    return BranchingOutcome(env.now, totals, _shares(times, count), peaks, source.held_up)


def _shares(times: list[float], count: int) -> tuple[float, ...]:
    shares, done, end = [], 0, TICK
    while done < count:
        while done < count and times[done] <= end:
            done += 1
        shares.append(done / count)
        end += TICK
    return tuple(shares)
