"""Two drivers and failed starts: the state directory keeps a consistent history, and the newest run owns it."""

import contextlib
import itertools
import shutil
import uuid
from functools import partial

import pytest

from penstock.driver.recovery import StateDirectory
from penstock.driver.savepoint_requests import save_at_rest
from penstock.errors import PenstockError, StateError, StateRemoved, Superseded
from penstock.plan.planner import make_plan
from penstock.state import manifest as manifests
from penstock.state.store import StateStore
from penstock.testing import LocalRunner
from tests.unit.test_epochs import INTERVAL, committed, counts, directory, small


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return StateStore(str(tmp_path / "state") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def flip(store, name):
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 0xFF
    store.write(name, bytes(data))


def saved(store, tmp_path):
    """A savepoint of the content of the store."""
    savepoint = StateStore(str(tmp_path / "savepoint"))
    save_at_rest(store.child("t"), savepoint)
    return savepoint


def test_a_damaged_savepoint_leaves_the_own_state(store, tmp_path):
    before = committed(store, count=10_000).commits.committed
    savepoint = saved(store, tmp_path)
    flip(savepoint, savepoint.list("snapshots/")[-1])
    with pytest.raises(StateError, match="their signature differs"):
        directory(store).adopt(savepoint)
    again = LocalRunner(small(count=10_000), folder=store.url)
    assert again.commits.committed == before
    assert counts(again)


def test_a_topology_does_not_begin_from_its_own_directory(store):
    before = committed(store, count=10_000).commits.committed
    with pytest.raises(StateError, match="own state directory"):
        directory(store).adopt(store.child("t"))
    assert LocalRunner(small(count=10_000), folder=store.url).commits.committed == before


def test_a_driver_that_was_stopped_and_continues_does_not_take_the_state_back(store):
    committed(store)
    stopped, successor = directory(store), directory(store)
    stopped.recover()
    successor.recover()
    with pytest.raises(PenstockError, match="another driver has taken over"):
        stopped.recover()
    assert manifests.newest(store.child("t")).epoch == successor.epoch


# ---- crashes between any two steps -------------------------------------------------------------------------

CHANGES = ("write", "create", "remove")
CALLS = (*CHANGES, "list", "read")


class Crash(BaseException):
    """Simulates the death of the process."""


class Calls:
    """Runs an action at one store call, counted from 0, among the calls inside ``with``."""

    def __init__(self, monkeypatch, verbs, at, happens, after=False):
        self._patch, self._verbs, self._at = monkeypatch, verbs, at
        self._happens, self._after = happens, after
        self.count, self._inside = 0, False
        self.reached = False

    def __enter__(self):
        for verb in self._verbs:
            self._patch.setattr(StateStore, verb, self._wrapped(getattr(StateStore, verb)))
        return self

    def __exit__(self, *error):
        self._patch.undo()

    def _wrapped(self, real):
        def call(store, *args):
            if self._inside:
                return real(store, *args)
            number, self.count = self.count, self.count + 1
            result = real(store, *args) if self._after else None
            if number == self._at:
                self.reached = self._inside = True
                try:
                    self.result = self._happens()
                finally:
                    self._inside = False
            return result if self._after else real(store, *args)

        return call


def crash():
    raise Crash


def crashes(monkeypatch, prepare, act):
    """Let ``act`` die before and after each change it makes to a store. Yields the store after each crash, and
    finally after a complete run."""
    for after in (False, True):
        at, alive = 0, False
        while not alive:
            subject = prepare()
            with Calls(monkeypatch, CHANGES, at, crash, after) as calls, contextlib.suppress(Crash):
                act(subject)
            alive, at = not calls.reached, at + 1
            yield subject, alive
        assert at > 3, "there were steps to die between"


def test_a_crash_while_beginning_from_a_savepoint_leaves_the_one_state_or_the_other(tmp_path, monkeypatch):
    origin = StateStore(str(tmp_path / "origin"))
    committed(origin, epochs=2, count=10_000)
    savepoint = saved(origin, tmp_path)
    saved_counts = counts(LocalRunner(small(count=10_000), folder=origin.url))
    own = StateStore(str(tmp_path / "own"))
    committed(own, epochs=5, count=10_000)
    own_counts = counts(LocalRunner(small(count=10_000), folder=own.url))
    assert own_counts != saved_counts
    numbers = itertools.count()

    def prepare():
        copied = str(tmp_path / f"copy-{next(numbers)}")
        shutil.copytree(own.url, copied)
        return StateStore(copied)

    seen = set()
    for store, done in crashes(monkeypatch, prepare, lambda store: directory(store).adopt(savepoint)):
        runner = LocalRunner(small(count=10_000), folder=store.url)
        found = (runner.commits.committed, counts(runner))
        assert found in [(5, own_counts), (2, saved_counts)]
        assert not done or found[0] == 2
        seen.add(found[0])
        files = set(manifests.newest(store.child("t")).files)
        assert files <= set(store.child("t").list("snapshots/"))
        runner.run(INTERVAL)
        assert runner.commit() > found[0]
    assert seen == {2, 5}


@pytest.mark.parametrize("what", ["clear", "recover", "fall_back"])
def test_a_crash_while_a_start_takes_over_leaves_the_one_state_or_the_other(what, tmp_path, monkeypatch):
    own = StateStore(str(tmp_path / "own"))
    committed(own, epochs=5, count=10_000)
    numbers = itertools.count()

    def prepare():
        copied = str(tmp_path / f"copy-{next(numbers)}")
        shutil.copytree(own.url, copied)
        return StateStore(copied)

    def act(store):
        found = directory(store)
        if what == "fall_back":
            found.inspect()
            found.owner.claim(found.store)
            found.fall_back("its files are broken.")
        else:
            getattr(found, what)()

    after = {"clear": 0, "recover": 5, "fall_back": 4}[what]
    for store, done in crashes(monkeypatch, prepare, act):
        runner = LocalRunner(small(count=10_000), folder=store.url)
        assert runner.commits.committed in ({after} if done else {5, after})
        assert bool(counts(runner)) == (runner.commits.committed > 0)
        runner.run(INTERVAL)
        runner.commit()


def test_a_crash_while_a_savepoint_is_replaced_leaves_one_that_is_whole(tmp_path, monkeypatch):
    origin = StateStore(str(tmp_path / "origin"))
    committed(origin, epochs=2, count=10_000)
    first = saved(origin, tmp_path)
    committed(origin, epochs=4, count=10_000)
    numbers = itertools.count()

    def prepare():
        copied = str(tmp_path / f"copy-{next(numbers)}")
        shutil.copytree(first.url, copied)
        return StateStore(copied)

    for savepoint, done in crashes(monkeypatch, prepare, lambda target: save_at_rest(origin.child("t"), target)):
        fresh = StateStore(str(tmp_path / f"fresh-{next(numbers)}"))
        assert directory(fresh).adopt(savepoint) in ({4} if done else {2, 4})


# ---- two drivers -------------------------------------------------------------------------------------------


def take_over(store):
    """Another driver starts, processes some tuples and commits."""
    runner = LocalRunner(small(count=10_000), folder=store.url)
    begun = runner.commits.committed
    runner.run(INTERVAL / 4)
    runner.commit()
    runner.run(INTERVAL / 4)
    runner.deactivate()  # so that its counts are those of the last epoch
    runner.commit()
    return begun, runner


@pytest.mark.parametrize("after", [False, True])
def test_a_driver_that_stalls_anywhere_in_a_commit_leaves_its_successor_alone(monkeypatch, after):
    """At each store call in turn, another driver takes over and commits; then the first one continues."""
    at, superseded, finished = 0, 0, 0
    while True:
        own = StateStore(f"memory://{uuid.uuid4().hex}")
        old = committed(own, epochs=3, count=10_000)
        old.run(INTERVAL / 4)
        with Calls(monkeypatch, CALLS, at, partial(take_over, own), after) as calls:
            try:
                old.commit()
                finished += 1
            except Superseded:
                superseded += 1
        if not calls.reached:
            break
        begun, runner = calls.result
        assert begun >= old.commits.published, "what the first driver published is in the state of the second"
        again = LocalRunner(small(count=10_000), folder=own.url)
        assert again.commits.committed == runner.commits.committed
        assert counts(again) == counts(runner)
        with pytest.raises(Superseded):
            old.commit()
        at += 1
    assert superseded > 3
    assert finished > 3
    assert at > 15


@pytest.mark.parametrize("after", [False, True])
def test_a_start_that_stalls_anywhere_leaves_its_successor_alone(monkeypatch, after):
    at = 0
    while True:
        own = StateStore(f"memory://{uuid.uuid4().hex}")
        committed(own, epochs=3, count=10_000)
        late = directory(own)
        late.inspect()
        late.owner.claim(late.store)
        with (
            Calls(monkeypatch, CALLS, at, partial(take_over, own), after) as calls,
            contextlib.suppress(Superseded),
        ):
            late.recover()
        if not calls.reached:
            break
        begun, runner = calls.result
        assert begun == 3
        again = LocalRunner(small(count=10_000), folder=own.url)
        assert again.commits.committed == runner.commits.committed
        assert counts(again) == counts(runner)
        with pytest.raises(Superseded):
            late.recover()
        at += 1
    assert at > 10


def test_a_late_manifest_does_not_count_even_if_the_successor_committed_nothing(store, monkeypatch):
    """What the sinks of the first driver had prepared was discarded when the second driver opened."""
    old = committed(store, epochs=3, count=10_000)
    begun = []

    def take_over_and_die():
        found = directory(store)
        found.recover()
        begun.append(found.epoch)

    create = StateStore.create

    def stalls(self, name, data):
        if name.startswith("manifests/"):
            monkeypatch.undo()
            take_over_and_die()
        return create(self, name, data)

    monkeypatch.setattr(StateStore, "create", stalls)
    with pytest.raises(Superseded):
        old.commit()
    assert begun == [3]
    assert len([name for name in store.child("t").list("manifests/") if "epoch-000000000004" in name]) == 1
    third = directory(store)
    third.recover()
    assert third.epoch == 3


def test_a_commit_that_stalls_until_a_later_start_of_the_same_driver_has_begun_publishes_nothing(
    store, monkeypatch
):
    """A replacement waits ten seconds for commits of the old topology, not forever. It starts without the epoch
    that stalls and repeats it, so sinks of the old topology must not publish it."""
    old = committed(store, epochs=3, count=10_000)
    topology = small(count=10_000)
    new = StateDirectory(make_plan(topology), topology, store.url, old._state.owner)
    create = StateStore.create

    def stalls(self, name, data):
        if name.startswith("manifests/"):
            monkeypatch.undo()
            new.recover()
        return create(self, name, data)

    monkeypatch.setattr(StateStore, "create", stalls)
    with pytest.raises(
        Superseded,
        match=r"a later query run of this driver owns the state directory \(generation 2, this one has 1\)",
    ):
        old.commit()
    assert new.epoch == old.commits.committed == old.commits.published == 3


def test_a_replacement_and_the_form_it_replaces_are_one_driver(store):
    committed(store)
    old = directory(store)
    old.recover()
    topology = small(tasks=3)
    new = StateDirectory(make_plan(topology), topology, store.url, old.owner)
    new.recover()
    old.recover()  # the new topology does not run, so the old one is started again
    assert old.generation == new.generation == 4


def test_a_removed_state_directory_is_not_begun_anew_in_silence(tmp_path):
    store = StateStore(str(tmp_path / "state"))
    runner = committed(store)
    found = directory(store)
    found.recover()
    shutil.rmtree(store.url)
    with pytest.raises(StateRemoved, match="was removed"):
        runner.commit()
    with pytest.raises(StateRemoved, match="was removed"):
        found.recover()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("form", ["{}/", "file://{}", "{}/t", "{}/t/", "{}/t/snapshots", "{}/link", "{}/t/../t"])
def test_a_savepoint_is_apart_from_the_own_directory_however_it_is_written(tmp_path, form):
    store = StateStore(str(tmp_path / "state"))
    committed(store)
    (tmp_path / "state" / "link").symlink_to(tmp_path / "state" / "t")
    with pytest.raises(StateError, match=r"it overlaps with the topology's own state directory \(.* and .*\)\."):
        directory(store).adopt(StateStore(form.format(store.url)))
    assert manifests.newest(store.child("t")).epoch == 3
