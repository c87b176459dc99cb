"""Bloom filters over hashes: sets of fixed size that may report a key they do not contain, but never miss one that
they do contain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.topology.hashing import U64, rehash

Bools: TypeAlias = npt.NDArray[np.bool_]
Frozen: TypeAlias = tuple[int, int, int, bytes]
"""⟨bits, probes, keys added, the bits⟩: immutable values, which snapshots neither copy nor write again if
unchanged."""

_FIRST, _STEP = 1, 2  # the indices of the further hashes of a key that determine its first position and its step


def _bits(keys: int, error_rate: float, probes: int) -> int:
    return math.ceil(-probes * keys / math.log1p(-(error_rate ** (1 / probes))))


@dataclass(frozen=True)
class BloomShape:
    """The number of bits of a filter, and the number of bits set for each key."""

    bits: int
    probes: int

    @classmethod
    def fit(cls, keys: int, error_rate: float) -> BloomShape:
        """The smallest filter for this number of keys. A filter is smallest when half of its bits are set, so k =
        log2 1/p, rounded to the better neighbouring integer. With this k, p = (1 - e^(-kn/m))^k is solved for
        m."""
        ideal = -math.log2(error_rate)
        neighbours = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
        bits, probes = min((_bits(keys, error_rate, probes), probes) for probes in neighbours)
        return cls(max(64, -(-bits // 8) * 8), probes)

    def error_rate(self, keys: int) -> float:
        """The probability that a filter with this number of keys reports a key it does not contain."""
        return float(-math.expm1(-self.probes * keys / self.bits)) ** self.probes

    @property
    def bytes(self) -> int:
        return self.bits // 8


class BloomFilter:
    """Keys are 64-bit hashes, processed in columns. The positions of a key are g + i·h, where g and h are two
    further hashes of it (double hashing). The key itself is not used as g: all keys that a grouping sends to one
    task are equal modulo the number of tasks, so some positions would be used more often."""

    __slots__ = ("_bits", "added", "shape")

    def __init__(self, shape: BloomShape) -> None:
        self.shape = shape
        self.added = 0
        """The number of keys in the filter; an estimate after ``joined``."""
        self._bits = np.zeros(shape.bytes, np.uint8)

    def holds(self, hashes: U64) -> Bools:
        """For each key, whether it was added. A key that was not is reported with the probability
        ``error_rate``."""
        found = np.ones(len(hashes), np.bool_)
        for byte, bit in self._places(hashes):
            found &= (self._bits[byte] & bit) != 0
        return found

    def add(self, hashes: U64) -> None:
        """Add distinct keys that the filter does not contain."""
        for byte, bit in self._places(hashes):
            np.bitwise_or.at(self._bits, byte, bit)
        self.added += len(hashes)

    @property
    def fill(self) -> float:
        """The share of bits that are set."""
        return int(np.bitwise_count(self._bits).sum()) / self.shape.bits

    @property
    def error_rate(self) -> float:
        """The error rate computed from the number of keys, because counting the bits would take time."""
        return self.shape.error_rate(self.added)

    def joined(self, other: BloomFilter) -> BloomFilter:
        """A filter that contains the keys of both filters, which must have the same shape. The number of keys is
        estimated from the bits, since some keys may be in both."""
        both = BloomFilter(self.shape)
        np.bitwise_or(self._bits, other._bits, out=both._bits)
        free = max(1.0 - both.fill, 1 / self.shape.bits)
        estimate = math.ceil(-self.shape.bits / self.shape.probes * math.log(free))
        both.added = min(max(estimate, self.added, other.added), self.added + other.added)
        return both

    def freeze(self) -> Frozen:
        return self.shape.bits, self.shape.probes, self.added, self._bits.tobytes()

    @classmethod
    def thaw(cls, frozen: Frozen) -> BloomFilter:
        bits, probes, added, content = frozen
        made = cls.__new__(cls)
        made.shape, made.added = BloomShape(bits, probes), added
        made._bits = np.frombuffer(content, np.uint8).copy()
        return made

    def _places(self, hashes: U64) -> Any:
        """For each probe, the byte and the bit of every key."""
        place, step = rehash(hashes, _FIRST), rehash(hashes, _STEP) | np.uint64(1)
        for _ in range(self.shape.probes):
            at = place % np.uint64(self.shape.bits)
            yield (at >> np.uint64(3)).astype(np.int64), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)
            place = place + step
