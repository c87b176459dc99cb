"""Signatures for data that is unpickled later: replay records, dead letters and state.

Unpickling runs code, so anyone who can write to a shared topic or state directory could run code in a worker.
Everything stored there is therefore signed with the **deployment key**, and verified before it is unpickled. The
key is 32 random bytes in a file that only its owner can read: the file named by ``PENSTOCK_KEY_FILE``, or
``penstock/key`` in the user's configuration folder, where it is created on first use. The driver reads it and
sends it to the workers with the job. Drivers on several machines that share topics or state directories need the
same file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import threading
from pathlib import Path

from penstock.errors import EnvironmentFault

KEY_FILE = "PENSTOCK_KEY_FILE"
"""The environment variable with the path of another key file."""
KEY_BYTES = 32
"""256 random bits cannot be guessed."""
SIGNATURE_BYTES = 16
"""128 bits. Without the key an attacker cannot search for a collision, so this is sufficient."""

_lock = threading.Lock()
_key: bytes | None = None


def sign(purpose: str, data: bytes) -> bytes:
    """Sign ``data``. ``purpose`` (at most 16 bytes) separates signatures for different uses."""
    return hashlib.blake2b(
        data, digest_size=SIGNATURE_BYTES, key=deployment_key(), person=purpose.encode()
    ).digest()


def is_signed(purpose: str, data: bytes, signature: bytes) -> bool:
    """Whether ``sign`` made ``signature`` with the key of this deployment."""
    return hmac.compare_digest(sign(purpose, data), signature)


def deployment_key() -> bytes:
    """The key of this process: that passed to ``use_key``, otherwise that of the key file, which is read once."""
    global _key
    with _lock:
        if _key is None:
            _key = _read_or_create(key_path())
        return _key


def use_key(key: bytes | None) -> None:
    """Use this key from now on. Workers use the key of the driver. None: read the key file at the next use."""
    global _key
    with _lock:
        _key = key


def key_path() -> Path:
    """The path of the key file of this process."""
    named = os.environ.get(KEY_FILE)
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder) / "penstock" / "key"


def _read_or_create(path: Path) -> bytes:
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written under another name and then linked: a reader sees no key or the whole key, and one of two creators
    # wins.
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY)) as file:
        seen = os.fstat(file.fileno())
        if seen.st_uid not in (os.getuid(), 0) or stat.S_IMODE(seen.st_mode) & 0o077:
            raise EnvironmentFault(
                f"key file {path}",
                "it must belong to this user and be readable by its owner alone, but its owner "
                f"is {seen.st_uid} and its mode {stat.S_IMODE(seen.st_mode):03o}",
                f"Check who wrote it, then run chmod 600 {path}.",
            )
        text = file.read().strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise EnvironmentFault(
            f"key file {path}",
            f"it must contain {KEY_BYTES} bytes in hexadecimal, but contains {len(text)} other characters",
            "Restore it from a backup. What was signed with another key cannot be read.",
        )
    return key
