"""Aggregates that can be computed as partials and merged in any order.

``Reduce`` describes an aggregate by key and creates its bolts. The merges (``Count``, ``Sum``, ``Mean`` …) define
what is computed from the tuples of a key. Derive your own from ``Merge``.
"""

from __future__ import annotations

from penstock.aggregates.bolts import MergeBolt, PartialBolt, WindowBolt
from penstock.aggregates.keyed import KeyedAggregate, KeyedBolt, KeyedMergeBolt
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
    "KeyedAggregate",
    "KeyedBolt",
    "KeyedMergeBolt",
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
