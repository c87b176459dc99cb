"""How messages are framed on a socket, and how both ends prove that they know the run's secret.

The secret never travels. The coordinator sends a nonce; the slot answers with its own nonce and a keyed hash of
both; the coordinator answers with a keyed hash of its own. Neither accepts a message before.
"""

from __future__ import annotations

import hmac
import secrets
import struct

NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING = b"penstock control 1\n"
LENGTH = struct.Struct("<I")
MOST_BYTES = 64 * 1024 * 1024  # no message comes near it; a larger length is garbage
HANDSHAKE_TIMEOUT = 10.0  # seconds; a stranger that says nothing does not hold a connection


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def slot_proof(secret: bytes, coordinator_nonce: bytes, slot_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"slot" + coordinator_nonce + slot_nonce, "sha256")


def coordinator_proof(secret: bytes, coordinator_nonce: bytes, slot_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"coordinator" + coordinator_nonce + slot_nonce, "sha256")


def same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)
