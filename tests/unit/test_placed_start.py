"""A start whose slots are to be on certain nodes, when these are not there."""

import threading
from types import SimpleNamespace

import pytest

from penstock import Settings, TopologyBuilder, make_plan
from penstock.errors import TopologyFailed
from penstock.plan.model import SlotId
from penstock.plan.seating import Placement
from penstock.spark.start import Start
from penstock.testing import CaptureBolt, FeederSpout


class Coordinator:
    """Has seats on node n1, and writes down who took them."""

    def __init__(self):
        self.taken = {}
        self.changed = threading.Condition()

    def begin(self, *_):
        seats = {seat: SimpleNamespace(hello=SimpleNamespace(node="n1")) for seat in (SlotId(0, 0), SlotId(1, 0))}
        return SimpleNamespace(seats=seats, slots={}, take_seats=self.taken.update)


def start(coordinator, again, exact=True):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"))
    builder.set_bolt("end", CaptureBolt()).shuffle_grouping("numbers")
    topology = builder.build("placed", Settings())
    placement = Placement({SlotId(0, 0): "n1", SlotId(1, 0): "gone"}, exact)
    design = SimpleNamespace(
        topology=topology, plan=make_plan(topology), placement=placement, job=SimpleNamespace(key=1)
    )
    before = Start(0, design, None, coordinator) if again else None
    return Start(1, design, None, coordinator, before)


def test_at_first_a_node_that_is_missing_is_an_error():
    coordinator = Coordinator()
    placed = start(coordinator, again=False)
    with pytest.raises(TopologyFailed, match=r"slot 1\.0 on gone; got 2 seats on n1"):
        placed._place(placed._placement)
    assert not coordinator.taken


@pytest.mark.parametrize(("again", "exact"), [(True, True), (False, False)])
def test_after_a_loss_it_goes_anywhere(again, exact):
    """Else a topology whose node died would never start again."""
    coordinator = Coordinator()
    placed = start(coordinator, again, exact)
    placed._place(placed._placement)
    assert coordinator.taken == {SlotId(0, 0): SlotId(0, 0), SlotId(1, 0): SlotId(1, 0)}


def test_after_a_loss_slots_are_where_they_had_moved():
    coordinator = Coordinator()
    seats = {SlotId(0, 0): "n1", SlotId(1, 0): "n1", SlotId(1, 1): "n2"}
    crew = SimpleNamespace(
        seats={seat: SimpleNamespace(hello=SimpleNamespace(node=node)) for seat, node in seats.items()},
        slots={SlotId(1, 0): SimpleNamespace(hello=SimpleNamespace(node="n2"))},
        take_seats=coordinator.taken.update,
    )
    coordinator.begin = lambda *_: crew
    placed = start(coordinator, again=True)
    placed._place(placed._placement)
    assert coordinator.taken == {SlotId(0, 0): SlotId(0, 0), SlotId(1, 0): SlotId(1, 1)}
