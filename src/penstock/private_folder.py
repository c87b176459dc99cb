"""Folders that only this user can read and write, and where the one for running processes is.

What lies in such a folder is acted upon: addresses are connected to, processes signalled, folders removed. So
nobody else may have written it. A folder is opened without following a symbolic link, its owner and mode are
checked on the open descriptor, and everything in it is reached through that descriptor: whoever exchanges a path
afterwards changes nothing. The folder above must not let others exchange it either: it belongs to this user or to
root, and is writable for nobody else or has the sticky bit, as the shared temporary folder has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from penstock.errors import EnvironmentFault

_MOST_BYTES = 16 * 1024 * 1024  # of a file; a cluster's record of 200 nodes has 100 KB
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_SYSTEM = Path("/run")  # on every Linux; emptied when the machine starts


def runtime_folder() -> Path:
    """Where the running processes of this user are written down, the same for all commands of a user: in
    ``$XDG_RUNTIME_DIR`` or ``/run/user/UID`` (for root ``/run``), if it exists and others cannot write to it;
    else in the shared temporary folder, under a name that has the user's number."""
    user = os.getuid()
    named = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(named)] if named else []
    candidates += [_SYSTEM / "user" / str(user)] + ([_SYSTEM] if user == 0 else [])
    for base in candidates:
        with contextlib.suppress(OSError):
            seen = base.stat()
            ours = seen.st_uid == user and not seen.st_mode & _OTHERS_WRITE
            if ours and stat.S_ISDIR(seen.st_mode) and os.access(base, os.W_OK | os.X_OK):
                return base / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{user}"


def make_folders(path: Path) -> None:
    """Make a folder, with those above it that do not exist, all for this user alone. One that exists keeps its
    mode."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def open_here(path: Path, flags: int) -> int:
    """Open a file, created for its owner alone. A symbolic link in its place raises ``OSError``: it may lead to a
    file of this user's elsewhere."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "It is a symbolic link, which is not followed", str(path)) from None


class PrivateFolder:
    """A folder of this user's alone, open. Close it, or use it in a ``with``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """From ``open``."""
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path, make: bool = False) -> Self:
        """``make``: create it where it does not exist. Raises ``FileNotFoundError``, and ``EnvironmentFault``
        where others can write to it or to the folder above."""
        with _above(path) as above:
            return cls._inside(path, above, make)

    def child(self, name: str, make: bool = False) -> PrivateFolder:
        """A folder in it; as ``open``."""
        return self._inside(self.path / name, self.descriptor, make)

    @classmethod
    def _inside(cls, path: Path, above: int, make: bool) -> Self:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=above)
        descriptor = _opened(path, above, os.O_NOFOLLOW)
        seen = os.fstat(descriptor)
        if seen.st_uid != os.getuid() or seen.st_mode & _OTHERS:
            os.close(descriptor)
            raise _not_private(path, seen, "nobody else can read or write what is in it")
        return cls(path, descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.descriptor))

    def read(self, name: str) -> bytes:
        """A file. Raises ``FileNotFoundError``, ``EnvironmentFault`` where it is not a plain file of this user's,
        or one that others can write to or that has another name elsewhere."""
        try:
            # Not blocking: to open a pipe would wait for somebody to write to it.
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.descriptor
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise EnvironmentFault(
                f"file {self.path / name}",
                f"it cannot be opened as a plain file of this user ({error.strerror})",
                "Find out who put it there, and remove it.",
            ) from error
        with open(descriptor, "rb") as file:
            seen = os.fstat(descriptor)
            plain = stat.S_ISREG(seen.st_mode) and seen.st_nlink <= 1  # 0: removed since it was opened
            if not plain or seen.st_uid != os.getuid() or seen.st_mode & _OTHERS_WRITE:
                raise EnvironmentFault(
                    f"file {self.path / name}",
                    "it must be a plain file that nobody else can have written to, but its owner is "
                    f"{seen.st_uid}, its mode {stat.filemode(seen.st_mode)} and its number of links {seen.st_nlink}",
                    "Find out who put it there, and remove it.",
                )
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise EnvironmentFault(
                f"file {self.path / name}", f"it has more than {_MOST_BYTES} bytes", "Remove it."
            )
        return data

    def write(self, name: str, data: bytes) -> None:
        """A file that only this user can read; whole or not at all, in place of one of that name."""
        fresh = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(fresh, flags, 0o600, dir_fd=self.descriptor), "wb") as file:
            file.write(data)
        os.replace(fresh, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """A file; one that is not there is as good as removed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """A folder with all that is in it. Symbolic links are removed and not followed."""
        shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)


@contextlib.contextmanager
def if_present(path: Path) -> Iterator[PrivateFolder | None]:
    """The folder, open; None where there is none."""
    try:
        folder = PrivateFolder.open(path)
    except FileNotFoundError:
        yield None
        return
    with folder:
        yield folder


def remove_private_tree(path: Path) -> None:
    """Remove a folder of this user's alone with all that is in it; nothing where there is none. Raises
    ``EnvironmentFault`` for a folder of others or a symbolic link, which stays as it is."""
    with contextlib.suppress(FileNotFoundError), _above(path) as above:
        PrivateFolder._inside(path, above, make=False).close()
        # Nobody else can exchange it now: the folder is ours, and the one above protects it.
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=above)


@contextlib.contextmanager
def _above(path: Path) -> Iterator[int]:
    """The folder above, open. Raises ``EnvironmentFault`` where others can replace what is in it."""
    above = _opened(path.parent, None, os.O_RDONLY)
    try:
        seen = os.fstat(above)
        protected = not seen.st_mode & _OTHERS_WRITE or seen.st_mode & stat.S_ISVTX
        if seen.st_uid not in (os.getuid(), 0) or not protected:
            raise _not_private(path.parent, seen, "nobody else can replace what is in it")
        yield above
    finally:
        os.close(above)


def _opened(path: Path, above: int | None, flags: int) -> int:
    try:
        return os.open(path if above is None else path.name, _FOLDER | flags, dir_fd=above)
    except FileNotFoundError:
        raise
    except OSError as error:  # ELOOP or ENOTDIR: a symbolic link, or no folder
        raise EnvironmentFault(
            f"folder {path}",
            f"it is not a folder of this user, but a symbolic link or a file ({error.strerror})",
            "Find out who put it there, and remove it; or set XDG_RUNTIME_DIR to a folder of yours.",
        ) from error


def _not_private(path: Path, seen: os.stat_result, why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path}",
        f"it must belong to this user alone, so that {why}, but its owner is "
        f"{seen.st_uid} and its mode {stat.S_IMODE(seen.st_mode):o}",
        "Find out who put it there, and remove it; or set XDG_RUNTIME_DIR to a folder of yours.",
    )
