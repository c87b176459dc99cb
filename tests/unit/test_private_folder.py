"""Files of other users never make commands connect to, signal or remove anything."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import private_folder
from penstock.cli.main import main
from penstock.cluster import manage, processes, record
from penstock.cluster.processes import Process
from penstock.cluster.record import ClusterRecord
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.driver.load_store import SQLite
from penstock.errors import EnvironmentFault
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.postgres import PostgresStore
from penstock.persist.spec import ProcessorSpec, save
from penstock.private_folder import PrivateFolder, make_folders, remove_private_tree, runtime_folder
from penstock.replay.embedded import EmbeddedStore
from penstock.replay.records import ReplayRecord
from penstock.topology.components import Context

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")


@pytest.fixture(autouse=True)
def shared_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Like a machine without folders for running processes: every user can write to the temporary folder."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(private_folder, "_SYSTEM", tmp_path / "no-run")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    log = logging.getLogger("penstock")
    monkeypatch.setattr(log, "handlers", log.handlers[:])  # commands add their own handlers
    return shared


def foreign(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def planted(owner: int, mode: int = 0o700) -> Path:
    """The folder of this user, created by another user beforehand."""
    place = discovery.folder()
    place.mkdir(mode=0o700)
    (place / "cluster").mkdir(mode=0o700)
    place.chmod(mode)
    os.chown(place, owner, owner)
    return place


@contextlib.contextmanager
def stranger() -> Iterator[socket.socket]:
    """A server to which nothing must connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        yield listener


def a_run(port: int) -> DriverEntry:
    return dataclasses.replace(DriverEntry.here("topology", ("127.0.0.1", port), bytes(32)))


def a_record(work: Path, **fields: object) -> ClusterRecord:
    names = {"tag": "ab12", "key": "0123456789abcdef", "secret": "s", "boot": record.boot(), "work": str(work)}
    offers = {"slots": 1, "memory": "1g", "host": "127.0.0.1", "port": 7077, "web_port": 1, "ready": True}
    return ClusterRecord(**{**names, **offers, **fields})


def put(place: Path, content: object) -> Path:
    path = place / "cluster" / "cluster.json"
    path.write_text(json.dumps(content))
    return path


# ---- where ---------------------------------------------------------------------------------------------


def test_the_folder_is_one_that_others_cannot_make_beforehand(tmp_path, monkeypatch, shared_temporary_folder):
    assert runtime_folder() == shared_temporary_folder / f"penstock-{os.getuid()}"
    own = tmp_path / "run" / "user" / str(os.getuid())
    own.mkdir(parents=True)
    monkeypatch.setattr(private_folder, "_SYSTEM", tmp_path / "run")
    assert runtime_folder() == own / "penstock"
    named = tmp_path / "named"
    named.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(named))
    assert runtime_folder() == named / "penstock"
    named.chmod(0o777)
    assert runtime_folder() == own / "penstock", "not one that everybody can write to"


@as_root
def test_root_does_not_take_the_runtime_folder_of_the_user_who_became_root(tmp_path, monkeypatch):
    users, system = tmp_path / "users", tmp_path / "run"
    users.mkdir(mode=0o700)
    system.mkdir()
    foreign(users)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(users))
    monkeypatch.setattr(private_folder, "_SYSTEM", system)
    assert runtime_folder() == system / "penstock"


# ---- runs ----------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("command", [["status", "topology"], ["kill", "topology"], ["list"]])
def test_a_strangers_coordinator_is_not_connected_to(command, capsys):
    with stranger() as listener:
        run = a_run(listener.getsockname()[1])
        place = planted(os.getuid())
        (place / run.file).write_text(json.dumps(dataclasses.asdict(run)))
        foreign(place)
        assert main(command) == 3
        with pytest.raises(TimeoutError):
            listener.accept()
    told = capsys.readouterr().err
    assert f"nobody else can read or write its content, but its owner is {NOBODY}" in told
    assert "XDG_RUNTIME_DIR" in told


@as_root
def test_a_file_of_a_stranger_in_our_folder_is_ignored_and_reported(caplog):
    place = planted(os.getuid())
    run = a_run(9)
    path = place / run.file
    path.write_text(json.dumps(dataclasses.asdict(run)))
    assert discovery.running() == [run]
    foreign(path)
    assert discovery.running() == []
    assert "it must be a plain file that nobody else can have written to" in caplog.text
    assert path.exists()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "writable"])
def test_only_plain_files_are_read(kind, tmp_path, caplog):
    place = planted(os.getuid())
    run = a_run(9)
    path, elsewhere = place / run.file, tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(dataclasses.asdict(run)))
    match kind:
        case "symlink":
            path.symlink_to(elsewhere)
        case "hard link":
            path.hardlink_to(elsewhere)
        case "pipe":
            os.mkfifo(path)
        case "writable":
            path.write_text(elsewhere.read_text())
            path.chmod(0o666)
    assert discovery.running() == []
    if kind == "symlink":
        assert "it cannot be opened as a plain file of this user" in caplog.text
    else:
        assert "it must be a plain file that nobody else can have written to" in caplog.text


