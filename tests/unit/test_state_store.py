"""The state store: files are written as a whole or not at all, names are given once, and errors become
StateError."""

import contextlib
import errno
import multiprocessing
import os
import pickle
import subprocess
import threading
import uuid
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import LocalFileSystem

from penstock.errors import StateError, StateUnavailable
from penstock.state.store import TEMPORARY, StateStore, is_missing


class Folders(ArrowFSWrapper):
    """Like HDFS: a remote file system, as fsspec sees it, in which a file needs a folder."""

    protocol = "folders"

    def __init__(self, **options):
        super().__init__(LocalFileSystem(), **options)


fsspec.register_implementation("folders", Folders)


@pytest.fixture(params=["local", "memory", "folders"])
def store(request, tmp_path):
    if request.param == "local":
        return StateStore(str(tmp_path / "state"))
    return StateStore(
        f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"folders://{tmp_path}/state"
    )


def test_what_is_written_is_read(store):
    store.write("a/b.bin", b"0123456789")
    assert store.read("a/b.bin") == b"0123456789"
    assert store.read("a/b.bin", 3, 4) == b"3456"
    assert store.read("a/b.bin", 8, 10) == b"89"
    assert store.read("a/b.bin", 4) == b"456789"
    assert store.read("a/b.bin", 0, 0) == b""
    store.write("a/b.bin", b"new")
    assert store.read("a/b.bin") == b"new"


def test_only_one_creates(store):
    assert store.create("lock", b"first") is True
    assert store.create("lock", b"second") is False
    assert store.read("lock") == b"first"
    assert store.list() == ["lock"]


def test_of_many_threads_one_creates(store):
    start, won = threading.Barrier(8), []

    def run(number):
        start.wait()
        if store.create("generations/1", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "://" in store.url:
        assert won  # these stores check first and then write
    else:
        assert len(won) == 1
        assert store.read("generations/1") == b"%d" % won[0]


def test_a_file_system_without_hard_links_creates_as_well(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = StateStore(str(tmp_path))
    assert store.create("lock", b"first") is True
    assert store.create("lock", b"second") is False
    assert store.read("lock") == b"first"
    assert os.listdir(tmp_path) == ["lock"]


def test_names_are_listed_in_order_relative_to_the_store(store):
    for name in ("b/2", "b/1", "a", "bb/3"):
        store.write(name, b"x")
    assert store.list() == ["a", "b/1", "b/2", "bb/3"]
    assert store.list("b/") == ["b/1", "b/2"]
    assert store.list("b/2") == ["b/2"]
    assert store.list("b") == ["b/1", "b/2", "bb/3"]
    assert store.list("nothing/") == []


def test_a_child_is_a_folder_of_it(store):
    child = store.child("inner/most")
    child.write("x", b"1")
    assert store.list() == ["inner/most/x"]
    assert child.list() == ["x"]
    assert child.url == f"{store.url}/inner/most"


def test_removing_twice_is_fine(store):
    store.write("x", b"1")
    store.remove("x")
    store.remove("x")
    assert store.list() == []


def test_it_pickles_as_its_url(store):
    store.write("x", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert again.read("x") == b"1"


def test_a_relative_path_does_not_follow_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = StateStore("state")
    store.write("x", b"1")
    assert store.url == str(tmp_path / "state")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(store)).read("x") == b"1"


def test_a_missing_file_says_so(store):
    with pytest.raises(StateError, match="file nothing: the attempt to read it failed") as caught:
        store.read("nothing")
    assert is_missing(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "", "a/./b", f"{TEMPORARY}x"])
def test_a_name_stays_inside(store, name):
    with pytest.raises(StateError, match="could leave the store"):
        store.write(name, b"")


def test_an_unknown_kind_of_url_says_what_to_do():
    with pytest.raises(StateError, match=r"neither a local path nor a URL that fsspec knows .*nonsense"):
        StateStore("nonsense://x")


def _write_and_die(url, dying):
    """A writer that is killed when its file is partially written."""
    os.fsync = lambda descriptor: os._exit(9)
    dying.set()
    StateStore(url).write("a/x", b"new" * 1000)


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_nothing_listed(tmp_path):
    store = StateStore(str(tmp_path))
    store.write("a/x", b"old")
    context = multiprocessing.get_context("fork")
    dying = context.Event()
    writer = context.Process(target=_write_and_die, args=(store.url, dying))
    writer.start()
    writer.join()
    assert dying.is_set()
    assert writer.exitcode == 9
    assert len(os.listdir(tmp_path / "a")) == 2  # the partial file is there
    assert store.list() == ["a/x"]
    assert store.read("a/x") == b"old"
    store.sweep("a")
    assert os.listdir(tmp_path / "a") == ["x"]


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.decode().strip()}")
    try:
        yield StateStore(str(folder))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as store:
        store.write("x", b"old")
        with pytest.raises(
            StateError, match=r"file x: the attempt to write it failed .*No space left.*Free some space"
        ):
            store.write("x", b"n" * 100_000)
        assert store.read("x") == b"old"
        assert store.list() == ["x"]
        assert os.listdir(tmp_path / "disk") == ["x"]  # the space of the partial file was freed
        store.write("x", b"new")


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "state").write_text("not a folder")
    with pytest.raises(StateError, match=r"the attempt to write it failed \((NotADirectory|FileExists)Error"):
        StateStore(str(tmp_path / "state")).write("x", b"1")


