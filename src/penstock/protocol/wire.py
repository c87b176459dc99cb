"""How messages are framed on a socket, and how both ends prove that they know the run's secret.

The secret never travels. The coordinator sends a nonce; the worker answers with its own nonce and a keyed hash of
both; the coordinator answers with a keyed hash of its own. Neither accepts a message before.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from penstock.errors import ControlRefused

NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING = b"penstock control 1\n"
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


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def worker_proof(secret: bytes, coordinator_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"worker" + coordinator_nonce + worker_nonce, "sha256")


def coordinator_proof(secret: bytes, coordinator_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"coordinator" + coordinator_nonce + worker_nonce, "sha256")


def framed(data: bytes) -> bytes:
    """A message with its length. Raises ``ControlRefused`` for one that is too long."""
    if len(data) > MOST_BYTES:
        raise too_long(len(data))
    return LENGTH.pack(len(data)) + data


def too_long(length: int) -> ControlRefused:
    return ControlRefused(
        "control connection",
        f"a message of {length:,} bytes is longer than {MOST_BYTES:,} bytes",
        "The state of a task, what a sink keeps for its commit or what a component publishes is too large.",
    )


def same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)
