"""Ready-made bolts: ``ShowBolt`` shows results in the live view, ``DedupBolt`` drops duplicates.

>>> once = DedupBolt(("order", int), ("amount", float), by="order")
>>> builder.set_bolt("once", once, 2).fields_grouping("orders", "order")
"""

from __future__ import annotations

from penstock.bolts.dedup import DedupBolt
from penstock.bolts.show import ShowBolt

__all__ = ["DedupBolt", "ShowBolt"]
