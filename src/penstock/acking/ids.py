"""Root and edge ids: 64 bits each, whole columns at a time.

A root is ⟨spout task, running number⟩, so that an acker finds it in an array by its number. Edge ids are spread
over 64 bits by a mixing function of a random seed and a position: a frame carries its seed instead of them.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

NUMBER_BITS = 48  # 2^48 tuples of one spout task: nine years at a million a second
NUMBER_MASK = np.uint64((1 << NUMBER_BITS) - 1)
UNTRACKED = np.uint64(0)
"""No root: task ids begin at 1."""

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
    """What the ledger of each root begins with: a keyed function, so that a spout need not announce it."""
    return mix((roots + np.uint64(1)) * np.uint64(_GOLDEN) ^ np.uint64(key))


def seeded_edges(seed: int, count: int) -> U64:
    """The edge ids of a frame's groups."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed & _WORD))


def new_seed() -> int:
    return secrets.randbits(64)
