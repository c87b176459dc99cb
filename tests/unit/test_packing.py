"""Which components share workers, for topologies as people write them."""

import time

import pytest

from penstock.control.packing import (
    Link,
    PackedGroup,
    Part,
    busiest_load,
    hops_between,
    in_dependency_order,
    pack,
    worker_loads,
)

WORD_COUNT = [Part("lines", 1, 1), Part("split", 2, 2), Part("count", 4, 4), Part("persist", 1, 1)]
WORD_LINKS = [Link("lines", "split", True), Link("split", "count", False), Link("count", "persist", False)]


def groups(packed):
    return [(*group.names, group.workers) for group in packed]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_word_count_on_few_cores_is_one_worker(workers):
    # Two workers would have a load of 7 instead of 8: half of the gain is spent on hops.
    assert groups(pack(WORD_COUNT, WORD_LINKS, workers)) == [("lines", "split", "count", "persist", 1)]
    two = [PackedGroup(("lines", "split"), 1), PackedGroup(("count", "persist"), 1)]
    assert busiest_load(WORD_COUNT, WORD_LINKS, two) == 7
    assert hops_between(WORD_LINKS, two) == 1


@pytest.mark.parametrize("workers", [4, 7])
def test_word_count_on_more_cores_is_divided_where_that_lowers_the_load(workers):
    found = pack(WORD_COUNT, WORD_LINKS, workers)
    assert groups(found) == [("lines", "split", 1), ("count", 2), ("persist", 1)]
    assert busiest_load(WORD_COUNT, WORD_LINKS, found) == 4


def test_word_count_with_a_core_for_each_executor_is_as_wide_as_it_says():
    assert groups(pack(WORD_COUNT, WORD_LINKS, 8)) == [("lines", 1), ("split", 2), ("count", 4), ("persist", 1)]


def test_components_behind_shuffle_grouping_follow_their_source_into_each_worker():
    parts = [Part("spout", 2, 2), Part("parse", 2, 2), Part("filter", 4, 4)]
    links = [Link("spout", "parse", True), Link("parse", "filter", True)]
    assert groups(pack(parts, links, 2)) == [("spout", "parse", "filter", 2)]


def test_independent_branches_get_a_worker_each():
    parts = [Part(name, 1, 1) for name in ("s1", "s2", "b1", "b2")]
    assert groups(pack(parts, [Link("s1", "b1", False), Link("s2", "b2", False)], 2)) in (
        [("s1", "b1", 1), ("s2", "b2", 1)],
        [("s2", "b2", 1), ("s1", "b1", 1)],
    )


def test_no_worker_is_used_for_a_component_that_does_next_to_nothing():
    parts = [Part("spout", 1, 1), Part("work", 1, 1), Part("log", 0.01, 1), Part("end", 0.01, 1)]
    links = [Link("spout", "work", False), Link("work", "log", False), Link("log", "end", False)]
    assert groups(pack(parts, links, 3)) in (
        [("spout", 1), ("work", "log", "end", 1)],
        [("spout", "work", "log", "end", 1)],
    )


def test_measured_weights_separate_two_heavy_components():
    parts = [Part("spout", 0.02, 1), Part("parse", 0.5, 4), Part("join", 0.5, 4), Part("end", 0.01, 1)]
    links = [Link("spout", "parse", True), Link("parse", "join", False), Link("join", "end", False)]
    assert groups(pack(parts, links, 2)) == [("spout", "parse", 1), ("join", "end", 1)]


def test_blocking_component_has_a_worker_per_executor_beyond_the_limit():
    parts = [Part("spout", 1, 1), Part("wait", 3, 3, blocking=True), Part("work", 1, 1)]
    links = [Link("spout", "wait", True), Link("spout", "work", False)]
    assert groups(pack(parts, links, 1)) == [("spout", "work", 1), ("wait", 3)]


def test_what_comes_before_and_after_a_blocking_component_is_not_in_one_worker():
    parts = [Part("spout", 1, 1), Part("wait", 1, 1, blocking=True), Part("end", 1, 1)]
    links = [Link("spout", "wait", True), Link("wait", "end", True)]
    assert groups(pack(parts, links, 1)) == [("spout", 1), ("wait", 1), ("end", 1)]


def test_load_of_blocking_components_is_not_counted():
    parts = [Part("spout", 2, 1), Part("wait", 100, 1, blocking=True)]
    links = [Link("spout", "wait", True)]
    assert busiest_load(parts, links, pack(parts, links, 1)) == 3


def test_hops_cost_by_traffic():
    parts = [Part("spout", 4, 1), Part("often", 2, 1), Part("rarely", 2, 1)]
    links = [Link("spout", "often", False, 100), Link("spout", "rarely", False, 10)]
    apart = [PackedGroup(("spout",), 1), PackedGroup(("often",), 1), PackedGroup(("rarely",), 1)]
    assert busiest_load(parts, links, apart) == pytest.approx(4 + 2 + 0.2)
    assert groups(pack(parts, links, 2)) == [("spout", "often", 1), ("rarely", 1)]


