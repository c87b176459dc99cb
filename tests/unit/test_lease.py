"""Whether the driver that owns a state directory is alive. A second start is refused exactly while it is."""

import contextlib
import os
import subprocess
import sys
import threading
import uuid

import pytest

from penstock.driver import lease_thread
from penstock.driver.lease_thread import Lease
from penstock.errors import AlreadyRunning, StateError, StateRemoved, StateUnavailable, Superseded
from penstock.state import lease as leases
from penstock.state.generations import GenerationRecord, Ownership, read_record
from penstock.state.lease import LEASE, LeaseHolder, Verdict, check_free, judge, process_started, this_process
from penstock.state.store import StateStore

ELSEWHERE = {"host": "there", "pid": 7, "boot": "other", "pids": "pid:[1]", "started": "5"}


@pytest.fixture
def store():
    return StateStore(f"memory://{uuid.uuid4().hex}")


class Clock:
    """Sleeps without waiting; ``each`` is called for every second that passes."""

    def __init__(self, each=lambda second: None):
        self.seconds, self._each = 0.0, each

    def __call__(self, seconds):
        self.seconds += seconds
        self._each(self.seconds)


def check(store, clock=None, holds=lambda token: True, said=None):
    check_free(store, "words", holds, (lambda text: None) if said is None else said.append, clock or Clock())


def test_an_ended_or_unknown_owner_leaves_the_directory_free(store):
    here = this_process()
    assert judge(None, here) is Verdict.FREE
    assert judge(GenerationRecord("x", {}), here) is Verdict.FREE, "a savepoint, or a local runner"
    assert judge(GenerationRecord("x", here, ended=True), here) is Verdict.FREE
    check(store)


def test_a_live_process_of_this_machine_holds_it_and_a_dead_one_does_not():
    here = this_process()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    record = GenerationRecord("x", {**here, "pid": process.pid, "started": started})
    assert judge(record, here) is Verdict.HELD
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert judge(record, here) is Verdict.FREE, "it has ended, though its parent has not asked for its exit code"
    process.wait()
    process.stdin.close()
    assert judge(record, here) is Verdict.FREE


def test_another_process_with_the_same_number_does_not_hold_it():
    here = this_process()
    assert judge(GenerationRecord("x", {**here, "started": "1"}), here) is Verdict.FREE


def test_a_driver_of_this_process_holds_it_until_it_ends():
    here = this_process()
    record = GenerationRecord("x", here)
    assert judge(record, here, holds=lambda token: token == "x") is Verdict.HELD
    assert judge(record, here, holds=lambda token: False) is Verdict.FREE


@pytest.mark.parametrize("what", ["boot", "pids"])
def test_process_numbers_of_another_machine_or_container_say_nothing(what):
    here = this_process()
    assert judge(GenerationRecord("x", {**here, what: "other"}), here) is Verdict.WATCH


def test_an_owner_elsewhere_that_shows_no_life_is_dead_after_the_lease(store):
    Ownership("words", ELSEWHERE).claim(store)
    clock, said = Clock(), []
    check(store, clock, said=said)
    assert clock.seconds == LEASE
    assert said == [
        "topology 'words' was last run by process 7 on there, which did not release its state directory; "
        "waiting up to 15 s to see whether it is alive"
    ]


def test_an_owner_elsewhere_that_shows_life_is_alive(store):
    owner = Ownership("words", ELSEWHERE)
    owner.claim(store)
    clock = Clock(lambda second: second == 4.0 and owner.beat(store))
    message = (
        r"topology 'words': process 7 on there already runs it with the state directory memory:.*\. "
        r"End that driver with penstock kill, or replace it with --take-over"
    )
    with pytest.raises(AlreadyRunning, match=message):
        check(store, clock)
    assert clock.seconds == 4.0


def test_an_owner_elsewhere_that_starts_again_meanwhile_is_alive(store):
    owner = Ownership("words", ELSEWHERE)
    owner.claim(store)
    with pytest.raises(AlreadyRunning):
        check(store, Clock(lambda second: owner.claim(store)))


def test_an_owner_elsewhere_that_ends_meanwhile_need_not_be_waited_for(store):
    owner = Ownership("words", ELSEWHERE)
    owner.claim(store)
    clock = Clock(lambda second: second == 2.0 and owner.release(store))
    check(store, clock)
    assert clock.seconds == 2.0


def test_half_a_record_is_watched(store):
    store.write("generations/00000001", b'{"tok')
    clock = Clock()
    check(store, clock)
    assert clock.seconds == LEASE


# ---- the thread --------------------------------------------------------------------------------------------


def test_a_name_that_runs_in_this_process_is_refused_until_it_ends(store):
    running = Lease(store, "words")
    running.take()
    second = Lease(store, "words")
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()} on"):
        second.take()
    running.owner.check(store)
    running.release()
    second.take()
    second.release()
    assert read_record(store, second.owner.generation).ended


def test_taking_over_claims_nothing_before_the_new_driver_is_ready(store):
    running, second = Lease(store, "words"), Lease(store, "words")
    running.take()
    second.take(take_over=True)
    running.owner.check(store)
    second.owner.claim(store)
    with pytest.raises(Superseded):
        running.owner.check(store)
    second.release()
    running.release()
    assert read_record(store, second.owner.generation).ended


def wait_for_error(lease):
    lease._thread.join(30)
    assert not lease._thread.is_alive()
    return lease.error


