"""A query run whose workers are to be on certain nodes, when these are not there."""

import threading
from types import SimpleNamespace

import pytest

from penstock import Settings, TopologyBuilder, make_plan
from penstock.driver.query_run import QueryRun, RunContext
from penstock.errors import TopologyFailed
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement
from penstock.testing import CaptureBolt, FeederSpout

IN_THE_DRIVER = SimpleNamespace(has_processes=False)
"""The only acker."""


class Server:
    """Has slots on node n1, and writes down who took them."""

    def __init__(self):
        self.taken = {}
        self.changed = threading.Condition()

    def begin(self, *_):
        slots = {
            slot: SimpleNamespace(hello=SimpleNamespace(node="n1")) for slot in (WorkerId(0, 0), WorkerId(1, 0))
        }
        return SimpleNamespace(slots=slots, workers={}, assign_slots=self.taken.update, ackers=IN_THE_DRIVER)


def start(server, again, exact=True):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"))
    builder.set_bolt("end", CaptureBolt()).shuffle_grouping("numbers")
    topology = builder.build("placed", Settings())
    placement = SlotPlacement({WorkerId(0, 0): "n1", WorkerId(1, 0): "gone"}, exact)
    deployment = SimpleNamespace(
        topology=topology, plan=make_plan(topology), placement=placement, job=SimpleNamespace(key=1), slots=(1, 1)
    )
    context = RunContext(server, None)
    before = QueryRun(0, deployment, None, context) if again else None
    return QueryRun(1, deployment, None, context, before)


def place(run):
    """The last step of a launch: when all slots have connected, workers are assigned to them."""
    run.launch_steps(())[-1].do()


def test_at_first_a_node_that_is_missing_is_an_error():
    server = Server()
    with pytest.raises(TopologyFailed, match=r"worker 1\.0 on gone; the query has 2 slots on n1\."):
        place(start(server, again=False))
    assert not server.taken


@pytest.mark.parametrize(("again", "exact"), [(True, True), (False, False)])
def test_after_a_loss_it_goes_anywhere(again, exact):
    """Else a topology whose node died would never start again."""
    server = Server()
    place(start(server, again, exact))
    assert server.taken == {WorkerId(0, 0): WorkerId(0, 0), WorkerId(1, 0): WorkerId(1, 0)}


def test_after_a_loss_workers_are_where_they_had_moved():
    server = Server()
    slots = {WorkerId(0, 0): "n1", WorkerId(1, 0): "n1", WorkerId(1, 1): "n2"}
    registry = SimpleNamespace(
        slots={slot: SimpleNamespace(hello=SimpleNamespace(node=node)) for slot, node in slots.items()},
        workers={WorkerId(1, 0): SimpleNamespace(hello=SimpleNamespace(node="n2"))},
        assign_slots=server.taken.update,
        ackers=IN_THE_DRIVER,
    )
    server.begin = lambda *_: registry
    place(start(server, again=True))
    assert server.taken == {WorkerId(0, 0): WorkerId(0, 0), WorkerId(1, 0): WorkerId(1, 1)}
