"""The simulated cluster: nothing is lost, times are what they must be, strategies do what they are for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.control.placement import ExecutorMove, Regulate, Release
from penstock.sim.baselines import Proposal
from penstock.sim.cluster import run
from penstock.sim.executor import KEY, SimComponent, weights
from penstock.sim.machine import BURST, UPDATE_INTERVAL, MachineSpec, SimServer, all_busy
from penstock.sim.outcome import ClusterSetUp
from penstock.sim.relocation import moves_within_limits
from penstock.sim.storm_benchmarks import BENCHMARKS, STRATEGIES, USE
from penstock.sim.storm_few_pairs import FEW_PAIRS, USE_OF
from penstock.topology.groupings import Fields, Shuffle

MB = 1e6


def words(**changes):
    """Two spouts, four splits, four counts, two ackers on four machines of two cores."""
    components = (
        SimComponent("spout", 2, 1e-4, size=200, emits=1, memory=MB, state=MB),
        SimComponent("split", 4, 1e-3, "spout", size=100, emits=3, frames=3, memory=MB, state=MB),
        SimComponent("count", 4, 5e-4, "split", grouping=Fields(KEY), memory=MB, state=MB),
    )
    machine = MachineSpec(cores=2, memory=100 * MB, bandwidth=2e6, delay=0.02)
    return replace(
        ClusterSetUp(
            components,
            20,
            machine=machine,
            machines=4,
            workers=4,
            ackers=2,
            max_pending=40,
            frame=10,
            switch=8.0,
            sample_seconds=6.0,
        ),
        **changes,
    )


def one(service, rate, **changes):
    """One spout and one bolt on one machine, each with a core for itself, tuple by tuple, without ackers."""
    components = (SimComponent("spout", 1, 0.0, emits=1, rate=rate), SimComponent("bolt", 1, service, "spout"))
    machine = MachineSpec(cores=2)
    return ClusterSetUp(components, machine=machine, machines=1, workers=1, ackers=0, frame=1, **changes)


# ---- conservation


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_every_tuple_is_processed_once_and_acked(strategy):
    outcome = run(words(), STRATEGIES.get(strategy), seed=3)
    assert outcome.emitted == outcome.completed + outcome.pending
    assert outcome.failed == 0
    assert outcome.pending <= 2 * 40
    split, count = outcome.processed["split"], outcome.processed["count"]
    assert outcome.completed <= split <= outcome.emitted
    assert 3 * outcome.completed <= count <= 3 * split
    assert sum(tick.processed for tick in outcome.ticks) == split + count
    assert outcome.completed > 5_000


def test_a_source_that_ends_in_time_is_processed_to_the_last_tuple():
    slow = words(
        components=tuple(
            replace(component, rate=50.0) if component.source is None else component
            for component in words().components
        )
    )
    outcome = run(replace(slow, seconds=400), seed=6)
    assert outcome.pending < 40
    assert outcome.processed["count"] == pytest.approx(3 * outcome.completed, abs=3 * 40)
    assert outcome.completed == pytest.approx(2 * 50 * 400, rel=0.05)


def test_the_same_seed_is_the_same_run():
    set_up = words()
    first, again, other = (run(set_up, STRATEGIES["erdm"], seed) for seed in (7, 7, 8))
    assert first == again
    assert first.ticks != other.ticks


def test_a_frame_larger_than_what_may_be_pending_is_refused():
    with pytest.raises(ValueError, match="a frame of 10 tuples exceeds max_pending 5"):
        words(max_pending=5)


# ---- times


def test_one_executor_waits_as_m_m_1_does():
    """Service is exponential: mean time in the system 1 / (μ − λ)."""
    outcome = run(one(0.01, rate=70.0, max_pending=10_000, seconds=1_000, tick=10.0), seed=2)
    assert outcome.mean_latency(100, 1_000) == pytest.approx(1 / (100 - 70), rel=0.1)
    assert sum(tick.cpu[0] for tick in outcome.ticks) / len(outcome.ticks) == pytest.approx(0.7 / 2, rel=0.03)


@pytest.mark.parametrize("frame", [1, 5, 10])
def test_tuples_wait_as_single_ones_whatever_their_frame(frame):
    """Pollaczek and Khinchine for exponential service of 1 ms at 70 % use, not for a frame's service."""
    set_up = replace(one(1e-3, rate=700.0, max_pending=1_000_000, seconds=600, tick=10.0), frame=frame)
    assert run(set_up, seed=2).mean_latency(100, 600) == pytest.approx(1 / (1_000 - 700), rel=0.12)


