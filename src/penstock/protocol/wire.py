"""How messages are framed on a socket, and how both ends prove that they know the run's secret.

The secret never travels. The driver greets with the version of its protocol and a nonce; the other end answers
with its version, a nonce of its own and a keyed hash of both nonces; the driver answers with a keyed hash of its
own. Neither end accepts a message before. A message is its length in four bytes, then its bytes.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from penstock.errors import ControlRefused

VERSION = 2
"""Of the protocol. Raised with every change of a message: both ends come from the same release."""
NONCE_BYTES = 32
PROOF_BYTES = 32
LENGTH = struct.Struct("<I")
MOST_BYTES = 64 * 1024 * 1024
"""Of a message. What workers report is cut to less at its source; a longer message is not sent, and not read."""
HANDSHAKE_TIMEOUT = 10.0  # seconds; a stranger that says nothing does not hold a connection
MOST_STRANGERS = 128
"""Connections at a time that have not proved yet that they know the secret. One more, and the oldest of them is
closed: a worker needs milliseconds for its proof, so the oldest is most likely a stranger. The process may have
1024 open files by default."""
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before those accepted earlier are served: keeps the count near the limit above."""
QUEUE = 1024
"""Connections that wait in the kernel: all workers of a large topology connect at the same time."""

_NAME = b"penstock control "
_VERSION = struct.Struct("<H")
GREETING_BYTES = len(_NAME) + _VERSION.size + NONCE_BYTES
ANSWER_BYTES = _VERSION.size + NONCE_BYTES + PROOF_BYTES

_WHERE = "control connection"


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


# ---- the handshake ---------------------------------------------------------------------------------------


def greeting(nonce: bytes) -> bytes:
    """The driver's first bytes."""
    return _NAME + _VERSION.pack(VERSION) + nonce


def read_greeting(data: bytes) -> bytes:
    """The driver's nonce. Raises ``ControlRefused`` where the other end is not a driver, or one of another
    version."""
    if len(data) != GREETING_BYTES or not data.startswith(_NAME):
        raise ControlRefused(_WHERE, f"the other end is not a driver of penstock: it began with {data[:40]!r}")
    _check_version(data[len(_NAME) :], "driver")
    return data[-NONCE_BYTES:]


def answer(secret: bytes, driver_nonce: bytes, nonce: bytes) -> bytes:
    """The worker's or operator's first bytes."""
    return _VERSION.pack(VERSION) + nonce + _proof(b"worker", secret, driver_nonce, nonce)


def read_answer(data: bytes, secret: bytes, driver_nonce: bytes) -> bytes:
    """The other end's nonce. Raises ``ControlRefused`` where it has another version or does not know the
    secret."""
    _check_version(data, "other end")
    nonce = data[_VERSION.size : _VERSION.size + NONCE_BYTES]
    if not hmac.compare_digest(data[-PROOF_BYTES:], _proof(b"worker", secret, driver_nonce, nonce)):
        raise ControlRefused(_WHERE, "the other end does not know the secret of this run")
    return nonce


def driver_proof(secret: bytes, driver_nonce: bytes, nonce: bytes) -> bytes:
    """The driver's last bytes of the handshake."""
    return _proof(b"driver", secret, driver_nonce, nonce)


def check_driver_proof(data: bytes, secret: bytes, driver_nonce: bytes, nonce: bytes) -> None:
    """Raises ``ControlRefused`` where the driver does not know the secret, or ended the connection."""
    if not hmac.compare_digest(data, driver_proof(secret, driver_nonce, nonce)):
        raise ControlRefused(
            _WHERE,
            "the driver refused this end, or could not prove that it knows the secret of this run",
            "Workers of another run cannot join; start the topology again.",
        )


def _proof(end: bytes, secret: bytes, driver_nonce: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, end + driver_nonce + nonce, "sha256")


def _check_version(data: bytes, end: str) -> None:
    (theirs,) = _VERSION.unpack_from(data)
    if theirs != VERSION:
        raise ControlRefused(
            _WHERE,
            f"the {end} speaks version {theirs} of the control protocol, and this end version {VERSION}",
            "Install the same version of penstock on all nodes and for all commands.",
        )


# ---- messages --------------------------------------------------------------------------------------------


def framed(data: bytes) -> bytes:
    """A message with its length. Raises ``ControlRefused`` for one that is too long."""
    return LENGTH.pack(checked_length(len(data))) + data


def length_of(head: bytes) -> int:
    """Of the message behind these bytes. Raises ``ControlRefused`` for one that is too long."""
    return checked_length(LENGTH.unpack(head)[0])


def checked_length(length: int) -> int:
    if length > MOST_BYTES:
        raise ControlRefused(
            _WHERE,
            f"a message of {length:,} bytes is longer than {MOST_BYTES:,} bytes",
            "The state of a task, what a sink keeps for its commit or what a component shows is too large.",
        )
    return length
