"""The parallelism that was chosen at run time outlives the driver, until the program declares another one."""

import uuid
from dataclasses import replace

import pytest

from penstock import Settings, TopologyBuilder
from penstock.cli.main import main
from penstock.driver.kept_numbers import as_left, as_scaled, kept_texts, scaled_bolts
from penstock.driver.recovery import StateDirectory
from penstock.driver.savepoint_requests import save_at_rest
from penstock.errors import StateUnavailable
from penstock.plan.planner import make_plan
from penstock.state import manifest as manifests
from penstock.state.manifest import ScaledBolt
from penstock.state.store import StateStore
from penstock.testing import CaptureBolt, LocalRunner
from tests.consistency.components import Numbers


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "state")


def program(root, count=1, tasks=None, delivery="at_least_once", **settings):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10))
    declarer = builder.set_bolt("count", CaptureBolt(), count).fields_grouping("numbers", "key")
    if tasks:
        declarer.set_num_tasks(tasks)
    builder.set_bolt("show", CaptureBolt()).global_grouping("numbers")
    values = {"delivery": delivery, "delivery.state_dir": root, **settings}
    return builder.build("t", Settings().with_values(values))


def claimed(topology):
    """What a replacement does when the new form takes the state directory over."""
    state = StateDirectory(make_plan(topology), topology)
    state.recover()
    return state


def numbers(topology):
    return {id: (node.parallelism, node.tasks) for id, node in topology.nodes.items()}


def test_a_start_begins_with_what_was_chosen(root):
    assert numbers(as_left(program(root))) == numbers(program(root)), "nothing is stored yet"
    claimed(program(root))
    claimed(program(root).scaled({"count": 4}))
    left = as_left(program(root))
    assert numbers(left)["count"] == (4, 4)
    assert scaled_bolts(left) == {"count": ScaledBolt(1, 1, 4)}
    assert kept_texts(left) == {
        "count": "begins with parallelism 4, which was chosen while it ran; its program declares 1"
    }
    claimed(left)
    assert numbers(as_left(program(root)))["count"] == (4, 4), "the next driver has it from this one"


def test_it_is_in_every_later_epoch(root):
    topology = program(root, **{"delivery.epoch_interval": 0.5}).scaled({"count": 2})
    runner = LocalRunner(topology, folder=root)
    runner.run(2.0)
    newest = manifests.newest(StateStore(root).child("t"))
    assert newest.epoch >= 2
    assert newest.scaled == {"count": ScaledBolt(1, 1, 2)}


def test_scaling_back_leaves_nothing_to_keep(root):
    claimed(program(root).scaled({"count": 4}))
    back = as_left(program(root)).scaled({"count": 1})
    assert scaled_bolts(back) == {}
    claimed(back)
    assert numbers(as_left(program(root)))["count"] == (1, 1)


@pytest.mark.parametrize("changed", [{"count": 3}, {"tasks": 2}])
def test_a_changed_program_takes_effect(root, changed):
    claimed(program(root).scaled({"count": 4}))
    new = program(root, **changed)
    assert numbers(as_left(new)) == numbers(new)


def test_the_setting_and_a_fresh_start_return_to_the_program(root):
    claimed(program(root).scaled({"count": 4}))
    assert numbers(as_left(program(root, **{"scaling.keep": False})))["count"] == (1, 1)
    fresh = program(root)
    StateDirectory(make_plan(fresh), fresh).clear()
    assert numbers(as_left(program(root)))["count"] == (1, 1)


def test_at_most_once_nothing_is_kept(root):
    claimed(program(root).scaled({"count": 4}))
    assert numbers(as_left(program(root, delivery="at_most_once")))["count"] == (1, 1)


def test_a_savepoint_has_it_too(root, tmp_path):
    topology = program(root, **{"delivery.epoch_interval": 0.5}).scaled({"count": 2})
    LocalRunner(topology, folder=root).run(2.0)
    savepoint = str(tmp_path / "savepoint")
    save_at_rest(StateStore(root).child("t"), StateStore(savepoint))
    elsewhere = program(str(tmp_path / "other"))
    assert numbers(as_left(elsewhere))["count"] == (1, 1)
    left = as_left(elsewhere, savepoint)
    assert numbers(left)["count"] == (2, 2)
    StateDirectory(make_plan(left), left).adopt(StateStore(savepoint))
    assert numbers(as_left(elsewhere))["count"] == (2, 2)


def test_bolts_that_are_gone_or_spouts_now_are_left_out(root):
    scaled = {"gone": ScaledBolt(1, 1, 4), "numbers": ScaledBolt(1, 1, 4), "count": ScaledBolt(1, 1, 2)}
    assert numbers(as_scaled(program(root), scaled)) == {"numbers": (1, 1), "count": (2, 2), "show": (1, 1)}


def test_several_tasks_for_an_executor(root):
    claimed(program(root, count=1, tasks=2).scaled({"count": 3}))
    assert numbers(as_left(program(root, count=1, tasks=2)))["count"] == (3, 6)


def test_the_declared_form_of_a_topology(root):
    topology = program(root)
    assert numbers(topology.scaled({"count": 4}).scaled({"count": 8}).as_declared()) == numbers(topology)


def test_a_store_that_does_not_answer_is_asked_again_and_a_damaged_one_is_left_to_the_start(root, monkeypatch):
    def unavailable(store):
        raise StateUnavailable("store", "it does not answer")

    topology = program(root)
    claimed(topology.scaled({"count": 4}))
    store = StateStore(root).child("t")
    name = manifests.history(store)[0].file
    store.write(name, store.read(name)[:-20])
    assert as_left(topology) is topology
    monkeypatch.setattr(manifests, "newest", unavailable)
    with pytest.raises(StateUnavailable):
        as_left(topology)


PROGRAM = """
from penstock import Settings, TopologyBuilder
from penstock.testing import CaptureBolt
from tests.consistency.components import Numbers

builder = TopologyBuilder()
builder.set_spout("numbers", Numbers(10))
builder.set_bolt("count", CaptureBolt()).fields_grouping("numbers", "key")
values = {"delivery": "at_least_once", "delivery.state_dir": ROOT}
topology = builder.build("t", Settings().with_values(values))
"""


def test_plan_shows_it(root, tmp_path, capsys):
    claimed(program(root).scaled({"count": 4}))
    file = tmp_path / "kept.py"
    file.write_text(f"ROOT = {root!r}\n{PROGRAM}")
    assert main(["plan", str(file), "--format", "text"]) == 0
    out = capsys.readouterr().out
    assert "count            begins with parallelism 4, which was chosen while it ran" in out
    file.write_text(f"ROOT = {root + uuid.uuid4().hex!r}\n{PROGRAM}")
    assert main(["plan", str(file), "--format", "text"]) == 0
    assert "kept" not in capsys.readouterr().out


def test_declared_numbers_do_not_make_topologies_differ(root):
    node = program(root).nodes["count"]
    assert replace(node, declared=(2, 2)) == node