def test_a_server_that_is_behind_makes_wait_for_all_beyond_a_burst():
    server = SimServer(channels=2)
    assert server.accept(1.0, work=2 * BURST, squares=0.0) == 0.0
    assert server.accept(1.0, work=2.0, squares=0.0) == pytest.approx(0.0, abs=1e-9)
    assert server.accept(1.0, work=2.0, squares=0.0) == pytest.approx(1.0)
    assert server.done(2.0) == pytest.approx(2.0)
    assert server.clear == pytest.approx(3.0 + BURST)


def test_a_server_waits_by_its_recent_use():
    """M/D/1 at a half: half a service; with four channels Erlang's C for two of four busy, 4 / 23."""
    server = SimServer()
    for _ in range(100):
        server.accept(0.0, work=UPDATE_INTERVAL / 2, squares=UPDATE_INTERVAL / 2 * 0.01)
        server.update()
    assert server.wait == pytest.approx(0.5 * 0.01)
    assert all_busy(4, 0.5) == pytest.approx(4 / 23)
    assert all_busy(1, 0.3) == pytest.approx(0.3)


def test_pending_tuples_and_the_delay_bound_the_rate():
    """Little: with nothing else to wait for, 40 tuples of two spouts every four delays between machines."""
    spout, bolt = SimComponent("spout", 1, 0.0, size=1, emits=1), SimComponent("bolt", 1, 1e-6, "spout")
    machine = MachineSpec(delay=0.1)
    set_up = ClusterSetUp(
        (spout, bolt), 50, machine=machine, machines=3, workers=3, ackers=1, max_pending=40, frame=10
    )
    outcome = run(set_up)
    assert outcome.mean_latency(5, 50) == pytest.approx(0.3, rel=0.01)
    assert outcome.mean_rate(5, 50) == pytest.approx(40 / 0.3, rel=0.02)


def test_executors_share_the_cores_and_none_is_on_two():
    def busy(bolts, cores):
        components = (SimComponent("spout", 1, 0.0, emits=1), SimComponent("bolt", bolts, 0.001, "spout"))
        set_up = ClusterSetUp(
            components, 20, machine=MachineSpec(cores=cores), machines=1, workers=1, ackers=0, max_pending=500
        )
        outcome = run(set_up)
        return outcome.mean_rate(2, 20), outcome.ticks[-1].cpu[0]

    assert busy(1, 4) == (pytest.approx(1_000, rel=0.03), pytest.approx(0.25, rel=0.1))
    assert busy(4, 4) == (pytest.approx(4_000, rel=0.03), pytest.approx(1.0, abs=0.1))
    assert busy(8, 4) == (pytest.approx(4_000, rel=0.03), pytest.approx(1.0, abs=0.1))


def test_links_keep_to_their_rate_in_both_directions():
    """Three senders of 1 kB tuples to one receiver: its downlink is full, theirs are not."""
    components = (SimComponent("spout", 3, 0.0, size=1_000, emits=1), SimComponent("bolt", 1, 1e-6, "spout"))
    machine = MachineSpec(bandwidth=1e6)
    outcome = run(ClusterSetUp(components, 40, machine=machine, machines=4, workers=4, ackers=0))
    assert outcome.mean_rate(5, 40) == pytest.approx(1_000, rel=0.02)
    for tick in outcome.ticks[5:]:
        assert tick.bandwidth[3] == pytest.approx(0.5, rel=0.05)  # in, nothing out
        assert all(share < 0.51 for share in tick.bandwidth)


def test_tuples_between_machines_cost_work_at_both_ends():
    """Two machines, a spout on one and a bolt on the other: 1 kB at 1 µs a byte is 1 ms at each end."""
    components = (
        SimComponent("spout", 1, 0.0, size=1_000, emits=1, rate=100.0),
        SimComponent("bolt", 1, 0.0, "spout"),
    )
    machine = MachineSpec(cores=1, handling=1e-6)
    set_up = ClusterSetUp(components, 100, machine=machine, machines=2, workers=2, ackers=0, frame=1)
    apart, together = run(set_up, seed=1), run(replace(set_up, machines=1, workers=1), seed=1)
    for number in (0, 1):
        assert sum(tick.cpu[number] for tick in apart.ticks) / 100 == pytest.approx(0.1, rel=0.05)
    assert all(tick.cpu == (0.0,) for tick in together.ticks)