def test_a_process_id_that_was_given_again_is_not_the_run():
    run = DriverEntry.here("topology", ("127.0.0.1", 9), bytes(32))
    earlier = dataclasses.replace(run, started=run.started - 1)
    earlier.announce()
    assert discovery.running() == []
    assert list(discovery.folder().iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [{"pid": "1"}, {"pid": -1}, {"port": 0}, {"secret": "zz"}, {"topology": 3}, {"more": 1}, {"host": None}],
)
def test_what_is_not_a_run_is_ignored(wrong):
    place = planted(os.getuid())
    run = a_run(9)
    (place / run.file).write_text(json.dumps({**dataclasses.asdict(run), **wrong}))
    assert discovery.running() == []


def test_a_run_is_found_under_its_own_file_name_only():
    place = planted(os.getuid())
    (place / "other.json").write_text(json.dumps(dataclasses.asdict(a_run(9))))
    assert discovery.running() == []


def test_a_run_is_announced_with_a_warning_where_others_read_along(caplog):
    planted(os.getuid(), 0o755)
    run = a_run(9)
    run.announce()
    assert "will not find this topology" in caplog.text
    assert list(discovery.folder().glob("*.json")) == []
    assert "0000" not in repr(run), "the secret"


# ---- the cluster ---------------------------------------------------------------------------------------


