"""Slots take seats: each its own, in its stage, on the node it is wanted on wherever Spark left one there."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock import make_plan
from penstock.plan.model import SlotId
from penstock.plan.seating import Placement, fitted, seats_for, take_seats
from penstock.testing import CaptureBolt, FeederSpout
from penstock.topology.builder import TopologyBuilder

NODES = ["n0", "n1", "n2", "n3"]


def plan_of(spouts, bolts):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"), spouts)
    builder.set_bolt("end", CaptureBolt(), bolts).shuffle_grouping("numbers")
    return make_plan(builder.build("seats"))


@st.composite
def cases(draw):
    plan = plan_of(draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    nodes = NODES[: draw(st.integers(1, 4))]
    placement = draw(st.dictionaries(st.sampled_from(plan.slot_ids()), st.sampled_from(nodes)))
    return plan, nodes, placement


@given(cases())
def test_with_the_seats_asked_for_everybody_sits_where_it_is_wanted(case):
    plan, nodes, placement = case
    seats = {}
    for stage, count in enumerate(seats_for(plan, Placement(placement), len(nodes))):
        for number in range(count):  # as Spark does: one by one in turn
            seats[SlotId(stage, number)] = nodes[number % len(nodes)]
    taken, unmet = take_seats(plan, Placement(placement), seats)
    assert not unmet
    assert all(seats[taken[slot]] == node for slot, node in placement.items())


@given(cases(), st.randoms(use_true_random=False))
def test_each_has_a_seat_of_its_own_wherever_seats_are(case, random):
    plan, nodes, placement = case
    seats = {}
    for stage in plan.stages:
        for number in range(stage.slots + random.randrange(3)):
            seats[SlotId(stage.index, number)] = random.choice(nodes)
    taken, unmet = take_seats(plan, Placement(placement), seats)
    assert set(taken) == set(plan.slot_ids())
    assert max(Counter(taken.values()).values()) == 1
    assert all(seat in seats and seat.stage == slot.stage for slot, seat in taken.items())
    wrong = [f"slot {slot} on {node}" for slot, node in placement.items() if seats[taken[slot]] != node]
    assert sorted(unmet) == sorted(wrong), "what could not be is said, and nothing else"


@given(cases())
def test_a_placement_that_is_not_exact_has_no_more_seats_than_its_fullest_node_needs(case):
    plan, nodes, placement = case
    exact, loose = (seats_for(plan, Placement(placement, each), len(nodes)) for each in (True, False))
    for stage, more, less in zip(plan.stages, exact, loose, strict=True):
        wanted = [node for slot, node in placement.items() if slot.stage == stage.index]
        fullest = max(Counter(wanted).values(), default=0)
        assert less == max(stage.slots, fullest * len(nodes))
        assert more >= less


@given(cases(), st.integers(1, 3))
def test_spare_seats_of_bolts_stay_free_on_every_node(case, spare):
    plan, nodes, _ = case
    anywhere = Placement({}, exact=False)
    counts = seats_for(plan, anywhere, len(nodes), spare)
    seats = {SlotId(s, n): nodes[n % len(nodes)] for s, count in enumerate(counts) for n in range(count)}
    taken, _ = take_seats(plan, anywhere, seats)
    free = Counter((seat.stage, node) for seat, node in seats.items() if seat not in taken.values())
    assert counts[0] == plan.stages[0].slots, "spouts do not move alone"
    assert all(free[1, node] >= spare for node in nodes)


@given(cases(), st.integers(0, 3), st.integers(0, 60))
def test_where_a_node_is_lost_only_free_seats_are_given_up(case, spare, room):
    plan, nodes, _ = case
    seats = seats_for(plan, Placement({}, exact=False), len(nodes), spare)
    fewer = fitted(plan, seats, room)
    assert sum(fewer) == min(sum(seats), max(room, plan.slots))
    assert all(stage.slots <= now <= then for stage, now, then in zip(plan.stages, fewer, seats, strict=True))
