"""Where state is kept: one folder, on local disk or behind any fsspec URL.

The rest of ``penstock.state`` asks for four things: a file is there whole or not at all (``write``), a name is
given to one caller only (``create``), ranges can be read, names can be listed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.core
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import StateError

TEMPORARY = ".tmp-"
"""How the names of half-written files begin. They are never listed; ``sweep`` removes what a crash left."""

_WAYS_OUT = {
    errno.ENOSPC: "Free some space there, or set state_dir to a folder that has more.",
    errno.EDQUOT: "Raise the quota, or set state_dir to a folder that has more.",
    errno.EACCES: "Give this user the right to write there, or set state_dir to another folder.",
    errno.EPERM: "Give this user the right to write there, or set state_dir to another folder.",
    errno.EROFS: "Set state_dir to a folder on a file system that can be written to.",
    errno.ENOENT: "Was the state folder removed? It must stay for as long as its state is of use.",
}


class StateStore:
    """A folder of named files; a name may have folders in it (``manifests/epoch-1.json``).

    ``url`` is a local path or an fsspec URL (``s3://bucket/folder``, ``memory://folder``). The folder need not
    exist: the first write makes it. Any ``OSError`` comes out as a ``StateError``. Pickles as its URL, and so
    must not depend on a current directory: a relative path is made absolute here.
    """

    def __init__(self, url: str) -> None:
        try:
            self._files, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise StateError(
                f"state store {url}",
                "must be a local path or a URL that fsspec knows",
                str(error),
                "Install the package fsspec names for it, or set state_dir to another folder.",
            ) from error
        self._root: str = path.rstrip("/")
        # Arrow's file systems (HDFS): for a range from 0 on fsspec asks for no seeking, and then seeks.
        self._how_to_read = {"seekable": True} if isinstance(self._files, ArrowFSWrapper) else {}
        self._local = isinstance(self._files, LocalFileSystem)
        self.url = self._root if self._local else url.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url,)

    def __repr__(self) -> str:
        return f"StateStore({self.url!r})"

    def child(self, name: str) -> StateStore:
        """The store of a folder inside this one."""
        _check(self.url, name)
        return type(self)(f"{self.url}/{name}")

    def write(self, name: str, data: bytes) -> None:
        """Put a file in place, whole and durable, replacing one of that name.

        On local disk: a temporary file, fsync, rename, fsync of the folder. Elsewhere one PUT, which object
        stores make atomic and durable by themselves; on a remote file system where a PUT is a plain write
        (HDFS, sftp) a crash may leave half a file, which the checksums of those who read it will find.
        """
        path = self._path(name)
        with self._errors("write", name):
            if not self._local:
                self._put(path, data, "overwrite")
                return
            with _temporary(path, data) as temporary:
                os.replace(temporary, path)
            _sync_folder(os.path.dirname(path))

    def create(self, name: str, data: bytes) -> bool:
        """``write``, but only where no file has that name: False if one has. Of several callers at once, in any
        process, one gets True. (Not on local disk: as exclusive as fsspec's ``mode="create"``, which S3 and
        Google's store decide on the server, while others look first and then write.)"""
        path = self._path(name)
        with self._errors("create", name):
            try:
                if not self._local:
                    self._files.invalidate_cache()
                    self._put(path, data, "create")
                    return True
                with _temporary(path, data) as temporary:
                    _link(temporary, path)
                    os.unlink(temporary)
            except FileExistsError:
                return False
            _sync_folder(os.path.dirname(path))
            return True

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A file, or ``length`` bytes of it from ``offset``; fewer where the file ends before that."""
        path = self._path(name)
        with self._errors("read", name):
            if length == 0:
                return b""
            if not self._local:
                end = None if length is None else offset + length
                data: bytes = self._files.cat_file(path, start=offset or None, end=end, **self._how_to_read)
                return data
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(-1 if length is None else length)

    def list(self, prefix: str = "") -> list[str]:
        """The names that begin with ``prefix``, sorted, folders walked. A half-written file is not among them."""
        return sorted(name for name in self._names(prefix) if not _is_temporary(name))

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is as good as removed."""
        path = self._path(name)
        with self._errors("remove", name), contextlib.suppress(FileNotFoundError):
            if self._local:
                os.unlink(path)
            else:
                self._files.rm_file(path)

    def sweep(self, folder: str) -> None:
        """Remove what crashed writers left half written in a folder. A write still going on there fails."""
        for name in filter(_is_temporary, self._names(f"{folder}/")):
            with self._errors("remove", name), contextlib.suppress(FileNotFoundError):
                if self._local:
                    os.unlink(f"{self._root}/{name}")
                else:
                    self._files.rm_file(f"{self._root}/{name}")

    def _put(self, path: str, data: bytes, mode: str) -> None:
        try:
            self._files.pipe_file(path, data, mode=mode)
        except FileNotFoundError:  # folders are real there, as in HDFS or sftp; object stores never come here
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data, mode=mode)

    def _names(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        root = self._path(folder) if folder else self._root
        found: list[str] = []
        with self._errors("list", prefix):
            if self._local:
                found = [f"{base}/{file}" for base, _, files in os.walk(root) for file in files]
            else:
                self._files.invalidate_cache()  # others write here: what was listed before may be out of date
                with contextlib.suppress(FileNotFoundError):
                    found = self._files.find(root)
        for path in found:
            name = path.removeprefix(self._root).lstrip("/")
            if name.startswith(prefix):
                yield name

    def _path(self, name: str) -> str:
        _check(self.url, name)
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StateError(
                f"state store {self.url}, file {name or '.'}",
                f"the file system must let it {verb}",
                f"{type(error).__name__}: {error.strerror or error}",
                _WAYS_OUT.get(error.errno or 0, "Look at the file system behind state_dir."),
            ) from error


def is_missing(error: StateError) -> bool:
    """Was the file not there, rather than unreadable?"""
    return isinstance(error.__cause__, FileNotFoundError)


@contextlib.contextmanager
def _temporary(path: str, data: bytes) -> Iterator[str]:
    """A durable file beside ``path``; gone at the end unless the caller moved it away."""
    folder, _, base = path.rpartition("/")
    _make_folder(folder)
    temporary = f"{folder}/{TEMPORARY}{base}-{uuid.uuid4().hex}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _link(temporary: str, path: str) -> None:
    """Give a file its name; unlike a rename it refuses one that is taken."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # Mounted buckets and FAT have no hard links. Exclusive still, though a crash may leave it half written.
        with open(temporary, "rb") as source, open(path, "xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())


def _make_folder(folder: str) -> None:
    """Make it and its parents, each durable in its own parent."""
    missing: list[Path] = []
    path = Path(folder)
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync_folder(str(each.parent))


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(TEMPORARY)


def _check(url: str, name: str) -> None:
    parts = name.split("/")
    if not all(parts) or "." in parts or ".." in parts or _is_temporary(name):
        raise StateError(
            f"state store {url}",
            "a name must stay inside the store: no empty part, '.', '..' or leading '/'",
            repr(name),
            f"Use a plain name that does not begin with {TEMPORARY!r}.",
        )