@as_root
def test_a_strangers_record_removes_and_kills_nothing(tmp_path, capsys):
    """The attack: another user creates root's folder first, with a record that names a folder and a process."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "precious").write_text("data")
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            seen = processes._stat(sleeper.pid)
            made = a_record(victim, master=Process(sleeper.pid, seen.started))
            place = planted(os.getuid())
            foreign(put(place, dataclasses.asdict(made)))
            foreign(place / "cluster")
            foreign(place)
            assert main(["cluster", "down"]) == 3
            assert main(["cluster", "status"]) == 3
            assert f"its owner is {NOBODY}" in capsys.readouterr().err
            assert (victim / "precious").exists()
            assert sleeper.poll() is None
        finally:
            sleeper.kill()


@as_root
@pytest.mark.parametrize("level", ["folder", "cluster"])
def test_a_symbolic_link_in_place_of_the_folder_is_not_followed(level, tmp_path, capsys):
    """It leads to a folder of this user that another user chose."""
    ours = tmp_path / "ours"
    (ours / "cluster").mkdir(parents=True, mode=0o700)
    ours.chmod(0o700)
    (ours / "cluster" / "cluster.json").write_text(json.dumps(dataclasses.asdict(a_record(tmp_path / "x"))))
    if level == "folder":
        discovery.folder().symlink_to(ours)
        foreign(discovery.folder())
    else:
        discovery.folder().mkdir(mode=0o700)
        (discovery.folder() / "cluster").symlink_to(ours / "cluster")
    assert main(["cluster", "down"]) == 3
    assert "but a symbolic link" in capsys.readouterr().err
    assert (ours / "cluster" / "cluster.json").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"work": "victim"},
        {"tag": "*"},
        {"tag": "../x"},
        {"network": {"tag": "*", "range": "10.1.2.0/24", "rate": None}},
        {"network": {"tag": "ab12", "range": "x; rm", "rate": None}},
        {"nodes": [{"name": "../x", "number": 1, "host": "h", "port": 1, "process": None, "draining": False}]},
        {"tag": 3},
    ],
)
def test_a_record_up_would_not_write_is_refused(wrong, tmp_path, shared_temporary_folder, capsys):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    wrong = {name: str(victim) if value == "victim" else value for name, value in wrong.items()}
    place = planted(os.getuid())
    made = a_record(record.work_folder("ab12"), named=1)
    put(place, {**dataclasses.asdict(made), **wrong})
    assert main(["cluster", "down"]) == 3
    assert "it is not a record that penstock cluster up writes" in capsys.readouterr().err
    assert victim.exists()


@as_root
def test_a_work_folder_of_a_stranger_is_not_removed(capsys):
    work = record.work_folder("ab12")
    work.mkdir(mode=0o700)
    (work / "precious").write_text("data")
    foreign(work)
    with record.changing(make=True):
        a_record(work).save()
    assert main(["cluster", "down"]) == 3
    assert "must belong to this user alone" in capsys.readouterr().err
    assert (work / "precious").exists()


def test_a_work_folder_that_became_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "precious").write_text("data")
    work = record.work_folder("ab12")
    work.symlink_to(victim)
    with record.changing(make=True):
        a_record(work).save()
    with pytest.raises(EnvironmentFault, match="but a symbolic link"):
        manage.down()
    assert (victim / "precious").exists()


def test_names_of_work_folders_cannot_be_guessed(shared_temporary_folder):
    one, other = record.work_folder("ab12"), record.work_folder("ab12")
    assert one != other
    assert one.parent == shared_temporary_folder
    assert record.is_work_folder(one, "ab12")
    assert not record.is_work_folder(one, "ab13")
    assert not record.is_work_folder(Path(one.name), "ab12")
    assert not record.is_work_folder(shared_temporary_folder / "x" / ".." / one.name, "ab12")


def test_the_secret_of_a_record_is_not_shown():
    assert "tell-nobody" not in repr(a_record(record.work_folder("ab12"), secret="tell-nobody"))


@as_root
def test_a_process_of_another_user_is_left_alone():
    with subprocess.Popen(
        ["sleep", "600"], user=NOBODY, env={"PENSTOCK_CLUSTER_NODE": "the-key/node-1"}
    ) as theirs:
        try:
            seen = processes._stat(theirs.pid)
            written = Process(theirs.pid, seen.started)
            assert not written.alive
            assert processes.marked("the-key") == []
            assert processes.end([written], 0.2) == []
            assert theirs.poll() is None
        finally:
            theirs.kill()


def test_the_signal_goes_to_the_process_that_was_looked_at(monkeypatch):
    """The process id is given to another process between the check and the signal, as if ``alive`` were
    outdated."""
    earlier = subprocess.Popen(["true"])
    seen = processes._stat(earlier.pid)
    opened, real = [], os.pidfd_open

    def open_then_die(pid):
        opened.append(real(pid))
        earlier.wait()
        return opened[-1]

    monkeypatch.setattr(os, "pidfd_open", open_then_die)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("os.kill signals whoever has the id"))
    monkeypatch.setattr(Process, "alive", True)
    processes.send(Process(earlier.pid, seen.started), 9)
    assert opened


# ---- folders -------------------------------------------------------------------------------------------


def test_a_folder_below_one_that_everybody_can_change_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(EnvironmentFault, match=r"nobody else can replace its content, .*mode 777"):
        PrivateFolder.open(open_to_all / "mine", make=True)


def test_files_are_written_whole_and_for_this_user_only(tmp_path):
    with PrivateFolder.open(tmp_path / "mine", make=True) as place:
        place.write("a", b"1")
        place.write("a", b"2")
        assert place.read("a") == b"2"
        assert place.names() == ["a"]
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "mine" / "a").stat().st_mode & 0o777 == 0o600


def test_what_was_exchanged_after_the_check_is_not_reached(tmp_path):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with PrivateFolder.open(tmp_path / "mine", make=True) as place:
        place.write("a", b"mine")
        (tmp_path / "mine").rename(tmp_path / "aside")
        (tmp_path / "mine").symlink_to(other)
        assert place.read("a") == b"mine"
        place.write("b", b"")
        place.remove("a")
    assert list(other.iterdir()) == []


def test_a_tree_is_removed_without_following_links(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    tree.chmod(0o700)
    (tree / "link").symlink_to(kept)
    (tree / "inner" / "link").symlink_to(kept)
    remove_private_tree(tree)
    assert not tree.exists()
    assert (kept / "file").exists()
    remove_private_tree(tree)  # removed already, so nothing happens


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(private_folder, "_MAX_BYTES", 10)
    with PrivateFolder.open(tmp_path / "mine", make=True) as place:
        place.write("a", bytes(11))
        with pytest.raises(EnvironmentFault, match="it has more than 10 bytes"):
            place.read("a")


def test_folders_are_made_for_this_user_alone_with_those_above(tmp_path):
    tmp_path.chmod(0o755)
    make_folders(tmp_path / "a" / "b")
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "a", tmp_path / "a" / "b")} == {0o700}
    make_folders(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("kind", ["replay", "queue", "specification", "monitor"])
def test_what_waits_on_disk_is_readable_for_this_user_alone(kind, tmp_path):
    """Queues, dead letters and the database of the monitor contain users' data."""
    folder = tmp_path / "state" / "topology"
    before = os.umask(0o022)
    try:
        match kind:
            case "replay":
                context = Context("t", "c", 1, 0, 1, folder=str(folder))
                queues = EmbeddedStore().open(context)
                queues.from_.append([ReplayRecord((1,))])
                queues.close()
            case "queue":
                client = EmbeddedQueue().open("t/c", str(folder))
                client.put([b"entry"], "w", client.register("w"))
                client.close()
            case "specification":
                store = PostgresStore("host=h password=x", "t")
                save(ProcessorSpec("t", "c", EmbeddedQueue(), store, str(folder), str(folder), 1.0, 10, 5.0))
            case "monitor":
                database = SQLite(str(folder / "load.sqlite"))
                database.run([("CREATE TABLE t (x)", None)])
                database.close()
    finally:
        os.umask(before)
    made = list((tmp_path / "state").rglob("*"))
    assert any(path.is_file() for path in made)
    assert {oct(path.stat().st_mode & 0o077) for path in [tmp_path / "state", *made]} == {"0o0"}