def test_inside_a_machine_nothing_goes_over_the_link():
    outcome = run(words(machines=1, workers=1, switch=math.inf))
    assert all(tick.bandwidth == (0.0,) for tick in outcome.ticks)


def test_words_go_where_productions_hash_sends_them():
    edges = weights(Fields(KEY), 4)
    shares = [edge - before for before, edge in zip([0.0, *edges], edges, strict=False)]
    assert all(0.15 < share / edges[-1] < 0.4 for share in shares)
    snapshot = run(words(), STRATEGIES["default"], seed=1).switch.snapshot
    sent = [
        sum(stream.tuples for stream in snapshot.streams if stream.target == f"count[{number}]")
        for number in range(4)
    ]
    expected = [share / edges[-1] for share in shares]
    assert [each / sum(sent) for each in sent] == pytest.approx(expected, abs=0.02)


# ---- strategies


def test_the_snapshot_tells_what_the_run_did():
    outcome = run(words(), STRATEGIES["default"], seed=1)
    snapshot = outcome.switch.snapshot
    ticks = outcome.between(2.0, 8.0)
    cores = sum(sum(tick.cpu) for tick in ticks) / len(ticks) * 2
    assert sum(executor.cpu for executor in snapshot.executors) == pytest.approx(cores, rel=0.02)
    to = {executor.id: executor.component for executor in snapshot.executors}
    processed = sum(stream.tuples for stream in snapshot.streams if to[stream.target] in ("split", "count"))
    assert processed == pytest.approx(outcome.mean_rate(2, 8), rel=0.03)
    assert {node.limit.cpu for node in snapshot.nodes} == {2 * 0.95}


def test_with_few_pairs_each_executor_receives_from_one():
    set_up = words()
    paired = tuple(replace(each, pairs=each.source is not None, grouping=Shuffle()) for each in set_up.components)
    found = []
    for seed in (1, 2):
        streams = run(
            replace(set_up, components=paired, ackers=0), STRATEGIES["default"], seed
        ).switch.snapshot.streams
        targets = [stream.target for stream in streams]
        assert len(targets) == len(set(targets)) == 8, "four splits and four counts"
        senders = [stream.source for stream in streams if stream.target.startswith("split")]
        assert sorted(senders) == ["spout[0]"] * 2 + ["spout[1]"] * 2, "senders have equally many"
        found.append({(stream.source, stream.target) for stream in streams})
    assert found[0] != found[1], "the seed draws the pairs"


@pytest.mark.parametrize("name", FEW_PAIRS)
def test_few_pairs_keep_the_shape_and_raise_the_use(name):
    set_up, whole = FEW_PAIRS[name], BENCHMARKS[name]
    assert [each.executors for each in set_up.components] == [each.executors for each in whole.components]
    more = USE_OF[name] / USE
    for one, other in zip(set_up.components, whole.components, strict=True):
        assert (one.service, one.memory) == (other.service * more, other.memory * more)
        assert (one.size, one.state) == (other.size, other.state)


def test_moves_are_carried_out_and_the_empty_machine_is_released():
    def leave(snapshot):
        mine = [executor for executor in snapshot.executors if executor.node == "n4"]
        moves = tuple(ExecutorMove(each.id, "n4", "n1", "told") for each in mine)
        return Proposal(moves, (Release("n4", "told"),))

    outcome = run(words(start=0.5), leave, seed=1)
    assert outcome.released == ("n4",)
    assert "n4" not in outcome.places.values()
    # Two executors of 1 MB one after the other over 2 MB/s; an acker has no state.
    assert 1.0 <= outcome.switch.took < 3.0
    before, after = outcome.ticks[7], outcome.ticks[-1]
    assert before.power.base == pytest.approx(4 / 3 * after.power.base)
    assert after.cpu[3] == after.bandwidth[3] == 0.0
    peak = max(tick.latency for tick in outcome.between(8.0, 13.0))
    assert peak > 1.1 * outcome.mean_latency(2, 8)


def test_moves_beyond_a_limit_are_refused():
    snapshot = run(words(), STRATEGIES["default"], seed=1).switch.snapshot
    full = replace(
        snapshot,
        nodes=tuple(replace(each, limit=replace(each.limit, memory=4.5 * MB)) for each in snapshot.nodes),
    )
    moves = [ExecutorMove(each.id, each.node, "n1", "told") for each in full.executors if each.node != "n1"]
    held, refused = moves_within_limits(full, moves)
    there = sum(
        each.memory for each in full.executors if each.node == "n1" or each.id in {m.executor for m in held}
    )
    assert refused > 0
    assert there <= 4.5 * MB


