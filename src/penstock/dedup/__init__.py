"""Dropping what was seen before, in bounded memory (SPEC 6.6b).

>>> once = DedupBolt(("order", int), ("amount", float), by="order")
>>> builder.set_bolt("once", once, 2).fields_grouping("orders", "order")
"""

from __future__ import annotations

from penstock.dedup.bolt import DedupBolt

__all__ = ["DedupBolt"]