def test_who_was_taken_over_finds_out_without_a_commit(store):
    running = Lease(store, "words", beat=0.001)
    running.take()
    other = Ownership("words", ELSEWHERE)
    other.claim(store)
    error = wait_for_error(running)
    assert isinstance(error, Superseded)
    assert "another driver has taken over" in str(error)
    running.release()
    assert not read_record(store, other.generation).ended, "a loser changes nothing"


def test_a_removed_directory_is_found_out_without_a_commit(tmp_path):
    store = StateStore(str(tmp_path / "state"))
    running = Lease(store, "words", beat=0.001)
    running.take()
    for name in store.list("generations/"):
        store.remove(name)
    error = wait_for_error(running)
    # A heartbeat may be in progress while the file is removed; the next one then finds another generation.
    assert isinstance(error, StateRemoved) or error is None
    running.release()


def test_a_store_that_does_not_answer_is_no_loss(store, monkeypatch, caplog):
    running = Lease(store, "words", beat=0.001)
    calls = []

    def unavailable(self, store):
        calls.append(store)
        if len(calls) > 3:
            running._ended.set()
        raise StateUnavailable("store", "it does not answer")

    monkeypatch.setattr(Ownership, "beat", unavailable)
    running.take()
    assert wait_for_error(running) is None
    monkeypatch.undo()
    running.release()
    assert "the lease could not be renewed" in caplog.text


@pytest.mark.parametrize("hangs", ["during a renewal", "at the end", "in a commit"])
def test_a_store_that_hangs_does_not_keep_the_driver_from_ending(store, monkeypatch, caplog, hangs):
    monkeypatch.setattr(lease_thread, "_JOIN_TIMEOUT", 0.1)
    running = Lease(store, "words", beat=0.001 if hangs == "during a renewal" else 3600.0)
    running.take()
    reached, answers = threading.Event(), threading.Event()

    def hang(*_):
        reached.set()
        answers.wait(30)
        raise StateUnavailable("store", "it does not answer")

    monkeypatch.setattr(StateStore, "list", hang)
    if hangs == "in a commit":  # the thread of the commits waits for the store and holds the owner's lock
        threading.Thread(target=lambda: suppressed(running.owner.check, store), daemon=True).start()
    if hangs != "at the end":
        assert reached.wait(30)
    ended = threading.Thread(target=running.release, daemon=True)
    ended.start()
    ended.join(20)
    try:
        assert not ended.is_alive()
        assert f"the state store {store.url} does not answer, so the lease is not released" in caplog.text
        assert "It expires by itself after 15 s." in caplog.text
    finally:
        monkeypatch.undo()
        answers.set()
        running._thread.join(30)


def suppressed(action, *arguments):
    with contextlib.suppress(Exception):
        action(*arguments)


def test_a_store_that_may_not_create_exclusively_is_named_at_the_start(store, caplog, tmp_path):
    running = Lease(store, "words")
    running.take()
    running.release()
    assert f"state store {store.url} may not support exclusive file creation" in caplog.text
    caplog.clear()
    local = Lease(StateStore(str(tmp_path)), "words")
    local.take()
    local.release()
    assert caplog.text == ""


def test_a_directory_of_another_user_is_refused_at_the_start(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    folder = tmp_path / "state"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(StateError, match=r"it belongs to user 12345, and"):
        Lease(StateStore(str(folder)), "words").take()
    assert list(folder.iterdir()) == []


def test_the_lease_outlasts_some_lost_signs_of_life():
    assert leases.LEASE >= 4 * leases.BEAT


class HalfWritten(StateStore):
    """Like sftp: while a file is written, others read an empty file. ``between`` is called at that moment."""

    between = staticmethod(lambda: None)

    def write(self, name, data):
        super().write(name, b"")
        self.between()
        super().write(name, data)


def test_a_sign_of_life_that_is_being_written_is_not_taken_for_another_driver():
    store, owner, errors = HalfWritten(f"memory://{uuid.uuid4().hex}"), Ownership("words", this_process()), []
    owner.claim(store)

    def commit():
        try:
            owner.check(store)
        except StateError as error:
            errors.append(error)

    commits = threading.Thread(target=commit)

    def between():
        commits.start()
        commits.join(0.2)

    store.between = between
    owner.beat(store)
    commits.join()
    assert errors == []


def test_a_sign_of_life_that_was_cut_off_is_not_taken_for_another_driver():
    store, owner = HalfWritten(f"memory://{uuid.uuid4().hex}"), Ownership("words", this_process())
    owner.claim(store)

    def cut_off():
        raise StateUnavailable("store", "it does not answer")

    store.between = cut_off
    with pytest.raises(StateUnavailable):
        owner.beat(store)
    del store.between
    owner.check(store)
    owner.beat(store)
    assert read_record(store, owner.generation).token == owner.token
    other = Ownership("words", this_process())
    other.claim(store)
    with pytest.raises(Superseded):
        owner.check(store)


def test_an_owner_elsewhere_lives_as_long_as_it_gives_signs_of_life(store):
    elsewhere = Ownership("words", ELSEWHERE)
    elsewhere.claim(store)
    now = 100.0
    owner = LeaseHolder(store, lambda: now)
    assert owner.may_live()
    now += LEASE - 1
    assert owner.may_live()
    elsewhere.beat(store)
    now += LEASE - 1
    assert owner.may_live()
    now += LEASE
    assert not owner.may_live()
    elsewhere.beat(store)
    assert owner.may_live()
    elsewhere.release(store)
    assert not owner.may_live()
