"""The simulated network: what goes in comes out once, queues keep to their length, times are what they must be."""

from __future__ import annotations

import pytest
import simpy

from penstock.control.migration import MigrationPolicy
from penstock.sim.branching import FIGURE_3, SINK, SOURCE, TICK, oracle, run
from penstock.sim.flow import Credit, StopResume
from penstock.sim.network import LinkSpec, NodeSpec, Packet, SimNetwork
from penstock.sim.strategies import CreditStrategy, MigrationStrategy, StaticStrategy
from penstock.sim.workload import WorkloadShape, packets

STRATEGIES = [CreditStrategy, StaticStrategy, MigrationStrategy]


def packet(number, bound="a", gap=0.0):
    return Packet(number, bound, gap, flow=number, value=1)


class Line:
    """Source → a → sink, with a look at what happens."""

    def __init__(self, control, speed=1.0, queue=4, bandwidth=10.0, delay=0.5):
        self.env = simpy.Environment()
        nodes = [NodeSpec(SOURCE, 1.0, 1), NodeSpec("a", speed, queue), NodeSpec(SINK, 100.0, 4)]
        links = [LinkSpec(SOURCE, "a", bandwidth, delay), LinkSpec("a", SINK, bandwidth, delay)]
        self.network = SimNetwork(self.env, nodes, links)
        for link in self.network.links:
            control(self.env, link)
        self.node, self.source = self.network.nodes["a"], self.network.nodes[SOURCE]
        self.sent, self.done, self.lengths = [], [], []
        self.source.on_sent = lambda packet, link: self.sent.append((self.env.now, packet.number))
        self.node.on_queue.append(lambda: self.lengths.append((self.env.now, self.node.length)))
        self.network.nodes[SINK].on_done = lambda packet: self.done.append((self.env.now, packet.number))

    def run(self, made, until=None):
        self.source.produce(made)
        self.env.run(until)
        return self


def stop_resume(env, link):
    StopResume(link)


def no_control(env, link):
    pass


def test_a_packet_takes_its_gap_both_links_and_the_work():
    line = Line(no_control, speed=4.0, bandwidth=10.0, delay=0.5).run([packet(0, gap=2.0)])
    assert line.done == [(pytest.approx(2.0 + (0.1 + 0.5) + 1 / 4 + (0.1 + 0.5) + 1 / 100), 0)]


def test_a_link_sends_one_packet_after_the_other_while_earlier_ones_are_under_way():
    line = Line(no_control, speed=1e6, bandwidth=10.0, delay=0.5).run([packet(number) for number in range(5)])
    assert [time for time, _ in line.done] == pytest.approx([1.21 + 0.1 * number for number in range(5)], abs=0.01)


def test_a_source_that_cannot_send_makes_nothing():
    line = Line(no_control, bandwidth=1.0).run([packet(number, gap=0.1) for number in range(5)])
    # Two fit into the link; then one leaves it each second, and only then is the next one made.
    assert [time for time, _ in line.sent] == pytest.approx([0.1, 0.2, 1.1, 2.1, 3.1])
    assert line.source.held_up == pytest.approx(0.8 + 0.9 + 0.9)


@pytest.mark.parametrize("control", [stop_resume, Credit, no_control])
def test_queues_never_exceed_their_length_and_nothing_is_lost(control):
    line = Line(control, queue=4, delay=0.05).run([packet(number) for number in range(30)], until=60)
    assert [number for _, number in line.done] == list(range(30))
    assert max(length for _, length in line.lengths) == line.node.peak == 4


def test_a_full_queue_stops_the_sender_and_a_half_empty_one_lets_it_go_on():
    line = Line(stop_resume, queue=8, delay=0.05).run([packet(number) for number in range(60)], until=80)
    full = [time for time, length in line.lengths if length == 8]
    half = next(time for time, length in line.lengths if length == 4 and time > full[0])
    sent = [time for time, _ in line.sent]
    # The stop takes its delay; what was in the link comes and waits at the door, and keeps the queue full.
    assert not [time for time in sent if full[0] + 0.05 < time < half + 0.05 - 1e-9]
    assert [time for time in sent if half + 0.05 - 1e-9 <= time < half + 0.1]


def test_credits_never_let_more_be_sent_than_there_is_room_for():
    line = Line(Credit, queue=4, delay=0.05)
    ahead = []
    line.source.on_sent = lambda packet, link: ahead.append(packet.number + 1 - link.taken)
    line.run([packet(number) for number in range(30)], until=60)
    assert max(ahead) == 4
    assert len(line.done) == 30


