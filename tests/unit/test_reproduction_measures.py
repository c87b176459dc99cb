"""What the reproduction works out of its simulations, and which values of the papers it compares."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from benchmarks.energy_sim import Case
from benchmarks.harness import Results
from benchmarks.reproduction import branch_sim, cluster_sim
from benchmarks.reproduction.acker import PENDING, measure_acker
from benchmarks.reproduction.registry import EXHIBITS
from penstock import Settings
from penstock.control.energy import Power
from penstock.sim.outcome import ClusterOutcome, ClusterSetUp, ClusterTick

SWITCH, SECONDS = 100.0, 200
OF_MOVES = {"released", "moved", "saved", "use.before", "use.after"}


def case(strategy="default", rate=10, watts=100.0, latency=1.0, above=0):
    """10 tuples a second, 100 W and a latency of 1 s until the switch; then these. For the first ``above`` seconds
    after it, latency and power are three times those before it."""
    ticks = []
    for second in range(1, SECONDS + 1):
        moved, at_switch = second > SWITCH, SWITCH < second <= SWITCH + above
        waited, used = (3.0, 300.0) if at_switch else (latency, watts) if moved else (1.0, 100.0)
        processed = rate if moved else 10
        ticks.append(ClusterTick(float(second), processed, waited, (), (), (), Power(0.0, used)))
    set_up = ClusterSetUp((), seconds=SECONDS, switch=SWITCH)
    outcome = ClusterOutcome(set_up, tuple(ticks), None, 0, 0, 0, 0, {}, {}, ())
    return Case("rollingcount", strategy, outcome, 0.0)


def compared(experiment, *exhibits):
    """The values of an experiment that these exhibits show, by name; without exhibits, those of all."""
    shown = [each for each in EXHIBITS if not exhibits or each.id in exhibits]
    return {value.name: value for each in shown for value in each.values if value.experiment == experiment}


def bars(results):
    return {bar["name"]: bar["value"] for bar in results.bars}


# ---- Pu 2021 -----------------------------------------------------------------------------------------------


def test_time_and_energy_count_from_0_on():
    """1,000 tuples in 100 s at 100 W, then 20 a second at 50 W."""
    assert cluster_sim.from_0(case(rate=20, watts=50.0), 2_000) == pytest.approx((150, 100 * 100 + 50 * 50))


def test_what_is_missing_at_the_end_of_the_run_is_extrapolated_as_at_rest():
    """The run ends at 3,000 tuples; 1,000 more take 50 s at 20 a second."""
    seconds, joules = cluster_sim.from_0(case(rate=20, watts=50.0), 4_000)
    assert (seconds, joules) == pytest.approx((250, 100 * 100 + 150 * 50))


def test_a_peak_ends_with_the_last_second_that_is_clearly_higher():
    values = [(101.0, 1.5), (102.0, 1.01), (103.0, 1.03), (104.0, 1.019), (105.0, 0.9)]
    assert cluster_sim.seconds_above(values, 100.0, 1.0) == 3.0
    assert cluster_sim.seconds_above([(101.0, 1.0)], 100.0, 1.0) == 0.0


def test_figures_10_to_15_of_pu_2021_are_all_measured(monkeypatch):
    def simulate(name, strategy, *_):
        erdm = strategy == "erdm"
        return case(strategy, rate=20, watts=50.0, latency=0.9, above=30) if erdm else case(strategy)

    monkeypatch.setattr(cluster_sim, "simulate", simulate)
    monkeypatch.setattr(cluster_sim, "_moves", lambda results, case: None)
    monkeypatch.setattr(cluster_sim, "TUPLES", 2_000.0)
    results = Results("rollingcount")
    cluster_sim.measure_cluster(results, argparse.Namespace(part="rollingcount", quick=True, seed=1))
    found = bars(results)
    for experiment in ("pu-sim-rollingcount", "pu-pairs-rollingcount", "pu-sim-wordcount", "pu-pairs-sol"):
        assert set(compared(experiment)) - OF_MOVES - set(found) == set(), experiment
    assert (found["latency_above.erdm"], found["power_peak.erdm"]) == (30, 30)
    assert (found["seconds_from_0.default"], found["seconds_from_0.erdm"]) == (200, 150)
    assert found["shorter_from_0.erdm"] == 25
    assert found["less_from_0.erdm"] == pytest.approx(100 * (1 - (10_000 + 30 * 300 + 20 * 50) / 20_000))
    assert found["less.erdm"] == 75, "at rest"
    assert found["power_above.erdm"] == pytest.approx((30 * 300 + 70 * 50 + 10_000) / 200 - 100)


def test_few_pairs_are_shown_for_the_same_figures_as_all_streams():
    for number in range(8, 16):
        for benchmark in ("wordcount", "sol", "rollingsort", "rollingcount"):
            streams, pairs = (compared(f"pu-{of}-{benchmark}", f"pu-fig{number}") for of in ("sim", "pairs"))
            assert set(streams) == set(pairs), f"figure {number}, {benchmark}"


def test_only_what_counts_from_0_on_is_compared_with_figures_14_and_15():
    values = compared("pu-sim-rollingcount", "pu-fig14", "pu-fig15")
    assert {name for name, value in values.items() if "from_0" not in name and value.paper is not None} == set()
    assert all("at rest" in value.label for name, value in values.items() if "from_0" not in name)
    saved = {name: round(value.paper, 1) for name, value in values.items() if name.startswith("less_from_0")}
    assert saved == {
        "less_from_0.erdm": 27.3,
        "less_from_0.leedsp": 18.4,
        "less_from_0.dvrcp": 17.0,
        "less_from_0.dvrnp": 13.1,
    }


def test_power_relative_to_the_default_and_rates_of_tmsh_as_the_paper_has_them():
    values = compared("pu-sim-rollingcount", "pu-fig12", "pu-fig13")
    power = {name: round(value.paper, 1) for name, value in values.items() if name.startswith("power_above")}
    assert power == {
        "power_above.erdm": 0.2,
        "power_above.leedsp": 1.0,
        "power_above.dvrnp": -1.7,
        "power_above.dvrcp": -3.8,
    }
    assert values["faster.tmsh"].paper == 15.8


def test_inputs_of_the_set_up_are_not_compared():
    inputs = {"rate.default", "use.before", "seconds_from_0.default"}
    for of in ("sim", "pairs"):
        values = compared(f"pu-{of}-rollingcount")
        assert {name for name, value in values.items() if "chosen" in value.differs} == inputs


# ---- Sun 2022 ----------------------------------------------------------------------------------------------


def test_pairs_of_weights_are_compared_with_the_chosen_pair(monkeypatch):
    def checked(strategy, count, seed):
        return SimpleNamespace(seconds=500.0 if strategy.policy.beta == 0.5 else 510.0)

    monkeypatch.setattr(branch_sim, "checked", checked)
    monkeypatch.setattr(
        branch_sim, "MigrationStrategy", lambda policy: SimpleNamespace(policy=policy), raising=True
    )
    results = Results("grid")
    branch_sim.measure_grid(results, argparse.Namespace(quick=True, seed=1))
    found, values = bars(results), compared("sun-grid")
    assert set(values) - set(found) == set()
    assert found["above.0.3.0.5"] == 0
    assert found["above.0.9.2"] == 2
    papers = {
        beta: [values[f"above.{alpha}.{beta}"].paper for alpha in (0.1, 0.3, 0.5, 0.7, 0.9)] for beta in (1, 2)
    }
    assert [round(find(papers[beta]), 1) for beta in (1, 2) for find in (min, max)] == [4.1, 5.4, 15.8, 17.6]


# ---- Storm overview ----------------------------------------------------------------------------------------


def test_an_open_root_takes_17_bytes_in_a_full_ring_and_22_at_the_limit_of_a_spout():
    assert Settings().delivery.max_spout_pending == PENDING
    results = Results("acker")
    measure_acker(results, argparse.Namespace(quick=True, seed=1))
    found = bars(results)
    assert found["acker.bytes_per_root.1"] == pytest.approx(17, abs=0.1)
    assert found[f"acker.bytes_per_root_of_{PENDING}.1"] == pytest.approx(22.3, abs=0.1)
    assert (found["acker.left_open.1"], found["acker.left_open.10"]) == (0, 0)
    assert {name for name in compared("storm-acker") if not name.endswith("100")} <= set(found)
