"""What a query run reports about a state directory that was written with another number of tasks."""

import uuid

import fsspec
import pytest

from penstock import BasicBolt, Delivery, Settings, Spout, StateError, TopologyBuilder, TransactionalSink
from penstock.driver.commits import read_published, write_published
from penstock.driver.recovery import StateDirectory
from penstock.plan.owners import OwnerRule
from penstock.plan.planner import make_plan
from penstock.protocol.task_states import InheritedTask, SavedTask
from penstock.state import manifest as manifests
from penstock.state.generations import Ownership
from penstock.state.manifest import Manifest, TaskEntry
from penstock.state.snapshots import SnapshotPart
from penstock.state.store import StateStore


class Source(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("word")

    def open(self, conf, context, collector):
        pass

    def next_tuple(self):
        pass


class Keeps(BasicBolt):
    def execute(self, tup, collector):
        pass


class Sink(TransactionalSink):
    def recover(self, tokens):
        pass

    def write(self, batch, source):
        pass

    def prepare_commit(self, epoch):
        pass

    def commit(self, token):
        pass


def topology(spouts=2, bolts=2, sinks=2, group=lambda bolt: bolt.fields_grouping("s", "word"), without=()):
    builder = TopologyBuilder()
    builder.set_spout("s", Source(), spouts)
    if "bolt" not in without:
        group(builder.set_bolt("bolt", Keeps(), bolts))
    if "sink" not in without:
        builder.set_bolt("sink", Sink(), sinks).shuffle_grouping("s")
    return builder.build("t", Settings(delivery=Delivery("exactly_once")))


@pytest.fixture
def store():
    name = f"memory://{uuid.uuid4().hex}"
    yield StateStore(name)
    files = fsspec.filesystem("memory")
    if files.exists(name):
        files.rm(name, recursive=True)


def part(number):
    return SnapshotPart(f"snapshots/epoch-{number}.bin", 0, 10, "07", "full", 1)


def write(store, epoch=5, tokens=("token",), kept=("s", "bolt")):
    parts = {f"{component}/{i}": TaskEntry({"state": [part(i)]}) for component in kept for i in range(2)}
    sinks = {f"sink/{i}": TaskEntry({}, list(tokens)) for i in range(2)}
    numbers = {"s": 2, "bolt": 2, "sink": 2}
    own = store.child("t")
    before = manifests.newest(own)
    base = (0, 0) if before is None else (before.generation, before.epoch)
    generation = Ownership("t").claim(own)
    made = Manifest("t", epoch, "exactly_once", generation, base, 0.0, parts | sinks, numbers)
    made.write(own)
    return made


def publish(store, epoch):
    write_published(store.child("t"), manifests.newest(store.child("t")).generation, epoch)


def published(store):
    return read_published(store.child("t"), manifests.newest(store.child("t")).generation)


def directory(store, **shape):
    made = topology(**shape)
    return StateDirectory(make_plan(made), made, store.url)


def recovered(store, published=0, **shape):
    found = directory(store, **shape)
    found.recover(published)
    return found.tasks()


def test_the_same_numbers_of_tasks_begin_with_their_own(store):
    write(store)
    tasks = recovered(store)
    assert set(tasks) == {f"{component}/{i}" for component in ("s", "bolt", "sink") for i in range(2)}
    assert tasks["bolt/1"] == SavedTask({"state": [part(1)]})
    assert tasks["sink/0"] == SavedTask({}, '["token"]')


def test_only_what_a_task_needs_of_the_tasks_before(store):
    write(store)
    tasks = recovered(store, bolts=4)
    assert [sorted(tasks[f"bolt/{index}"].sources) for index in range(4)] == [[0], [1], [0], [1]]
    assert tasks["bolt/3"] == InheritedTask(2, 4, OwnerRule(fields=1), {1: {"state": [part(1)]}})
    assert isinstance(tasks["s/0"], SavedTask)
    assert sorted(recovered(store, bolts=3)["bolt/2"].sources) == [0, 1]
    assert sorted(recovered(store, bolts=1)["bolt/0"].sources) == [0, 1]


def test_the_sources_of_other_groupings(store):
    write(store)
    shuffled = recovered(store, bolts=3, group=lambda bolt: bolt.shuffle_grouping("s"))
    assert [sorted(shuffled[f"bolt/{index}"].sources) for index in range(3)] == [[0], [1], []]
    first = recovered(store, bolts=3, group=lambda bolt: bolt.global_grouping("s"))
    assert [sorted(first[f"bolt/{index}"].sources) for index in range(3)] == [[0, 1], [], []]


def test_without_state_any_number_of_tasks_will_do(store):
    write(store, tokens=(), kept=("s",))
    tasks = recovered(store, bolts=5, sinks=1, group=lambda bolt: bolt.all_grouping("s"))
    assert tasks["bolt/4"] == tasks["sink/0"] == SavedTask({})
    write(store, tokens=(), kept=("bolt",))
    assert recovered(store, spouts=3)["s/2"] == SavedTask({})


def test_a_component_with_state_that_is_gone_is_refused(store):
    write(store)
    rule = (
        r"topology 't', component 'bolt': memory:.* holds state of its 2 tasks, but .* no such component.*--fresh"
    )
    with pytest.raises(StateError, match=rule):
        recovered(store, without=["bolt"])


def test_a_spout_with_state_keeps_its_tasks(store):
    write(store)
    with pytest.raises(
        StateError,
        match=r"component 's': it has 3 tasks now, but .* holds state of 2 tasks, and it is a spout.*--fresh",
    ):
        recovered(store, spouts=3)


@pytest.mark.parametrize("now", [1, 3])
def test_what_a_sink_prepared_is_published_before_its_number_changes(store, now):
    write(store)
    rule = r"component 'sink': .* output .* 2 tasks prepared in epoch 5 .*Start it once more with 2 tasks .*Ctrl-C"
    with pytest.raises(StateError, match=rule):
        recovered(store, sinks=now)
    with pytest.raises(StateError, match=rule):
        recovered(store, sinks=now, published=4)
    assert recovered(store, sinks=now, published=5)["sink/0"] == SavedTask({})
    assert recovered(store, published=5)["sink/0"].tokens == "[]", "of all sinks"


def test_what_is_written_down_as_published_will_do(store):
    write(store)
    publish(store, 5)
    assert recovered(store, sinks=3)["sink/0"].tokens == "[]"
    assert recovered(store)["sink/0"].tokens == '["token"]', "of no use, and no harm"
    assert "sink/0" not in recovered(store, without=["sink"])


def test_what_was_published_before_a_fresh_start_says_nothing_of_what_comes(store):
    write(store)
    publish(store, 5)
    directory(store).clear()
    assert published(store) == 0
    write(store, epoch=2)
    with pytest.raises(StateError, match="prepared in epoch 2"):
        recovered(store, sinks=3)


def test_nor_does_what_was_published_before_a_fall_back(store):
    write(store, epoch=4)
    write(store, epoch=5)
    publish(store, 5)
    found = directory(store)
    found.recover()
    found.fall_back("broken.")
    assert published(store) == 4


@pytest.mark.parametrize("name", ["all", "direct"])
def test_a_grouping_without_owners_keeps_the_tasks(store, name):
    class Both(Source):
        def declare_output_fields(self, declarer):
            declarer.declare("word", direct=name == "direct")

    def made(tasks):
        builder = TopologyBuilder()
        builder.set_spout("s", Both(), 2)
        getattr(builder.set_bolt("bolt", Keeps(), tasks), f"{name}_grouping")("s")
        found = builder.build("t", Settings())
        return StateDirectory(make_plan(found), found, store.url)

    write(store, tokens=())
    made(2).recover()
    reads = rf"it reads 's' by {name} grouping"
    rule = rf"component 'bolt': it has 3 tasks now, but .* of 2 tasks, and {reads}.*Keep 2 tasks"
    with pytest.raises(StateError, match=rule):
        made(3).recover()


def test_a_look_takes_nothing_over(store):
    write(store)
    owner = Ownership("t")
    owner.claim(store.child("t"))
    found = directory(store, bolts=4, sinks=3)
    assert (found.inspect(), found.epoch) == (None, 5)
    assert found.tasks()["bolt/3"].before == 2
    assert found.tasks()["sink/0"].tokens == "[]", "theirs who prepared it"
    owner.check(store.child("t"))
    with pytest.raises(StateError, match="is a spout"):
        directory(store, spouts=3).inspect()
    nothing = directory(StateStore(f"{store.url}/nothing"))
    nothing.inspect()
    assert nothing.tasks() == {}


def test_what_was_published_says_nothing_of_epochs_after_a_manifest_that_cannot_be_read(store):
    """The next epoch 5 has other rows than the published one, whose manifest is damaged."""
    write(store, epoch=4)
    write(store, epoch=5)
    (damaged,) = [name for name in store.child("t").list("manifests/") if "5" in name.rpartition("/")[2]]
    store.child("t").write(damaged, b"half a manif")
    publish(store, 5)
    found = directory(store)
    found.recover()
    assert found.epoch == 4
    assert published(store) == 4
