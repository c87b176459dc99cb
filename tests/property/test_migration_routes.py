"""Migration routes at the branching point: every tuple goes somewhere once, and the ledger says which went another
way."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.topology.groupings import ALL_ROWS
from penstock.worker.migration_routes import MigrationRoutes

TASKS = (3, 4, 5, 6)
KEYS = {task: f"count/{index}" for index, task in enumerate(TASKS)}


@st.composite
def routes(draw):
    """Heavy tasks and where their tuples go: never to one that is heavy itself."""
    heavy = draw(st.sets(st.sampled_from(TASKS), max_size=3))
    light = [task for task in TASKS if task not in heavy]
    return {task: draw(st.sampled_from(light)) for task in sorted(heavy)}


@st.composite
def splits(draw):
    """What a router may say of a batch: targets by row, all rows, or slices."""
    rows = draw(st.integers(1, 12))
    if draw(st.booleans()):
        return rows, [(draw(st.sampled_from(TASKS)), ALL_ROWS)]
    if draw(st.booleans()):
        cut = draw(st.integers(0, rows))
        pair = draw(st.permutations(TASKS))[:2]
        return rows, [(pair[0], slice(0, cut)), (pair[1], slice(cut, rows))]
    targets = np.array(draw(st.lists(st.sampled_from(TASKS), min_size=rows, max_size=rows)))
    return rows, [(task, np.flatnonzero(targets == task)) for task in dict.fromkeys(targets.tolist())]


def listed(chosen, rows):
    return np.arange(rows)[chosen].tolist()


@given(st.lists(st.one_of(routes(), splits()), max_size=40))
def test_every_row_goes_once_and_the_ledger_adds_up(script):
    migration_routes, now, ended = MigrationRoutes(KEYS), {}, []
    bound = dict.fromkeys(TASKS, 0)
    diverted = {task: [] for task in TASKS}  # ⟨target, number among the tuples bound for the task⟩
    for step in script:
        if isinstance(step, dict):
            ended += migration_routes.set(step)
            now = step
            continue
        rows, shares = step
        got = migration_routes.apply(shares, rows)
        assert len({task for task, _ in got}) == len(got), "a target comes at most once"
        assert sorted(row for _, chosen in got for row in listed(chosen, rows)) == list(range(rows))
        found = {row: task for task, chosen in got for row in listed(chosen, rows)}
        for _, chosen in got:
            assert listed(chosen, rows) == sorted(listed(chosen, rows)), "rows keep their order"
        for task, chosen in shares:
            for row in listed(chosen, rows):
                assert found[row] == now.get(task, task)
                if found[row] != task:
                    diverted[task].append((found[row], bound[task]))
                bound[task] += 1
        migration_routes.ledger.validate()
    ended += migration_routes.set({})
    for task in TASKS:
        mine = [segment for segment in ended if segment.branch == KEYS[task]]
        recorded = [
            (segment.target, number)
            for segment in mine
            for number in range(segment.offset, segment.offset + segment.length)
        ]
        assert recorded == [(KEYS[target], number) for target, number in diverted[task]]
        assert migration_routes.ledger.migrated.get(KEYS[task], 0) == len(diverted[task])
    assert ended == [] or all(segment.length > 0 for segment in ended)


@given(splits(), routes())
def test_the_same_routes_again_end_no_segment(split, routes):
    migration_routes = MigrationRoutes(KEYS)
    migration_routes.set(routes)
    migration_routes.apply(split[1], split[0])
    assert migration_routes.set(dict(routes)) == []
