"""Bloom filters over hashes: sets of fixed size that may say yes to what they do not hold, and never say no to
what they do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.topology.hashing import U64, rehash

Bools: TypeAlias = npt.NDArray[np.bool_]
Frozen: TypeAlias = tuple[int, int, int, bytes]
"""⟨bits, probes, keys added, the bits themselves⟩: plain values, which state need not copy or write twice."""

_FIRST, _STEP = 1, 2  # which of a key's further hashes say where it begins and how it goes on


def _bits(keys: int, error_rate: float, probes: int) -> int:
    return math.ceil(-probes * keys / math.log1p(-(error_rate ** (1 / probes))))


@dataclass(frozen=True)
class BloomShape:
    """How many bits a filter has, and how many of them stand for one key."""

    bits: int
    probes: int

    @classmethod
    def fit(cls, keys: int, error_rate: float) -> BloomShape:
        """The smallest for so many keys: a filter that is half full is the smallest there is, so k = log2 1/p, of
        whole numbers the better neighbour; with that, p = (1 - e^(-kn/m))^k solved for m."""
        ideal = -math.log2(error_rate)
        neighbours = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
        bits, probes = min((_bits(keys, error_rate, probes), probes) for probes in neighbours)
        return cls(max(64, -(-bits // 8) * 8), probes)

    def error_rate(self, keys: int) -> float:
        """How often a filter with so many keys says yes to one that it does not hold."""
        return float(-math.expm1(-self.probes * keys / self.bits)) ** self.probes

    @property
    def bytes(self) -> int:
        return self.bits // 8


class BloomFilter:
    """Keys are 64-bit hashes, in whole columns. All of a key's places come from two further hashes of it, g + i·h
    (double hashing). Not from the hash itself: the keys that a grouping sends to one task agree in it modulo the
    number of tasks, and would crowd some places."""

    __slots__ = ("_bits", "added", "shape")

    def __init__(self, shape: BloomShape) -> None:
        self.shape = shape
        self.added = 0
        """Keys in it, as far as known: after a join it is an estimate."""
        self._bits = np.zeros(shape.bytes, np.uint8)

    def holds(self, hashes: U64) -> Bools:
        """For each key whether it was added, or, at the error rate, as if."""
        found = np.ones(len(hashes), np.bool_)
        for byte, bit in self._places(hashes):
            found &= (self._bits[byte] & bit) != 0
        return found

    def add(self, hashes: U64) -> None:
        """Add keys that differ and are not in it."""
        for byte, bit in self._places(hashes):
            np.bitwise_or.at(self._bits, byte, bit)
        self.added += len(hashes)

    @property
    def fill(self) -> float:
        """The share of bits that are set."""
        return int(np.bitwise_count(self._bits).sum()) / self.shape.bits

    @property
    def error_rate(self) -> float:
        """By the keys added: a formula, where counting bits takes time."""
        return self.shape.error_rate(self.added)

    def joined(self, other: BloomFilter) -> BloomFilter:
        """One that holds what either holds. Both have the same shape. How many keys that is, is told by the bits:
        some may be in both."""
        both = BloomFilter(self.shape)
        np.bitwise_or(self._bits, other._bits, out=both._bits)
        free = max(1.0 - both.fill, 1 / self.shape.bits)
        told = math.ceil(-self.shape.bits / self.shape.probes * math.log(free))
        both.added = min(max(told, self.added, other.added), self.added + other.added)
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
        """For each probe the byte and the bit in it, of every key."""
        place, step = rehash(hashes, _FIRST), rehash(hashes, _STEP) | np.uint64(1)
        for _ in range(self.shape.probes):
            at = place % np.uint64(self.shape.bits)
            yield (at >> np.uint64(3)).astype(np.int64), np.uint8(1) << (at & np.uint64(7)).astype(np.uint8)
            place = place + step
