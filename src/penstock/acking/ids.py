"""Root ids and edge ids: 64 bits each, computed for whole columns.

A root id combines a spout task and a running number, so that the acker can use the number as an array index. Edge
ids are computed by a mixing function from a random seed and a position, so a frame carries the seed instead of the
ids.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

NUMBER_BITS = 48  # 2^48 tuples per spout task last nine years at a million per second
NUMBER_MASK = np.uint64((1 << NUMBER_BITS) - 1)
UNTRACKED = np.uint64(0)
"""The id that means "no root". Valid because task ids begin at 1."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(values: U64) -> U64:
    """A bijection of 64-bit words in which every input bit reaches every output bit (splitmix64)."""
    z = values ^ (values >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def roots(task: int, first: int, count: int) -> U64:
    """The roots of ``count`` tuples of a spout task, numbered from ``first``."""
    begin = (task << NUMBER_BITS) | first
    return np.arange(begin, begin + count, dtype=np.uint64)


def edges_of_roots(key: int, roots: U64) -> U64:
    """The initial value of the ledger of each root. It is a keyed function of the root, so a spout does not have
    to announce it."""
    return mix((roots + np.uint64(1)) * np.uint64(_GOLDEN) ^ np.uint64(key))


def seeded_edges(seed: int, count: int) -> U64:
    """The edge ids of the groups of a frame."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed & _WORD))


def new_seed() -> int:
    return secrets.randbits(64)
