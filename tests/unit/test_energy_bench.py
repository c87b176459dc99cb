"""What ``penstock bench energy`` makes of what it measured on the cluster."""

import pytest

from benchmarks import energy_auto
from benchmarks.energy_calibration import Measured
from benchmarks.energy_cluster import Phase, bars
from benchmarks.harness import Results
from penstock.control.placement import ExecutorStream, Use
from penstock.driver.load_sample import ExecutorLoad, MonitorSample, NodeLoad
from penstock.plan.model import WorkerId


def phase(rate, bytes, p50, watts, nodes):
    return Phase("x", rate, bytes, p50, p50, watts, nodes, {})


def test_bars_are_medians_of_the_turns_own_ratios():
    turns = [
        (phase(1000, 400, 0.5, 200, 4), phase(1200, 300, 0.4, 120, 2)),
        (phase(800, 400, 0.6, 200, 4), phase(1200, 200, 0.3, 120, 3)),
        (phase(1000, 400, 0.5, 200, 4), phase(1100, 320, 0.45, 132, 2)),
    ]
    results = Results("energy")
    bars(results, {"sol": turns})
    found = {bar["name"].removesuffix(".sol"): bar["value"] for bar in results.bars}
    assert found["erdm.rate"] == pytest.approx(20)
    assert found["erdm.internode_bytes"] == pytest.approx(25)
    assert found["erdm.p50"] == pytest.approx(20)
    assert found["erdm.energy"] == pytest.approx(50), "joules a tuple: 0.2 to 0.1, 0.25 to 0.1, 0.2 to 0.12"
    assert found["erdm.nodes_released"] == 1, "the fewest"


def test_bars_of_erdm_by_itself_are_the_worst_of_the_benchmarks():
    def found(rate, base, dynamic, gaps, wrong):
        default, back = energy_auto.Steady(1000.0, 0.01, 140.0, 60.0, 4, 0.4), 1600.0
        erdm = energy_auto.Steady(rate, 0.01, base, dynamic, 2, 0.8)
        after = energy_auto.Steady(back, 0.01, 140.0, 90.0, 4, 0.7)
        return energy_auto.Found(default, erdm, after, gaps, [0.3], 0.2, 20.0, wrong, 100)

    results = Results("energy")
    energy_auto.bars(
        results,
        {"sol": [found(1000.0, 70.0, 50.0, [0.1, 0.4], 0)], "word_count": [found(990.0, 105.0, 55.0, [0.1], 3)]},
    )
    bar = {each["name"]: each["value"] for each in results.bars}
    assert bar["erdm.auto.rate"] == 0.99
    assert bar["erdm.auto.energy"] == pytest.approx(100 * (1 - 160 / 990 / 0.2), abs=1e-3), "joules per tuple"
    assert (bar["erdm.auto.wrong"], bar["erdm.auto.gap_s"], bar["erdm.auto.moves"]) == (3, 0.4, 3)
    assert (bar["erdm.auto.sol.base"], bar["erdm.auto.sol.dynamic"], bar["erdm.auto.sol.released"]) == (70, 10, 2)
    assert bar["erdm.auto.sol.rate_back"] == 1.0


def test_service_times_have_their_part_of_what_moves_the_frames():
    loads = (
        ExecutorLoad("source@0.0", "source", "a", 0.2, 0.0),
        ExecutorLoad("level2@1.0", "level2", "a", 0.3, 0.0),
        ExecutorLoad("level2@1.1", "level2", "b", 0.1, 0.0),
    )
    streams = (
        ExecutorStream("source@0.0", "level2@1.0", 60.0, 120_000.0),
        ExecutorStream("source@0.0", "level2@1.1", 40.0, 80_000.0),
    )
    nodes = tuple(NodeLoad(name, Use(), Use(0.2), Use(2.0), Use(2.0)) for name in ("a", "b"))
    workers = {each.executor: WorkerId.parse(each.executor.partition("@")[2]) for each in loads}
    measured = Measured.of(MonitorSample("sol", 0.0, 10.0, loads, streams, nodes, workers), rate=100.0)
    assert measured.services == pytest.approx({"source": 0.0, "level2": 0.010})
    assert measured.sizes == pytest.approx({"source": 2_000.0, "level2": 0.0})
    assert measured.cores == pytest.approx(1.0)
    components = measured.set_up(nodes=4, pending=50).components
    assert [(part.name, part.source, part.emits) for part in components] == [
        ("source", None, 1),
        ("level2", "source", 0),
    ]
    assert components[1].service == pytest.approx(0.040), "a quarter of a core for each of four nodes"
