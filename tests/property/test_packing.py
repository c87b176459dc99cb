"""Random graphs: every packing is legal, uses no more workers than allowed, and is as good as an exhaustive search
of what the packer considers."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.packing import (
    CLEAR_GAIN,
    ROUNDING,
    Link,
    PackedGroup,
    Part,
    busiest_load,
    hops_between,
    in_dependency_order,
    orders,
    pack,
    worker_loads,
)

ENOUGH = st.just(0.0) | st.sampled_from([0.005, 0.5, 2.0, 3.3, 7.0, 50.0])
"""Below all loads, between them, and above them."""


@st.composite
def graphs(draw, most_parts=7, blocking=True):
    count = draw(st.integers(1, most_parts))
    parts = [
        Part(
            f"c{number}",
            draw(st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0, 5.0, 40.0])),
            draw(st.integers(1, 5)),
            blocking and draw(st.integers(0, 4)) == 0,
        )
        for number in range(count)
    ]
    links = []
    for number in range(1, count):
        for source in draw(st.sets(st.integers(0, number - 1), max_size=3)):
            local, traffic = draw(st.booleans()), draw(st.sampled_from([0.0, 1.0, 7.5]))
            links.append(Link(f"c{source}", f"c{number}", local, traffic))
    return draw(st.permutations(parts)), links


@st.composite
def chains(draw):
    count = draw(st.integers(1, 5))
    weights = st.sampled_from([0.1, 1.0, 2.0, 3.5])
    parts = [Part(f"c{number}", draw(weights), draw(st.integers(1, 3))) for number in range(count)]
    return parts, [Link(f"c{number}", f"c{number + 1}", draw(st.booleans())) for number in range(count - 1)]


def check_legal(parts, links, groups):
    part_of = {part.name: part for part in parts}
    assert sorted(name for group in groups for name in group.names) == sorted(part_of)
    group_of = {name: group for group in groups for name in group.names}
    place = {
        name: (number, group.names.index(name)) for number, group in enumerate(groups) for name in group.names
    }
    for group in groups:
        members = [part_of[name] for name in group.names]
        assert 1 <= group.workers <= min(part.parallelism for part in members)
        if any(part.blocking for part in members):
            assert len(members) == 1
            assert group.workers == members[0].parallelism
    fed = {link.target for link in links}
    for link in links:
        if group_of[link.source] is not group_of[link.target]:
            assert fed.issuperset(group_of[link.target].names), "what reads from others has no spout"
        assert place[link.source] < place[link.target], "a part comes after the parts that it reads"
        if group_of[link.source] is group_of[link.target]:
            assert link.local or group_of[link.source].workers == 1


def counted_workers(parts, groups):
    blocking = {part.name for part in parts if part.blocking}
    return sum(group.workers for group in groups if not blocking.issuperset(group.names))


def divisions(parts, links, orders):
    """Every legal packing whose groups are sections of one of the orders."""
    alone = [PackedGroup((part.name,), part.parallelism) for part in parts if part.blocking]
    for order in orders:
        for cuts in itertools.product((False, True), repeat=max(0, len(order) - 1)):
            edges = [0, *(at for at, cut in enumerate(cuts, 1) if cut), len(order)]
            sections = [order[start:end] for start, end in itertools.pairwise(edges) if start < end]
            widths = [range(1, min(part.parallelism for part in section) + 1) for section in sections]
            for chosen in itertools.product(*widths):
                groups = [
                    PackedGroup(tuple(part.name for part in section), width)
                    for section, width in zip(sections, chosen, strict=True)
                ]
                try:
                    groups = in_dependency_order([*groups, *alone], links)
                    check_legal(parts, links, groups)
                except (AssertionError, ValueError):
                    continue
                yield groups


def expected(parts, links, workers, packings, enough=0.0):
    """The rule of ``pack``, applied to a list of packings: (highest load allowed, hops, workers)."""
    judged = [
        (counted_workers(parts, each), busiest_load(parts, links, each), hops_between(links, each))
        for each in packings
    ]
    fewest = min(used for used, _, _ in judged)
    good = [
        (hops, used)
        for used, load, hops in judged
        if used <= max(workers, fewest) and load <= enough * (1 + ROUNDING)
    ]
    if good:
        return enough, *min(good)
    lowest = {
        limit: min(load for used, load, _ in judged if used <= limit)
        for limit in range(fewest, max(workers, fewest) + 1)
    }
    useful = fewest
    for limit, load in lowest.items():
        if load < (1 - CLEAR_GAIN) * (1 - ROUNDING) * lowest[useful]:
            useful = limit
    bound = lowest[useful] * (1 + ROUNDING)
    hops, used = min((hops, used) for used, load, hops in judged if used <= useful and load <= bound)
    return lowest[useful], hops, used


@given(graphs(), st.integers(1, 12), ENOUGH)
def test_every_packing_is_legal_and_within_the_limit(graph, workers, enough):
    parts, links = graph
    groups = pack(parts, links, workers, enough)
    check_legal(parts, links, groups)
    if not any(part.blocking for part in parts):
        assert counted_workers(parts, groups) <= workers


@given(graphs(), st.integers(1, 12), ENOUGH)
def test_more_workers_than_allowed_only_if_blocking_parts_leave_no_choice(graph, workers, enough):
    parts, links = graph
    used = counted_workers(parts, pack(parts, links, workers, enough))
    if used > workers:
        assert used == counted_workers(parts, pack(parts, links, 1))


@given(graphs(), st.integers(0, 3))
def test_with_enough_workers_every_executor_has_its_own(graph, more):
    parts, links = graph
    enough = max(1, sum(part.parallelism for part in parts if not part.blocking))
    groups = pack(parts, links, enough + more)
    assert {group.names: group.workers for group in groups} == {(part.name,): part.parallelism for part in parts}


@given(graphs(), st.integers(1, 12))
def test_a_packing_depends_only_on_the_arguments(graph, workers):
    parts, links = graph
    assert pack(parts, links, workers) == pack(list(parts), list(links), workers)


@given(graphs(), st.integers(1, 12), st.sampled_from([0.001, 3.0, 1e6]))
def test_the_unit_of_weights_and_traffic_does_not_matter(graph, workers, factor):
    parts, links = graph
    other_parts = [Part(p.name, p.weight * factor, p.parallelism, p.blocking) for p in parts]
    other_links = [Link(e.source, e.target, e.local, e.traffic / factor) for e in links]
    first, second = pack(parts, links, workers), pack(other_parts, other_links, workers)
    assert busiest_load(parts, links, second) <= busiest_load(parts, links, first) * (1 + 1e-6)
    assert hops_between(links, first) == hops_between(links, second)


@settings(max_examples=100)
@given(graphs(most_parts=5), st.integers(1, 8), ENOUGH)
def test_no_section_of_the_orders_gives_a_better_packing(graph, workers, enough):
    parts, links = graph
    if not enough and workers >= sum(part.parallelism for part in parts if not part.blocking):
        return  # every executor has its own worker, whatever that costs
    groups = pack(parts, links, workers, enough)
    load, hops, used = expected(parts, links, workers, divisions(parts, links, orders(parts, links)), enough)
    assert busiest_load(parts, links, groups) <= load * (1 + 1e-6)
    assert (hops_between(links, groups), counted_workers(parts, groups)) == (hops, used)


@settings(max_examples=100)
@given(chains(), st.integers(1, 6), ENOUGH)
def test_components_in_a_row_are_packed_as_well_as_possible(chain, workers, enough):
    parts, links = chain
    if not enough and workers >= sum(part.parallelism for part in parts):
        return
    groups = pack(parts, links, workers, enough)
    load, hops, used = expected(parts, links, workers, divisions(parts, links, [parts]), enough)
    assert busiest_load(parts, links, groups) <= load * (1 + 1e-6)
    assert (hops_between(links, groups), counted_workers(parts, groups)) == (hops, used)


@given(graphs(), st.integers(1, 12), st.floats(0.01, 100), st.floats(1, 10))
def test_a_worker_that_carries_more_never_needs_more_hops(graph, workers, enough, factor):
    parts, links = graph
    first, second = pack(parts, links, workers, enough), pack(parts, links, workers, enough * factor)
    if busiest_load(parts, links, first) <= enough:
        assert hops_between(links, second) <= hops_between(links, first)


@settings(max_examples=100)
@given(graphs(most_parts=5), st.integers(1, 6), ENOUGH, st.sampled_from([0.0, 0.05, 0.5, 3.0]))
def test_light_workers_are_not_counted_and_never_make_it_worse(graph, workers, enough, light):
    parts, links = graph
    packed, without = pack(parts, links, workers, enough, light), pack(parts, links, workers, enough)
    check_legal(parts, links, packed)
    loads = worker_loads(parts, links, packed)
    counted = sum(group.workers for group in loads if group.workers > 1 or loads[group] > light)
    if not any(part.blocking for part in parts) and counted_workers(parts, packed) > workers:
        assert counted <= workers
    if busiest_load(parts, links, packed) > max(enough, light) * (1 + 1e-6):
        assert busiest_load(parts, links, packed) <= busiest_load(parts, links, without) * (1 + 1e-6) / (
            1 - CLEAR_GAIN
        )
