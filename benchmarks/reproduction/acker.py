"""*Storm overview*, section 2.5.1: the acker keeps a constant number of bytes for each root, however many tuples
stem from it."""

from __future__ import annotations

import argparse
import tracemalloc

import numpy as np

from benchmarks.harness import Results
from penstock.acking.ids import NUMBER_BITS, edges_of_roots
from penstock.acking.ledger import Acker
from penstock.acking.lineage import Entries

EDGES = (1, 10, 100)
"""Tuples that stem from each root."""
PENDING = 50_000
"""Open roots of a spout task that works at its limit: the default of ``delivery.max_spout_pending``."""
_KEY = 12345


def measure_acker(results: Results, options: argparse.Namespace) -> None:
    """Fill the acker with open roots and measure its memory; then ack all of them. The capacity of a ring is a
    power of two: one number of roots fills it exactly, the other is that of a spout at its limit."""
    full = 1 << (16 if options.quick else 20)
    for edges in EDGES[:2] if options.quick else EDGES:
        open_roots = 0
        for name, roots in (("", full), (f"_of_{PENDING}", PENDING)):
            size, left = bytes_per_root(roots, edges, options.seed)
            open_roots += left
            results.row(roots=roots, **{"tuples of a root": edges, "bytes a root": size, "left open": left})
            unit = f"bytes a root, {edges} tuples of each, {roots:,} roots"
            results.bar(f"acker.bytes_per_root{name}.{edges}", size, unit)
        results.bar(f"acker.left_open.{edges}", open_roots, "roots left open after all their tuples were acked")


def bytes_per_root(roots: int, edges: int, seed: int) -> tuple[float, int]:
    """Bytes for each open root, and roots that were not completed when all edges had been entered twice."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(roots, dtype=np.uint64) | np.uint64(1 << NUMBER_BITS)
    ones = np.ones(roots, np.int64)
    nothing = Entries(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint64))
    sent = [rng.integers(1, 2**63, roots, dtype=np.uint64) for _ in range(edges)]
    tracemalloc.start()
    acker = Acker(_KEY)
    for values in sent:
        acker.apply(Entries(numbers, ones, values), nothing)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    complete = 0
    first = edges_of_roots(_KEY, numbers)
    for place, values in enumerate(sent):
        last = values if place else values ^ first
        complete += sum(map(len, acker.apply(Entries(numbers, ones, last), nothing).values()))
    return held / roots, roots - complete