@pytest.mark.parametrize("workers", [2, 4, 8, 30])
def test_a_load_that_one_worker_carries_gets_one_worker(workers):
    assert groups(pack(WORD_COUNT, WORD_LINKS, workers, enough=8)) == [("lines", "split", "count", "persist", 1)]


def test_no_hop_is_added_to_lower_a_load_that_is_low_enough():
    # The lowest load, 4, needs two hops; 7 needs one.
    assert groups(pack(WORD_COUNT, WORD_LINKS, 4, enough=7)) == [("lines", "split", 1), ("count", "persist", 1)]
    assert hops_between(WORD_LINKS, pack(WORD_COUNT, WORD_LINKS, 4)) == 2


def test_a_load_that_no_packing_reaches_changes_nothing():
    assert pack(WORD_COUNT, WORD_LINKS, 4, enough=3.9) == pack(WORD_COUNT, WORD_LINKS, 4)


def test_workers_for_all_executors_are_not_used_if_one_component_has_the_load():
    parts = [Part("spout", 4, 1), Part("parse", 0.1, 4)]
    links = [Link("spout", "parse", True)]
    assert groups(pack(parts, links, 5)) == [("spout", 1), ("parse", 4)]
    assert groups(pack(parts, links, 5, enough=0.5)) == [("spout", "parse", 1)]


def test_a_topology_of_blocking_components_has_nothing_to_search_for():
    parts = [Part("spout", 1, 1, blocking=True), Part("wait", 1, 2, blocking=True)]
    assert groups(pack(parts, [Link("spout", "wait", True)], 1, enough=1)) == [("spout", 1), ("wait", 2)]


def test_loads_of_all_groups_are_told_apart():
    parts = [Part("spout", 2, 1), Part("work", 6, 3), Part("wait", 9, 1, blocking=True)]
    links = [Link("spout", "work", True, 10), Link("spout", "wait", True, 10)]
    spout, work, wait = PackedGroup(("spout",), 1), PackedGroup(("work",), 2), PackedGroup(("wait",), 1)
    # The busiest worker of "work" has two of the three executors. The spout sends to both others.
    assert worker_loads(parts, links, [spout, work, wait]) == {spout: 2 + 1 + 1, work: pytest.approx(4 + 2)}


def test_groups_that_read_from_each_other_are_rejected():
    crossed = [PackedGroup(("a", "d"), 1), PackedGroup(("b", "c"), 1)]
    with pytest.raises(ValueError, match="two groups read from each other"):
        in_dependency_order(crossed, [Link("a", "b", True), Link("c", "d", True)])


@pytest.mark.parametrize("enough", [0, 640])
@pytest.mark.parametrize("local", [True, False])
def test_fifty_components_on_64_workers_are_packed_quickly(local, enough):
    parts = [Part(f"c{number}", 64, 64) for number in range(50)]
    links = [Link(f"c{number}", f"c{number + 1}", local) for number in range(49)]
    before = time.process_time()
    packed = pack(parts, links, 64, enough)
    assert time.process_time() - before < 0.1
    assert sum(group.workers for group in packed) <= 64


def test_a_measured_hop_costs_what_its_tuples_cost_whatever_the_bolt_computes():
    parts = [Part("spout", 0.0, 1), Part("first", 0.5, 1), Part("second", 0.5, 1)]
    few = [Link("spout", "first", False, 500.0, True), Link("first", "second", False, 500.0, True)]
    assert groups(pack(parts, few, 2)) == [("spout", "first", 1), ("second", 1)]
    many = [Link("spout", "first", False, 2e6, True), Link("first", "second", False, 2e6, True)]
    assert groups(pack(parts, many, 2)) == [("spout", "first", "second", 1)]
    two = [PackedGroup(("spout", "first"), 1), PackedGroup(("second",), 1)]
    assert busiest_load(parts, few, two) == pytest.approx(0.575, abs=0.001)
    assert busiest_load(parts, many, two) == pytest.approx(1.075, abs=0.001)


def test_workers_with_little_to_do_are_not_counted():
    """Otherwise two cores could not share a heavy bolt between a spout and a sink with one executor each."""
    parts = [Part("spout", 0.02, 1), Part("burn", 1.8, 8), Part("show", 0.01, 1)]
    links = [Link("spout", "burn", True, 300.0, True), Link("burn", "show", False, 300.0, True)]
    assert groups(pack(parts, links, 2, enough=0.6)) == [("spout", "burn", "show", 1)]
    assert groups(pack(parts, links, 2, enough=0.6, light=0.15)) == [("spout", 1), ("burn", 2), ("show", 1)]
    assert groups(pack(parts, links, 1, enough=0.6, light=0.15)) == [("spout", "burn", "show", 1)]
