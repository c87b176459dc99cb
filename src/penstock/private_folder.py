"""Folders that only this user can read and write, and the location of the folder for running processes.

Penstock acts on the content of such a folder: it connects to addresses, signals processes and removes folders. So
no other user may have written it. A folder is opened without following symbolic links, its owner and mode are
checked on the open descriptor, and its files are accessed through that descriptor, so replacing a path afterwards
has no effect. The parent folder must not let others replace the folder: it must belong to this user or root, and
be writable by no one else or have the sticky bit, like the shared temporary folder.
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

_MAX_BYTES = 16 * 1024 * 1024  # per file; the record of a cluster of 200 nodes has 100 KB
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_SYSTEM = Path("/run")  # exists on every Linux and is emptied at boot


def runtime_folder() -> Path:
    """The folder with the records of this user's running processes, the same for all commands of a user. It is in
    ``$XDG_RUNTIME_DIR`` or ``/run/user/UID`` (for root ``/run``) if that exists and others cannot write to it,
    otherwise in the shared temporary folder, with the user id in its name."""
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
    """Create a folder and its missing parents, accessible only to this user. Existing folders keep their mode."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def open_here(path: Path, flags: int) -> int:
    """Open a file, which is created accessible only to its owner. Raises ``OSError`` for a symbolic link, because
    it may lead to another file of this user."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "It is a symbolic link, which is not followed", str(path)) from None


class PrivateFolder:
    """An open folder that only this user can access. Close it, or use it in a ``with`` statement."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use ``open`` instead."""
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path, make: bool = False) -> Self:
        """Open a folder. ``make``: create it if it does not exist. Raises ``FileNotFoundError``, or
        ``EnvironmentFault`` if others can write to it or to its parent."""
        with _above(path) as above:
            return cls._inside(path, above, make)

    def child(self, name: str, make: bool = False) -> PrivateFolder:
        """Open a folder in this one. Raises the errors of ``open``."""
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
            raise _not_private(path, seen, "nobody else can read or write its content")
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
        """Read a file. Raises ``FileNotFoundError``, or ``EnvironmentFault`` if it is not a regular file of this
        user, if others can write to it, or if it has a second name (hard link)."""
        try:
            # Non-blocking, because opening a pipe would wait for a writer.
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.descriptor
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise EnvironmentFault(
                f"file {self.path / name}",
                f"it cannot be opened as a plain file of this user ({error.strerror})",
                "Find out who created it, and remove it.",
            ) from error
        with open(descriptor, "rb") as file:
            seen = os.fstat(descriptor)
            plain = stat.S_ISREG(seen.st_mode) and seen.st_nlink <= 1  # 0: removed after it was opened
            if not plain or seen.st_uid != os.getuid() or seen.st_mode & _OTHERS_WRITE:
                raise EnvironmentFault(
                    f"file {self.path / name}",
                    "it must be a plain file that nobody else can have written to, but its owner is "
                    f"{seen.st_uid}, its mode {stat.filemode(seen.st_mode)} and its link count {seen.st_nlink}",
                    "Find out who created it, and remove it.",
                )
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise EnvironmentFault(
                f"file {self.path / name}", f"it has more than {_MAX_BYTES} bytes", "Remove it."
            )
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file that only this user can read, as a whole or not at all. Replaces a file of that name."""
        fresh = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(fresh, flags, 0o600, dir_fd=self.descriptor), "wb") as file:
            file.write(data)
        os.replace(fresh, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file. Does nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a folder and its content. Symbolic links are removed and not followed."""
        shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)


@contextlib.contextmanager
def if_present(path: Path) -> Iterator[PrivateFolder | None]:
    """The open folder. None if it does not exist."""
    try:
        folder = PrivateFolder.open(path)
    except FileNotFoundError:
        yield None
        return
    with folder:
        yield folder


def remove_private_tree(path: Path) -> None:
    """Remove a folder of this user and its content. Does nothing if it does not exist. Raises ``EnvironmentFault``
    for a folder of another user or a symbolic link, and leaves it unchanged."""
    with contextlib.suppress(FileNotFoundError), _above(path) as above:
        PrivateFolder._inside(path, above, make=False).close()
        # No other user can replace it now: the folder belongs to this user, and its parent protects it.
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=above)


@contextlib.contextmanager
def _above(path: Path) -> Iterator[int]:
    """The open parent folder. Raises ``EnvironmentFault`` if others can replace its content."""
    above = _opened(path.parent, None, os.O_RDONLY)
    try:
        seen = os.fstat(above)
        protected = not seen.st_mode & _OTHERS_WRITE or seen.st_mode & stat.S_ISVTX
        if seen.st_uid not in (os.getuid(), 0) or not protected:
            raise _not_private(path.parent, seen, "nobody else can replace its content")
        yield above
    finally:
        os.close(above)


def _opened(path: Path, above: int | None, flags: int) -> int:
    try:
        return os.open(path if above is None else path.name, _FOLDER | flags, dir_fd=above)
    except FileNotFoundError:
        raise
    except OSError as error:  # ELOOP or ENOTDIR: a symbolic link, or not a folder
        raise EnvironmentFault(
            f"folder {path}",
            f"it is not a folder of this user, but a symbolic link or a file ({error.strerror})",
            "Find out who created it, and remove it, or set XDG_RUNTIME_DIR to a folder of your own.",
        ) from error


def _not_private(path: Path, seen: os.stat_result, purpose: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path}",
        f"it must belong to this user alone, so that {purpose}, but its owner is {seen.st_uid} and its mode "
        f"{stat.S_IMODE(seen.st_mode):o}",
        "Find out who created it, and remove it, or set XDG_RUNTIME_DIR to a folder of your own.",
    )