# ---- errors of file systems --------------------------------------------------------------------------------


class ClientError(Exception):
    """Like botocore's: not an OSError, with the details in its response."""

    def __init__(self, status):
        super().__init__(f"An error occurred ({status})")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """Like those of gcsfs and aiohttp."""

    def __init__(self, status):
        super().__init__("HTTP error")
        self.status = self.code = status


class Unreliable(MemoryFileSystem):
    """Raises the configured error."""

    protocol = "unreliable"
    error = None
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def _maybe(self):
        if Unreliable.error is not None:
            raise Unreliable.error

    def pipe_file(self, *args, **options):
        self._maybe()
        return super().pipe_file(*args, **options)

    def cat_file(self, *args, **options):
        self._maybe()
        return super().cat_file(*args, **options)

    def ls(self, *args, **options):
        self._maybe()
        return super().ls(*args, **options)

    def rm_file(self, *args, **options):
        self._maybe()
        return super().rm_file(*args, **options)


fsspec.register_implementation("unreliable", Unreliable)


@pytest.fixture
def unreliable():
    store = StateStore(f"unreliable://{uuid.uuid4().hex}")
    store.write("a/x", b"1")
    yield store
    Unreliable.error = None


CALLS = {
    "write": lambda store: store.write("a/y", b"2"),
    "create": lambda store: store.create("a/y", b"2"),
    "read": lambda store: store.read("a/x"),
    "list": lambda store: store.list("a/"),
    "remove": lambda store: store.remove("a/x"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error",
    [
        ClientError(503),
        ClientError(429),
        HttpError(500),
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        OSError(errno.EIO, "I/O error"),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("the client's own word for no connection"),
    ],
    ids=repr,
)
def test_what_may_pass_is_told_apart(unreliable, call, error):
    Unreliable.error = error
    with pytest.raises(StateUnavailable, match=rf"the attempt to {call} it failed \({type(error).__name__}"):
        CALLS[call](unreliable)


@pytest.mark.parametrize("call", ["write", "create", "read", "list"])
@pytest.mark.parametrize(
    "error",
    [
        ClientError(403),
        HttpError(401),
        PermissionError(errno.EACCES, "no"),
        OSError(errno.EROFS, "read only"),
        ValueError("a bucket name with a blank"),
    ],
    ids=repr,
)
def test_what_lasts_is_told_apart(unreliable, call, error):
    Unreliable.error = error
    with pytest.raises(StateError) as caught:
        CALLS[call](unreliable)
    assert type(caught.value) is StateError
    assert not is_missing(caught.value)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "gone"), ClientError(404), HttpError(404)], ids=repr
)
def test_what_is_missing_is_told_apart(unreliable, error):
    Unreliable.error = error
    with pytest.raises(StateError) as caught:
        unreliable.read("a/x")
    assert type(caught.value) is StateError
    assert is_missing(caught.value)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    """Otherwise a topology would start from nothing while a disk does not respond."""
    store = StateStore(str(tmp_path))
    store.write("manifests/x", b"1")
    assert store.list("nothing/") == []

    def broken(path):
        raise OSError(errno.EIO, "I/O error", path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(StateUnavailable, match=r"the attempt to list it failed \(OSError: I/O error"):
        store.list("manifests/")


# ---- who may read and write --------------------------------------------------------------------------------


def test_only_the_owner_reads_what_is_written(tmp_path):
    before = os.umask(0)
    try:
        store = StateStore(str(tmp_path / "a" / "state"))
        store.write("snapshots/x", b"1")
        store.create("generations/1", b"1")
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    store = StateStore(str(tmp_path / "state"))
    with pytest.raises(StateError, match=r"every user may write to it .mode 0777.*chmod -R go-rwx"):
        store.check_owner()
    (tmp_path / "state").chmod(0o755)
    store.check_owner()
    StateStore(str(tmp_path / "nothing")).check_owner()
    StateStore("memory://there").check_owner()