def test_a_lower_frequency_takes_longer_and_less_power():
    def slow(snapshot):
        return Proposal(settings=tuple(Regulate(node.name, "told", frequency=0.5) for node in snapshot.nodes))

    rates = words().components
    set_up = words(
        components=tuple(
            replace(component, rate=150.0) if component.source is None else component for component in rates
        )
    )
    full, half = (run(replace(set_up, seconds=40), each, seed=4) for each in (STRATEGIES["default"], slow))
    assert half.mean_rate(12, 40) == pytest.approx(full.mean_rate(12, 40), rel=0.05)
    assert half.mean_latency(12, 40) > 1.015 * full.mean_latency(12, 40)
    used = [sum(sum(tick.cpu) for tick in each.between(12, 40)) for each in (half, full)]
    assert used[0] == pytest.approx(2 * used[1], rel=0.06)
    assert half.mean_power(12, 40) < full.mean_power(12, 40)


@pytest.fixture(scope="module")
def small_rolling_count():
    """The cluster of Pu 2021 and RollingCount for 60 s; figures from 40 s on."""
    small = replace(BENCHMARKS["rollingcount"], seconds=60, switch=14.0, sample_seconds=8.0, frame=20, start=0.2)
    return {name: run(small, strategy, seed=1) for name, strategy in STRATEGIES.items()}


def test_energy_a_tuple_is_least_with_erdm_and_most_with_the_default(small_rolling_count):
    outcomes = small_rolling_count
    joules = {name: each.mean_power(40, 60) / each.mean_rate(40, 60) for name, each in outcomes.items()}
    assert joules["erdm"] < joules["leedsp"] < joules["dvrcp"] < joules["dvrnp"] < joules["default"]
    assert joules["erdm"] < 0.75 * joules["default"]
    assert len(outcomes["erdm"].released) >= 6
    assert outcomes["erdm"].switch.refused == 0
    assert outcomes["dvrcp"].mean_rate(40, 60) == outcomes["default"].mean_rate(40, 60)


def test_fewer_machines_are_no_slower_where_less_goes_between_them(small_rolling_count):
    default, erdm = small_rolling_count["default"], small_rolling_count["erdm"]
    assert erdm.mean_rate(40, 60) > default.mean_rate(40, 60)
    assert erdm.mean_latency(40, 60) < default.mean_latency(40, 60)


def test_so_many_tuples_take_so_long_and_so_many_joules():
    outcome = run(words(switch=math.inf), seed=1)
    rate = outcome.ticks[0].processed
    seconds, joules = outcome.until(rate / 2)
    assert seconds == pytest.approx(0.5)
    assert joules == pytest.approx(0.5 * outcome.ticks[0].power.total)
    assert outcome.until(1e12) is None


# ---- failures


def test_a_dead_machines_executors_go_to_the_others_and_nothing_is_lost():
    set_up = words(seconds=60, dies=((10.0, 1),), recover=3.0, time_out=5.0, switch=math.inf, start=0.1)
    outcome = run(set_up, seed=6)
    assert "n2" not in outcome.places.values()
    assert sorted(set(outcome.places.values())) == ["n1", "n3", "n4"]
    assert outcome.failed > 0
    assert outcome.emitted == outcome.completed + outcome.failed + outcome.pending
    assert outcome.pending <= 2 * 40
    # At rest again: as fast as on the three machines that are left, and the dead one draws nothing.
    assert outcome.mean_rate(30, 60) > 0.5 * outcome.mean_rate(2, 10)
    assert outcome.ticks[-1].power.base == pytest.approx(0.75 * outcome.ticks[5].power.base)
    assert outcome.mean_rate(11, 13) < 0.5 * outcome.mean_rate(2, 10)


def test_a_machine_that_dies_while_executors_move_to_it():
    def to_second(snapshot):
        return Proposal(
            tuple(ExecutorMove(e.id, e.node, "n2", "told") for e in snapshot.executors if e.node == "n4")
        )

    outcome = run(words(seconds=60, dies=((8.7, 1),), recover=2.0, time_out=5.0), to_second, seed=6)
    assert "n2" not in outcome.places.values()
    assert outcome.emitted == outcome.completed + outcome.failed + outcome.pending
    assert outcome.mean_rate(40, 60) > 0.5 * outcome.mean_rate(2, 8)
