"""The migration policy under any load, and the ledger under any calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.control.migration import (
    Branch,
    BranchNodeLoad,
    Migrate,
    MigrationPolicy,
    Restore,
    scores,
)
from penstock.control.segments import SegmentLedger

NAMES = ("a", "b", "c", "d")
rates = st.floats(0, 1e9)
loads = st.builds(BranchNodeLoad, st.floats(0, 1), rates, rates)
nodes = st.lists(loads, min_size=1, max_size=3).map(tuple)
bandwidths = st.floats(1e3, 1e9)


@st.composite
def snapshots(draw):
    """All branches at one moment. Occasionally one is missing."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return [Branch(name, draw(nodes), draw(bandwidths)) for name in names]


policies = st.builds(MigrationPolicy, st.floats(0.01, 0.99), st.floats(0.1, 3))


def is_heavy(branch, policy):
    return any(node.queue_use > policy.overload and node.bytes_in > node.bytes_out for node in branch.nodes)


@given(policies, st.lists(snapshots(), max_size=12))
def test_suggestions_keep_to_the_rules_and_lead_from_one_route_table_to_the_next(policy, moments):
    told: dict[str, str] = {}
    for branches in moments:
        known = {branch.name: branch for branch in branches}
        before = dict(policy.routes)
        pressure = scores(branches, policy.alpha, policy.beta)
        suggestions = policy.decide(branches)
        policy.validate()
        for found in suggestions:
            if isinstance(found, Migrate):
                told[found.heavy] = found.light
                assert is_heavy(known[found.heavy], policy) or found.heavy in before
                light = known[found.light]
                assert light.queue_use <= policy.overload
                assert light.name not in policy.routes
                others = [b for b in branches if b.queue_use <= policy.overload and b.name not in policy.routes]
                recovered = [b for b in others if b.name not in before or b.queue_use < policy.recovery]
                assert pressure[light.name] == min(pressure[b.name] for b in recovered)
            else:
                del told[found.heavy]
                assert found.reason
        assert told == policy.routes  # applying the suggestions one by one gives the routes of the policy
        for name, light in policy.routes.items():
            assert known[name].queue_use >= policy.recovery
            assert light in known
            assert not is_heavy(known[light], policy)
        if any(
            b.queue_use <= policy.overload and b.name not in policy.routes
            for b in branches
            if b.name not in before
        ):
            for branch in branches:  # another branch could take its data
                assert not is_heavy(branch, policy) or branch.name in policy.routes


@given(policies, snapshots())
def test_the_same_load_again_changes_nothing(policy, branches):
    policy.decide(branches)
    assert policy.decide(branches) == []


@given(policies, st.lists(snapshots(), max_size=6))
def test_a_network_at_rest_is_restored(policy, moments):
    for branches in moments:
        policy.decide(branches)
    migrated = set(policy.routes)
    found = policy.decide([Branch(name, (BranchNodeLoad(0.1, 1.0, 1.0),), 1e6) for name in NAMES])
    assert {each.heavy for each in found if isinstance(each, Restore)} == migrated
    assert not policy.routes


@given(snapshots(), st.floats(0.01, 0.99), st.floats(0.1, 3), st.floats(0.01, 100))
def test_pressure_does_not_depend_on_units(branches, alpha, beta, unit):
    scaled = [
        Branch(
            branch.name,
            tuple(BranchNodeLoad(n.queue_use, n.bytes_in * unit, n.bytes_out * unit) for n in branch.nodes),
            branch.bandwidth * unit,
        )
        for branch in branches
    ]
    found, again = scores(branches, alpha, beta), scores(scaled, alpha, beta)
    for name, value in found.items():
        assert abs(again[name] - value) <= 1e-6 * max(1.0, value)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["b", "c", None]), st.integers(0, 50)), max_size=40)
)
def test_the_ledger_against_a_list_of_every_tuple(steps):
    """A sender that records the target of each tuple has the same segments."""
    ledger, sent, going = SegmentLedger(keep=5), {"a": [], "b": []}, {}
    for branch, target, rows in steps:
        if target == branch or target is None:
            ledger.close(branch)
            going.pop(branch, None)
        elif going.get(branch) != target:
            ledger.open(branch, target, len(sent[branch]))
            going[branch] = target
        if branch in going:
            ledger.extend(branch, rows)
        sent[branch] += [going.get(branch)] * rows
        ledger.validate()
    for branch, targets in sent.items():
        assert ledger.migrated.get(branch, 0) == sum(target is not None for target in targets)
    for segment in ledger.segments:
        end = segment.offset + segment.length
        assert set(sent[segment.branch][segment.offset : end]) == {segment.target}