def test_a_packet_that_waits_can_be_sent_another_way():
    env = simpy.Environment()
    nodes = [NodeSpec(SOURCE, 1.0, 1), NodeSpec("a", 0.001, 1), NodeSpec("b", 9.0, 1), NodeSpec(SINK, 9.0, 1)]
    links = [LinkSpec(SOURCE, "a", 10.0, 0.0), LinkSpec(SOURCE, "b", 10.0, 0.0), LinkSpec("b", SINK, 10.0, 0.0)]
    network = SimNetwork(env, nodes, [*links, LinkSpec("a", SINK, 10.0, 0.0)])
    for link in network.links:
        StopResume(link)
    source, done = network.nodes[SOURCE], []
    network.nodes[SINK].on_done = lambda packet: done.append(packet.number)
    way = ["a"]
    source.router = lambda packet: source.links[way[0]]
    source.produce(packet(number) for number in range(20))
    env.run(100)
    assert done == []
    way[0] = "b"
    source.wake()
    env.run(200)
    assert len(done) >= 16, "all but what was sent to a before"


def test_paths_lead_from_the_branching_point_to_the_merge():
    env = simpy.Environment()
    names = [SOURCE, "a", "a2", "b", SINK]
    links = [(SOURCE, "a"), ("a", "a2"), ("a2", SINK), (SOURCE, "b"), ("b", SINK)]
    network = SimNetwork(env, [NodeSpec(n, 1.0, 1) for n in names], [LinkSpec(*ends, 1.0, 0.0) for ends in links])
    paths = network.paths(SOURCE, SINK)
    assert {name: [link.spec.target for link in path] for name, path in paths.items()} == {
        "a": ["a", "a2", SINK],
        "b": ["b", SINK],
    }


def test_packets_come_in_bursts_that_are_skewed():
    shape = WorkloadShape(calm=(10.0, 10.0), burst=(10.0, 10.0), base=1.0, peak=8.0)
    made = list(packets(4_000, "abc", shape, seed=3))
    assert [each.number for each in made] == list(range(4_000))
    seconds = sum(each.gap for each in made)
    assert 4_000 / seconds == pytest.approx((3 + 11) / 2, rel=0.05)
    ahead = [made[start : start + 50] for start in range(0, 4_000, 50)]
    most = [max(sum(each.bound == name for each in some) for name in "abc") for some in ahead]
    assert max(most) > 40, "in a burst one branch gets 9 of 11"
    assert min(most) < 28, "in a calm each gets a third"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_packet_is_merged_exactly_once(strategy, seed):
    outcome = run(strategy(), 800, seed)
    assert outcome.totals == oracle(800, seed)
    assert sum(count for count, _ in outcome.totals.values()) == 800
    for spec in FIGURE_3.nodes:
        assert 0 < outcome.peaks[spec.name] <= spec.queue
    assert outcome.shares[-1] == 1.0
    assert list(outcome.shares) == sorted(outcome.shares)
    assert (len(outcome.shares) - 1) * TICK < outcome.seconds <= len(outcome.shares) * TICK


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_seed_is_the_same_run(strategy):
    first, again, other = run(strategy(), 600, 7), run(strategy(), 600, 7), run(strategy(), 600, 8)
    assert first == again
    assert first.seconds != other.seconds
    assert first.totals != other.totals


def test_static_shares_follow_what_each_branch_bears():
    sent = {}

    class Counted(StaticStrategy):
        def set_up(self, env, network, source, paths):
            super().set_up(env, network, source, paths)
            source.on_sent = lambda packet, link: sent.update(
                {link.spec.target: sent.get(link.spec.target, 0) + 1}
            )

    run(Counted(), 1_400, 1)
    assert sent == {"a": 300, "b": 600, "c": 500}


def test_migration_holds_the_source_up_less_than_credits_and_writes_down_what_it_moved():
    strategy = MigrationStrategy(MigrationPolicy())
    moved = {}

    class Watched(MigrationStrategy):
        def set_up(self, env, network, source, paths):
            super().set_up(env, network, source, paths)
            note = source.on_sent

            def sent(packet, link):
                note(packet, link)
                if link.spec.target != packet.bound:
                    moved[packet.bound] = moved.get(packet.bound, 0) + 1

            source.on_sent = sent

    strategy = Watched()
    outcome = run(strategy, 2_000, 3)
    assert outcome.held_up < run(CreditStrategy(), 2_000, 3).held_up / 2
    strategy.policy.validate()
    strategy.ledger.validate()
    assert moved
    assert strategy.ledger.migrated == moved
    bound = [each.bound for each in packets(2_000, FIGURE_3.branches, FIGURE_3.shape, 3)]
    for segment in strategy.ledger.segments:
        assert segment.offset + segment.length <= bound.count(segment.branch)
    assert strategy.log[0][1].startswith("branch ")
