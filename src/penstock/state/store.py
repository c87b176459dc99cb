"""The state store: a folder on a local disk or behind any fsspec URL.

The rest of ``penstock.state`` relies on four operations: a file is written as a whole or not at all (``write``), a
name is given to one caller only (``create``), ranges of a file are read, and names are listed. On a local disk,
folders and files are accessible only to their owner (modes 0700 and 0600).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import PenstockError, StateError
from penstock.filesystems import open_url
from penstock.redaction import redacted
from penstock.state.failures import is_missing, state_error

__all__ = ["TEMPORARY", "StateStore", "is_missing"]

TEMPORARY = ".tmp-"
"""The prefix of partially written files. They are never listed; ``sweep`` removes those that a crash left."""

_EXCLUSIVE = frozenset({"s3", "s3a", "gs", "gcs"})
"""fsspec protocols whose servers support exclusive creation."""


class StateStore:
    """A folder of named files. A name may contain folders (``manifests/epoch-1.json``).

    ``url`` is a local path or an fsspec URL (``s3://bucket/folder``, ``memory://folder``). Its password may be a
    reference (``penstock.credentials``), which stays unresolved in ``url``. The first write creates the folder.
    Errors of the file system are raised as ``StateError``, or as ``StateUnavailable`` if a retry may help. A store
    is pickled as its URL, so a relative path is made absolute here.
    """

    def __init__(self, url: str) -> None:
        try:
            self._files, path = open_url(url)
        except (ValueError, ImportError) as error:
            raise StateError(
                f"state store {url}",
                f"it is neither a local path nor a URL that fsspec knows ({error})",
                "Install the package that fsspec names for it, or set delivery.state_dir to another folder.",
            ) from error
        self._root: str = path.rstrip("/")
        # Arrow's file systems (HDFS): fsspec requests no seeking for a range from 0, and then seeks.
        self._how_to_read = {"seekable": True} if isinstance(self._files, ArrowFSWrapper) else {}
        self._local = isinstance(self._files, LocalFileSystem)
        self.url = self._root if self._local else url.rstrip("/")
        protocol = self._files.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.exclusive = self._local or bool(protocols & _EXCLUSIVE)
        """Whether the store itself decides which of several callers of ``create`` gets a name. Otherwise callers
        check and then write, and two of them at the same moment may both succeed."""
        self._above: tuple[str, ...] = ()
        """The folders between this one and the store from which it was reached by ``child``, outermost first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url,), {"_above": self._above}

    def __repr__(self) -> str:
        return f"StateStore({redacted(self.url)!r})"

    def child(self, name: str) -> StateStore:
        """The store of a folder inside this one."""
        _check(self.url, name)
        made = type(self)(f"{self.url}/{name}")
        between = itertools.accumulate((self._root, *name.split("/")[:-1]), "{}/{}".format)
        made._above = (*self._above, *between)
        return made

    def overlaps(self, other: StateStore) -> bool:
        """Whether one of the two folders is or contains the other, regardless of how their paths are written."""
        if self._local and other._local:
            mine, theirs = os.path.realpath(self._root), os.path.realpath(other._root)
        elif type(self._files) is type(other._files) and self._host == other._host:
            mine, theirs = (posixpath.normpath(f"/{each._root}") for each in (self, other))
        else:
            return False
        shorter, longer = sorted((mine.split("/"), theirs.split("/")), key=len)
        shorter = [part for part in shorter if part]
        return [part for part in longer if part][: len(shorter)] == shorter

    @property
    def _host(self) -> str:
        return str(self._files.storage_options.get("host", ""))

    def check_owner(self) -> None:
        """Raise ``StateError`` if the folder is on a local disk and belongs to another user or is writable by
        every user, because others could then change or remove its files. This applies to root as well.

        If the folder was reached by ``child``, others must not be able to replace it: the folders above it, up to
        the original store, must belong to this user or root, and must not be writable by every user unless they
        have the sticky bit.
        """
        if not self._local:
            return
        for path in self._above:
            _check_folder(path, {os.geteuid(), 0}, sticky=True)
        _check_folder(self._root, {os.geteuid()}, sticky=False)

    def write(self, name: str, data: bytes) -> None:
        """Write a file as a whole and durably. Replaces a file of that name.

        On a local disk: a temporary file, fsync, rename, fsync of the folder. Elsewhere one PUT, which is atomic
        and durable in object stores. On a remote file system where a PUT is a plain write (HDFS, sftp) a crash may
        leave a partial file, which the checksums of its readers detect.
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
        """Like ``write``, but return False if a file of that name exists. If the store is ``exclusive``, exactly
        one of several concurrent callers, in any process, gets True."""
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
        """Read a file, or ``length`` bytes of it from ``offset``. Returns fewer bytes if the file ends before
        that."""
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
        """The names that begin with ``prefix``, recursively and sorted, without partially written files."""
        return sorted(name for name in self._names(prefix) if not _is_temporary(name))

    def remove(self, name: str) -> None:
        """Remove a file. Does nothing if it does not exist."""
        path = self._path(name)
        with self._errors("remove", name), contextlib.suppress(FileNotFoundError):
            if self._local:
                os.unlink(path)
            else:
                self._files.rm_file(path)

    def sweep(self, folder: str, may: Callable[[str], bool] = lambda name: True) -> None:
        """Remove partially written files of crashed writers in a folder, if ``may`` permits it for the intended
        path. A write that is still in progress there fails."""
        for name in filter(_is_temporary, self._names(f"{folder}/")):
            place, _, file = name.rpartition("/")
            if not may(f"{place}/{file.removeprefix(TEMPORARY)}"):
                continue
            with self._errors("remove", name), contextlib.suppress(FileNotFoundError):
                if self._local:
                    os.unlink(f"{self._root}/{name}")
                else:
                    self._files.rm_file(f"{self._root}/{name}")

    def _put(self, path: str, data: bytes, mode: str) -> None:
        try:
            self._files.pipe_file(path, data, mode=mode)
        # for file systems with real folders, such as HDFS or sftp; object stores do not raise this
        except FileNotFoundError:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data, mode=mode)

    def _names(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        root = self._path(folder) if folder else self._root
        found: list[str] = []
        with self._errors("list", prefix):
            if self._local:
                folders = os.walk(root, onerror=_unless_missing)
                found = [f"{base}/{file}" for base, _, files in folders for file in files]
            else:
                self._files.invalidate_cache()  # other processes write here, so an earlier listing may be outdated
                found = list(self._walk(root))
        for path in found:
            name = path.removeprefix(self._root).lstrip("/")
            if name.startswith(prefix):
                yield name

    def _walk(self, folder: str) -> Iterator[str]:
        """The files below a folder. Unlike fsspec's ``find``, it does not treat an error as an empty folder."""
        try:
            entries = self._files.ls(folder, detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            path = str(entry["name"])
            if entry["type"] != "directory":
                yield path
            elif path.rstrip("/") != folder.rstrip("/"):
                yield from self._walk(path.rstrip("/"))

    def _path(self, name: str) -> str:
        _check(self.url, name)
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:  # clients of object stores have their own exceptions
            raise state_error(f"state store {self.url}, file {name or '.'}", verb, error) from error


@contextlib.contextmanager
def _temporary(path: str, data: bytes) -> Iterator[str]:
    """A durable temporary file beside ``path``. It is removed at the end unless the caller moved it."""
    folder, _, base = path.rpartition("/")
    _make_folder(folder)
    temporary = f"{folder}/{TEMPORARY}{base}-{uuid.uuid4().hex}"
    try:
        with open(temporary, "xb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _link(temporary: str, path: str) -> None:
    """Give a file its name. Unlike a rename, this fails if the name is taken."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # Mounted buckets and FAT have no hard links. This is still exclusive, but a crash may leave a partial
        # file.
        with open(temporary, "rb") as source, open(path, "xb", opener=_private) as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())


def _check_folder(path: str, owners: set[int], sticky: bool) -> None:
    """See ``StateStore.check_owner``. ``sticky``: every user may write to the folder if it has that bit."""
    try:
        seen = os.lstat(path)
        if stat.S_ISLNK(seen.st_mode):
            _check_user(path, seen, {os.geteuid(), 0})  # the creator of the link decides where it leads
            seen = os.stat(path)
    except OSError:
        return  # it does not exist yet, or the first access reports the error
    _check_user(path, seen, owners)
    if seen.st_mode & stat.S_IWOTH and not (sticky and seen.st_mode & stat.S_ISVTX):
        raise StateError(
            f"state directory {path}",
            f"every user may write to it (mode {stat.S_IMODE(seen.st_mode):04o})",
            f"Check its content, then run chmod -R go-rwx {path}.",
        )


def _check_user(path: str, seen: os.stat_result, owners: set[int]) -> None:
    if seen.st_uid not in owners:
        raise StateError(
            f"state directory {path}",
            f"it belongs to user {seen.st_uid}, and this process runs as user {os.geteuid()}",
            "Run the topology as that user, set delivery.state_dir to another folder, or "
            "change the owner with chown -R.",
        )


def _make_folder(folder: str) -> None:
    """Create a folder and its parents, each durably in its parent."""
    missing: list[Path] = []
    path = Path(folder)
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(str(each.parent))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unless_missing(error: OSError) -> None:
    """Raise the error unless the folder is missing: a folder that cannot be listed is not an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error


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
            f"the name {name!r} could leave the store (an empty part, '.', '..' or a leading "
            "'/') or is one of its own",
            f"Use a plain name that does not begin with {TEMPORARY!r}.",
        )
