"""The framing of messages on a socket, and the handshake in which both sides prove that they know the run's
secret.

The secret itself is never sent. The driver sends its protocol version and a nonce. The client answers with its
version, its own nonce and a keyed hash of both nonces. The driver answers with a keyed hash of its own, or with
``REFUSAL`` if the client's hash is wrong. A connection that ends without either was closed for another reason, and
the client may try again. Neither side accepts a message before the handshake is complete. A message is preceded by
its length in four bytes.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from penstock.errors import ControlRefused

VERSION = 6
"""The version of the protocol. It is incremented with every change of a message; both sides must come from the
same release."""
NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)
"""What the driver sends in place of its proof to a client that does not know the secret."""
LENGTH = struct.Struct("<I")
MOST_BYTES = 64 * 1024 * 1024
"""Bytes of the longest message. Workers limit their reports to less. A longer message is neither sent nor read,
so that a wrong length cannot exhaust the memory."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds for the whole handshake: a client that sends nothing must not keep a connection open, and a busy
driver answers within this time."""
MOST_HANDSHAKES = 128
"""Connections that may be in their handshake at a time. With one more, the oldest is closed: a worker needs
milliseconds for its handshake, so the oldest is most likely not a worker. A process may have 1024 open files by
default, so the number stays far below that."""
ACCEPTED_AT_ONCE = 16
"""Connections that the driver accepts before it serves the ones accepted earlier: keeps their number near the
limit above."""
QUEUE = 1024
"""Connections that may wait in the kernel to be accepted, because all workers of a large topology connect at the
same time."""

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
    """The driver's nonce. Raises ``ControlRefused`` if the other side is not a driver or has another version."""
    if len(data) != GREETING_BYTES or not data.startswith(_NAME):
        raise ControlRefused(_WHERE, f"the other side is not a Penstock driver: it sent {data[:40]!r}")
    _check_version(data[len(_NAME) :], "driver")
    return data[-NONCE_BYTES:]


def answer(secret: bytes, driver_nonce: bytes, nonce: bytes) -> bytes:
    """The worker's or operator's first bytes."""
    return _VERSION.pack(VERSION) + nonce + _proof(b"worker", secret, driver_nonce, nonce)


def read_answer(data: bytes, secret: bytes, driver_nonce: bytes) -> bytes:
    """The client's nonce. Raises ``ControlRefused`` if the client has another version or does not know the
    secret."""
    _check_version(data, "client")
    nonce = data[_VERSION.size : _VERSION.size + NONCE_BYTES]
    if not hmac.compare_digest(data[-PROOF_BYTES:], _proof(b"worker", secret, driver_nonce, nonce)):
        raise ControlRefused(_WHERE, "the client does not know the secret of this run")
    return nonce


def driver_proof(secret: bytes, driver_nonce: bytes, nonce: bytes) -> bytes:
    """The driver's last bytes of the handshake."""
    return _proof(b"driver", secret, driver_nonce, nonce)


def check_driver_proof(data: bytes, secret: bytes, driver_nonce: bytes, nonce: bytes) -> None:
    """Check the driver's proof. Raises ``ControlRefused`` if the driver refuses this client or does not know the
    secret."""
    if not hmac.compare_digest(data, driver_proof(secret, driver_nonce, nonce)):
        raise ControlRefused(
            _WHERE,
            "the driver refused this client, or could not prove that it knows the secret of this run",
            "Workers of another run cannot join; start the topology again.",
        )


def _proof(end: bytes, secret: bytes, driver_nonce: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, end + driver_nonce + nonce, "sha256")


def _check_version(data: bytes, end: str) -> None:
    (theirs,) = _VERSION.unpack_from(data)
    if theirs != VERSION:
        raise ControlRefused(
            _WHERE,
            f"the {end} uses version {theirs} of the control protocol, but this side uses version {VERSION}",
            "Install the same version of Penstock on all nodes and for the command line.",
        )


# ---- messages --------------------------------------------------------------------------------------------


def framed(data: bytes) -> bytes:
    """A message preceded by its length. Raises ``ControlRefused`` if it is too long."""
    return LENGTH.pack(checked_length(len(data))) + data


def length_of(head: bytes) -> int:
    """The length of the message that follows these bytes. Raises ``ControlRefused`` if it is too long."""
    return checked_length(LENGTH.unpack(head)[0])


def checked_length(length: int) -> int:
    if length > MOST_BYTES:
        raise ControlRefused(
            _WHERE,
            f"a message of {length:,} bytes is longer than the limit of {MOST_BYTES:,} bytes",
            "The state of a task, a sink's token or the rows that a component publishes are too large.",
        )
    return length
