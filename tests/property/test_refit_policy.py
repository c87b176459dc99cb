"""The refit policy with any samples at all, and with constant loads in noise."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.call_waits import separate
from penstock.control.packing import busiest_load, pack
from penstock.control.refit import CallWait, RefitKind, RefitPolicy, RefitSample, RefitTuning, same_packing
from tests.property.test_packing import check_legal, graphs

COOL_DOWN = 300.0
waits = st.none() | st.builds(CallWait, st.sampled_from([0.0, 0.25, 0.7]), st.sampled_from([0.0, 0.01]))
loads = st.tuples(
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),  # of the weights
    st.floats(0.0, 1.0),  # busiest
    st.sampled_from([0.0, 10.0, 100.0]),  # throughput
    st.booleans(),  # behind
    st.integers(1, 40),  # samples in a row
)


def first_packing(parts, links, workers):
    return tuple(pack(parts, links, workers))


@settings(max_examples=100)
@given(graphs(most_parts=5), st.integers(1, 6), st.sampled_from(["once", "always"]), st.data())
def test_whatever_the_samples_proposals_are_legal_new_and_far_apart(graph, workers, mode, data):
    parts, links = graph
    policy = RefitPolicy(mode, workers, RefitTuning(cool_down=COOL_DOWN, light_samples=12))
    groups, blocking = first_packing(parts, links, workers), {part.name for part in parts if part.blocking}
    now, refits = 0.0, []
    for share, busiest, throughput, behind, times in data.draw(st.lists(loads, max_size=12)):
        found = {part.name: data.draw(waits) for part in parts}
        for _ in range(times):
            now += 10.0
            shown = tuple(replace(p, weight=p.weight * share, blocking=p.name in blocking) for p in parts)
            sample = RefitSample(
                now, 10.0, shown, tuple(links), groups, busiest, throughput, behind,
                {name: wait for name, wait in found.items() if wait},
            )  # fmt: skip
            refit = policy.decide(sample)
            if refit is None:
                continue
            assert any(part.weight for part in shown)
            assert not same_packing(refit.groups, groups)
            assert refit.blocking >= blocking, "what was blocking stays so"
            assert refit.reason
            check_legal([replace(p, blocking=p.name in refit.blocking) for p in parts], links, refit.groups)
            if refit.kind is RefitKind.BLOCKING:
                assert refit.blocking > blocking
            else:
                assert throughput or behind
            refits.append((now, refit.kind))
            if data.draw(st.booleans()):
                groups, blocking = refit.groups, refit.blocking
            policy.replaced(now, by_refit=True)
    check_distances(refits, mode)


def check_distances(refits, mode):
    """A failed attempt counts too."""
    repacks = [time for time, kind in refits if kind is RefitKind.REPACK]
    reverts = [time for time, kind in refits if kind is RefitKind.REVERT]
    assert all(later - earlier >= COOL_DOWN for earlier, later in itertools.pairwise(repacks))
    assert all(repacks and repacks[0] < time for time in reverts)
    assert len(reverts) <= len(repacks)


@given(graphs(most_parts=6, blocking=False), st.integers(1, 6), st.sets(st.integers(0, 5), max_size=3))
def test_separating_is_legal_and_moves_nothing_else(graph, workers, numbers):
    parts, links = graph
    groups = first_packing(parts, links, workers)
    names = {part.name for part in parts if int(part.name[1:]) in numbers}
    found = separate(parts, links, groups, names)
    check_legal([replace(part, blocking=part.name in names) for part in parts], links, found)
    for group in found:
        if names.isdisjoint(group.names):
            (before,) = [each for each in groups if set(group.names) <= set(each.names)]
            assert group.workers == before.workers


@settings(max_examples=40)
@given(
    graphs(most_parts=5, blocking=False),
    st.integers(1, 5),
    st.floats(0.01, 1.0),
    st.booleans(),
    st.integers(0, 1_000),
)
def test_a_constant_load_in_noise_leads_to_at_most_one_repacking(graph, workers, busiest, one, seed):
    """If the model is right. Weights are wrong by up to 30 %, differently in each sample."""
    parts, links = graph
    groups = first_packing(parts, links, 1 if one else workers)
    load, chance = busiest_load(parts, links, groups), random.Random(seed)
    if not load:
        return
    policy, refits = RefitPolicy("always", workers, RefitTuning(light_samples=12)), []
    for number in range(1, 200):
        noisy = tuple(replace(part, weight=part.weight * chance.uniform(0.7, 1.3)) for part in parts)
        used = min(1.0, busiest * busiest_load(parts, links, groups) / load)
        refit = policy.decide(
            RefitSample(10.0 * number, 10.0, noisy, tuple(links), groups, used, 100.0, False, {})
        )
        if refit is not None:
            refits.append(refit)
            groups = refit.groups
            policy.replaced(10.0 * number, by_refit=True)
    assert len(refits) <= 1
