"""State directories that another user can change are neither read nor written, and links are not followed."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.driver.lease_thread import Lease
from penstock.driver.load_store import SQLite, open_store
from penstock.errors import StateError
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.queues import QueueUnavailable
from penstock.replay.dead_letters import DiskDeadLetterStore, drop
from penstock.replay.embedded import EmbeddedStore
from penstock.replay.records import ReplayRecord
from penstock.state.store import StateStore
from penstock.storage.segments import SegmentLog, replace_file
from penstock.topology.components import Context

COMMANDS = (
    ["dlq", "list", "--topology", "shop"],
    ["dlq", "drop", "--all", "--topology", "shop"],
    ["dlq", "send-back", "--all", "--topology", "shop"],
    ["drain", "shop"],
    ["savepoint", "shop", "copy", "--at-rest"],
)
LINK = "It is a symbolic link, which is not followed"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with a dead letter of topology 'shop'."""
    monkeypatch.chdir(tmp_path)  # a savepoint would be written here
    folder = tmp_path / "state" / "shop" / "tasks" / "lines-0"
    queues = EmbeddedStore().open(Context("shop", "lines", 1, 0, {"lines": (1,)}, folder=str(folder)))
    queues.dead.add([ReplayRecord((1,), 5, "boom", "split", 1.0)])
    queues.close()
    return tmp_path / "state"


def as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the files of the test seem to belong to another user."""
    user = os.geteuid() + 4242
    monkeypatch.setattr(os, "geteuid", lambda: user)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(each): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


# ---- whose folder it is


@pytest.mark.parametrize("level", ["", "shop"], ids=["state_dir", "topology"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_commands_refuse_a_folder_that_every_user_may_write_to(
    state: Path, level: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (state / level).chmod(0o777)
    before = contents(state)
    assert main([*command, "--state-dir", str(state)]) != 0
    assert f"state directory {state / level}: every user may write to it" in capsys.readouterr().err
    assert contents(state) == before


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_commands_refuse_a_folder_of_another_user(
    state: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(state)
    as_another_user(monkeypatch)
    assert main([*command, "--state-dir", str(state)]) != 0
    assert "and this process runs as user" in capsys.readouterr().err
    assert contents(state) == before


def test_dead_letters_of_a_folder_beside_the_topologys_are_checked_too(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "shop").rename(state / "other")  # the manifest contains the name of its topology
    (state / "other" / "tasks").chmod(0o777)
    assert main(["dlq", "list", "--topology", "shop", "--state-dir", str(state)]) != 0
    assert f"{state}/other/tasks: every user may write to it" in capsys.readouterr().err


def test_a_topologys_folder_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    """Also if the folder does not exist yet, because others could create it first."""
    above = tmp_path / "open"
    above.mkdir()
    above.chmod(0o777)
    store = StateStore(str(above)).child("t")
    for each in (store, pickle.loads(pickle.dumps(store)), StateStore(str(tmp_path)).child("open/t")):
        with pytest.raises(StateError, match=rf"state directory {above}: every user may write to it"):
            each.check_owner()
    with pytest.raises(StateError, match="every user may write to it"):
        Lease(store, "t").take()
    assert list(above.iterdir()) == []
    above.chmod(0o1777)  # like the temporary folder, where no other user can replace its content
    store.check_owner()
    above.chmod(0o755)
    store.check_owner()


def test_a_link_that_another_user_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat
    (tmp_path / "mine").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    store = StateStore(str(tmp_path))
    store.child("t").check_owner()

    def of_another(path: str) -> os.stat_result:
        seen = list(real(path))
        if stat.S_ISLNK(seen[0]):
            seen[4] = os.geteuid() + 1
        return os.stat_result(seen)

    monkeypatch.setattr("penstock.state.store.os.lstat", of_another)
    for name in ("t", "dangling"):
        with pytest.raises(StateError, match="and this process runs as user"):
            store.child(name).check_owner()


def test_the_monitors_database_is_not_put_into_a_folder_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StateError, match="every user may write to it"):
        open_store("sqlite", str(tmp_path), 100.0)
    assert list(tmp_path.iterdir()) == []


# ---- links in place of files


def _segment(folder: Path) -> Callable[[], object]:
    log = SegmentLog(folder / "log")
    log.append([b"one"])
    log.close()
    return lambda: SegmentLog(folder / "log").append([b"two"])


def _reader(folder: Path) -> Callable[[], object]:
    _segment(folder)
    return lambda: SegmentLog(folder / "log").reader(1).read(10)


def _dead_letters(folder: Path) -> Callable[[], object]:
    dead = DiskDeadLetterStore(folder / "dead")
    return lambda: drop(dead, [0])


def _queue(folder: Path) -> Callable[[], object]:
    client = EmbeddedQueue().open("t/c", str(folder))
    client.put([b"entry"], "w", client.register("w"))
    return lambda: client.register("w")


def _position(folder: Path) -> Callable[[], object]:
    _queue(folder)
    client = EmbeddedQueue().open("t/c", str(folder))
    client.read(1)
    return lambda: client.release(0)


def _owner(folder: Path) -> Callable[[], object]:
    context = Context("t", "c", 1, 0, {"c": (1,)}, folder=str(folder))
    EmbeddedStore().open(context).close()
    return lambda: EmbeddedStore().open(context)


def _database(folder: Path) -> Callable[[], object]:
    folder.mkdir()
    return lambda: SQLite(str(folder / "load.sqlite")).run([("CREATE TABLE t (x)", None)])


@pytest.mark.parametrize(
    ("make", "file"),
    [
        (_segment, "log/lock"),
        (_segment, f"log/{1:020d}.seg"),
        (_reader, f"log/{1:020d}.seg"),
        (_dead_letters, "dead/removal.lock"),
        (_queue, "queue-t%2Fc/incarnations.lock"),
        (_position, "queue-t%2Fc/position"),
        (_owner, "replay/owner"),
        (_database, "load.sqlite"),
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["of a file", "of nothing"])
def test_a_link_in_place_of_a_file_is_not_followed(
    tmp_path: Path, make: Callable[[Path], Callable[[], object]], file: str, there: bool
) -> None:
    victim = tmp_path / "victim"
    use = make(tmp_path / "state")
    path = tmp_path / "state" / file
    before = path.read_bytes() if path.name == "position" else b"precious" * 20
    if there:
        victim.write_bytes(before)
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    with pytest.raises((OSError, QueueUnavailable), match=LINK):
        use()
    assert [each.read_bytes() for each in tmp_path.glob("victim")] == ([before] if there else [])


def test_a_file_is_replaced_though_links_wait_for_it(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "position"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    (tmp_path / "position.new").symlink_to(victim)
    replace_file(path, b"1")
    assert (path.read_bytes(), path.is_symlink(), path.stat().st_mode & 0o777) == (b"1", False, 0o600)
    assert victim.read_bytes() == b"precious"


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "position" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="position"):
        replace_file(tmp_path / "position", b"1")
    assert [each.name for each in tmp_path.iterdir()] == ["position"]


def test_dlq_says_which_file_is_a_link(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = state / "shop" / "tasks" / "lines-0" / "replay" / "dead"
    (dead / "removal.lock").symlink_to(tmp_path / "made")
    assert main(["dlq", "drop", "--all", "--topology", "shop", "--state-dir", str(state)]) == 2
    said = capsys.readouterr().err
    assert f"{LINK}: '{dead}/removal.lock'). Check that file, then run the command again." in said
    assert not (tmp_path / "made").exists()
