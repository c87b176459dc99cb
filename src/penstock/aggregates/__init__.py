"""Aggregates that can be built from partials and merged in any order.

``Reduce`` describes an aggregate by key and makes its bolts; the merges (``Count``, ``Sum``, ``Mean`` …) say what
is kept of the tuples of a key. Derive your own from ``Merge``.
"""

from __future__ import annotations

from penstock.aggregates.bolts import MergeBolt, PartialBolt, WindowBolt
from penstock.aggregates.merges import (
    Count,
    CountOf,
    Distinct,
    FieldMerge,
    Max,
    Mean,
    Merge,
    Min,
    Sum,
    TopK,
    Variance,
)
from penstock.aggregates.reduce import Reduce
from penstock.aggregates.windows import Window

__all__ = [
    "Count",
    "CountOf",
    "Distinct",
    "FieldMerge",
    "Max",
    "Mean",
    "Merge",
    "MergeBolt",
    "Min",
    "PartialBolt",
    "Reduce",
    "Sum",
    "TopK",
    "Variance",
    "Window",
    "WindowBolt",
]
