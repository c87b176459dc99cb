"""Assignment of slots: each worker gets its own slot in its stage, on its wanted node if Spark placed a slot
there."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock import make_plan
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement, assign_slots, fitted, slots_for
from penstock.testing import CaptureBolt, FeederSpout
from penstock.topology.builder import TopologyBuilder

NODES = ["n0", "n1", "n2", "n3"]


def plan_of(spouts, bolts):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"), spouts)
    builder.set_bolt("end", CaptureBolt(), bolts).shuffle_grouping("numbers")
    return make_plan(builder.build("slots"))


@st.composite
def cases(draw):
    plan = plan_of(draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    nodes = NODES[: draw(st.integers(1, 4))]
    placement = draw(st.dictionaries(st.sampled_from(plan.worker_ids()), st.sampled_from(nodes)))
    return plan, nodes, placement


@given(cases())
def test_with_the_slots_asked_for_everybody_sits_where_it_is_wanted(case):
    plan, nodes, placement = case
    slots = {}
    for stage, count in enumerate(slots_for(plan, SlotPlacement(placement), len(nodes))):
        for number in range(count):  # like Spark, in turn
            slots[WorkerId(stage, number)] = nodes[number % len(nodes)]
    taken, unmet = assign_slots(plan, SlotPlacement(placement), slots)
    assert not unmet
    assert all(slots[taken[worker]] == node for worker, node in placement.items())


@given(cases(), st.randoms(use_true_random=False))
def test_each_has_a_slot_of_its_own_wherever_slots_are(case, random):
    plan, nodes, placement = case
    slots = {}
    for stage in plan.stages:
        for number in range(stage.workers + random.randrange(3)):
            slots[WorkerId(stage.index, number)] = random.choice(nodes)
    taken, unmet = assign_slots(plan, SlotPlacement(placement), slots)
    assert set(taken) == set(plan.worker_ids())
    assert max(Counter(taken.values()).values()) == 1
    assert all(slot in slots and slot.stage == worker.stage for worker, slot in taken.items())
    wrong = [f"worker {worker} on {node}" for worker, node in placement.items() if slots[taken[worker]] != node]
    assert sorted(unmet) == sorted(wrong), "what could not be is said, and nothing else"


@given(cases())
def test_a_placement_that_is_not_exact_has_no_more_slots_than_its_fullest_node_needs(case):
    plan, nodes, placement = case
    exact, loose = (slots_for(plan, SlotPlacement(placement, each), len(nodes)) for each in (True, False))
    for stage, more, less in zip(plan.stages, exact, loose, strict=True):
        wanted = [node for worker, node in placement.items() if worker.stage == stage.index]
        fullest = max(Counter(wanted).values(), default=0)
        assert less == max(stage.workers, fullest * len(nodes))
        assert more >= less


@given(cases(), st.integers(1, 3))
def test_spare_slots_of_bolts_stay_free_on_every_node(case, spare):
    plan, nodes, _ = case
    anywhere = SlotPlacement({}, exact=False)
    counts = slots_for(plan, anywhere, len(nodes), spare)
    slots = {WorkerId(s, n): nodes[n % len(nodes)] for s, count in enumerate(counts) for n in range(count)}
    taken, _ = assign_slots(plan, anywhere, slots)
    free = Counter((slot.stage, node) for slot, node in slots.items() if slot not in taken.values())
    assert counts[0] == plan.stages[0].workers, "spouts do not move alone"
    assert all(free[1, node] >= spare for node in nodes)


@given(cases(), st.integers(0, 3), st.integers(0, 60))
def test_where_a_node_is_lost_only_free_slots_are_given_up(case, spare, room):
    plan, nodes, _ = case
    slots = slots_for(plan, SlotPlacement({}, exact=False), len(nodes), spare)
    fewer = fitted(plan, slots, room)
    assert sum(fewer) == min(sum(slots), max(room, plan.workers))
    assert all(stage.workers <= now <= then for stage, now, then in zip(plan.stages, fewer, slots, strict=True))
