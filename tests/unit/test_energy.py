"""The energy model: watts and joules (Pu 2021, section 3.3)."""

from __future__ import annotations

import pytest

from penstock.control.energy import Energy, Power, PowerModel, energy, power, saved_dynamic
from penstock.control.erdm import plan
from penstock.control.placement import PlacedExecutor, PlacementNode, PlacementSnapshot, Regulate, Use
from tests.placements import NODE, example_of_pu_2021

MODEL = PowerModel(idle=30.0, cpu=40.0, memory=10.0, network=5.0)


def used(cpu=0.5, memory=0.25, network=0.2):
    """One node that uses these shares of its resources."""
    other = Use(cpu * NODE.cpu, memory * NODE.memory, network * NODE.bandwidth)
    return PlacementSnapshot((PlacementNode("n1", NODE, other),), ())


def test_a_node_draws_its_base_and_what_it_uses():
    assert power(used(), {"n1": MODEL}) == Power(30.0, pytest.approx(20.0 + 2.5 + 1.0))


def test_the_defaults_draw_what_pu_2021_measured():
    """16 workers at 60 % draw 1,063.15 W with the default scheduler (Pu 2021, figure 13)."""
    nodes = tuple(PlacementNode(f"n{index}", NODE, Use(2.4, 4.8e9, 7.5e6)) for index in range(16))
    assert power(PlacementSnapshot(nodes, ())).total == pytest.approx(1063.15, rel=0.01)


def test_frequency_and_voltage_lower_their_own_part_only():
    settings = [Regulate("n1", "", frequency=0.5, voltage=0.8)]
    assert power(used(), {"n1": MODEL}, regulated=settings).dynamic == pytest.approx(20 * 0.25 + 2.5 * 0.64 + 1.0)


def test_a_released_node_draws_nothing():
    snapshot = example_of_pu_2021()
    found = plan(snapshot)
    after = snapshot.moved({move.executor: move.target for move in found.moves})
    before, then = power(snapshot), power(after, released={release.node for release in found.releases})
    assert before.base - then.base == PowerModel().idle
    assert then.dynamic < before.dynamic, "less goes over the network"


def test_energy_is_base_and_the_integral_of_the_rest():
    found = energy([(30.0, Power(100.0, 50.0)), (10.0, Power(66.0, 80.0))])
    assert found == Energy(3660.0, 2300.0)
    assert found.total == 5960.0
    assert found.label == "6.0 kJ (modelled: base 3.7, dynamic 2.3)"
    assert Energy(4000.0, 3000.0) - found == Energy(340.0, 700.0)


def test_time_does_not_run_backwards():
    with pytest.raises(ValueError, match="cannot last -1"):
        energy([(-1.0, Power(1.0, 1.0))])


def test_equation_33_of_pu_2021():
    """5 of 13 streams become local; each tuple costs 2 ms between nodes; a million tuples at 40 W."""
    assert saved_dynamic(5, 13, 0.002, 1e6, 40.0) == pytest.approx(5 / 13 * 2000 * 40)
    assert saved_dynamic(0, 0, 0.0, 1e6, 40.0) == 0.0


def test_what_has_no_limit_draws_nothing():
    node = PlacementNode("n1", Use(4.0, float("inf"), float("inf")))
    snapshot = PlacementSnapshot((node,), (PlacedExecutor("a", "a", "n1", 2.0, 1e9, 1e6),))
    assert power(snapshot, {"n1": MODEL}).dynamic == pytest.approx(20.0)
